"""A line for each run, with the time that is left."""

import time
from collections.abc import Sequence

from studies.study import Run


class Progress:
    """Prints ``[2/8] name, seed 0 ... 1:35; about 12 min left``."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Takes the runs in their order."""
        self._runs = list(runs)
        self._number = 0
        self._start = 0.0
        self._seconds: dict[str, float] = {}

    def begin(self, run: Run) -> None:
        """Tells that a run begins."""
        self._number += 1
        self._start = time.monotonic()
        print(f"[{self._number}/{len(self._runs)}] {run.name}, seed {run.seed}", end="", flush=True)

    def step(self, name: str) -> None:
        """Tells what the run does now."""
        print(f" ... {name}", end="", flush=True)

    def end(self, run: Run, *, did_nothing: bool) -> None:
        """Tells that a run is done, and what time the others will take."""
        if did_nothing:
            print(": done before", flush=True)
            return
        seconds = time.monotonic() - self._start
        self._seconds[run.name] = seconds
        left = self.left()
        rest = "" if left is None else f"; about {max(1, round(left / 60))} min left"
        print(f": {clock(seconds)}{rest}", flush=True)

    def left(self) -> float | None:
        """Returns the seconds that the runs still to come will take; None behind the last one.

        A run takes as long as it did with another seed, or else as its declared cost says.
        """
        coming = self._runs[self._number :]
        if not coming or not self._seconds:
            return None
        cost = sum({r.name: r.cost for r in self._runs if r.name in self._seconds}.values())
        unit = sum(self._seconds.values()) / cost
        return sum(self._seconds.get(run.name, run.cost * unit) for run in coming)


def clock(seconds: float) -> str:
    """Returns minutes and seconds, e.g. ``12:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
