"""The store of tokenised examples: memory-mapped arrays in a folder.

It is a text store (see `datamodules.store`) whose documents are the texts of the examples, each
followed by EOS: query, steps, answer, and then the next example. Each split's shard comes with
arrays of int64::

    train.firsts    index of each example's first text, and the number of texts; (N + 1,)
    train.groups    (N,)
    train.places    index of each step's query token, with the first EOS as 0; (S,)
    train.shifts    offset from the token before its marker (see `examples.align`); (S,)

meta.json also has, for each split, the number of examples, the length of the longest row, and a
report: counts of examples read, kept, and left out by reason.

`prepare_examples` writes the folder under a temporary name, under a file lock, and renames it at
the end, so it is visible only when complete. A killed preparation starts over; it takes minutes at
most.
"""

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from datamodules.encoding import EncodedChunk
from datamodules.journals import full_disk_named
from datamodules.prepare import SectionWriter, shard_name, write_meta, write_tokenizer
from datamodules.reasoning.examples import EncodedExample, Example, FixedTokens, encode_examples
from datamodules.store import (
    SIZE,
    SPLITS,
    Counts,
    Split,
    Store,
    TokenStream,
    damaged,
    expect,
    token_dtype,
    whole_number,
)
from datamodules.tokenizer_base import Tokenizer
from lightning_models.atomic_files import write_whole

# ---- counts


READ, KEPT, STEPS = "examples read", "examples kept", "steps"
UNRESTORED = "left out, a text is not what its tokens decode to"
TOO_LONG = "left out, longer than max_length"
NO_STEPS = "kept without steps, a text is not what its tokens decode to"
MOVED = "steps moved on, their token has one already"
JOINED = "steps joined at the end of their query"

Reports = dict[Split, Counter[str]]


def format_reports(reports: Mapping[Split, Mapping[str, int]]) -> str:
    """Formats the counts of all non-empty splits in one line."""
    parts = [
        f"{split}: " + ", ".join(f"{count} {reason}" for reason, count in report.items() if count)
        for split, report in reports.items()
        if report.get(READ)
    ]
    return "; ".join(parts) + "."


def why_empty(split: Split, report: Mapping[str, int], tokenizer: str) -> str | None:
    """Returns why no example of a split was kept, and the cure, or None if none was read.

    Args:
        split: Name of the split.
        report: Counts of the split.
        tokenizer: The tokenizer's name.
    """
    if not report[READ]:
        return None
    if report[UNRESTORED]:
        return (
            f"The {split} split has no examples left: tokenizer={tokenizer!r} does not restore the "
            f"text of {report[UNRESTORED]} of its {report[READ]} examples, so steps cannot be "
            "aligned with it. Use a byte-level tokenizer: 'bytes', 'gpt2', 'bpe:N', or Qwen2.5's."
        )
    return (
        f"The {split} split has no examples left: all {report[READ]} are longer than max_length. "
        "Raise it, or set it to null."
    )


# ---- reading the store


INDEX = np.dtype("<i8")
ARRAYS = ("firsts", "groups", "places", "shifts")


