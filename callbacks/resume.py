"""Exact resumption: position, random states, unfinished steps, optimiser settings and rates."""

import math
import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from callbacks.hooks import gather
from callbacks.random_state import RandomState
from callbacks.trainer_state import in_accumulation

KEY = "resume_state"
_EPOCHS, _BATCHES = "epoch_progress", "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"
STATED = ("global_batch", "global_batch_tokens")
"""Data options that state the batch of a step."""
KERNEL_CHOICES = {"params", "fused", "foreach", "capturable", "differentiable", "maximize"}
TOLERANCE = 0.01
"""Relative difference of learning rates up to which a schedule counts as the same."""

Settings = dict[str, Any]


class ResumeState(L.Callback):
    """Makes a resumed run equal the uninterrupted one, and training independent of its breaks.

    - The run goes on after the batches that it has processed, in the epoch that these are in:
      Lightning takes an epoch that ``max_steps`` or ``max_time`` has cut for done.
    - The random states of all ranks (torch, CUDA, numpy, Python) are part of the checkpoint.
    - The state after one training batch is put back before the next one, so validation, text
      samples, checkpoints and new epochs in between never change the draws of training; and before
      a validation, so that one that is made up for draws the same.
    - A checkpoint between two accumulated micro-batches also holds the sums after ``train/loss``
      and the gradient so far. Over several ranks that is the ranks' mean: equal in value after the
      next synchronisation, not in every bit.
    - Where the data state the rows of a step (``order_of_steps``), a run goes on with the same rows
      on another number of devices, and in micro-batches of another size: the loops' count of
      micro-batches is converted.
    """

    def __init__(self) -> None:
        self._state: RandomState | None = None
        self._gradients: dict[str, Tensor] = {}
        self._sums: dict[str, list[float]] = {}
        self._step_start = 0  # batches before the optimiser step in work

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the state after model construction, unless a checkpoint brought another.

        Ranks have built equal models from one seed; from here on their dropout masks differ.
        """
        if self._state is None:
            if trainer.global_rank:
                torch.manual_seed(torch.initial_seed() + trainer.global_rank)
            self._state = RandomState.capture()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
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
        _restore_log_step(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
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
        self._state = RandomState.capture()
        if not in_accumulation(trainer):
            self._step_start = _processed(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # a validation draws the same numbers in the first process and in a resumed one
        if self._state is not None and not trainer.sanity_checking:
            self._state.restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # a later ``fit`` of the same process starts afresh
        self._state = None
        self._gradients, self._sums = {}, {}
        self._step_start = 0

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = self._state or RandomState.capture()
        unfinished = _place_in_step(trainer)[0] > 0  # also where an error ends the next batch
        model: Any = pl_module
        checkpoint[KEY] = {
            "random": gather(state.plain()),
            "unfinished_step": unfinished,
            "step_start": self._step_start,
            "step_place": _place_in_step(trainer),
            "order_of_steps": _order_of_steps(trainer),
            "gradients": _mean_gradients(trainer, pl_module) if unfinished else {},
            "sums": gather(model.train_metrics.sums()) if unfinished else [],
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Takes this rank's states; says so if the checkpoint cannot be continued exactly.
        if trainer.state.fn != TrainerFn.FITTING:
            return
        same_steps = _convert_micro_batches(trainer, checkpoint)
        _restore_position(trainer, checkpoint)
        self._begin_step(trainer, checkpoint)
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
                f"{trainer.world_size}: it continues, but with other random draws"
                f"{'' if same_steps else ' and batches'}"
            )
        if trainer.global_rank < len(states):
            self._state = RandomState.from_plain(states[trainer.global_rank])
        self._gradients = saved["gradients"]
        sums = saved.get("sums", [])  # older checkpoints have none
        if len(sums) != trainer.world_size:  # the first rank takes all
            sums = [_added(sums)]
        if trainer.global_rank < len(sums):
            self._sums = sums[trainer.global_rank]
        if saved["unfinished_step"] and not self._gradients:  # as older versions wrote them
            rank_zero_warn(
                "the checkpoint was written between two accumulated micro-batches of sharded "
                "parameters: the gradient of the unfinished step is lost"
            )

    def _begin_step(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
        """Goes on with the optimiser step that the checkpoint was written in, or begins one."""
        saved = checkpoint.get(KEY) or {}
        batches = _processed(trainer)
        if saved.get("unfinished_step"):
            _check_step(trainer, saved.get("step_place"), int(checkpoint["global_step"]))
            position, _ = _place_in_step(trainer)
            self._step_start = saved.get("step_start", batches - position)
        else:
            self._step_start = batches
        begin_step = getattr(trainer.datamodule, "begin_step", None)  # type: ignore[attr-defined]
        if begin_step is not None:
            begin_step(self._step_start)


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


def _added(sums: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Returns the sums over all ranks."""
    names = dict.fromkeys(name for each in sums for name in each)
    pairs = {name: [each[name] for each in sums if name in each] for name in names}
    return {name: [math.fsum(part) for part in zip(*pairs[name], strict=True)] for name in names}


