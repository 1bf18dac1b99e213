"""Endpoints that wait for nothing."""

import pytest

from datamodules.reasoning.teacher import ChatEndpoint, EndpointConfig
from tests.datamodules.reasoning.endpoint_server import FAST


@pytest.fixture
def endpoint(server):
    """Returns a function that makes an endpoint which does not wait."""

    def make(**options):
        return ChatEndpoint(EndpointConfig(**{"url": server.url, "model": "m", **FAST, **options}))

    return make
