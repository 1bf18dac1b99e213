"""Endpoints that wait for nothing."""

import pytest

from datamodules.reasoning.teacher import ChatEndpoint, EndpointConfig, Pace
from tests.datamodules.reasoning.endpoint_server import FAST


@pytest.fixture
def waits():
    """Seconds that endpoints of `endpoint` would have waited."""
    return []


@pytest.fixture
def endpoint(server, waits):
    """Returns a function that makes an endpoint which does not wait."""

    def wait(seconds):
        waits.append(seconds)
        return False

    def make(**options):
        config = EndpointConfig(**{"url": server.url, "model": "m", **FAST, **options})
        return ChatEndpoint(config, pace=Pace(1e9), wait=wait)

    return make
