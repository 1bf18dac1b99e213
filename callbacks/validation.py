"""Interval and size of validations, and early stopping."""

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

OPTIONS = ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches")


class Validation(L.Callback):
    """Validates every n optimiser steps, on a given number of rows over all devices.

    Args:
        every_n_train_steps: Number of optimiser steps between validations, counted across epochs.
            In a run of several epochs, each epoch must consist of whole steps. Null leaves the
            interval to trainer.val_check_interval, which counts micro-batches.
        rows: Number of rows that all devices together score per validation, rounded up to whole
            batches. Null scores the whole split. trainer.limit_val_batches, the number of batches
            per device, takes precedence.
    """

    def __init__(self, every_n_train_steps: int | None = None, rows: int | None = None) -> None:
        for key, value in (("every_n_train_steps", every_n_train_steps), ("rows", rows)):
            if value is not None and value < 1:
                raise ValueError(f"validation.{key} ({value}) must be at least 1, or null")
        self.every_n_train_steps, self.rows = every_n_train_steps, rows
        self._interval: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # the data module has set the accumulation by now
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if stage != "fit" or vars(trainer).get("fast_dev_run"):
            return
        options = self.trainer_options(
            {key: getattr(trainer, key) for key in OPTIONS},
            accumulate=trainer.accumulate_grad_batches,
            rows_at_once=getattr(data, "eval_batch_size", 1) * trainer.world_size,
        )
        for key, value in options.items():
            setattr(trainer, key, value)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The trainer counts micro-batches across epochs, and an epoch's last step may have fewer.
        epoch, accumulate = trainer.num_training_batches, trainer.accumulate_grad_batches
        trial = vars(trainer).get("overfit_batches")
        if self._interval is None or trial or math.isinf(epoch) or epoch % accumulate == 0:
            return
        if trainer.estimated_stepping_batches > math.ceil(epoch / accumulate):
            raise ValueError(
                f"validation.every_n_train_steps ({self.every_n_train_steps}) needs epochs of "
                f"whole steps: an epoch has {epoch} micro-batches, and a step {accumulate}. Set "
                "trainer.limit_train_batches to a multiple of trainer.accumulate_grad_batches, or "
                "set data.global_batch"
            )

    def check_interval(self, interval: float | None) -> None:
        """Checks that the trainer sets no interval if ``every_n_train_steps`` is set.

        Args:
            interval: Value of ``trainer.val_check_interval``.

        Raises:
            ValueError: If both are set.
        """
        every = self.every_n_train_steps
        if every is not None and interval not in (None, 1.0, self._interval):
            raise ValueError(
                f"trainer.val_check_interval ({interval}) counts micro-batches, and "
                f"validation.every_n_train_steps ({every}) counts optimiser steps; leave one of "
                "them out, or set it to null"
            )

    def trainer_options(
        self, options: Mapping[str, Any], *, accumulate: int, rows_at_once: int
    ) -> dict[str, Any]:
        """Returns the trainer's ``OPTIONS``, in micro-batches and in batches per device.

        Args:
            options: The configured options of the trainer.
            accumulate: Number of micro-batches per optimiser step.
            rows_at_once: Number of rows that all devices score at once.

        Raises:
            ValueError: If both ``every_n_train_steps`` and the trainer's interval are set.
        """
        result = {key: options[key] for key in OPTIONS}
        every = self.every_n_train_steps
        if every is not None:
            self.check_interval(options["val_check_interval"])
            self._interval = every * accumulate
            result |= {"val_check_interval": self._interval, "check_val_every_n_epoch": None}
        if self.rows is not None and options["limit_val_batches"] in (None, 1.0):
            result["limit_val_batches"] = -(-self.rows // rows_at_once)
        return result


class LastStageStopping(EarlyStopping):
    """Early stopping that starts in the last stage of a curriculum.

    Validations of earlier stages neither end a run nor count as its best, because a model that
    still writes a chain of thought is more accurate than one that no longer does. For models
    without stages it is Lightning's EarlyStopping, which documents the arguments.
    """

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if _in_last_stage(pl_module):
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if _in_last_stage(pl_module):
            super().on_validation_end(trainer, pl_module)


def _in_last_stage(model: Any) -> bool:
    stages = getattr(model, "stages", None)
    return stages is None or model.stage >= stages.final
