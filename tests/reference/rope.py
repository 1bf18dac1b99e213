"""Rotary positions as multiplication by complex numbers."""

import torch


def rotate(x, positions, base=10000.0):
    """Turns channel pair (i, i + C/2) of x (B, H, T, C) by position * base^(-2 i / C) radians.

    ``positions`` is (T,) or (B, T).
    """
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    frequency = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)]).double()
    if positions.dim() == 1:
        positions = positions[None]
    angle = positions.double()[:, None, :, None] * frequency
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)
