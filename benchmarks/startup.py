"""How long a newcomer waits: imports, help, and the first training step of the demo.

    python -m benchmarks.startup

Whole processes, in turn, medians. The demo's corpus is prepared beforehand.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 5
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


def main() -> None:
    """Prints the table."""
    imports = [
        (
            process_seconds(["-c", "import lightning_models"]),
            process_seconds(["-c", "import lightning"]),
        )
        for _ in range(ROUNDS)
    ]
    ratio = statistics.median(ours / theirs for ours, theirs in imports)
    ours = statistics.median(pair[0] for pair in imports)
    print(f"import lightning_models  {ours:.1f} s, {ratio:.2f} times import lightning")
    helps = statistics.median(process_seconds(["train.py", "fit", "--help"]) for _ in range(ROUNDS))
    print(f"train.py fit --help      {helps:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        one = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"]
        place = ["--trainer.default_root_dir", folder, "--data.cache_dir", f"{folder}/cache"]
        lines = ["--progress.line_every_n_steps", "1"]
        times = []
        for _ in range(ROUNDS + 1):
            times.append(process_seconds([*FIT, *one, *place, *lines], until="step 1/1"))
            assert Path(folder, "cache").exists()
    print(
        f"first step of the demo   {statistics.median(times[1:]):.1f} s "
        f"({times[0]:.1f} s where the corpus is prepared first)"
    )


if __name__ == "__main__":
    main()
