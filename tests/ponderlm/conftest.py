"""Float64 throughout, rotary tables included, for comparisons with the reference."""

import pytest
import torch

from lightning_models.layers import Rope
from lightning_models.transformer import network


def exact_rope_tables(positions, head_dim, base=10000.0):
    """``layers.rope_tables`` in float64."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = positions.double()[..., None] * base**-exponent
    angles = torch.cat((angles, angles), dim=-1).reshape(-1, 1, positions.shape[-1], head_dim)
    return Rope(angles.cos(), angles.sin())


@pytest.fixture
def exact(monkeypatch):
    """Rotary tables in float64, which are float32 otherwise."""
    monkeypatch.setattr(network, "rope_tables", exact_rope_tables)