class ExampleStore(Store):
    """A store of examples, opened for reading.

    Args:
        folder: Folder that `prepare_examples` wrote.

    Raises:
        StoreError: If it is missing, has a different format, or does not match its meta.json.
    """

    def _files(self) -> Iterator[tuple[str, int, np.dtype]]:
        yield from super()._files()
        for split in SPLITS:
            part = self.meta["splits"][split]
            examples, steps = whole_number(part, "examples"), whole_number(part, "steps")
            whole_number(part, "longest")
            report = expect(part, "report", dict)
            for key in report:
                whole_number(report, key)
            for name, count in zip(ARRAYS, (examples + 1, examples, steps, steps), strict=True):
                yield f"{split}.{name}", count, INDEX

    def verify(self, checked: Callable[[int], object] = lambda size: None) -> None:
        super().verify(checked)
        for split in SPLITS:
            self._check_examples(split)

    def _check_examples(self, split: Split) -> None:
        """Raises if texts and steps are not consistent with examples."""
        part, path = self.meta["splits"][split], self.folder / f"{split}.firsts"
        firsts = np.fromfile(path, INDEX)
        texts = np.diff(firsts)
        in_order = firsts[0] == 0 and firsts[-1] == part["documents"] and (texts >= 2).all()
        if not in_order or (texts - 2).sum() != part["steps"]:
            raise damaged(
                self.folder, f"{path.name} does not index the texts of {part['examples']} examples"
            )
        examples = self.examples(split)
        if examples.has_misplaced_steps():
            raise damaged(self.folder, f"{split}.places has steps outside their query")

    def report(self, split: Split) -> dict[str, int]:
        """Returns the counts of a split by description."""
        return dict(self.meta["splits"][split]["report"])

    def longest(self, split: Split) -> int:
        """Returns the length of the longest row of a split; see `EncodedExample.row_length`."""
        return int(self.meta["splits"][split]["longest"])

    def examples(self, split: Split, token_bytes: np.ndarray | None = None) -> "Examples":
        """Returns the examples of a split; `token_bytes` as in `Store.stream`."""
        return Examples(self.stream(split, token_bytes), self.folder, split)


