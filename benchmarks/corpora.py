"""Preparing and loading text: memory, speed against the tokenizer alone, tokens per second.

    python -m benchmarks.corpora
    TIKTOKEN_CACHE_DIR=/path/to/cache python -m benchmarks.corpora    # with gpt2

Memory: each size alone in a fresh process, its peak resident set and that of its largest worker.
Preparation: a jsonl file to a finished store, against nothing but the tokenizer's own batch call on
the same texts in memory; in turn, median ratio. Loading: batches out of the training loader, in one
process. Order: what each of several processes keeps for itself, in bytes a document, to read packed
rows of 10 million documents (of four tokens; their number matters, not their text) in four shards.
The text is Python's documentation over and over, each copy with other numbers in it.
"""

import argparse
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import compare
from datamodules import LocalText, PythonDocs
from datamodules.prepare import usable_cores
from datamodules.store import TokenStream
from datamodules.text import PackedWindows
from datamodules.tokenizers import Tokenizer, TokenizerUnavailableError, load_tokenizer, train_bpe

MEGABYTE = 10**6
TARGETS = {"memory": 1.1, "preparation": 0.8, "loading": 5e6, "order": 1.0}
AT_MOST = ("memory", "order")


def documents(megabytes: float) -> Iterator[str]:
    """Yields about so much text, as documents of Python's documentation."""
    topics = list(PythonDocs(val_fraction=0.0, test_fraction=0.0).documents("train"))
    left = megabytes * MEGABYTE
    for copy in itertools.count():
        for text in topics:
            yield f"{copy} {text} {copy * 7919}"
            left -= len(text.encode())
            if left < 0:
                return


def write_jsonl(path: Path, megabytes: float) -> None:
    """Writes the documents as a jsonl file."""
    with path.open("w", encoding="utf-8") as file:
        for text in documents(megabytes):
            file.write(json.dumps({"text": text}) + "\n")


def corpus(file: Path, cache: Path, tokenizer: str, **options: Any) -> LocalText:
    """Returns a corpus of that file without held-out documents."""
    return LocalText(
        data_files=str(file),
        cache_dir=str(cache),
        tokenizer=tokenizer,
        val_fraction=0.0,
        test_fraction=0.0,
        **options,
    )


# Memory


def peak_of_preparing(file: Path, tokenizer: str) -> dict[str, float]:
    """Prepares in this process; returns its peak and that of its largest worker, in MB.

    ``imports`` is what the process held before it began.
    """
    imports = _peak()
    with tempfile.TemporaryDirectory() as folder:
        corpus(file, Path(folder), tokenizer).prepare_data()
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / MEGABYTE
    return {"imports": imports, "process": _peak(), "worker": worker}


