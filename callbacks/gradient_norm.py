"""The norm of the gradient, as the optimiser step finds it."""

import lightning as L
import torch
from torch.distributed.tensor import DTensor

from callbacks.trainer_state import log_interval


class GradientNorm(L.Callback):
    """Logs ``train/grad_norm``: the 2-norm over all parameters before clipping.

    It is the gradient of the whole optimiser step: accumulated, averaged over ranks, unscaled.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        """Chooses how often.

        Args:
            every_n_steps: optimiser steps between two values; null: trainer.log_every_n_steps,
                0: never.
        """
        self.every_n_steps = every_n_steps

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Logs the norm; Lightning clips after this hook."""
        interval = log_interval(trainer) if self.every_n_steps is None else self.every_n_steps
        if not interval or (trainer.global_step + 1) % interval:
            return
        pl_module.log("train/grad_norm", total_norm(optimizer))


def total_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Returns the 2-norm of all gradients of an optimiser, a scalar; of sharded ones, the whole."""
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
