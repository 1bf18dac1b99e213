"""Checkpoints from before or within a validation: the resumed run does that validation first."""

from typing import Any

import lightning as L

from callbacks.trainer_state import validation_follows, validation_unfinished

KEY = "pending_validation"
UNLIMITED = -1
_PROGRESS = "epoch_loop.val_loop.batch_progress"


class PendingValidation(L.Callback):
    """Has a run that ended within a validation begin with that validation, from its first batch.

    A checkpoint that is written before the end of a validation says so, in the words of Lightning's
    loops: as if its process had died in the first batch. They then go back into the validation with
    the epoch and the step of the log that it would have had.
    """

    def __init__(self) -> None:
        self._pending = False
        self._step = 0
        self._max_steps: int | None = None  # while it is lifted

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Notes whether the validation of this step is yet to be done."""
        checkpoint[KEY] = validation_unfinished(trainer)
        if checkpoint[KEY]:
            progress = checkpoint["loops"]["fit_loop"][_PROGRESS]
            nothing = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
            progress["current"] = nothing
            progress["total"] = {**nothing, "ready": 1, "started": 1}
            progress["is_last_batch"] = False

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes the note."""
        self._pending = bool(checkpoint.get(KEY, False))  # older checkpoints have none
        self._step = int(checkpoint["global_step"])
        if trainer.strategy.restore_checkpoint_after_setup:  # then after on_fit_start
            self._lift(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps Lightning from taking a run for finished that lacks its last validation only.

        The learning rate's schedule has been built with the true number of steps by now.
        """
        self._lift(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forgets the note if this run, with other settings, does not validate at this step."""
        if self._pending and not validation_follows(trainer):
            self._settle(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The validation is being made up for: from here on all is as it was."""
        if self._pending:
            self._settle(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leaves nothing for a later ``fit`` of the same process."""
        if self._pending:
            self._settle(trainer)

    def _lift(self, trainer: L.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        if self._pending and self._max_steps is None and 0 <= loop.max_steps <= self._step:
            self._max_steps, loop.max_steps = loop.max_steps, UNLIMITED

    def _settle(self, trainer: L.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._pending = False
        loop.val_loop.batch_progress.total.reset()  # or later checkpoints would look pending too
        if self._max_steps is not None:
            loop.max_steps, self._max_steps = self._max_steps, None
