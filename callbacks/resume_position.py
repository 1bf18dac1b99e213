"""Position of a run in its data: the batch and the step that follow a checkpoint."""

import math
import sys
from typing import Any

import lightning as L

from callbacks.trainer_state import in_accumulation

RESUME_STATE, PENDING_VALIDATION = "resume_state", "pending_validation"
"""Checkpoint keys, see `ResumeState` and `PendingValidation`."""
STATED = ("global_batch", "global_batch_tokens")
"""Data options that set the batch of a step."""
_EPOCHS, _BATCHES = "epoch_progress", "epoch_loop.batch_progress"
VALIDATION_PROGRESS = "epoch_loop.val_loop.batch_progress"


def order_of_steps(trainer: L.Trainer) -> dict[str, Any] | None:
    """Returns the settings that determine a step's rows, if the batch of a step is set."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return getattr(data, "order_of_steps", None)


def convert_micro_batches(trainer: L.Trainer, checkpoint: dict[str, Any]) -> bool:
    """Converts a checkpoint's count of micro-batches to micro-batches of this run.

    A step can have the same rows in micro-batches of a different size. If both runs set the same
    step size, the number is scaled by the ratio of their micro-batches per step. If only one of
    them sets it, or they differ, the checkpoint must end after the same rows and steps.

    Returns:
        Whether the steps of both runs have the same rows.

    Raises:
        ValueError: If the checkpoint was written within one of this run's micro-batches, or its
            steps do not have the same rows as this run's.
    """
    saved, order = checkpoint.get(RESUME_STATE) or {}, order_of_steps(trainer)
    saved_order = saved.get("order_of_steps")
    state = (checkpoint.get("loops") or {}).get("fit_loop") or {}
    if (order is None and saved_order is None) or _BATCHES not in state:
        return False
    total = state[_BATCHES]["total"]  # the other counts follow from it
    if (
        order is None
        or saved_order is None
        or any(order.get(k) != saved_order.get(k) for k in STATED)
    ):
        total["processed"] = _batches_of_rows(trainer, checkpoint, total["processed"])
        return True
    (past, saved_size), size = saved["step_place"], trainer.accumulate_grad_batches
    if past * size % saved_size:
        raise ValueError(
            f"the checkpoint was written after {past} of the {saved_size} micro-batches of an "
            f"optimiser step, within a micro-batch of this run, whose steps have {size}; resume on "
            "as many devices with that batch_size, or from a checkpoint between two steps"
        )
    total["processed"] = total["processed"] * size // saved_size
    saved["step_start"] = saved["step_start"] * size // saved_size
    saved["step_place"] = [past * size // saved_size, size]
    # the data module warns of other differences, such as the seed
    return bool(saved_order == order)


def _batches_of_rows(trainer: L.Trainer, checkpoint: dict[str, Any], batches: int) -> int:
    """Returns the number of this run's micro-batches that cover the checkpoint's rows.

    Args:
        trainer: The running trainer.
        checkpoint: Checkpoint of a run that sets a different step size, or none.
        batches: Number of micro-batches that this run had processed.

    Raises:
        ValueError: If the same number of this run's steps does not have the same rows.
    """
    if not batches:
        return 0
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    accumulate, steps = trainer.accumulate_grad_batches, int(checkpoint["global_step"])
    step, order = data.step_batch(trainer.world_size, accumulate), data.order()
    saved_order = (checkpoint.get(type(data).__qualname__) or {}).get("order") or {}
    saved_settings = (checkpoint.get(RESUME_STATE) or {}).get("order_of_steps") or {}
    if saved_settings.get("global_batch"):
        rows = batches * saved_settings["global_batch"] // checkpoint[RESUME_STATE]["step_place"][1]
    else:
        rows = batches * saved_order.get("batch_size", 0) * saved_order.get("world_size", 0)
    # An epoch of larger steps drops more rows at its end, so later epochs start at different rows.
    epoch = len(data.training_source()) * step.micro * step.devices // step.size * step.size
    agree = all(saved_order.get(key) == order[key] for key in order if key != "batch_size")
    agree &= rows <= epoch or order.get("train_windows") == "random"
    if step.unit != "rows" or not agree or rows != steps * step.size:
        changed = [
            f"data.{key} to {'null' if saved_settings.get(key) is None else saved_settings[key]}"
            for key in STATED
            if getattr(data, key, None) != saved_settings.get(key)
        ]
        raise ValueError(
            f"the {steps} steps of the checkpoint do not have the rows of the first {steps} steps "
            f"of this run, of {step.size} {step.unit} each: set {' and '.join(changed)}, as in the "
            "run that wrote it, to resume"
        )
    return steps * accumulate


def restore_position(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Rewrites the loops' state of a checkpoint for the next batch.

    It depends only on the number of processed batches and on whether a validation is pending, like
    the batches. For loaders of unknown length, Lightning's state is kept.
    """
    state = (checkpoint.get("loops") or {}).get("fit_loop") or {}
    if not {_EPOCHS, _BATCHES, VALIDATION_PROGRESS} <= state.keys():
        return
    loop = trainer.fit_loop
    loop.load_state_dict(state)
    loop.setup_data()
    length = _length(trainer)
    if length == sys.maxsize:
        return
    batches = int(state[_BATCHES]["total"]["processed"])
    pending = bool(checkpoint.get(PENDING_VALIDATION, False))
    if pending and batches % length == 0:  # the validation belongs to the epoch before
        state.update(_position(batches, length, ends_epoch=True))
        loop.load_state_dict(state)
        fetcher = loop._data_fetcher
        if fetcher is not None and loop.epoch_loop._should_check_val_fx(fetcher):
            return
    state.update(_position(batches, length))
    if not pending:
        state[VALIDATION_PROGRESS] = {**_progress(0, 0), "is_last_batch": False}
    loop.load_state_dict(state)


