"""Float64 throughout, rotary tables included, for comparisons with the reference."""

import pytest
import torch

from lightning_models.latent_thought import network
from lightning_models.layers import Rope
from lightning_models.transformer import network as transformer_network


def exact_rope_tables(positions, head_dim, base=10000.0):
    """``layers.rope_tables`` in float64."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = positions.double()[..., None] * base**-exponent
    angles = torch.cat((angles, angles), dim=-1).reshape(-1, 1, positions.shape[-1], head_dim)
    return Rope(angles.cos(), angles.sin())


@pytest.fixture
def exact(monkeypatch):
    """Positions, tables and weights in float64, instead of float32; noise has float32's values."""
    for module in (network, transformer_network):
        monkeypatch.setattr(module, "rope_tables", exact_rope_tables)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
