"""Harness of all benchmarks: rivals timed in turn, memory in fresh processes, tables.

A benchmark is a module with tables: functions that take the options and yield rows, dicts of column
names and values. ``run`` parses the command line, prints each row as Markdown as it comes, and
writes all of them to ``--output``, as JSON.
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

from evaluation.output import check_target, write_text
from lightning_models import LanguageModel, TransformerLM
from lightning_models.runtime import choose_kernels

Options = argparse.Namespace
Table = Callable[[Options], Iterator[dict[str, Any]]]
Step = Callable[[], Any]

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s."""


# ---- time


class TimeRatio(NamedTuple):
    """Median seconds of two rivals, and the median of the ratio ours / theirs over the rounds."""

    ours: float
    theirs: float
    ratio: float


def compare(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> TimeRatio:
    """Runs both in turn ``rounds`` times, after one uncounted run each."""
    mine, others = in_turn((ours, theirs), rounds)
    ratios = (a / b for a, b in zip(mine, others, strict=True))
    return TimeRatio(statistics.median(mine), statistics.median(others), statistics.median(ratios))


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


# ---- memory


def extra_peak(step: Step, device: str) -> float:
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
    before = status_bytes("VmRSS")
    step()
    step()
    return status_bytes("VmHWM") - before


def status_bytes(key: str, file: str = "status") -> float:
    """Returns a memory figure of this process in bytes, from a file of /proc/self (Linux)."""
    lines = Path("/proc/self", file).read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return float(line.split()[1]) * 1024


def in_a_process(module: str, settings: Mapping[str, Any]) -> float:
    """Returns what ``python -m module --memory SETTINGS`` prints last, a number of bytes."""
    command = [sys.executable, "-m", module, "--memory", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def megabytes(module: str, options: Options, **changes: Any) -> float:
    """Returns the peak memory in MB of a step with these options, alone in a fresh process."""
    return in_a_process(module, {**vars(options), **changes}) / 1e6


# ---- models, batches and steps


def gpt2_pair(
    vocab: int, context: int, layers: int, dim: int, heads: int
) -> tuple[Any, TransformerLM]:
    """Returns ``transformers``' GPT-2 and ours with the same weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from lightning_models.transformer.import_weights import import_transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": vocab, "n_positions": context, "n_embd": dim}
    shape: dict[str, Any] = {"n_layer": layers, "n_head": heads}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    no_dropout: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, **shape, **ends, **no_dropout))
    return theirs, import_transformers(theirs)


def built(model: LanguageModel, options: Options) -> LanguageModel:
    """Returns the model with its network, drawn from one seed, on the device, in training mode."""
    torch.manual_seed(0)
    model.configure_model()
    if getattr(options, "compile", False):
        assert model.network is not None
        model.network.compile()
    return model.to(options.device).train()


def random_windows(options: Options, vocab: int, length: int) -> dict[str, Any]:
    """Returns ``options.batch`` rows of ``length`` random tokens, as window data modules do."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(0, vocab, (options.batch, length + 1), generator=generator)
    tokens = stream[:, :-1].contiguous()
    batch = {"tokens": tokens, "targets": stream[:, 1:].contiguous()}
    batch["mask"] = torch.ones_like(tokens, dtype=torch.bool)
    batch["sequence_id"] = torch.arange(options.batch)
    return {key: value.to(options.device) for key, value in batch.items()}


def objective(model: LanguageModel, batch: dict[str, Any]) -> Tensor:
    """Returns the training objective of a batch, a scalar."""
    terms = model.loss(batch).terms.values()
    return torch.stack([term.sum / term.normaliser for term in terms]).sum()


def training_step(
    module: nn.Module, loss: Callable[[], Tensor], device: torch.device | str, *, bf16: bool
) -> Callable[[], float]:
    """Returns a function that does forward, backward and fused AdamW, and returns the loss.

    Args:
        module: what is trained.
        loss: computes the loss of one and the same batch.
        device: where both are.
        bf16: whether ``loss`` runs under autocast.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    kind = torch.device(device).type

    def step() -> float:
        """Trains on the batch once."""
        with torch.autocast(kind, torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return step


def utilisation(flops_per_second: float, options: Options) -> float | None:
    """Returns the share of the chip's peak; None where that is not known."""
    name = torch.cuda.get_device_name() if options.device == "cuda" else ""
    peak = getattr(options, "peak", None) or next((p for c, p in PEAKS.items() if c in name), None)
    return None if peak is None else flops_per_second / peak


# ---- command line and tables


def options_parser(doc: str | None, *, rounds: int = 5, **sizes: int) -> argparse.ArgumentParser:
    """Returns a parser with device, rounds, ``--output``, and an option for each of ``sizes``."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cpu")
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output", type=Path, default=None, help="JSON file of options and rows")
    parser.add_argument("--memory", default=None, help=argparse.SUPPRESS)
    return parser


def run(
    parser: argparse.ArgumentParser,
    tables: Mapping[str, Table],
    build_step: Callable[[Options], Step] | None = None,
    *,
    default: Sequence[str] | None = None,
    prepare: Callable[[Options], None] | None = None,
) -> None:
    """Parses the command line and prints the tables that it asks for.

    Args:
        parser: see ``options_parser``.
        tables: by name.
        build_step: returns the step whose memory a process of its own measures.
        default: names of the tables that are printed where ``--only`` is not given; None: all.
        prepare: checks the options, or adds to them; a ValueError ends the program with code 2, as
            does an ``--output`` that cannot be written, before anything is timed.
    """
    parser.add_argument("--only", nargs="+", choices=tables, default=list(default or tables))
    options = parser.parse_args()
    choose_kernels()
    if options.memory is not None:
        assert build_step is not None
        asked = Options(**json.loads(options.memory))
        print(extra_peak(build_step(asked), asked.device))
        return
    try:
        if options.output is not None:
            check_target(options.output)
        if prepare is not None:
            prepare(options)
    except ValueError as error:
        parser.error(str(error))
    del options.memory
    output, only = vars(options).pop("output"), vars(options).pop("only")
    print(heading(options))
    found = {name: print_rows(name, tables[name](options)) for name in only}
    if output is not None:
        content = {"place": place(options), "options": vars(options), "tables": found}
        write_text(output, json.dumps(content, indent=1, default=str) + "\n")


def place(options: Options) -> str:
    """Returns the device, threads and torch version."""
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def heading(options: Options) -> str:
    """Returns the options and the place of a run in a line."""
    shown = {key: value for key, value in vars(options).items() if key not in ("device", "lengths")}
    return ", ".join([*(f"{key} {value}" for key, value in shown.items()), place(options)])


def print_rows(title: str, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints rows as a Markdown table as they come, and returns them."""
    found: list[dict[str, Any]] = []

    def kept() -> Iterator[dict[str, Any]]:
        for row in rows:
            found.append(row)
            yield row

    for line in table_lines(title, kept()):
        print(line, flush=True)
    return found


def table_lines(title: str, rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a Markdown table, each as soon as its row is there."""
    for number, row in enumerate(rows):
        if not number:
            yield f"\n{title}\n\n| {' | '.join(row)} |\n|{'--:|' * len(row)}"
        yield f"| {' | '.join(map(_cell, row.values()))} |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
