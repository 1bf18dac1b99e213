"""Rotary position embeddings (arXiv 2104.09864), for whole and for fractional positions."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rope(NamedTuple):
    """Tables for one set of positions, float32: ``cos`` and ``sin``, each (B or 1, 1, T, C)."""

    cos: Tensor
    sin: Tensor


def rope_tables(positions: Tensor, head_dim: int, base: float = 10000.0) -> Rope:
    """Returns the rotation tables for ``positions``.

    Args:
        positions: (T,) or (B, T), integer or float: position of each token in tokens.
        head_dim: C, even.
        base: the longest wavelength is about ``2 pi base`` tokens.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.to(torch.float32)[..., None] * base**-exponent  # (B?, T, C/2)
    angles = torch.cat((angles, angles), dim=-1)
    if angles.dim() == 2:
        angles = angles[None]
    angles = angles[:, None]  # (B or 1, 1, T, C)
    return Rope(angles.cos(), angles.sin())


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Returns ``x`` (B, H, T, C) with channel pairs (i, i + C/2) rotated by their angle."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * rope.cos + turned * rope.sin).to(x.dtype)
