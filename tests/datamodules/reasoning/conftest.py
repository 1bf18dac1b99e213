"""Prepared data of a few questions, and an endpoint that runs on this machine."""

import threading

import pytest

from tests.datamodules.reasoning.endpoint_server import KEY, Server
from tests.datamodules.reasoning.reasoning_tasks import FewQuestions


@pytest.fixture
def make(tmp_path):
    def build(kind=FewQuestions, **options):
        data = kind(**{"cache_dir": str(tmp_path / "cache"), "batch_size": 2, **options})
        data.prepare_data()
        data.setup()
        return data

    return build


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """Returns a function that makes data of 25 training examples, which are prepared once."""
    cache = str(tmp_path_factory.mktemp("reasoning"))

    def build(trainer=None, **options) -> FewQuestions:
        data = FewQuestions(**{"cache_dir": cache, "batch_size": 4, "repeats": 5, **options})
        data.prepare_data()
        data.setup()
        data.trainer = trainer
        return data

    return build


@pytest.fixture
def server(monkeypatch):
    """A running endpoint, and its key in the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()