def _position(batches: int, length: int, *, ends_epoch: bool = False) -> dict[str, Any]:
    """Returns the loops' progress after a number of batches, in epochs of ``length``.

    Args:
        batches: Number of batches in all epochs so far.
        length: Number of batches in an epoch.
        ends_epoch: Whether the position is the end of an epoch instead of the start of the next.
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
    """Returns Lightning's counters for events that are all completed."""
    stages = ("ready", "started", "processed", "completed")
    return {"total": dict.fromkeys(stages, total), "current": dict.fromkeys(stages, current)}


def processed_batches(trainer: L.Trainer) -> int:
    """Returns the number of training batches so far, over all epochs and restarts."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)  # type: ignore[attr-defined]


def restore_log_step(trainer: L.Trainer) -> None:
    """Makes the next values appear at the same logged step as in an uninterrupted run.

    A loop that restarts at a batch before a validation repeats the end of that batch, and counts
    its step again.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    if not trainer.fit_loop.is_resuming or fetcher is None:
        return
    counts_again = (
        loop.restarting and not in_accumulation(trainer) and loop._should_check_val_fx(fetcher)
    )
    loop._batches_that_stepped = trainer.global_step - counts_again


def place_in_step(trainer: L.Trainer) -> list[int]:
    """Returns the numbers of past and total micro-batches in the current optimiser step.

    An epoch's last step may have fewer than ``accumulate_grad_batches``; [0, n] is between steps.
    """
    size, length = trainer.accumulate_grad_batches, _length(trainer)
    batch = processed_batches(trainer) % length
    position = batch % size
    return [position, min(size, length - batch + position)]


def _length(trainer: L.Trainer) -> int:
    """Returns the number of batches of an epoch, or ``sys.maxsize`` if unknown."""
    length = trainer.num_training_batches
    return int(length) if 0 < length < math.inf else sys.maxsize


def check_step(trainer: L.Trainer, saved: list[int] | None, steps: int) -> None:
    """Checks that an unfinished step of a checkpoint is the beginning of a step of this run.

    Args:
        trainer: The running trainer, with its position restored.
        saved: Position in the step when the checkpoint was written, None in older checkpoints.
        steps: Number of completed optimiser steps.

    Raises:
        ValueError: If this run would end the step at a different micro-batch.
    """
    accumulate, length = trainer.accumulate_grad_batches, _length(trainer)
    position = place_in_step(trainer)
    if saved is None:
        # inferred from the number of steps
        epoch, batch = divmod(processed_batches(trainer), length)
        same = position[0] > 0 and steps == epoch * -(-length // accumulate) + batch // accumulate
        where = "in the middle of an optimiser step"
    else:
        same = position == saved
        where = f"after {saved[0]} of the {saved[1]} micro-batches of an optimiser step"
    if not same:
        raise ValueError(
            f"trainer.accumulate_grad_batches ({accumulate}): the checkpoint was written {where}, "
            "which this run would end at a different micro-batch; resume with the accumulation and "
            "the limit_train_batches of that run, or from a checkpoint between two steps"
        )
