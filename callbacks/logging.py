"""Logging of pending values, Markdown and images."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from callbacks.trainer_state import in_accumulation
from lightning_models.checkpoint import WITHIN


def write_pending_logs(trainer: L.Trainer) -> None:
    """Flushes the values logged in this training batch to the loggers, and the loggers to disk.

    Lightning does so after the hooks of the batch. A checkpoint written in one of them would be
    newer than the log, and a run killed in between would lose values.
    """
    connector = trainer._logger_connector
    logs = trainer.training and connector._first_loop_iter is not None
    if logs and not in_accumulation(trainer) and connector.should_update_logs:
        connector.log_metrics(connector.metrics["log"])
    for logger in trainer.loggers:
        logger.save()


def log_details(
    logger: Logger, scalars: Mapping[str, float], step: int, cards: Sequence[str]
) -> None:
    """Logs the scalars of an analysis.

    TensorBoard draws a card for each and sorts them by name, so it gets only the tags that match
    the patterns ``cards``, below `WITHIN`, after loss, perplexity and learning rate.
    """
    if isinstance(logger, TensorBoardLogger):
        tags = [tag for tag in scalars if any(fnmatchcase(tag, card) for card in cards)]
        scalars = {WITHIN + tag: scalars[tag] for tag in tags}
    if scalars:
        logger.log_metrics(dict(scalars), step)


def takes_text(logger: Logger) -> bool:
    """Returns whether `log_text` can write text to a logger."""
    writer: Any = getattr(logger, "experiment", None)
    return isinstance(logger, WandbLogger | MLFlowLogger) or hasattr(writer, "add_text")


def log_text(logger: Logger, tag: str, text: str, step: int) -> None:
    """Logs Markdown to TensorBoard, W&B or MLflow; other loggers are skipped."""
    writer: Any = getattr(logger, "experiment", None)
    if isinstance(logger, WandbLogger):
        logger.log_text(tag, columns=["step", "text"], data=[[str(step), text]])
    elif isinstance(logger, MLFlowLogger):
        writer.log_text(logger.run_id, text, f"{tag}/step={step}.md")
    elif hasattr(writer, "add_text"):
        writer.add_text(tag, text, step)


def log_images(logger: Logger, tag: str, images: Sequence[np.ndarray], step: int) -> None:
    """Logs images (height, width, 3) to TensorBoard, W&B or MLflow; other loggers are skipped.

    TensorBoard shows them next to the scalars of `log_details`.
    """
    writer: Any = getattr(logger, "experiment", None)
    if isinstance(logger, WandbLogger):
        logger.log_image(tag, list(images), step)
        return
    for idx, image in enumerate(images, start=1):
        if isinstance(logger, MLFlowLogger):
            writer.log_image(logger.run_id, image, f"{tag}/{idx}/step={step}.png")
        elif hasattr(writer, "add_image"):
            # numbered, as TensorBoard does not show images with the tag of a scalar
            writer.add_image(f"{WITHIN}{tag}/{idx}", image, step, dataformats="HWC")
