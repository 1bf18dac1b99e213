"""Schedule and selection of checkpoints."""

import time
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from callbacks.hooks import AgreedEnd
from callbacks.logging import write_pending_logs
from callbacks.nonfinite import NonFiniteError, check_weights, weights_are_finite
from callbacks.trainer_state import in_accumulation, log_interval, run_id, validation_follows
from lightning_models.checkpoint import is_torn, read_file

MONITOR = "val/loss"


class SaveCheckpoints(ModelCheckpoint):
    """Writes ``last.ckpt`` to continue from, and the best checkpoints by validation.

    Unlike in Lightning's class, the two are independent: ``every_n_train_steps`` and
    ``train_time_interval`` write ``last.ckpt`` (never between two accumulated micro-batches)
    with or without validations; the ``save_top_k`` best are written after validations, with fresh
    values of ``monitor``. ``save_top_k: -1`` keeps a checkpoint of every trigger and every
    validation. The end of training always writes ``last.ckpt``.

    A run has one ``last.ckpt``, which replaces the previous one, even in a copied folder, or a
    damaged one. An intact one of another run in the same ``dirpath`` is kept, and this run writes
    ``last-v1.ckpt`` instead. Non-finite weights are not written.

    A run that is killed at any time and resumed has the same log as an uninterrupted one, since log
    files are written before the checkpoint. If a validation is due at the same step, ``last.ckpt``
    is written when it begins (``PendingValidation`` makes a resumed run repeat it) and again after
    it.

    Args:
        dirpath: Folder. If null, ``checkpoints`` in the run's log folder.
        filename: Template such as ``{epoch}-{step}``. If null, ``best-{step}``, or ``{step}`` if
            all are kept.
        monitor: Logged value that ranks checkpoints. If null, the most recent is the best.
        mode: Whether small or large values are better.
        save_top_k: Number of best checkpoints to keep, or -1 for all.
        save_last: Whether to keep ``last.ckpt``.
        every_n_train_steps: Optimiser steps between two ``last.ckpt``, or null to ignore steps.
        train_time_interval: Time between two ``last.ckpt``, or null to ignore time.
        save_on_exception: Whether to write a checkpoint if an error ends the run. Several processes
            can write one only after an error that all of them raise.
        save_weights_only: Whether to write weights only, from which no run can be resumed.
        auto_insert_metric_name: Whether ``{step}`` becomes ``step=7``; set false for templates with
            names that contain a slash, such as ``{val/loss:.2f}``.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str | None = None,
        monitor: str | None = MONITOR,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = timedelta(minutes=15),
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        auto_insert_metric_name: bool = True,
    ) -> None:
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(
                f"every_n_train_steps ({every_n_train_steps}) must be at least 1, or null"
            )
        super().__init__(
            dirpath=dirpath,
            filename=filename or ("{step}" if save_top_k == -1 else "best-{step}"),
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            auto_insert_metric_name=auto_insert_metric_name,
        )
        self.every_n_train_steps = every_n_train_steps
        self.train_time_interval = train_time_interval
        self._seen_step = -1
        self._last_step = -1  # step of the last.ckpt that _save_now has written
        self._requested = False
        self._deferred = False  # until the next validation
        self._numbered = ""
        self._first_step = 0  # first step of this process
        self._unchecked = monitor is not None and save_top_k != 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.enable_validation or not self._unchecked:
            return
        if _is_of(self.monitor, "val") and self.monitor != MONITOR:
            raise ValueError(
                f"checkpoint.monitor ({self.monitor}) is a validation metric, but this run has no "
                "validations; choose a value logged in training, such as train/loss, or null"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # starts the clock; a restored step counts as written
        super().on_train_start(trainer, pl_module)
        self._seen_step = self._first_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step == self._seen_step or in_accumulation(trainer):
            return
        self._seen_step = step
        # the throughput is logged from the second step on
        if step % log_interval(trainer) == 0 and step - self._first_step > 1:
            self._check_training(trainer)
        due = self.every_n_train_steps is not None and step % self.every_n_train_steps == 0
        if not (due or self._requested or self._time_is_up(trainer)):
            return
        if vars(trainer).get("fast_dev_run"):
            return
        self._last_time_checked = time.monotonic()
        self._requested = False
        self._deferred = validation_follows(trainer)
        if not self._deferred:
            self._save_now(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # a run that is killed in the validation then loses no steps
        if self._deferred and not trainer.sanity_checking:
            self.save_in_validation(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        names = trainer.callback_metrics
        # a training value may be logged later, with the first optimiser step
        comes_later = not _is_of(self.monitor, "val") and not self._has_logged(trainer)
        comes_later = comes_later and self.monitor not in names
        if not comes_later:
            if not trainer.sanity_checking:
                self._check_monitor(trainer, names, "the first validation")
            super().on_validation_end(trainer, pl_module)
        if self._deferred and not trainer.sanity_checking:
            self._deferred = False
            if self._last_global_step_saved != trainer.global_step:  # else it was written just now
                self._save_now(trainer)

    def request(self) -> None:
        """Requests ``last.ckpt`` at the end of the current optimiser step."""
        self._requested = True

    def restart_ranking(self) -> None:
        """Ranks all checkpoints so far below the next one, e.g. for a curriculum's next stage.

        It is for changes after which values of ``monitor`` are not comparable to earlier ones.
        """
        worst = torch.tensor(-torch.inf if self.mode == "max" else torch.inf)
        self.best_k_models = dict.fromkeys(self.best_k_models, worst)

    def save_in_validation(self, trainer: L.Trainer) -> None:
        """Writes ``last.ckpt`` before the end of a validation, unless this step has one.

        The numbered checkpoint is not written, as its name may contain a value of this validation.
        """
        if self._last_step != trainer.global_step:
            self._save_now(trainer, numbered=False)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._has_logged(trainer):
            self._check_training(trainer)
        if self.monitor is None or self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        written = self._last_step == trainer.global_step
        if not (written or self._should_skip_saving_checkpoint(trainer)):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        has_monitor = self.monitor not in (None, MONITOR)
        if self._unchecked and has_monitor and self.monitor not in trainer.callback_metrics:
            rank_zero_warn(
                f"checkpoint.monitor ({self.monitor}) was not logged in this run, so no best "
                "checkpoint was kept"
            )

    def _has_logged(self, trainer: L.Trainer) -> bool:
        """Returns whether this process has completed a logged step."""
        every = log_interval(trainer)
        # the throughput is logged from the second step on
        return trainer.global_step // every > max(self._first_step + 1, 1) // every

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A run in another folder starts a new ranking, and so does one whose state names files that
        # are not checkpoints in its folder, as files that drop out of the ranking are deleted.
        if state_dict.get("dirpath") == self.dirpath and self._ranks_own_files(state_dict):
            super().load_state_dict(state_dict)

    def _ranks_own_files(self, state_dict: dict[str, Any]) -> bool:
        """Returns whether all paths in a saved state are checkpoints in this callback's folder."""
        keys = ("best_model_path", "kth_best_model_path", "last_model_path")
        names = [state_dict.get(key) or "" for key in keys]
        names += list(state_dict.get("best_k_models") or {})
        folder = Path(self.dirpath or "").resolve()
        paths = [Path(str(name)) for name in names if name]
        return all(
            path.suffix == ".ckpt" and path.resolve().parent == folder and not path.is_dir()
            for path in paths
        )

    def _check_training(self, trainer: L.Trainer) -> None:
        """Checks once, in a run without validations, that training logs ``monitor``."""
        if trainer.enable_validation or _is_of(self.monitor, "val"):
            return
        logged: Any = trainer._results or {}  # also means over the epoch, which have no value yet
        names = {*trainer.callback_metrics, *(result.meta.name for result in logged.values())}
        self._check_monitor(trainer, names, f"step {trainer.global_step}")

    def _check_monitor(self, trainer: L.Trainer, names: Collection[str], option: str) -> None:
        """Raises a ValueError if ``monitor`` is not among the logged names."""
        if self._unchecked and self.monitor not in names:
            raise ValueError(
                f"checkpoint.monitor ({self.monitor}) was not logged by {option}; choose one of "
                f"{', '.join(sorted(trainer.callback_metrics))}, or null"
            )
        self._unchecked = False

    def _save_now(self, trainer: L.Trainer, *, numbered: bool = True) -> None:
        """Writes ``last.ckpt``, and a numbered checkpoint if all are kept, but not the best one."""
        write_pending_logs(trainer)
        step_of_best = self._last_global_step_saved
        candidates = self._monitor_candidates(trainer)
        if numbered and self.save_top_k == -1:
            self._numbered = self.format_checkpoint_name(candidates)
            self._save_checkpoint(trainer, self._numbered)
        self._save_last_checkpoint(trainer, candidates)
        self._last_step = trainer.global_step
        # else Lightning would skip the validated checkpoint of the same step
        self._last_global_step_saved = step_of_best

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # Writing is collective, and would hang if not all ranks have raised the error.
        together = trainer.world_size == 1 or isinstance(exception, AgreedEnd)
        writes = together and self._should_save_on_exception(trainer)
        if writes and weights_are_finite(trainer):
            super().on_exception(trainer, pl_module, exception)

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if self.save_weights_only:  # Lightning calls no callback then
            check_weights(trainer)
        super()._save_checkpoint(trainer, filepath)

    def _save_last_checkpoint(
        self, trainer: L.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        """Writes ``last.ckpt``, under another name only if that file is another run's."""
        previous = self.last_model_path
        last = self.format_checkpoint_name(monitor_candidates, self.CHECKPOINT_NAME_LAST)
        if previous != last and self._may_replace(trainer, Path(last)):
            self.last_model_path = last
        try:
            super()._save_last_checkpoint(trainer, monitor_candidates)
        except NonFiniteError:
            self.last_model_path = previous
            raise

    def _may_replace(self, trainer: L.Trainer, path: Path) -> bool:
        """Returns on all ranks whether rank 0 sees a file that is damaged or of this run."""
        replaced = trainer.is_global_zero and _is_torn_or_of_run(path, run_id(trainer))
        return bool(trainer.strategy.broadcast(replaced))

    def _get_metric_interpolated_filepath_name(self, *args: Any, **kwargs: Any) -> str:
        """Returns the numbered file of this step, if there is one, instead of a second name."""
        candidates = args[0] if args else kwargs["monitor_candidates"]
        plain = self.format_checkpoint_name(candidates)
        if plain == self._numbered:
            return plain
        return super()._get_metric_interpolated_filepath_name(*args, **kwargs)

    def _time_is_up(self, trainer: L.Trainer) -> bool:
        """Returns whether ``train_time_interval`` has passed on rank 0; false between log steps."""
        if self.train_time_interval is None or self._last_time_checked is None:
            return False
        if trainer.global_step % log_interval(trainer):
            return False
        passed = time.monotonic() - self._last_time_checked
        up = passed >= self.train_time_interval.total_seconds()
        return bool(trainer.strategy.broadcast(up))


def _is_of(name: str | None, stage: str) -> bool:
    return name is not None and name.startswith(f"{stage}/")


def _is_torn_or_of_run(path: Path, run: str | None) -> bool:
    if not path.is_file():
        return False
    if is_torn(path):
        return True
    try:
        written_by = read_file(path)["run"]["id"]
    except Exception:  # written by another program
        return False
    return run is not None and bool(written_by == run)
