"""Peak memory of a training step, measured in a process whose peak nothing else has raised."""

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def extra_peak(step: Callable[[], Any], device: str) -> float:
    """Returns the bytes that ``step`` needs beyond what is held before it.

    On a GPU what the allocator handed out; on a CPU the resident set, read from Linux' /proc.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = float(torch.cuda.memory_allocated())
        step()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
    before = _status("VmRSS")
    step()
    step()
    return _status("VmHWM") - before


def in_a_process(module: str, settings: Mapping[str, Any]) -> float:
    """Returns what ``python -m module --memory SETTINGS`` prints last, a number of bytes."""
    command = [sys.executable, "-m", module, "--memory", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _status(key: str) -> float:
    """Returns a memory figure of this process in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(key)]
    return float(line.split()[1]) * 1024
