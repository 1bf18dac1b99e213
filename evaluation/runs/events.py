"""The values that a run has logged, from its TensorBoard files."""

from pathlib import Path

PATTERN = "events.out.tfevents.*"
FLOPS_TAG = "throughput/flops_per_token"
"""FLOPs per token of a training step, by the model's own count on the batches it met."""


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Returns the logged values of a run by tag and step; of a resumed run those that count.

    Steps are logged from 0: behind n optimiser steps the latest is n - 1.

    Args:
        folder: log folder with TensorBoard files.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
