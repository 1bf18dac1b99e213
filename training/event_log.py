"""TensorBoard files of a run that may be killed and resumed."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_models.checkpoint import Checkpoint


class EventLog(TensorBoardLogger):
    """TensorBoard, where the same values of the same step in a row are written once.

    A checkpoint has the values of its step written before itself; the trainer then hands over the
    same ones again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes Lightning's arguments."""
        super().__init__(*args, **kwargs)
        self._latest = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes scalars, unless they are those of the last call."""
        written = f"{step} {sorted((key, float(value)) for key, value in metrics.items())}"
        if written != self._latest:
            self._latest = written
            super().log_metrics(metrics, step)


def purge_step(saved: Checkpoint) -> int:
    """Returns the first step of the log that a run resumed from ``saved`` writes anew.

    Steps count from 0 there: behind n optimiser steps the latest is n - 1. Only a checkpoint from
    between two accumulated micro-batches follows a validation that was logged at n, unless that
    was still to be done.
    """
    unfinished = bool(saved.content.get("resume_state", {}).get("unfinished_step"))
    return saved.step + (unfinished and not saved.content.get("pending_validation", False))
