"""Fair timing on a noisy machine: rivals in turn, medians, ratios pair by pair."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Comparison(NamedTuple):
    """Median seconds of two rivals, and the median of the ratio ours / theirs over the rounds."""

    ours: float
    theirs: float
    ratio: float


def compare(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> Comparison:
    """Runs both in turn ``rounds`` times, after one uncounted run each."""
    mine, others = in_turn((ours, theirs), rounds)
    ratios = (a / b for a, b in zip(mine, others, strict=True))
    return Comparison(statistics.median(mine), statistics.median(others), statistics.median(ratios))


def in_turn(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Returns the seconds of each run in every round, one run after the other in a round.

    What the machine does meanwhile then meets all of them alike. One round more comes first and is
    not counted.
    """
    times = [[seconds(run) for run in runs] for _ in range(rounds + 1)]
    return [list(counted) for counted in zip(*times[1:], strict=True)]


def seconds(run: Callable[[], object]) -> float:
    """Returns the wall time of one call, the device's queue included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