# ---- position in the run


def _order_of_steps(trainer: L.Trainer) -> dict[str, Any] | None:
    """Returns the settings that decide a step's rows, if the batch of a step is stated."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return getattr(data, "order_of_steps", None)


def _convert_micro_batches(trainer: L.Trainer, checkpoint: dict[str, Any]) -> bool:
    """Rewrites the count of micro-batches of a checkpoint as this run counts them.

    A step has the same rows in micro-batches of another size. If both runs state the same batch of
    a step, the count is scaled from the micro-batches of a step in that run to those in this one.
    If not, and one of them states it, the checkpoint must end after the same rows and steps.

    Returns:
        Whether the steps of both runs have the same rows.

    Raises:
        ValueError: If the checkpoint was written within one of this run's micro-batches, or its
            steps have other rows than this run's.
    """
    saved, order = checkpoint.get(KEY) or {}, _order_of_steps(trainer)
    theirs = saved.get("order_of_steps")
    state = (checkpoint.get("loops") or {}).get("fit_loop") or {}
    if (order is None and theirs is None) or _BATCHES not in state:
        return False
    total = state[_BATCHES]["total"]  # the other counts follow from it
    if order is None or theirs is None or any(order.get(k) != theirs.get(k) for k in STATED):
        total["processed"] = _batches_of_rows(trainer, checkpoint, total["processed"])
        return True
    (done, before), now = saved["step_place"], trainer.accumulate_grad_batches
    if done * now % before:
        raise ValueError(
            f"the checkpoint was written after {done} of the {before} micro-batches of an "
            f"optimiser step, within a micro-batch of this run, whose steps have {now}; resume on "
            "as many devices with that batch_size, or from a checkpoint between two steps"
        )
    total["processed"] = total["processed"] * now // before
    saved["step_start"] = saved["step_start"] * now // before
    saved["step_place"] = [done * now // before, now]
    return bool(theirs == order)  # another seed, for one, is warned of by the data module


def _batches_of_rows(trainer: L.Trainer, checkpoint: dict[str, Any], batches: int) -> int:
    """Returns the micro-batches of this run that have the rows of the checkpoint's.

    Args:
        trainer: In work.
        checkpoint: Written by a run that states another batch of a step, or none.
        batches: Micro-batches that run has processed.

    Raises:
        ValueError: If as many steps of this run have other rows.
    """
    if not batches:
        return 0
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    accumulate, steps = trainer.accumulate_grad_batches, int(checkpoint["global_step"])
    step, order = data.step_batch(trainer.world_size, accumulate), data.order()
    theirs = (checkpoint.get(type(data).__qualname__) or {}).get("order") or {}
    stated = (checkpoint.get(KEY) or {}).get("order_of_steps") or {}
    if stated.get("global_batch"):
        rows = batches * stated["global_batch"] // checkpoint[KEY]["step_place"][1]
    else:
        rows = batches * theirs.get("batch_size", 0) * theirs.get("world_size", 0)
    # An epoch of larger steps leaves more rows out, so that later epochs begin at other rows.
    epoch = len(data.training_source()) * step.micro * step.devices // step.size * step.size
    agree = all(theirs.get(key) == order[key] for key in order if key != "batch_size")
    agree &= rows <= epoch or order.get("train_windows") == "random"
    if step.unit != "rows" or not agree or rows != steps * step.size:
        changed = [
            f"data.{key} to {'null' if stated.get(key) is None else stated[key]}"
            for key in STATED
            if getattr(data, key, None) != stated.get(key)
        ]
        raise ValueError(
            f"the {steps} steps of the checkpoint do not have the rows of the first {steps} steps "
            f"of this run, of {step.size} {step.unit} each: set {' and '.join(changed)}, as in the "
            "run that wrote it, to resume"
        )
    return steps * accumulate


def _restore_position(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Rewrites the loops' state of a checkpoint, so that it says which batch comes next.

    All of it follows from the number of processed batches and whether a validation is to be made up
    for, as the batches do. Loaders of unknown length keep what Lightning has saved.
    """
    state = (checkpoint.get("loops") or {}).get("fit_loop") or {}
    if not {_EPOCHS, _BATCHES, _VALIDATION} <= state.keys():
        return
    loop = trainer.fit_loop
    loop.load_state_dict(state)
    loop.setup_data()
    length = _length(trainer)
    if length == sys.maxsize:
        return
    batches = int(state[_BATCHES]["total"]["processed"])
    pending = bool(checkpoint.get("pending_validation", False))
    if pending and batches % length == 0:  # the validation belongs to the epoch before
        state.update(_position(batches, length, ends_epoch=True))
        loop.load_state_dict(state)
        fetcher = loop._data_fetcher
        if fetcher is not None and loop.epoch_loop._should_check_val_fx(fetcher):
            return
    state.update(_position(batches, length))
    if not pending:
        state[_VALIDATION] = {**_progress(0, 0), "is_last_batch": False}
    loop.load_state_dict(state)


