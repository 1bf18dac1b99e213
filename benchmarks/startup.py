"""How long a newcomer waits: imports, help, and the first training step of the demo.

    python -m benchmarks.startup

Whole processes, in turn, medians. The demo's corpus is prepared beforehand.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.harness import Options, compare

FIT = ["train.py", "fit", "-c", "configs/transformer/tiny.yaml", "--trainer.accelerator", "cpu"]


def process_seconds(arguments: list[str], until: str | None = None) -> float:
    """Returns the seconds a python process takes, or those until it prints ``until``."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen = 0.0
    for line in process.stdout:
        if until is not None and until in line and not seen:
            seen = time.perf_counter() - start
    if process.wait():
        raise RuntimeError(f"{arguments} failed")
    return seen if until is not None else time.perf_counter() - start


def _median(rounds: int, arguments: list[str], until: str | None = None) -> float:
    return statistics.median(process_seconds(arguments, until) for _ in range(rounds))


def processes(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the seconds of each process, and of ``import lightning`` next to ours."""
    own, other = (
        partial(process_seconds, ["-c", f"import {name}"])
        for name in ("lightning_models.base", "lightning")
    )
    ours, theirs, ratio = compare(own, other, options.rounds)
    yield {"what": "import lightning_models.base", "s": ours, "to import lightning": ratio}
    yield {"what": "import lightning", "s": theirs, "to import lightning": 1.0}
    seconds = _median(options.rounds, ["train.py", "fit", "--help"])
    yield {"what": "train.py fit --help", "s": seconds, "to import lightning": seconds / theirs}
    with tempfile.TemporaryDirectory() as folder:
        one = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"]
        place = ["--trainer.default_root_dir", folder, "--data.cache_dir", f"{folder}/cache"]
        fit = [*FIT, *one, *place, "--progress.line_every_n_steps", "1"]
        names = ("first step, corpus prepared first", 1), ("first step", options.rounds)
        for what, rounds in names:
            seconds = _median(rounds, fit, until="step 1/1")
            yield {"what": what, "s": seconds, "to import lightning": seconds / theirs}


def main() -> None:
    """Parses the command line and prints the table."""
    harness.run(harness.options_parser(__doc__), {"processes": processes})


if __name__ == "__main__":
    main()
