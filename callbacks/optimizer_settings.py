"""Settings of optimisers and schedules in a resumed run: restored or configured."""

import math
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

KERNEL_CHOICES = {"params", "fused", "foreach", "capturable", "differentiable", "maximize"}
TOLERANCE = 0.01
"""Relative difference of learning rates up to which a schedule counts as the same."""

Settings = dict[str, Any]


class KeepOptimizerSettings(L.Callback):
    """Applies the configured optimiser settings in a resumed run.

    Restoring an optimiser also restores its settings (lr, betas, eps, weight_decay) and the base
    learning rates of its schedule, so the configured ones would have no effect. This callback
    records the configured settings and writes them back after restoration; moments, step counts
    and the position within the schedule stay restored.
    """

    def __init__(self) -> None:
        self._settings: list[list[Settings]] = []
        self._base_lrs: list[list[Any]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # fresh optimisers: the checkpoint has not been loaded into them yet
        self._settings = [_settings(optimizer) for optimizer in trainer.optimizers]
        self._base_lrs = [list(scheduler.base_lrs) for scheduler in _schedulers(trainer)]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer, fresh in zip(trainer.optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, fresh, strict=True):
                _report(group, settings)
                group.update(settings)
        for scheduler, base_lrs in zip(_schedulers(trainer), self._base_lrs, strict=True):
            _rebase(scheduler, base_lrs)


def _schedulers(trainer: L.Trainer) -> list[LRScheduler]:
    schedulers = (config.scheduler for config in trainer.lr_scheduler_configs)
    return [scheduler for scheduler in schedulers if isinstance(scheduler, LRScheduler)]


def _settings(optimizer: Optimizer) -> list[Settings]:
    """Returns the hyperparameters of each group, without parameters and kernel choices."""
    return [
        {key: value for key, value in group.items() if key not in KERNEL_CHOICES}
        for group in optimizer.param_groups
    ]


def _report(restored: Settings, fresh: Settings) -> None:
    """Reports each setting of a group that changes, and the peak as the learning rate."""
    for key, value in fresh.items():
        if (key != "lr" or "initial_lr" not in fresh) and restored.get(key) != value:
            name = "lr" if key == "initial_lr" else key
            rank_zero_info(f"{name}: {value} replaces the checkpoint's {restored.get(key)}")


def _rebase(scheduler: LRScheduler, base_lrs: list[Any]) -> None:
    """Sets the learning rates of ``base_lrs`` (floats) at the schedule's current position."""
    old: list[Any] = list(scheduler.base_lrs)
    current: list[Any] = list(scheduler.get_last_lr())
    scheduler.base_lrs = list(base_lrs)
    if isinstance(scheduler, LambdaLR):
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    else:  # assumes that any other schedule scales with its base
        factors = [lr / base if base else 1.0 for lr, base in zip(current, old, strict=True)]
    rates = [base * factor for base, factor in zip(base_lrs, factors, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


class ScheduleChange(L.Callback):
    """Makes a resumed run follow its configured schedule from the first step, and warns of jumps.

    A schedule depends on the length of the run, so the learning rate jumps if that changes. The
    restored optimiser has the checkpoint's rate for the next step; this callback replaces it with
    the rate of this run's schedule. A different peak rate is not a change of the schedule (see
    ``KeepOptimizerSettings``).
    """

    def __init__(self) -> None:
        self._end = math.inf

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The length that the schedule was built with; ``PendingValidation`` may lift it.
        model: Any = pl_module
        self._end = model.optimizer_config.horizon or trainer.estimated_stepping_batches

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Everything is restored here, and no step has been taken yet.
        if trainer.ckpt_path is None:
            return
        for scheduler in _schedulers(trainer):
            if not isinstance(scheduler, LambdaLR):
                continue
            rates = _rates(scheduler)
            _rebase(scheduler, scheduler.base_lrs)
            if rates is not None and not math.isclose(*rates, rel_tol=TOLERANCE):
                end = "has no end" if math.isinf(self._end) else f"ends at step {int(self._end)}"
                rank_zero_info(  # a Python warning would add a line of code
                    f"warning: the schedule now {end}: the learning rate goes from {rates[0]:.1e} "
                    f"to {rates[1]:.1e}"
                )


def _rates(scheduler: LambdaLR) -> tuple[float, float] | None:
    """Returns the checkpoint's rate and this schedule's, or None if the peak rates differ."""
    group, base = scheduler.optimizer.param_groups[0], scheduler.base_lrs[0]
    if scheduler.optimizer.defaults["lr"] != base:  # defaults are configured, never restored
        return None
    return float(group["lr"]), float(base * scheduler.lr_lambdas[0](scheduler.last_epoch))
