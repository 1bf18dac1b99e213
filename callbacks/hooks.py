"""One set of hooks for validations and tests, and communication between all ranks."""

from typing import Any, ClassVar

import lightning as L
import torch.distributed as dist


class EvaluationHooks(L.Callback):
    """A callback on validation batches, and on test batches if ``of_tests`` is set.

    Lightning has separate hooks for the two; here both call the same four methods, which do
    nothing unless overridden. The sanity check before training calls none.
    """

    of_tests: ClassVar[bool] = True
    """Whether the methods are also called for tests."""

    # ---- for subclasses

    def evaluation_starts(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Called before the first batch."""

    def evaluation_batch_ends(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Called after each batch, on all ranks."""

    def evaluation_epoch_ends(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Called after the last batch, when logged values can still rank checkpoints.

        Args:
            trainer: The trainer.
            pl_module: The model.
            stage: ``val`` or ``test``.
        """

    def evaluation_ends(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Called when all values have been logged."""

    # ---- Lightning's hooks

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
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
        if self._covers(trainer):
            self.evaluation_batch_ends(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._covers(trainer):
            self.evaluation_epoch_ends(trainer, pl_module, "test" if trainer.testing else "val")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._covers(trainer):
            self.evaluation_ends(trainer, pl_module)

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end
    on_test_epoch_end, on_test_end = on_validation_epoch_end, on_validation_end

    def _covers(self, trainer: L.Trainer) -> bool:
        return self.of_tests if trainer.testing else not trainer.sanity_checking


def check_minimum(name: str, value: float | None, minimum: int) -> None:
    """Raises a ValueError if an argument is below ``minimum``; None is valid."""
    if value is not None and value < minimum:
        raise ValueError(f"{name} ({value}) must be at least {minimum}")


class SumsOverRanks(L.Callback):
    """A callback that sums values over all ranks at each optimiser step of several processes.

    The values share the all-reduce of ``NonFinite``, so they cost no extra synchronisation.
    """

    def values_to_sum(self) -> list[float]:
        """Returns this rank's values, the same number on every rank."""
        return []

    def receive_sums(self, sums: list[float]) -> None:
        """Receives the sums over all ranks, before the optimiser's step."""


class AgreedEnd(Exception):  # noqa: N818 - some are not errors
    """Raised by all ranks at the same point to end the program; rank 0 reports it."""

    exit_code: int


def gather(value: Any) -> list[Any]:
    """Gathers a value from all ranks, in rank order."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
