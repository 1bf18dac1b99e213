"""Writing the store of examples, which is visible only when it is whole.

The folder is written under another name, under a file lock, and renamed at the end. A preparation
that was killed starts again: it takes minutes at most.
"""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from datamodules.prepare import (
    EncodedChunk,
    SectionWriter,
    full_disk_named,
    shard_name,
    write_whole,
)
from datamodules.reasoning.encoding import EncodedExample, encode_examples
from datamodules.reasoning.examples import Example
from datamodules.reasoning.reports import (
    JOINED,
    KEPT,
    MOVED,
    NO_STEPS,
    READ,
    STEPS,
    TOO_LONG,
    UNRESTORED,
    Reports,
)
from datamodules.reasoning.store import ARRAYS, INDEX, ExampleStore
from datamodules.store import FORMAT, SPLITS, Counts, Split, all_checksums, token_dtype
from datamodules.tokenizers import JsonTokenizer, Tokenizer

VERSION = 1
"""Raised with any change in how examples are tokenised, aligned or stored."""


@dataclass(frozen=True)
class RowLimits:
    """What the length of a row is made of besides its texts, and the most that it may be.

    Attributes:
        prefix: Tokens of the answer prefix.
        separator: Tokens in front of each step.
        max_length: Most tokens of a training example's row; None: no limit.
    """

    prefix: int
    separator: int
    max_length: int | None = None


def prepare_examples(
    folder: Path,
    *,
    description: Callable[[], Mapping[str, object]],
    examples: Callable[[Split], Iterable[Example]],
    make_tokenizer: Callable[[], Tokenizer],
    limits: Callable[[Tokenizer], RowLimits],
    noticed: Callable[[], Mapping[str, int]] = dict,
    check: Callable[[Reports], None] = lambda reports: None,
) -> bool:
    """Writes the store at `folder`, unless it is there already; several processes may ask at once.

    Returns whether this call wrote it.

    Args:
        folder: Final place; its parents are created.
        description: Called once, first; what goes into meta.json besides the rest.
        examples: Called once for each split.
        make_tokenizer: Called once, before `examples`.
        limits: Returns the limits of rows of that tokenizer.
        noticed: Called after the last example of each split: further counts for its report.
        check: Called with the report of each split before the store gets its name; may raise to
            refuse it.

    Raises:
        StoreError: A store is there and damaged, or the disk is full.
    """
    if folder.exists():  # renamed into place, so it was whole; a read-only cache needs no lock
        ExampleStore(folder)
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with full_disk_named(folder), FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            ExampleStore(folder)
            return False
        with _temporary(folder) as partial:
            meta = dict(description())
            tokenizer = make_tokenizer()
            with contextlib.closing(_Writer(partial, tokenizer, limits(tokenizer))) as writer:
                for split in SPLITS:
                    writer.write(split, examples(split))
                    writer.reports[split].update(noticed())
                check(writer.reports)
                writer.finish(meta)
            partial.rename(folder)
    return True


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Makes an empty folder next to another, and removes it if it is still there at the end."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass
class _Arrays:
    """What is kept of a split besides its texts, in parts.

    Attributes:
        ends: Number of the text after each example's last one.
        groups: Group of each example.
        places: Token of each step.
        shifts: How far it was moved on.
        texts: Texts so far.
        longest: Tokens of the longest row so far.
    """

    ends: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list)
    shifts: list[np.ndarray] = field(default_factory=list)
    texts: int = 0
    longest: int = 0

    def add(self, example: EncodedExample, length: int) -> None:
        """Adds an example whose row has that many tokens."""
        assert example.alignment is not None
        self.texts += len(example.texts)
        self.ends.append(self.texts)
        self.groups.append(example.group)
        self.places.append(example.alignment.places)
        self.shifts.append(example.alignment.shifts)
        self.longest = max(self.longest, length)

    def write(self, folder: Path, split: Split) -> dict[str, int]:
        """Writes the arrays, and returns what meta.json says of them."""
        nothing = np.empty(0, dtype=INDEX)
        firsts, groups = np.array([0, *self.ends], dtype=INDEX), np.array(self.groups, dtype=INDEX)
        steps = [np.concatenate([nothing, *parts]) for parts in (self.places, self.shifts)]
        for name, values in zip(ARRAYS, (firsts, groups, *steps), strict=True):
            # not tofile, whose error on a full disk does not say so
            (folder / f"{split}.{name}").write_bytes(values.astype(INDEX).tobytes())
        return {"examples": len(groups), "steps": len(steps[0]), "longest": self.longest}


