"""Parts that callbacks share: evaluation hooks, the trainer's state, evaluation mid-training."""

import dataclasses
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from torch import Tensor, nn


class EvaluationHooks(L.Callback):
    """A callback on the batches of validations, and of tests where ``of_tests`` is set.

    Lightning has separate hooks for the two; here both call the same four methods, which do
    nothing unless overridden. The sanity check before a training calls none.
    """

    of_tests: ClassVar[bool] = True
    """Whether tests are covered too."""

    # ---- for subclasses

    def evaluation_starts(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Called before the first batch."""

    def evaluation_batch_ends(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Called after each batch, on all ranks."""

    def evaluation_epoch_ends(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Called after the last batch, in time for checkpoints to be ranked by what is logged.

        Args:
            trainer: in work.
            pl_module: the model.
            stage: val or test.
        """

    def evaluation_ends(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Called when all has been logged."""

    # ---- Lightning's hooks

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calls ``evaluation_starts``."""
        if self._covers(trainer):
            self.evaluation_starts(trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Calls ``evaluation_batch_ends``."""
        if self._covers(trainer):
            self.evaluation_batch_ends(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calls ``evaluation_epoch_ends``."""
        if self._covers(trainer):
            self.evaluation_epoch_ends(trainer, pl_module, "test" if trainer.testing else "val")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calls ``evaluation_ends``."""
        if self._covers(trainer):
            self.evaluation_ends(trainer, pl_module)

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end
    on_test_epoch_end, on_test_end = on_validation_epoch_end, on_validation_end

    def _covers(self, trainer: L.Trainer) -> bool:
        return self.of_tests if trainer.testing else not trainer.sanity_checking


def check_least(name: str, value: float | None, least: int) -> None:
    """Raises ValueError if the argument of that name, where there is one, is below ``least``."""
    if value is not None and value < least:
        raise ValueError(f"{name} ({value}) must be at least {least}")


class AsksAllRanks(L.Callback):
    """A callback with a question to all ranks at each optimiser step of several processes.

    ``NonFinite`` puts it, in the exchange that it needs anyway.
    """

    def question(self) -> list[float]:
        """Returns this rank's numbers, as many on every rank."""
        return []

    def answer(self, totals: list[float]) -> None:
        """Takes the sums of the numbers over all ranks, before the optimiser's step."""


class AgreedEnd(Exception):  # noqa: N818 - some are no errors
    """An end of the program that every rank raises at the same place; rank 0 reports it."""

    exit_code: int


# ---- the trainer's state that Lightning does not declare


def log_interval(trainer: L.Trainer) -> int:
    """Returns ``trainer.log_every_n_steps`` in optimiser steps, at least 1."""
    return max(1, vars(trainer).get("log_every_n_steps") or 1)


def in_accumulation(trainer: L.Trainer) -> bool:
    """Whether the micro-batch in work, or just ended, leaves its optimiser step unfinished."""
    loop = trainer.fit_loop.epoch_loop
    return loop.batch_progress.current.ready > 0 and loop._should_accumulate()


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether a validation comes directly after the training batch that just ended."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or not loop._should_check_val_fx(fetcher):
        return False
    return sum(trainer.num_val_batches) > 0


def validation_unfinished(trainer: L.Trainer) -> bool:
    """Whether a validation has begun and not all of its batches have ended."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    ended = progress.is_last_batch and progress.current.completed == progress.current.ready
    return trainer.validating and not ended


def write_pending_logs(trainer: L.Trainer) -> None:
    """Hands what this training batch has logged to the loggers, and what they hold to the disk.

    Lightning does so after the hooks of the batch. A checkpoint that is written in one of them
    would else be newer than the log, and a run killed in between would lose values for good.
    """
    connector = trainer._logger_connector
    logs = trainer.training and connector._first_loop_iter is not None
    if logs and not in_accumulation(trainer) and connector.should_update_logs:
        connector.log_metrics(connector.metrics["log"])
    for logger in trainer.loggers:
        logger.save()


def takes_text(logger: Logger) -> bool:
    """Whether `log_text` finds a place for text in a logger."""
    writer: Any = getattr(logger, "experiment", None)
    return isinstance(logger, WandbLogger | MLFlowLogger) or hasattr(writer, "add_text")


def log_text(logger: Logger, tag: str, text: str, step: int) -> None:
    """Hands Markdown to a logger that takes text: TensorBoard, W&B or MLflow."""
    writer: Any = getattr(logger, "experiment", None)
    if isinstance(logger, WandbLogger):
        logger.log_text(tag, columns=["step", "text"], data=[[str(step), text]])
    elif isinstance(logger, MLFlowLogger):
        writer.log_text(logger.run_id, text, f"{tag}/step={step}.md")
    elif hasattr(writer, "add_text"):
        writer.add_text(tag, text, step)


def log_images(logger: Logger, tag: str, images: Sequence[np.ndarray], step: int) -> None:
    """Hands images (height, width, 3) to a logger that takes them: TensorBoard, W&B or MLflow."""
    writer: Any = getattr(logger, "experiment", None)
    if isinstance(logger, WandbLogger):
        logger.log_image(tag, list(images), step)
        return
    for number, image in enumerate(images, start=1):
        if isinstance(logger, MLFlowLogger):
            writer.log_image(logger.run_id, image, f"{tag}/{number}/step={step}.png")
        elif hasattr(writer, "add_image"):
            # numbered, as TensorBoard shows nothing of a tag that is a scalar's, too
            writer.add_image(f"{tag}/{number}", image, step, dataformats="HWC")


def has_scaler(trainer: L.Trainer) -> bool:
    """Whether the loss is scaled (16-mixed)."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def unscaled(trainer: L.Trainer, loss: Tensor) -> Tensor:
    """Returns the loss that ``on_before_backward`` gets without a scaler's factor (16-mixed).

    No value is waited for.
    """
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    loss = loss.detach()
    return loss if scaler is None else loss / scaler.scale(torch.ones_like(loss))


def checkpoint_to_resume(trainer: L.Trainer) -> str | None:
    """Returns the newest checkpoint that this run has written, or else the one it came from."""
    written = newest_written(trainer)
    if written is not None:
        return str(written)
    return None if trainer.ckpt_path is None else str(trainer.ckpt_path)


def newest_written(trainer: L.Trainer) -> Path | None:
    """Returns the newest checkpoint that this run has written; None if it has written none."""
    written = [
        Path(path)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
        for path in (callback.last_model_path, callback.best_model_path)
        if path and Path(path).is_file()
    ]
    return max(written, key=lambda path: path.stat().st_mtime_ns, default=None)


def run_id(trainer: L.Trainer) -> str | None:
    """Returns the id that the run's record gives it; None in a run without a record."""
    found = (getattr(callback, "run_id", None) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return next((value for value in found if isinstance(value, str)), None)


def tokenizer_of(trainer: L.Trainer) -> Any:
    """Returns the tokenizer of the data module; None where there is none."""
    return getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]


def gather(value: Any) -> list[Any]:
    """Returns the value of each rank, in the order of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- models evaluated mid-training


@dataclasses.dataclass(frozen=True)
class RandomState:
    """States of torch (CPU and every CUDA device), numpy and Python, as these give them."""

    torch_cpu: Tensor
    torch_cuda: list[Tensor]
    numpy: Any
    python: tuple[Any, ...]

    @classmethod
    def capture(cls) -> "RandomState":
        """Returns the present state; a few microseconds."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(legacy=True), random.getstate())

    def restore(self) -> None:
        """Puts the generators back; CUDA only if there are as many devices as there were."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda and torch.cuda.device_count() == len(self.torch_cuda):
            torch.cuda.set_rng_state_all(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def plain(self) -> dict[str, Any]:
        """Returns tensors and plain values only, which load with ``weights_only=True``."""
        kind, keys, position, has_gauss, cached = self.numpy
        version, internal, gauss_next = self.python
        return {
            "torch_cpu": self.torch_cpu,
            "torch_cuda": self.torch_cuda,
            "numpy": [
                str(kind),
                torch.from_numpy(keys.astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ],
            "python": [version, torch.tensor(internal), gauss_next],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "RandomState":
        """Returns the state that ``plain`` described (its tensors may have moved to a device)."""
        kind, keys, *rest = plain["numpy"]
        version, internal, gauss_next = plain["python"]
        return cls(
            torch_cpu=plain["torch_cpu"].cpu(),
            torch_cuda=[state.cpu() for state in plain["torch_cuda"]],
            numpy=(kind, keys.cpu().numpy().astype(np.uint32), *rest),
            python=(version, tuple(internal.tolist()), gauss_next),
        )


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluates ``module`` without gradients; restores random states and every submodule's mode.

    Also after an error, which Lightning's ``isolate_rng`` does not. Sharded parameters are whole
    on every rank; all ranks must enter.
    """
    random_state = RandomState.capture()
    modes = {child: child.training for child in module.modules()}
    module.eval()
    gathered = getattr(module, "gathered", nullcontext)
    try:
        with torch.no_grad(), gathered():
            yield
    finally:
        for child, mode in modes.items():
            child.training = mode
        random_state.restore()


def has_dial(model: nn.Module, name: str) -> bool:
    """Returns whether the model's configuration is a dataclass with a field of that name."""
    config = vars(model).get("config")
    return dataclasses.is_dataclass(config) and name in {
        field.name for field in dataclasses.fields(config)
    }


@contextmanager
def dialled(model: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Temporarily overrides one field of the model's configuration; restores it after errors too.

    Every module that holds the model's configuration sees the change: networks and parts of them
    have the same object. It works for settings that are read again at each call, not for those that
    a network was built from.

    Args:
        model: with its configuration, a frozen dataclass, as ``config``.
        name: the field.
        value: its temporary value.

    Raises:
        ValueError: if there is no such field, or the configuration refuses the value.
    """
    if not has_dial(model, name):
        raise ValueError(
            f"{name}: the configuration of {type(model).__name__} has no such field, so it cannot "
            f"be set to {value}"
        )
    config: Any = vars(model)["config"]
    changed = dataclasses.replace(config, **{name: value})
    holders = [module for module in model.modules() if vars(module).get("config") is config]
    try:
        for holder in holders:
            holder.config = changed
        yield
    finally:
        for holder in holders:
            holder.config = config


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file under another name and renames it: it is the old one or the new one.

    Raises:
        OSError: if it cannot be written; ``filename`` is the path, on a full disk too.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(part, path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)
