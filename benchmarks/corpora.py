"""Preparing and loading text: memory, speed against the tokenizer alone, tokens per second.

    python -m benchmarks.corpora
    TIKTOKEN_CACHE_DIR=/path/to/cache python -m benchmarks.corpora    # with gpt2

Memory: each size alone in a fresh process, its peak resident set and that of its largest worker.
Document: the same peaks for 100 MB of text in one document, in MB.
Preparation: a jsonl file to a finished store, against nothing but the tokenizer's own batch call on
the same texts in memory; in turn, median ratio. Loading: batches out of the training loader, in one
process. Order: what each of several processes keeps for itself, in bytes a document, to read packed
rows of 10 million documents (of four tokens; their number matters, not their text) in four shards.
The text is Python's documentation over and over, each copy with other numbers in it.
"""

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Options, compare, status_bytes
from datamodules import LocalText, PythonDocs
from datamodules.encoding import usable_cores
from datamodules.store import TokenStream
from datamodules.text import PackedWindows
from datamodules.tokenizers import Tokenizer, TokenizerUnavailableError, load_tokenizer, train_bpe

MEGABYTE = 10**6
TARGETS = {"memory": 1.1, "document": 1000.0, "preparation": 0.8, "loading": 5e6, "order": 1.0}
AT_MOST = ("memory", "document", "order")

Rows = Iterator[dict[str, Any]]


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
    imports = status_bytes("VmHWM") / MEGABYTE  # getrusage would inherit the parent's peak
    with tempfile.TemporaryDirectory() as folder:
        corpus(file, Path(folder), tokenizer).prepare_data()
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / MEGABYTE
    return {"imports": imports, "process": status_bytes("VmHWM") / MEGABYTE, "worker": worker}