def _peak() -> float:
    """Returns the largest resident set of this process so far, in MB (Linux).

    Not that of getrusage, which a new program inherits from the one that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / MEGABYTE


def memory(files: dict[int, Path], tokenizer: str) -> None:
    """Prints the peaks for each size, and their ratio."""
    peaks = {}
    for size, file in files.items():
        command = [sys.executable, "-m", "benchmarks.corpora", "--peak", str(file), tokenizer]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[size] = json.loads(output.splitlines()[-1])
    for kind in ("process", "worker"):
        small, large = (peaks[size][kind] for size in files)
        if large == 0:
            continue
        sizes = " / ".join(f"{size} MB" for size in files)
        name = Path(tokenizer).name
        of = f" (imports {peaks[size]['imports']:.0f})" if kind == "process" else ""
        measured = f"{small:.0f} / {large:.0f} MB{of}"
        row("memory", f"{name}, {kind}, {sizes}", measured, large / small)


# Preparation


def preparation(file: Path, tokenizer: Tokenizer, name: str, rounds: int) -> None:
    """Prints the speed of preparing `file` and of `tokenizer` alone, and their ratio."""
    texts = [json.loads(line)["text"] for line in file.open(encoding="utf-8")]
    megabytes = sum(len(text.encode()) for text in texts) / MEGABYTE

    def ours() -> None:
        """Prepares the corpus in a folder that is thrown away."""
        with tempfile.TemporaryDirectory() as folder:
            corpus(file, Path(folder), name).prepare_data()

    def theirs() -> None:
        """Encodes the same texts in batches, and keeps nothing."""
        for first in range(0, len(texts), 1024):
            tokenizer.encode_batch(texts[first : first + 1024])

    result = compare(ours, theirs, rounds)
    speeds = f"{megabytes / result.ours:.1f} / {megabytes / result.theirs:.1f} MB/s"
    row("preparation", f"{tokenizer.name}, ours / tokenizer alone", speeds, 1 / result.ratio)


# Loading


def loading(file: Path, kind: Any, rounds: int, seconds: float = 2.0) -> None:
    """Prints the tokens per second that the training loader yields in one process."""
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(
            file, Path(folder), "bytes", block_size=1024, batch_size=16, train_windows=kind
        )
        data.prepare_data()
        data.setup()
        speeds = [_tokens_per_second(data, seconds) for _ in range(rounds)]
    speed = statistics.median(speeds)
    row("loading", f"{kind}, 16 x 1024", f"{speed / 1e6:.1f} M tokens/s", speed)


def _tokens_per_second(data: LocalText, seconds: float) -> float:
    batches = iter(data.train_dataloader())
    next(batches)  # plans the epoch
    tokens, start = 0, time.perf_counter()
    for batch in batches:
        tokens += batch["tokens"].numel()
        if time.perf_counter() - start > seconds:
            break
    return tokens / (time.perf_counter() - start)


# The order of many documents


def write_shards(folder: Path, count: int, shards: int = 4) -> None:
    """Writes the shards of a split of `count` documents of four tokens."""
    per_shard = count // shards
    for number in range(shards):
        ends = np.arange(1, per_shard + 1, dtype="<i8") * 4
        ends.tofile(folder / f"train-{number:05d}.ends")
        np.zeros(4 * per_shard, "<u2").tofile(folder / f"train-{number:05d}.tokens")


def own_memory_of_rows(folder: Path) -> float:
    """Reads packed rows; returns by how many bytes the memory of this process alone grew (Linux).

    Not counted: mapped files, which all processes share, and which the system may drop.
    """
    shards = sorted(path.with_suffix("") for path in folder.glob("*.ends"))
    rows = PackedWindows(TokenStream(shards, "<u2", 1), block_size=1024, eos_id=0, seed=0)
    before = _anonymous()
    for first in range(0, 1600, 16):
        rows.rows(np.arange(first, first + 16))
    return _anonymous() - before


def _anonymous() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("Anonymous:"))
    return int(line.split()[1]) * 1024


def order(count: int = 10**7, processes: int = 4) -> None:
    """Prints what each process keeps; the first to come makes the order, the others wait."""
    with tempfile.TemporaryDirectory() as name:
        write_shards(Path(name), count)
        command = [sys.executable, "-m", "benchmarks.corpora", "--rows", name]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
        outputs = [process.communicate()[0] for process in running]
    grown = sorted(float(output) for output in outputs)
    measured = " / ".join(f"{value / MEGABYTE:.1f}" for value in grown) + " MB"
    detail = f"{count:,} documents, {processes} processes"
    row("order", detail, measured, statistics.median(grown) / count)


# The table


def row(what: str, detail: str, measured: str, value: float) -> None:
    """Prints a line of the table."""
    target = TARGETS[what]
    met = value <= target if what in AT_MOST else value >= target
    number = f"{value / 1e6:.1f} M" if value > 1e5 else f"{value:.2f}"
    limit = f"{'<=' if what in AT_MOST else '>='} " + (
        f"{target / 1e6:.0f} M" if target > 1e5 else f"{target}"
    )
    verdict = "met" if met else "MISSED"
    print(f"| {what} | {detail} | {measured} | {number} | {limit} | {verdict} |", flush=True)


def tokenizers(folder: Path) -> list[tuple[Tokenizer, str]]:
    """Returns the tokenizers to measure, each with the name that a corpus takes."""
    trained = train_bpe("bpe:1024", documents(2))
    path = folder / "bpe1024.json"
    path.write_text(trained.json_text, encoding="utf-8")
    found: list[tuple[Tokenizer, str]] = [(load_tokenizer("bytes"), "bytes"), (trained, str(path))]
    try:
        found.append((load_tokenizer("gpt2"), "gpt2"))
    except TokenizerUnavailableError as error:
        print(f"gpt2 is left out: {error}", file=sys.stderr)
    return found


def main() -> None:
    """Runs all measurements, or, with ``--peak``, one in this process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=24, help="text for preparing")
    parser.add_argument("--only", choices=TARGETS, help="one of the four measurements")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", nargs=2, metavar=("FILE", "TOKENIZER"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        print(own_memory_of_rows(Path(options.rows)))
        return
    if options.peak:
        print(json.dumps(peak_of_preparing(Path(options.peak[0]), options.peak[1])))
        return
    packages = ", ".join(f"{p} {version(p)}" for p in ("tokenizers", "tiktoken", "numpy", "torch"))
    print(f"Python {platform.python_version()}, {packages}; {usable_cores()} cores\n")
    print("| what | case | measured | value | target | |\n|---|---|--:|--:|--:|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {size: folder / f"{size}.jsonl" for size in (10, 100)}
        for size, path in files.items():
            write_jsonl(path, size)
        middle = folder / "middle.jsonl"
        write_jsonl(middle, options.megabytes)
        found = tokenizers(folder)
        if options.only in (None, "memory"):
            for _, argument in found:
                memory(files, argument)
        if options.only in (None, "preparation"):
            for tokenizer, argument in found:
                preparation(middle, tokenizer, argument, options.rounds)
        if options.only in (None, "loading"):
            for kind in ("packed", "random"):
                loading(files[100], kind, options.rounds)
        if options.only in (None, "order"):
            order()


if __name__ == "__main__":
    main()