class _Writer:
    """Writes the files of a store.

    Attributes:
        reports: Counts of each split, in words.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, limits: RowLimits) -> None:
        self._folder, self._tokenizer, self._limits = folder, tokenizer, limits
        self._section = SectionWriter(folder, 0, 0)
        self._sizes: dict[Split, dict[str, int]] = {}
        self.reports: Reports = {split: Counter() for split in SPLITS}

    def close(self) -> None:
        """Closes the files."""
        self._section.close()

    def write(self, split: Split, examples: Iterable[Example]) -> None:
        """Writes a split."""
        arrays = _Arrays()
        bar = tqdm(examples, desc=f"tokenising {split}", unit=" examples", disable=None)
        for batch in encode_examples(bar, self._tokenizer):
            kept = [one for one in (self._sifted(split, one) for one in batch) if one is not None]
            if kept:
                self._section.add(_as_chunk(split, kept, self._tokenizer))
            for one in kept:
                arrays.add(one, self._length(one))
        self._sizes[split] = arrays.write(self._folder, split)

    def _length(self, example: EncodedExample) -> int:
        return example.row_length(self._limits.prefix, self._limits.separator)

    def _sifted(self, split: Split, example: EncodedExample) -> EncodedExample | None:
        """Returns what is kept of an example, and counts it.

        Only training examples are left out: accuracies on the others must stay comparable.
        """
        report, most = self.reports[split], self._limits.max_length
        training = split == "train"
        report[READ] += 1
        if example.alignment is None:
            report[UNRESTORED if training else NO_STEPS] += 1
            if training:
                return None
            example = example.without_steps()
        if training and most is not None and self._length(example) > most:
            report[TOO_LONG] += 1
            return None
        assert example.alignment is not None
        report[KEPT] += 1
        report[STEPS] += len(example.alignment.places)
        report[MOVED] += int((example.alignment.shifts > 0).sum())
        report[JOINED] += int((np.diff(example.alignment.places) == 0).sum())
        return example

    def finish(self, description: Mapping[str, object]) -> None:
        """Writes meta.json, and the tokenizer where it is a file."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, JsonTokenizer):
            write_whole(self._folder / "tokenizer.json", tokenizer.json_text)
        section = self._section.finish()
        meta = {
            "format": FORMAT,
            **description,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "dtype": token_dtype(tokenizer.vocab_size).str,
            "splits": {s: self._described(s, section.splits.get(s)) for s in SPLITS},
            "checksums": all_checksums(self._folder, section.checksums),
        }
        write_whole(self._folder / "meta.json", json.dumps(meta, indent=2))

    def _described(self, split: Split, counts: Counts | None) -> dict[str, object]:
        """Returns what meta.json says of a split."""
        shards = [] if counts is None else [{"name": shard_name(split, 0), **asdict(counts)}]
        return {
            **asdict(counts or Counts()),
            "shards": shards,
            **self._sizes[split],
            "report": dict(self.reports[split]),
        }


def _as_chunk(
    split: Split, examples: Sequence[EncodedExample], tokenizer: Tokenizer
) -> EncodedChunk:
    """Returns the texts of examples as the documents of a chunk."""
    texts = [text for one in examples for text in one.texts]
    end = np.array([tokenizer.eos_id])
    tokens = np.concatenate([part for text in texts for part in (text, end)])
    return EncodedChunk(
        splits=[split] * len(texts),
        sizes=np.array([size for one in examples for size in one.sizes], dtype=INDEX),
        numbers=list(range(len(texts))),
        lengths=np.array([len(text) + 1 for text in texts], dtype=INDEX),
        tokens=tokens.astype(token_dtype(tokenizer.vocab_size)),
        documents=len(texts),
    )
