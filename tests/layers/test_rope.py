"""Rotary positions against multiplication by complex numbers."""

import pytest
import torch

from lightning_models.layers import apply_rope, rope_tables
from tests.reference.rope import rotate

POSITIONS = {
    "shared": torch.arange(5),
    "gaps": torch.tensor([0, 3, 4, 90, 511]),
    "per-row": torch.tensor([[0, 1, 2, 3, 4], [7, 7, 8, 2, 0]]),
    "fractional": torch.tensor([0.0, 0.25, 1.5, 2.875, 100.1]),
    "fractional-per-row": torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0], [3.25, 3.5, 3.75, 4.0, 9.9]]),
    "negative": torch.tensor([-3, -2, -1, 0, 1]),
}


def states(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("base", [10000.0, 500.0])
@pytest.mark.parametrize("channels", [2, 8, 10])
def test_rotation_of_complex_pairs(name, base, channels):
    x = states(2, 3, 5, channels)
    mine = apply_rope(x, rope_tables(POSITIONS[name], channels, base))
    expected = rotate(x, POSITIONS[name], base)
    assert (mine - expected).abs().max() < 1e-4  # 511 radians in float32 are known to 3e-5
    assert mine.dtype == x.dtype


@pytest.mark.parametrize(("name", "rows"), [("shared", 1), ("per-row", 2), ("fractional", 1)])
def test_tables_are_float32_and_broadcast_over_heads(name, rows):
    for table in rope_tables(POSITIONS[name], 6):
        assert table.shape == (rows, 1, 5, 6)
        assert table.dtype == torch.float32


def test_half_precision_is_turned_in_float32():
    x = states(2, 3, 40, 8).bfloat16()
    mine = apply_rope(x, rope_tables(torch.arange(1000, 1040), 8))
    expected = rotate(x, torch.arange(1000, 1040)).bfloat16()
    assert mine.dtype == torch.bfloat16
    assert (mine.float() - expected.float()).abs().max() < 2**-5  # one step of bfloat16 below 4
    assert (mine == expected).float().mean() > 0.99
