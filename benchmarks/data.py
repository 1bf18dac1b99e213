"""Preparation and loading of text: memory, speed relative to the tokenizer, tokens per second.

    python -m benchmarks.data
    python -m benchmarks.data --megabytes 100 --tokenizers bytes bpe:1024 gpt2

Preparation is the time from a jsonl file to a finished store, relative to the tokenizer's batch
call on the same texts in memory; the two alternate. Memory is the peak resident set of a fresh
process that prepares the file, and of one that prepares it as a single document. Loading is the
rate of the training loader in one process. The text is Python's documentation, repeated with
different numbers in each copy. For imports and the first step of the demo: ``time python train.py
fit --help``.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Options, Rows, Step
from datamodules import LocalText, PythonDocs
from datamodules.tokenizers import load_tokenizer, train_bpe

MEGABYTE = 10**6
WINDOWS = ("packed", "random")


def documents(megabytes: float) -> Iterator[str]:
    """Yields about `megabytes` of text, from Python's documentation."""
    topics = list(PythonDocs(val_fraction=0.0, test_fraction=0.0).documents("train"))
    left = megabytes * MEGABYTE
    for copy in itertools.count():
        for text in topics:
            yield f"{copy} {text} {copy * 7919}"
            left -= len(text.encode())
            if left < 0:
                return


def corpus(file: str | Path, cache: str | Path, tokenizer: str, **options: Any) -> LocalText:
    """Returns a corpus of a file without held-out documents."""
    return LocalText(
        data_files=str(file),
        cache_dir=str(cache),
        tokenizer=tokenizer,
        val_fraction=0.0,
        test_fraction=0.0,
        **options,
    )


def prepare(file: str | Path, tokenizer: str) -> None:
    """Prepares a file in a temporary folder."""
    with tempfile.TemporaryDirectory() as cache:
        corpus(file, cache, tokenizer).prepare_data()


def loading_speed(file: Path, tokenizer: str, windows: Any, rounds: int) -> float:
    """Returns the median tokens per second of the training loader."""
    sizes = {"block_size": 1024, "batch_size": 16}
    speeds = []
    with tempfile.TemporaryDirectory() as cache:
        data = corpus(file, cache, tokenizer, train_windows=windows, **sizes)
        data.prepare_data()
        data.setup()
        for _ in range(rounds):
            batches = iter(data.train_dataloader())
            next(batches)  # plans the epoch
            start = time.perf_counter()
            tokens = sum(b["tokens"].numel() for b in itertools.islice(batches, 1000))
            speeds.append(tokens / (time.perf_counter() - start))
    return statistics.median(speeds)


def build_step(options: Options) -> Step:
    """Returns the preparation of ``options.file``, for the measurement of memory."""
    return lambda: prepare(options.file, options.tokenizer)


def rows(options: Options) -> Rows:
    """Yields speeds and memory for each tokenizer."""
    texts = list(documents(options.megabytes))
    size = sum(len(text.encode()) for text in texts) / MEGABYTE
    with tempfile.TemporaryDirectory() as name:
        lines, single = Path(name, "lines.jsonl"), Path(name, "single.txt")
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        single.write_text("".join(texts))
        for tokenizer in options.tokenizers:
            trained = tokenizer.startswith("bpe:")
            alone = (
                train_bpe(tokenizer, iter(texts[:200])) if trained else load_tokenizer(tokenizer)
            )

            def encode(alone: Any = alone) -> None:
                """Encodes the texts in batches and discards the result."""
                for first in range(0, len(texts), 1024):
                    alone.encode_batch(texts[first : first + 1024])

            time_ratio = harness.compare(
                lambda t=tokenizer: prepare(lines, t),  # type: ignore[misc]
                encode,
                options.rounds,
            )
            row: dict[str, Any] = {
                "tokenizer": tokenizer,
                "MB": size,
                "prepared MB/s": size / time_ratio.ours,
                "tokenizer alone MB/s": size / time_ratio.theirs,
                "speed ratio": 1 / time_ratio.ratio,
            }
            for layout, file in (("documents", lines), ("one document", single)):
                settings = {"file": str(file), "tokenizer": tokenizer, "device": "cpu"}
                peak = harness.in_a_process("benchmarks.data", settings)
                row[f"memory MB, {layout}"] = peak / MEGABYTE
            for windows in WINDOWS:
                speed = loading_speed(lines, tokenizer, windows, options.rounds)
                row[f"{windows} M tokens/s"] = speed / MEGABYTE
            yield row


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = harness.options_parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=24.0)
    parser.add_argument("--tokenizers", nargs="+", default=["bytes", "bpe:1024"])
    return parser


def main() -> None:
    """Prints the table."""
    harness.run(build_parser(), rows, build_step)


if __name__ == "__main__":
    main()
