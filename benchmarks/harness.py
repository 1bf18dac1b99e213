"""Harness of all benchmarks: alternating timings, memory in fresh processes, tables.

A benchmark is a module with ``rows(options)``, which yields dicts of column names and values.
``run`` parses the command line and prints each row as Markdown as soon as it is measured.
"""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import benchmark

from lightning_models.runtime import choose_kernels

Options = argparse.Namespace
Rows = Iterator[dict[str, Any]]
Step = Callable[[], Any]


# ---- time


class TimeRatio(NamedTuple):
    """Median seconds of two contenders, and the median of the ratio ours / theirs over rounds."""

    ours: float
    theirs: float
    ratio: float


def compare(ours: Step, theirs: Step, rounds: int) -> TimeRatio:
    """Times both alternately for ``rounds`` rounds, after one uncounted run each."""
    first, second = in_turn((ours, theirs), rounds)
    ratios = (a / b for a, b in zip(first, second, strict=True))
    return TimeRatio(statistics.median(first), statistics.median(second), statistics.median(ratios))


def in_turn(runs: Sequence[Step], rounds: int, *, cpu_time: bool = False) -> list[list[float]]:
    """Returns the seconds of each run in every round.

    Runs alternate within a round, so that other load on the machine affects them equally. The
    first round is not counted.

    Args:
        runs: Functions to time.
        rounds: Number of counted rounds.
        cpu_time: Whether to measure processor time, which other processes do not affect.
    """
    times = [[seconds(run, cpu_time=cpu_time) for run in runs] for _ in range(rounds + 1)]
    return [list(counted) for counted in zip(*times[1:], strict=True)]


def seconds(run: Step, *, cpu_time: bool = False) -> float:
    """Returns the wall time of one call, including the device's queue, or its processor time."""
    clock = time.process_time if cpu_time else benchmark.timer
    threads = torch.get_num_threads()
    timer = benchmark.Timer("run()", timer=clock, globals={"run": run}, num_threads=threads)
    return timer.timeit(1).median


# ---- memory


def extra_peak(step: Step, device: str) -> float:
    """Returns the peak bytes of ``step`` above the memory in use before it.

    On a GPU, the allocator counts them; on a CPU, it is the resident set in Linux' /proc over two
    steps, because the first one creates the optimiser's moments.
    """
    if device == "cuda":
        step()
        torch.cuda.reset_peak_memory_stats()
        before = float(torch.cuda.memory_allocated())
        step()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak
    before = status_bytes("VmRSS")
    step()
    step()
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> float:
    """Returns a memory figure of this process in bytes, from /proc/self/status (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return float(line.split()[1]) * 1024


def in_a_process(module: str, settings: Mapping[str, Any]) -> float:
    """Returns the last output of ``python -m module --memory SETTINGS``, in bytes."""
    command = [sys.executable, "-m", module, "--memory", json.dumps(settings, default=str)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


# ---- steps


def training_step(module: nn.Module, loss: Callable[[], Tensor], *, bf16: bool) -> Step:
    """Returns a function for forward, backward and fused AdamW that returns the loss.

    Args:
        module: Module to train.
        loss: Computes the loss of a fixed batch.
        bf16: Whether ``loss`` runs under autocast.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    device = next(module.parameters()).device

    def step() -> float:
        """Trains on the batch once."""
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return step


# ---- command line and tables


def options_parser(doc: str | None, *, rounds: int = 5) -> argparse.ArgumentParser:
    """Returns a parser with device, rounds and precision."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--bf16", action="store_true", help="Run under autocast.")
    parser.add_argument("--memory", default=None, help=argparse.SUPPRESS)
    return parser


def run(
    parser: argparse.ArgumentParser,
    rows: Callable[[Options], Rows],
    build_step: Callable[[Options], Step] | None = None,
    *,
    others: bool = False,
) -> None:
    """Parses the command line and prints the table.

    Args:
        parser: See ``options_parser``.
        rows: Yields the rows; a ValueError ends the program with code 2.
        build_step: Returns the step whose memory a fresh process measures.
        others: Whether to collect unknown arguments in ``options.others``.
    """
    options, rest = parser.parse_known_args() if others else (parser.parse_args(), [])
    choose_kernels()
    if options.memory is not None:
        assert build_step is not None
        measured = Options(**json.loads(options.memory))
        print(extra_peak(build_step(measured), measured.device))
        return
    if others:
        options.others = rest
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    machine = f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    arguments = " ".join(sys.argv[1:])
    print(f"\n`python -m benchmarks.{Path(sys.argv[0]).stem} {arguments}`, {machine}:\n")
    try:
        for idx, row in enumerate(rows(options)):
            if not idx:
                print(f"| {' | '.join(row)} |\n|{'--:|' * len(row)}")
            print(f"| {' | '.join(map(_cell, row.values()))} |", flush=True)
    except ValueError as error:
        parser.error(str(error))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
