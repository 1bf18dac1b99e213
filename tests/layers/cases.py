"""Inputs of attention tests."""

import torch

CASES = {
    "full": (4, 4, {}),
    "causal": (6, 6, {"causal": True}),
    "window-1": (6, 6, {"causal": True, "window": 1}),
    "window-3": (6, 6, {"causal": True, "window": 3}),
    "cross": (3, 7, {}),
    "fewer-queries": (3, 7, {"causal": True}),
    "fewer-queries-window": (3, 7, {"causal": True, "window": 2}),
    "one-query": (1, 5, {"causal": True}),
    "one-query-window": (1, 5, {"causal": True, "window": 2}),
    "more-queries": (7, 4, {"causal": True}),
    "more-queries-window": (7, 4, {"causal": True, "window": 2}),
}
"""Name -> queries, keys, options of attend."""


def qkv(T, N, *, B=2, H=2, C=6, dtype=torch.float64, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, C), (B, H, N, C), (B, H, N, C))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_(grad) for x in drawn]


def key_biases(N, *, B=2, low=-3.0, high=0.0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(B, N, generator=generator, dtype=torch.float64)


def random_mask(shape, *, seed=2):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def values_and_gradients(function, *inputs, seed=3):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def largest_error(mine, expected):
    return max(
        (m.double() - e.double()).abs().max().item() for m, e in zip(mine, expected, strict=True)
    )
