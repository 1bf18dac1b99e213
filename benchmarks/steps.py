"""A whole training step, as every benchmark times it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def training_step(
    module: nn.Module, loss: Callable[[], Tensor], device: torch.device | str, *, bf16: bool
) -> Callable[[], float]:
    """Returns a function that does forward, backward and fused AdamW, and returns the loss.

    Args:
        module: what is trained.
        loss: computes the loss of one and the same batch.
        device: where both are.
        bf16: whether ``loss`` runs under autocast.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    kind = torch.device(device).type

    def step() -> float:
        """Trains on the batch once."""
        with torch.autocast(kind, torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return step
