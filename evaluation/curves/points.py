"""What a run has logged, against the training that led there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from evaluation.runs.events import FLOPS_TAG, read_scalars
from evaluation.runs.folders import TrainedRun
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint


class Point(NamedTuple):
    """A value behind so much training."""

    steps: int
    """Optimiser steps done."""
    tokens: int
    """Tokens trained on, each time they were."""
    flops: float
    """FLOPs of training on them."""
    value: float


@dataclass(frozen=True)
class Curve:
    """What a run has logged of one value."""

    name: str
    """Of the run."""
    flops_per_token: float
    """Of a training step."""
    points: list[Point]


def read_curve(
    run: TrainedRun, model: LanguageModel, scalar: str, tokens_per_step: int | None = None
) -> Curve:
    """Returns the curve of a run; nothing but its folder is read.

    Args:
        run: whose log.
        model: that of its checkpoint; needs no weights.
        scalar: tag of the value.
        tokens_per_step: tokens of an optimiser step, where the checkpoint does not tell.

    Raises:
        ValueError: if the value was not logged, or tokens or FLOPs are not known.
    """
    scalars = read_scalars(run.folder)
    if scalar not in scalars:
        known = ", ".join(tag for tag in scalars if tag.startswith(("val/", "train/", "test/")))
        raise ValueError(
            f"scalar ({scalar}) was not logged by {run.folder}; it has {known or 'nothing'}"
        )
    each = window_tokens(run.checkpoint, model) or tokens_per_step
    if each is None:
        raise ValueError(
            f"runs ({run.folder}): how many tokens a step of these data has is not known from the "
            "folder (sentences differ in length); give --tokens_per_step"
        )
    flops = _flops_per_token(run, model, scalars)
    points = [
        Point(step + 1, round((step + 1) * each), (step + 1) * each * flops, value)
        for step, value in sorted(scalars[scalar].items())  # steps are logged from 0
    ]
    return Curve(run.name, flops, points)


def window_tokens(checkpoint: Checkpoint, model: LanguageModel) -> float | None:
    """Returns the tokens of an optimiser step on all ranks, padding included.

    The mean over the steps done, as the last one of an epoch may have fewer micro-batches. None
    where rows are not windows of a fixed length.
    """
    recipe, progress = checkpoint.data_recipe, micro_batches(checkpoint)
    rows = None if recipe is None else recipe["init_args"].get("batch_size")
    if rows is None or not progress or not checkpoint.step or model.reads != "windows":
        return None
    ranks = checkpoint.data_state.get("order", {}).get("world_size", 1)
    return float(progress / checkpoint.step * ranks * rows * model.config.block_size)


def micro_batches(checkpoint: Checkpoint) -> int:
    """Returns the micro-batches that each rank has trained on; 0 where it is not known."""
    value: Any = checkpoint.content
    for key in ("loops", "fit_loop", "epoch_loop.batch_progress", "total", "processed"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return int(value or 0)


def _flops_per_token(
    run: TrainedRun, model: LanguageModel, scalars: Mapping[str, Mapping[int, float]]
) -> float:
    """Returns the FLOPs per token of training, by the model's own count.

    Of windows by today's, of other rows by that of the training, on the batches it met.
    """
    if model.reads == "windows":
        return model.flops_per_token(model.config.block_size, training=True)
    logged = scalars.get(FLOPS_TAG, {}).values()
    if not logged:
        raise ValueError(
            f"runs ({run.folder}) did not log {FLOPS_TAG}, which the length of its rows decides; "
            "train with a lower trainer.log_every_n_steps, or leave the run out"
        )
    return sum(logged) / len(logged)
