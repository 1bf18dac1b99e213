"""Validations and tests through one set of hooks, without the check before a training."""

from typing import Any, ClassVar

import lightning as L


class EvaluationHooks(L.Callback):
    """A callback that looks at the batches of validations, and of tests where ``of_tests`` is set.

    Lightning asks for a hook each; here each calls one of four methods, which do nothing.
    """

    of_tests: ClassVar[bool] = True
    """Whether tests are looked at, too."""

    # ---- what a callback says

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

    # ---- hooks

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calls ``evaluation_starts``."""
        if not trainer.sanity_checking:
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
        if not trainer.sanity_checking:
            self.evaluation_batch_ends(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calls ``evaluation_epoch_ends``."""
        if not trainer.sanity_checking:
            self.evaluation_epoch_ends(trainer, pl_module, "val")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calls ``evaluation_ends``."""
        if not trainer.sanity_checking:
            self.evaluation_ends(trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calls ``evaluation_starts``."""
        if self.of_tests:
            self.evaluation_starts(trainer, pl_module)

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Calls ``evaluation_batch_ends``."""
        if self.of_tests:
            self.evaluation_batch_ends(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calls ``evaluation_epoch_ends``."""
        if self.of_tests:
            self.evaluation_epoch_ends(trainer, pl_module, "test")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calls ``evaluation_ends``."""
        if self.of_tests:
            self.evaluation_ends(trainer, pl_module)
