"""Exact resumption: random states, unfinished steps, optimiser settings, learning rates."""

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from callbacks.hooks import RandomState, gather, in_accumulation

KEY = "resume_state"
KERNEL_CHOICES = {"params", "fused", "foreach", "capturable", "differentiable", "maximize"}
TOLERANCE = 0.01
"""Relative difference of learning rates up to which a schedule counts as the same."""

Settings = dict[str, Any]


class ResumeState(L.Callback):
    """Makes a resumed run equal the uninterrupted one, and training independent of its breaks.

    - The random states of all ranks (torch, CUDA, numpy, Python) are part of the checkpoint.
    - The state after one training batch is put back before the next one, so validation, text
      samples, checkpoints and new epochs in between never change the draws of training; and before
      a validation, so that one that is made up for draws the same.
    - A checkpoint between two accumulated micro-batches also holds the sums after ``train/loss``
      and the gradient so far. Over several ranks that is the ranks' mean: equal in value after the
      next synchronisation, not in every bit.
    """

    def __init__(self) -> None:
        self._state: RandomState | None = None
        self._gradients: dict[str, Tensor] = {}
        self._sums: dict[str, list[float]] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the state after model construction, unless a checkpoint brought another.

        Ranks have built equal models from one seed; from here on their dropout masks differ.
        """
        if self._state is None:
            if trainer.global_rank:
                torch.manual_seed(torch.initial_seed() + trainer.global_rank)
            self._state = RandomState.capture()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Puts back the gradient of an optimiser step that the checkpoint was in the middle of."""
        for name, parameter in pl_module.named_parameters():
            if name in self._gradients:
                gradient = self._gradients[name].to(parameter.device, parameter.dtype)
                if gradient.shape != parameter.shape:  # of older checkpoints
                    gradient = gradient.reshape(parameter.shape)
                if isinstance(parameter, DTensor) and not isinstance(gradient, DTensor):
                    gradient = distribute_tensor(
                        gradient, parameter.device_mesh, parameter.placements
                    )
                parameter.grad = gradient
        model: Any = pl_module
        if self._sums:
            model.train_metrics.add_sums(self._sums)
        self._gradients, self._sums = {}, {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Continues the random streams where the previous training batch left them."""
        if self._state is not None:
            self._state.restore()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Notes where the random streams are."""
        self._state = RandomState.capture()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Has a validation draw the same numbers in the first process and in a resumed one."""
        if self._state is not None and not trainer.sanity_checking:
            self._state.restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets, so that a later ``fit`` of the same process starts afresh."""
        self._state = None
        self._gradients, self._sums = {}, {}

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the random states of all ranks, and the gradient of an unfinished step."""
        state = self._state or RandomState.capture()
        unfinished = in_accumulation(trainer)
        model: Any = pl_module
        checkpoint[KEY] = {
            "random": gather(state.plain()),
            "unfinished_step": unfinished,
            "gradients": _mean_gradients(trainer, pl_module) if unfinished else {},
            "sums": gather(model.train_metrics.sums()) if unfinished else [],
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes this rank's states; says so if the checkpoint cannot be continued exactly."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        saved = checkpoint.get(KEY)
        if saved is None:
            rank_zero_warn(
                "the checkpoint holds no random state (it was written without ResumeState): "
                "random draws of the resumed run start from the seed"
            )
            return
        states = saved["random"]
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint was written by {len(states)} processes, this run has "
                f"{trainer.world_size}: it continues, but with other random draws and batches"
            )
        if trainer.global_rank < len(states):
            self._state = RandomState.from_plain(states[trainer.global_rank])
        self._gradients = saved["gradients"]
        sums = saved.get("sums", [])  # older checkpoints have none
        if trainer.global_rank < len(sums):
            self._sums = sums[trainer.global_rank]
        if saved["unfinished_step"] and not self._gradients:  # as older versions wrote them
            rank_zero_warn(
                "the checkpoint was written between two accumulated micro-batches of sharded "
                "parameters: the gradient of the unfinished step is lost"
            )


def _mean_gradients(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Tensor]:
    """Returns each parameter's gradient, averaged over ranks; sharded ones are so already.

    Those stay sharded: how they are written is the strategy's choice.
    """
    return {
        name: parameter.grad.clone()
        if isinstance(parameter.grad, DTensor)
        else torch.as_tensor(trainer.strategy.reduce(parameter.grad.clone(), reduce_op="mean"))
        for name, parameter in pl_module.named_parameters()
        if parameter.grad is not None
    }


# ---- optimiser settings


class KeepOptimizerSettings(L.Callback):
    """Gives the configured optimiser settings effect in a resumed run.

    Restoring an optimiser also restores its settings (lr, betas, eps, weight_decay) and the base
    learning rates of its schedule, so what the configuration says has no effect. This callback
    notes the fresh settings and writes them back after the restoration; moments, step counts and
    the position within the schedule stay restored.
    """

    def __init__(self) -> None:
        self._settings: list[list[Settings]] = []
        self._base_lrs: list[list[Any]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the settings of the fresh optimisers, which the checkpoint has not touched yet."""
        self._settings = [_settings(optimizer) for optimizer in trainer.optimizers]
        self._base_lrs = [
            list(config.scheduler.base_lrs)
            for config in trainer.lr_scheduler_configs
            if isinstance(config.scheduler, LRScheduler)
        ]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes them back and says what changed."""
        for optimizer, fresh in zip(trainer.optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, fresh, strict=True):
                _report(group, settings)
                group.update(settings)
        schedulers = [
            config.scheduler
            for config in trainer.lr_scheduler_configs
            if isinstance(config.scheduler, LRScheduler)
        ]
        for scheduler, base_lrs in zip(schedulers, self._base_lrs, strict=True):
            _rebase(scheduler, base_lrs)


def _settings(optimizer: Optimizer) -> list[Settings]:
    """Returns the hyper-parameters of each group, without parameters and kernel choices."""
    return [
        {key: value for key, value in group.items() if key not in KERNEL_CHOICES}
        for group in optimizer.param_groups
    ]


def _report(restored: Settings, fresh: Settings) -> None:
    """Names each setting of a group that changes; of the two learning rates, the peak."""
    for key, value in fresh.items():
        if (key != "lr" or "initial_lr" not in fresh) and restored.get(key) != value:
            name = "lr" if key == "initial_lr" else key
            rank_zero_info(f"{name}: {value} replaces the checkpoint's {restored.get(key)}")


def _rebase(scheduler: LRScheduler, base_lrs: list[Any]) -> None:
    """Sets the learning rates that ``base_lrs`` (floats) have at the schedule's present place."""
    old: list[Any] = list(scheduler.base_lrs)
    current: list[Any] = list(scheduler.get_last_lr())
    scheduler.base_lrs = list(base_lrs)
    if isinstance(scheduler, LambdaLR):
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    else:  # any other schedule is taken to scale with its base
        factors = [lr / base if base else 1.0 for lr, base in zip(current, old, strict=True)]
    rates = [base * factor for base, factor in zip(base_lrs, factors, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


# ---- the schedule


class ScheduleChange(L.Callback):
    """Warns if the schedule of a resumed run, at its step, is not where the checkpoint left it.

    A schedule is a function of the length of the run: with another one the learning rate jumps.
    The restored optimiser has the checkpoint's rate for the next step, the scheduler computes this
    run's. Another peak rate is no change of the schedule (see ``KeepOptimizerSettings``).
    """

    def __init__(self) -> None:
        self._end = math.inf

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the length by which the schedule was built; ``PendingValidation`` may lift it."""
        self._end = trainer.estimated_stepping_batches

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compares; at this point all is restored and nothing has been stepped yet."""
        if trainer.ckpt_path is None:
            return
        for config in trainer.lr_scheduler_configs:
            rates = _rates(config.scheduler) if isinstance(config.scheduler, LambdaLR) else None
            if rates is not None and not math.isclose(*rates, rel_tol=TOLERANCE):
                end = "has no end" if math.isinf(self._end) else f"ends at step {int(self._end)}"
                rank_zero_info(  # a Python warning would take two lines, one of them of code
                    f"warning: the schedule now {end}: the learning rate goes from {rates[0]:.1e} "
                    f"to {rates[1]:.1e}"
                )


def _rates(scheduler: LambdaLR) -> tuple[float, float] | None:
    """Returns the checkpoint's rate and this schedule's; None if the peak rates differ."""
    group, base = scheduler.optimizer.param_groups[0], scheduler.base_lrs[0]
    if scheduler.optimizer.defaults["lr"] != base:  # what was configured, which nothing restores
        return None
    return float(group["lr"]), float(base * scheduler.lr_lambdas[0](scheduler.last_epoch))