def _position(batches: int, length: int, *, ends_epoch: bool = False) -> dict[str, Any]:
    """Returns the loops' progress after so many batches, in epochs of ``length``.

    Args:
        batches: Batches of all epochs so far.
        length: Batches of an epoch.
        ends_epoch: Whether to stand behind the last batch of an epoch, not before the next epoch.
    """
    epoch, batch = divmod(batches, length)
    if ends_epoch:
        epoch, batch = epoch - 1, length
    epochs = _progress(epoch, epoch)
    if batch:  # the epoch has begun
        for counts in epochs.values():
            counts["ready"] = counts["started"] = epoch + 1
    progress = {**_progress(batches, batch), "is_last_batch": ends_epoch}
    return {_EPOCHS: epochs, _BATCHES: progress}


def _progress(total: int, current: int) -> dict[str, dict[str, int]]:
    """Returns Lightning's record of events that are all completed."""
    stages = ("ready", "started", "processed", "completed")
    return {"total": dict.fromkeys(stages, total), "current": dict.fromkeys(stages, current)}


def _processed(trainer: L.Trainer) -> int:
    """Returns the training batches so far, over all epochs and restarts."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)  # type: ignore[attr-defined]


def _restore_log_step(trainer: L.Trainer) -> None:
    """Has the next values logged under the step that they have in an uninterrupted run.

    A loop that restarts at a batch after which a validation is due goes through the end of that
    batch once more, and counts its step again.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    if not trainer.fit_loop.is_resuming or fetcher is None:
        return
    counts_again = (
        loop.restarting and not in_accumulation(trainer) and loop._should_check_val_fx(fetcher)
    )
    loop._batches_that_stepped = trainer.global_step - counts_again