class Examples:
    """The N examples of a split as memory-mapped arrays; pickled by path.

    Args:
        stream: Tokens of the texts.
        folder: Folder of the store.
        split: Name of the split.
    """

    def __init__(self, stream: TokenStream, folder: Path, split: Split) -> None:
        self.stream = stream
        self._folder, self._split = folder, split
        self._firsts, self._groups, self._places, self._shifts = map(self._array, ARRAYS)

    def _array(self, name: str) -> np.ndarray:
        path = self._folder / f"{self._split}.{name}"
        if not path.stat().st_size:  # nothing to map
            return np.empty(0, INDEX)
        return np.memmap(path, INDEX, "r")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the paths; a pickled memory map would copy the files."""
        return Examples, (self.stream, self._folder, self._split)

    def __len__(self) -> int:
        """Returns the number of examples, N."""
        return len(self._groups)

    def groups(self, indices: np.ndarray) -> np.ndarray:
        """Returns the group of each example, int64."""
        return np.asarray(self._groups[indices])

    def num_steps(self, indices: np.ndarray) -> np.ndarray:
        """Returns the number of steps of each example, int64."""
        return np.asarray(self._firsts[indices + 1] - self._firsts[indices] - 2)

    def queries(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the start of each query in the stream, and its length without EOS."""
        return self._spans(self._firsts[indices])

    def answers(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the start of each answer in the stream, and its length without EOS."""
        return self._spans(self._firsts[indices + 1] - 1)

    def steps(
        self, indices: np.ndarray, step_indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the start, the length without EOS and the query token of steps.

        Args:
            indices: Indices of examples, any shape.
            step_indices: Index of the step in its example, of the same shape.
        """
        starts, lengths = self._spans(self._firsts[indices] + 1 + step_indices)
        return starts, lengths, np.asarray(self._places[self._step_indices(indices) + step_indices])

    def _spans(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = self.stream.starts(texts)
        return starts, self.stream.ends(texts) - 1 - starts

    def _step_indices(self, indices: np.ndarray) -> np.ndarray:
        """Returns each example's first step; query and answer are texts, but not steps."""
        return np.asarray(self._firsts[indices] - 2 * indices)

    def mean_query_and_answer(self) -> float:
        """Returns the mean length of a query and its answer, with an EOS each."""
        indices = np.arange(len(self))
        (_, queries), (_, answers) = self.queries(indices), self.answers(indices)
        return float((queries + answers + 2).mean())

    def row_lengths(self, wording: FixedTokens) -> np.ndarray:
        """Returns the length of each row (N,), int64; see `EncodedExample.row_length`."""
        indices = np.arange(len(self))
        if not len(indices):
            return np.empty(0, dtype=np.int64)
        first, last = self._firsts[:-1], self._firsts[1:] - 1
        steps = self.num_steps(indices)
        stored = self.stream.ends(last) - self.stream.starts(first)  # with an EOS after each text
        texts = stored - (steps + 2) + steps * len(wording.step_separator)
        return np.asarray(1 + texts + len(wording.answer_prefix) + 1)

    def crossings(self, chunk_size: int) -> int:
        """Returns the number of examples with a step outside its marker's chunk.

        Chunks are aligned to the end of the query, so the first chunk may be shorter.

        Args:
            chunk_size: Number of tokens per chunk (c).
        """
        examples, _ = self._all_steps()
        positions = self._before_end(examples)
        crosses = positions // chunk_size != (positions - self._shifts) // chunk_size
        return len(np.unique(examples[crosses]))

    def longest_thought(self, chunk_size: int) -> int:
        """Returns the length of the longest thought, or 0 if there are no steps.

        A thought is the steps of one chunk, joined by a separator token; its end token does not
        count.

        Args:
            chunk_size: Number of tokens per chunk, as for `crossings`.
        """
        examples, order = self._all_steps()
        if not len(examples):
            return 0
        _, lengths, _ = self.steps(examples, order)
        chunks = self._before_end(examples) // chunk_size
        # Nonzero at the first step of each (example, chunk), where a thought starts.
        new = np.diff(examples, prepend=-1) | np.diff(chunks, prepend=chunks[0])
        return int(np.add.reduceat(lengths + 1, np.flatnonzero(new)).max()) - 1

    def has_misplaced_steps(self) -> bool:
        """Returns whether a step's token is outside its query and the EOS before it."""
        if not len(self._places):
            return False
        examples, _ = self._all_steps()
        return bool((self._places < 0).any() or (self._before_end(examples) >= 0).any())

    def _all_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the example of each step and the step's index in it, both (S,)."""
        indices = np.arange(len(self))
        counts = self.num_steps(indices)
        examples = np.repeat(indices, counts)
        return examples, np.arange(len(examples)) - (np.cumsum(counts) - counts)[examples]

    def _before_end(self, examples: np.ndarray) -> np.ndarray:
        """Returns each step's token relative to its query's end, (S,); -1 is the last token.

        A chunk's last token is then a multiple of c, minus 1.

        Args:
            examples: Index of each step's example.
        """
        return np.asarray(self._places - (self.queries(examples)[1] + 1))


# ---- writing the store


VERSION = 1
"""Incremented with every change in how examples are tokenised, aligned or stored."""


def prepare_examples(
    folder: Path,
    *,
    description: Callable[[], Mapping[str, object]],
    examples: Callable[[Split], Iterable[Example]],
    make_tokenizer: Callable[[], Tokenizer],
    wording: Callable[[Tokenizer], FixedTokens],
    max_length: int | None = None,
    noticed: Callable[[], Mapping[str, int]] = dict,
    check: Callable[[Reports], None] = lambda reports: None,
) -> bool:
    """Writes the store at `folder` unless it exists, and returns whether this call wrote it.

    Several processes may call it at the same time.

    Args:
        folder: Path of the store; its parents are created.
        description: Returns further content of meta.json; it is called once, before the others.
        examples: Yields the examples of a split; called once for each split.
        make_tokenizer: Makes the tokenizer; called once, before `examples`.
        wording: Returns the ids of the fixed text in rows.
        max_length: Maximum length of a training example's row. None means no limit.
        noticed: Returns further counts for the report; called after the last example of each split.
        check: Called with the report of each split before the store gets its name; may raise to
            reject it.

    Raises:
        StoreError: If the store exists and is damaged, or the disk is full.
    """
    if folder.exists():  # renamed when complete; a read-only cache needs no lock
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
            writer = _Writer(partial, tokenizer, wording(tokenizer), max_length)
            with contextlib.closing(writer):
                for split in SPLITS:
                    writer.write(split, examples(split))
                    writer.reports[split].update(noticed())
                check(writer.reports)
                writer.finish(meta)
            partial.rename(folder)
    return True


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Creates an empty folder next to another, and removes it unless it was renamed."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Writer:
    """Writes the files of a store.

    Attributes:
        reports: Counts of each split by description.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, wording: FixedTokens, max_length: int | None
    ) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._wording, self._max_length = wording, max_length
        self._section = SectionWriter(folder, 0)
        self._sizes: dict[Split, dict[str, int]] = {}
        self.reports: Reports = {split: Counter() for split in SPLITS}

    def close(self) -> None:
        """Closes the files."""
        self._section.close()

    def write(self, split: Split, examples: Iterable[Example]) -> None:
        """Writes a split."""
        firsts, groups, longest = [0], [], 0
        positions, shifts = [np.empty(0, INDEX)], [np.empty(0, INDEX)]
        bar = tqdm(examples, desc=f"tokenising {split}", unit=" examples", disable=None)
        for batch in encode_examples(bar, self._tokenizer):
            kept = [
                example
                for example in (self._sifted(split, example) for example in batch)
                if example is not None
            ]
            if kept:
                self._section.add(_as_chunk(split, kept, self._tokenizer))
            for example in kept:
                assert example.alignment is not None
                firsts.append(firsts[-1] + len(example.texts))
                groups.append(example.group)
                positions.append(example.alignment.places)
                shifts.append(example.alignment.shifts)
                longest = max(longest, example.row_length(self._wording))
        steps = [np.concatenate(parts) for parts in (positions, shifts)]
        for name, values in zip(ARRAYS, (firsts, groups, *steps), strict=True):
            # not tofile, whose error does not report a full disk
            content = np.asarray(values, dtype=INDEX).tobytes()
            write_whole(self._folder / f"{split}.{name}", content)
        self._sizes[split] = {"examples": len(groups), "steps": len(steps[0]), "longest": longest}

    def _sifted(self, split: Split, example: EncodedExample) -> EncodedExample | None:
        """Counts an example and returns its kept part, or None.

        Only training examples are left out; accuracies on the others must stay comparable.
        """
        report, max_length = self.reports[split], self._max_length
        training = split == "train"
        report[READ] += 1
        if example.alignment is None:
            report[UNRESTORED if training else NO_STEPS] += 1
            if training:
                return None
            example = example.without_steps()
        if training and max_length is not None and example.row_length(self._wording) > max_length:
            report[TOO_LONG] += 1
            return None
        assert example.alignment is not None
        report[KEPT] += 1
        report[STEPS] += len(example.alignment.places)
        report[MOVED] += int((example.alignment.shifts > 0).sum())
        report[JOINED] += int((np.diff(example.alignment.places) == 0).sum())
        return example

    def finish(self, description: Mapping[str, object]) -> None:
        """Writes meta.json, and the tokenizer if it is a file."""
        tokenizer = self._tokenizer
        write_tokenizer(tokenizer, self._folder)
        checksums = self._section.finish()
        splits = {split: self._described(split) for split in SPLITS}
        write_meta(self._folder, description, tokenizer, splits, checksums)

    def _described(self, split: Split) -> dict[str, object]:
        """Returns the entry of a split in meta.json."""
        counts = self._section.counts.get(split)
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
    texts = [text for example in examples for text in example.texts]
    end = np.array([tokenizer.eos_id])
    tokens = np.concatenate([part for text in texts for part in (text, end)])
    covered = None
    if not tokenizer.exact_bytes:
        sizes = [
            part for example in examples for text in example.token_sizes for part in (text, end * 0)
        ]
        covered = np.concatenate(sizes).astype(SIZE)
    return EncodedChunk(
        splits=[split] * len(texts),
        sizes=np.array([size for example in examples for size in example.sizes], dtype=INDEX),
        lengths=np.array([len(text) + 1 for text in texts], dtype=INDEX),
        tokens=tokens.astype(token_dtype(tokenizer.vocab_size)),
        token_sizes=covered,
    )
