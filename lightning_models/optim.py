"""Optimiser, learning-rate schedule and weight-decay groups."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Raises:
        ValueError: If a value is out of range.
    """

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment; above 0, as a weight without gradient has 0 / eps."""
    weight_decay: float = 0.1
    """Decoupled decay of weights with two or more dimensions; norms and biases never decay."""
    decay_embeddings: bool = True
    """Whether embedding matrices, including a tied head, decay like other weights."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Schedule after the warm-up: cosine or linear down to lr * min_lr_ratio, wsd (constant, then
    linear over the last decay_fraction), or constant."""
    warmup: float = 0.02
    """Linear warm-up, in optimiser steps if 1 or more, else as a fraction of all steps."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of lr."""
    decay_fraction: float = 0.1
    """Fraction of all steps in which wsd decays."""
    horizon: int | None = None
    """Number of optimiser steps of this schedule and others that follow the run, such as
    ``inner_lr``. A shorter run stops before their end. Null means the steps of the run."""

    def __post_init__(self) -> None:
        for key in ("lr", "eps"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key} ({getattr(self, key)}) must be above 0 and finite")
        for key in ("warmup", "weight_decay"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"{key} ({getattr(self, key)}) must be finite and not negative")
        if self.warmup >= 1 and self.warmup % 1:
            raise ValueError(
                f"warmup ({self.warmup:g}) must be a fraction of all steps below 1, or a whole "
                "number of steps"
            )
        if self.horizon is not None and self.horizon < 1:
            raise ValueError(
                f"horizon ({self.horizon}) must be at least 1, or null for the steps of the run"
            )
        for key in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key} ({getattr(self, key)}) must be between 0 and 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas ({self.betas}) must be two numbers in [0, 1)")


def build_optimizer(
    module: nn.Module,
    config: OptimizerConfig,
    *,
    no_decay: Iterable[nn.Parameter] = (),
    fused: bool = True,
) -> torch.optim.AdamW:
    """Returns AdamW over the trainable parameters of ``module``, in two decay groups.

    Args:
        module: The network.
        config: Configuration of the optimiser.
        no_decay: Parameters exempt from weight decay, in addition to norms and biases.
        fused: Whether to use the fused kernel if the device has one (CPU, CUDA).
    """
    exempt = {id(parameter) for parameter in no_decay}
    if not config.decay_embeddings:
        exempt |= {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in module.parameters():
        if parameter.requires_grad:
            # vectors and scalars are norms, biases and gates; a bool indexes the pair of groups
            groups[parameter.dim() < 2 or id(parameter) in exempt].append(parameter)
    decays = (config.weight_decay, 0.0)
    settings: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in zip(groups, decays, strict=True)
        if parameters
    ]
    fused = fused and all(p.device.type in ("cpu", "cuda") for group in groups for p in group)
    return torch.optim.AdamW(
        settings, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused
    )


def schedule_factor(config: OptimizerConfig, total_steps: float) -> Callable[[int], float]:
    """Returns the function step -> factor on lr (step 0 is the first optimiser step).

    Args:
        config: Configuration of the schedule.
        total_steps: Number of optimiser steps of the whole run, used if ``horizon`` is None. May be
            infinite for ``constant``.

    Raises:
        ValueError: If the schedule needs an end, and the run has none.
    """
    if config.horizon is not None:
        total_steps = config.horizon
    if math.isinf(total_steps) and (config.schedule != "constant" or 0 < config.warmup < 1):
        raise ValueError(
            f"schedule ({config.schedule}) needs to know the number of steps; set "
            "trainer.max_steps or trainer.max_epochs, or optimizer.horizon, or schedule=constant "
            "with warmup in steps"
        )
    warmup = config.warmup if config.warmup >= 1 else config.warmup * total_steps
    return lambda step: _factor(config, step + 1, warmup if warmup else 0.0, total_steps)


def _factor(config: OptimizerConfig, step: int, warmup: float, total: float) -> float:
    """Returns the factor on lr in a step (1-based)."""
    if step < warmup:
        return step / warmup
    if config.schedule == "constant":
        return 1.0
    floor = config.min_lr_ratio
    # wsd stays at the peak until its decay begins; the others decay from the end of warm-up
    start = total * (1 - config.decay_fraction) if config.schedule == "wsd" else warmup
    done = (step - start) / (total - start) if total > start else float(step > start)
    progress = min(1.0, max(0.0, done))
    if config.schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (1 - floor) * progress