def _place_in_step(trainer: L.Trainer) -> list[int]:
    """Returns the number of past micro-batches of the current optimiser step, and of all of it.

    An epoch's last step may have fewer than ``accumulate_grad_batches``; [0, n] is between steps.
    """
    size, batch, length = trainer.accumulate_grad_batches, _processed(trainer), _length(trainer)
    batch %= length
    position = batch % size
    return [position, min(size, length - batch + position)]


def _length(trainer: L.Trainer) -> int:
    """Returns the number of batches of an epoch, ``sys.maxsize`` if unknown."""
    length = trainer.num_training_batches
    return int(length) if 0 < length < math.inf else sys.maxsize


def _check_step(trainer: L.Trainer, saved: list[int] | None, steps: int) -> None:
    """Refuses a checkpoint in the middle of a step that this run would end at another micro-batch.

    Args:
        trainer: In work, its position restored.
        saved: The place in the step when the checkpoint was written, None in older checkpoints.
        steps: Optimiser steps done.

    Raises:
        ValueError: If the accumulated gradient is not the beginning of this run's step.
    """
    accumulate, length = trainer.accumulate_grad_batches, _length(trainer)
    position = _place_in_step(trainer)
    if saved is None:  # then the number of steps tells
        epoch, batch = divmod(_processed(trainer), length)
        same = position[0] > 0 and steps == epoch * -(-length // accumulate) + batch // accumulate
        where = "in the middle of an optimiser step"
    else:
        same = position == saved
        where = f"after {saved[0]} of the {saved[1]} micro-batches of an optimiser step"
    if not same:
        raise ValueError(
            f"trainer.accumulate_grad_batches ({accumulate}): the checkpoint was written {where}, "
            "which this run would end at another micro-batch; resume with the accumulation and the "
            "limit_train_batches of that run, or from a checkpoint between two steps"
        )


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
        # fresh optimisers: the checkpoint has not been loaded into them yet
        self._settings = [_settings(optimizer) for optimizer in trainer.optimizers]
        self._base_lrs = [
            list(config.scheduler.base_lrs)
            for config in trainer.lr_scheduler_configs
            if isinstance(config.scheduler, LRScheduler)
        ]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
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
    """Has a resumed run follow its own schedule from the first step, and warns where that jumps.

    A schedule is a function of the length of the run: with another one the learning rate jumps.
    The restored optimiser has the checkpoint's rate for the next step, the scheduler computes this
    run's, which is the one that counts. Another peak rate is no change of the schedule (see
    ``KeepOptimizerSettings``).
    """

    def __init__(self) -> None:
        self._end = math.inf

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Notes the length by which the schedule was built; ``PendingValidation`` may lift it.
        model: Any = pl_module
        self._end = model.optimizer_config.horizon or trainer.estimated_stepping_batches

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Compares and sets; at this point all is restored and nothing has been stepped yet.
        if trainer.ckpt_path is None:
            return
        for config in trainer.lr_scheduler_configs:
            if not isinstance(config.scheduler, LambdaLR):
                continue
            rates = _rates(config.scheduler)
            _rebase(config.scheduler, config.scheduler.base_lrs)
            if rates is not None and not math.isclose(*rates, rel_tol=TOLERANCE):
                end = "has no end" if math.isinf(self._end) else f"ends at step {int(self._end)}"
                rank_zero_info(  # a Python warning would take two lines, one of them of code
                    f"warning: the schedule now {end}: the learning rate goes from {rates[0]:.1e} "
                    f"to {rates[1]:.1e}"
                )


def _rates(scheduler: LambdaLR) -> tuple[float, float] | None:
    """Returns the checkpoint's rate and this schedule's, or None if the peak rates differ."""
    group, base = scheduler.optimizer.param_groups[0], scheduler.base_lrs[0]
    if scheduler.optimizer.defaults["lr"] != base:  # what was configured, which nothing restores
        return None
    return float(group["lr"]), float(base * scheduler.lr_lambdas[0](scheduler.last_epoch))
