"""A line for each run, with the time that is left."""

import time
from collections.abc import Sequence

from studies.study import Run


class Progress:
    """Prints ``[2/8] name, seed 0 ... 1:35; about 12 min left``.

    Where several runs are under way, each of their steps has a line of its own.
    """

    def __init__(self, runs: Sequence[Run], jobs: int = 1) -> None:
        """Takes the runs in their order, and how many are done at a time."""
        self._coming = list(runs)
        self._costs = {run.name: run.cost for run in runs}
        self._jobs = jobs
        self._titles = {
            run.folder: f"[{number}/{len(runs)}] {run.name}, seed {run.seed}"
            for number, run in enumerate(runs, start=1)
        }
        self._starts: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def begin(self, run: Run) -> None:
        """Tells that a run begins."""
        self._starts[run.folder] = time.monotonic()
        if self._jobs == 1:
            print(self._titles[run.folder], end="", flush=True)

    def step(self, run: Run, name: str) -> None:
        """Tells what the run does now."""
        if self._jobs == 1:
            print(f" ... {name}", end="", flush=True)
        else:
            print(f"{self._titles[run.folder]} ... {name}", flush=True)

    def end(self, run: Run, *, did_nothing: bool) -> None:
        """Tells that a run is done, and what time the others will take."""
        title = "" if self._jobs == 1 else self._titles[run.folder]
        self._coming.remove(run)
        if did_nothing:
            print(f"{title}: done before", flush=True)
            return
        seconds = time.monotonic() - self._starts[run.folder]
        self._seconds[run.name] = seconds
        left = self.left()
        rest = "" if left is None else f"; about {max(1, round(left / 60))} min left"
        print(f"{title}: {clock(seconds)}{rest}", flush=True)

    def left(self) -> float | None:
        """Returns the seconds that the runs not yet done will take; None behind the last one.

        A run takes as long as it did with another seed, or else as its declared cost says.
        """
        if not self._coming or not self._seconds:
            return None
        unit = sum(self._seconds.values()) / sum(self._costs[name] for name in self._seconds)
        costs = (self._seconds.get(run.name, run.cost * unit) for run in self._coming)
        return sum(costs) / self._jobs


def clock(seconds: float) -> str:
    """Returns minutes and seconds, e.g. ``12:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
