"""Fair timing on a noisy machine: rivals in turn, medians, ratios pair by pair."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Comparison(NamedTuple):
    """Median seconds of two rivals, and the median of the ratio ours / theirs over the rounds."""

    ours: float
    theirs: float
    ratio: float


def compare(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> Comparison:
    """Runs both in turn ``rounds`` times, after one uncounted run each."""
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds + 1)]
    counted = times[1:]
    return Comparison(
        statistics.median(a for a, _ in counted),
        statistics.median(b for _, b in counted),
        statistics.median(a / b for a, b in counted),
    )


def seconds(run: Callable[[], object]) -> float:
    """Returns the wall time of one call, the device's queue included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