def peaks_of_preparing(file: Path, tokenizer: str) -> dict[str, float]:
    """Returns `peak_of_preparing` of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.corpora", "--peak", str(file), tokenizer]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peaks: dict[str, float] = json.loads(output.splitlines()[-1])
    return peaks


def document(file: Path, tokenizer: str) -> Rows:
    """Yields the larger of the two peaks for a file that is one document."""
    peaks = peaks_of_preparing(file, tokenizer)
    measured = " / ".join(f"{peaks[kind]:.0f}" for kind in ("process", "worker"))
    detail = f"{Path(tokenizer).name}, {file.stat().st_size / MEGABYTE:.0f} MB, process / worker"
    largest = max(peaks["process"], peaks["worker"])
    yield row("document", detail, f"{measured} MB (imports {peaks['imports']:.0f})", largest)


def memory(files: dict[int, Path], tokenizer: str) -> Rows:
    """Yields the peaks for each size, and their ratio."""
    peaks = {size: peaks_of_preparing(file, tokenizer) for size, file in files.items()}
    for kind in ("process", "worker"):
        small, large = (peaks[size][kind] for size in files)
        if large == 0:
            continue
        sizes = " / ".join(f"{size} MB" for size in files)
        name = Path(tokenizer).name
        of = f" (imports {peaks[max(files)]['imports']:.0f})" if kind == "process" else ""
        measured = f"{small:.0f} / {large:.0f} MB{of}"
        yield row("memory", f"{name}, {kind}, {sizes}", measured, large / small)


# Preparation


def preparation(file: Path, tokenizer: Tokenizer, name: str, rounds: int) -> Rows:
    """Yields the speed of preparing `file` and of `tokenizer` alone, and their ratio."""
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
    yield row("preparation", f"{tokenizer.name}, ours / tokenizer alone", speeds, 1 / result.ratio)


# Loading


def loading(file: Path, kind: Any, rounds: int, seconds: float = 2.0) -> Rows:
    """Yields the tokens per second that the training loader yields in one process."""
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(
            file, Path(folder), "bytes", block_size=1024, batch_size=16, train_windows=kind
        )
        data.prepare_data()
        data.setup()
        speeds = [_tokens_per_second(data, seconds) for _ in range(rounds)]
    speed = statistics.median(speeds)
    yield row("loading", f"{kind}, 16 x 1024", f"{speed / 1e6:.1f} M tokens/s", speed)


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
    before = status_bytes("Anonymous", "smaps_rollup")
    for first in range(0, 1600, 16):
        rows.rows(np.arange(first, first + 16))
    return status_bytes("Anonymous", "smaps_rollup") - before


def order(count: int = 10**7, processes: int = 4) -> Rows:
    """Yields what each process keeps; the first to come makes the order, the others wait."""
    with tempfile.TemporaryDirectory() as name:
        write_shards(Path(name), count)
        command = [sys.executable, "-m", "benchmarks.corpora", "--rows", name]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
        outputs = [process.communicate()[0] for process in running]
    grown = sorted(float(output) for output in outputs)
    measured = " / ".join(f"{value / MEGABYTE:.1f}" for value in grown) + " MB"
    detail = f"{count:,} documents, {processes} processes"
    yield row("order", detail, measured, statistics.median(grown) / count)


# The tables


def row(what: str, detail: str, measured: str, value: float) -> dict[str, Any]:
    """Returns a row: what was measured, its ratio or speed, and whether the target is met."""
    at_most, target = what in AT_MOST, TARGETS[what]
    met = value <= target if at_most else value >= target
    limit = f"{'<=' if at_most else '>='} {target:g}"
    verdict = "met" if met else "MISSED"
    return {"case": detail, "measured": measured, "value": value, "target": limit, "": verdict}


def tokenizers(folder: Path) -> list[tuple[Tokenizer, str]]:
    """Returns the tokenizers to measure, each with the name that a corpus takes."""
    trained = train_bpe("bpe:1024", documents(2))
    path = folder / "bpe1024.json"
    path.write_text(trained.json_text, encoding="utf-8")
    found: list[tuple[Tokenizer, str]] = [(load_tokenizer("bytes"), "bytes"), (trained, str(path))]
    pieces = folder / "pieces.json"
    pieces.write_text(sentence_pieces(documents(2)), encoding="utf-8")
    found.append((load_tokenizer(str(pieces)), str(pieces)))
    try:
        found.append((load_tokenizer("gpt2"), "gpt2"))
    except TokenizerUnavailableError as error:
        print(f"gpt2 is left out: {error}", file=sys.stderr)
    return found


def sentence_pieces(texts: Iterator[str]) -> str:
    """Returns a tokenizer.json as of SentencePiece BPE: spaces are letters, and nothing splits."""
    import tokenizers as library
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    inner = library.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=special, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    space = normalizers.Replace(" ", "\u2581")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    data = json.loads(inner.to_str())
    return json.dumps({**data, "pre_tokenizer": None})


def tables(folder: Path, options: Options) -> dict[str, harness.Table]:
    """Returns the measurements by name, of texts that are written to ``folder``."""
    files = {size: folder / f"{size}.jsonl" for size in (10, 100)}
    for size, path in files.items():
        write_jsonl(path, size)
    single = folder / "single.txt"
    with single.open("w", encoding="utf-8") as file:
        file.writelines(documents(100))
    middle = folder / "middle.jsonl"
    write_jsonl(middle, options.megabytes)
    found, rounds = tokenizers(folder), options.rounds
    names = [argument for _, argument in found]
    return {
        "memory": lambda _: chain(*(memory(files, name) for name in names)),
        "document": lambda _: chain(*(document(single, name) for name in [*names, "bpe:1024"])),
        "preparation": lambda _: chain(*(preparation(middle, *own, rounds) for own in found)),
        "loading": lambda _: chain(*(loading(files[100], k, rounds) for k in ("packed", "random"))),
        "order": lambda _: order(),
    }


def main() -> None:
    """Runs all measurements, or, with ``--peak``, one in this process."""
    parser = harness.options_parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=24, help="text for preparing")
    parser.add_argument("--peak", nargs=2, metavar=("FILE", "TOKENIZER"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", metavar="FOLDER", help=argparse.SUPPRESS)
    lazily: dict[str, harness.Table] = {}
    with tempfile.TemporaryDirectory() as name:

        def table(what: str) -> harness.Table:
            """Returns a table whose numbers are measured once it is asked for."""
            return lambda options: lazily[what](options)

        def prepare(options: Options) -> None:
            """Measures in this process and ends it, or writes the texts."""
            if options.rows:
                print(own_memory_of_rows(Path(options.rows)))
                parser.exit()
            if options.peak:
                print(json.dumps(peak_of_preparing(Path(options.peak[0]), options.peak[1])))
                parser.exit()
            packages = ("tokenizers", "tiktoken", "numpy")
            print(", ".join(f"{p} {version(p)}" for p in packages), f"{usable_cores()} cores")
            lazily.update(tables(Path(name), options))

        harness.run(parser, {what: table(what) for what in TARGETS}, prepare=prepare)


if __name__ == "__main__":
    main()
