"""Seconds that models take to answer, measured in turn in the same run, and speed-ups."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

Answering = Callable[[], object]
"""Has a model answer the questions that are timed, all of them."""


@dataclass(frozen=True)
class Timing:
    """Wall-clock time of one model.

    Attributes:
        rounds: Seconds that all questions took, by round; at least one.
        questions: How many these were.
    """

    rounds: tuple[float, ...]
    questions: int

    @property
    def seconds(self) -> float:
        """Seconds per question, the median over the rounds."""
        return statistics.median(self.rounds) / self.questions

    def speed_up(self, baseline: "Timing") -> float:
        """Returns how many times faster than another model, the median over the rounds.

        Both were timed in the same rounds: what slows the machine down meanwhile, slows both.
        """
        pairs = zip(baseline.rounds, self.rounds, strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)


def time_in_turn(
    answering: Sequence[Answering], rounds: int, questions: int, device: torch.device
) -> list[Timing]:
    """Returns the time of each model: every round asks each, and begins with another.

    A round before the first warms up and does not count.

    Args:
        answering: one a model; each asks the same questions.
        rounds: at least 1.
        questions: how many are asked.
        device: where the models are.
    """
    taken: list[list[float]] = [[] for _ in answering]
    for number in tqdm(range(rounds + 1), desc="timing", unit=" rounds", disable=None):
        first = number % len(answering)
        for place in [*range(first, len(answering)), *range(first)]:
            seconds = _seconds(answering[place], device)
            if number:
                taken[place].append(seconds)
    return [Timing(tuple(times), questions) for times in taken]


def _seconds(run: Answering, device: torch.device) -> float:
    """Returns the wall-clock time of a call, with what it has queued on a GPU."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
