"""State of the trainer that Lightning does not declare."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor


def log_interval(trainer: L.Trainer) -> int:
    """Returns ``trainer.log_every_n_steps`` in optimiser steps, at least 1."""
    return max(1, vars(trainer).get("log_every_n_steps") or 1)


def in_accumulation(trainer: L.Trainer) -> bool:
    """Returns whether the current micro-batch is in the middle of a gradient-accumulation step."""
    loop = trainer.fit_loop.epoch_loop
    return loop.batch_progress.current.ready > 0 and loop._should_accumulate()


def validation_follows(trainer: L.Trainer) -> bool:
    """Returns whether a validation directly follows the training batch that just ended."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or not loop._should_check_val_fx(fetcher):
        return False
    return sum(trainer.num_val_batches) > 0


def validation_unfinished(trainer: L.Trainer) -> bool:
    """Returns whether a validation is running, with batches left."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    ended = progress.is_last_batch and progress.current.completed == progress.current.ready
    return trainer.validating and not ended


def has_scaler(trainer: L.Trainer) -> bool:
    """Returns whether the loss is scaled (16-mixed)."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def unscaled(trainer: L.Trainer, loss: Tensor) -> Tensor:
    """Returns the loss of ``on_before_backward`` without a scaler's factor (16-mixed).

    It does not synchronise with the device.
    """
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    loss = loss.detach()
    return loss if scaler is None else loss / scaler.scale(torch.ones_like(loss))


def checkpoint_to_resume(trainer: L.Trainer) -> str | None:
    """Returns the newest checkpoint of this run, or the one that it was resumed from."""
    written = newest_written(trainer)
    if written is not None:
        return str(written)
    return None if trainer.ckpt_path is None else str(trainer.ckpt_path)


def newest_written(trainer: L.Trainer) -> Path | None:
    """Returns the newest checkpoint that this run has written, or None."""
    written = [
        Path(path)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
        for path in (callback.last_model_path, callback.best_model_path)
        if path and Path(path).is_file()
    ]
    return max(written, key=lambda path: path.stat().st_mtime_ns, default=None)


def run_id(trainer: L.Trainer) -> str | None:
    """Returns the id in the run's record, or None in a run without a record."""
    ids = (getattr(callback, "run_id", None) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return next((value for value in ids if isinstance(value, str)), None)


def tokenizer_of(trainer: L.Trainer) -> Any:
    """Returns the tokenizer of the data module, or None."""
    return getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
