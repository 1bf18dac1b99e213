"""Prepared data of word problems."""

import pytest

from datamodules import ReasoningGSM8K
from tests.datamodules.reasoning.gsm8k.word_problems import ROWS, write


@pytest.fixture
def train_file(tmp_path):
    return write(tmp_path / "train.jsonl", ROWS)


@pytest.fixture
def make(tmp_path, train_file):
    """Returns a function that makes prepared data."""

    def build(**options):
        defaults = {"data_files": train_file, "cache_dir": str(tmp_path / "cache"), "num_proc": 1}
        data = ReasoningGSM8K(**{"batch_size": 4, **defaults, **options})
        data.prepare_data()
        data.setup()
        return data

    return build
