"""The store of tokenised examples: memory-mapped arrays in a folder.

It is a text store (see `datamodules.store`) whose documents are the texts of the examples, each
followed by EOS: query, steps, answer, and the next example's. Next to the shard of each split lie
arrays of int64::

    train.firsts    number of each example's first text, and of the one after the last; (N + 1,)
    train.groups    (N,)
    train.places    index of the token that each step belongs to; that of the first EOS is 0; (S,)
    train.shifts    tokens that it was moved on from its marker's own (see `examples.align`); (S,)

meta.json also has, for each split, the number of its examples, the tokens of the longest row, and
counts for people: what was read, kept, left out and why.

`prepare_examples` writes the folder under another name, under a file lock, and renames it at the
end: it is visible only when it is whole. A preparation that was killed starts again: it takes
minutes at most.
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
from datamodules.reasoning.examples import EncodedExample, Example, Wording, encode_examples
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

# ---- what is counted


READ, KEPT, STEPS = "examples read", "examples kept", "steps"
UNRESTORED = "left out, a text is not what its tokens decode to"
TOO_LONG = "left out, longer than max_length"
NO_STEPS = "kept without steps, a text is not what its tokens decode to"
MOVED = "steps moved on, their token has one already"
JOINED = "steps joined at the end of their query"

Reports = dict[Split, Counter[str]]


def in_words(reports: Mapping[Split, Mapping[str, int]]) -> str:
    """Returns the counts of all splits that have any, in a line."""
    parts = [
        f"{split}: " + ", ".join(f"{count} {what}" for what, count in report.items() if count)
        for split, report in reports.items()
        if report.get(READ)
    ]
    return "; ".join(parts) + "."


def why_empty(split: Split, report: Mapping[str, int], tokenizer: str) -> str | None:
    """Returns why no example of a split was kept, and the cure; None where none was read.

    Args:
        split: Which split.
        report: Its counts.
        tokenizer: The tokenizer's name.
    """
    if not report[READ]:
        return None
    if report[UNRESTORED]:
        return (
            f"The {split} split has no examples left: of {report[UNRESTORED]} of its "
            f"{report[READ]} examples tokenizer={tokenizer!r} does not give back the text, so that "
            "steps cannot be aligned with it. Use a byte-level tokenizer: 'bytes', 'gpt2', "
            "'bpe:N', or that of Qwen2.5."
        )
    return (
        f"The {split} split has no examples left: all {report[READ]} are longer than max_length. "
        "Raise it, or set it to null."
    )


# ---- the store, read


INDEX = np.dtype("<i8")
ARRAYS = ("firsts", "groups", "places", "shifts")


class ExampleStore(Store):
    """A store of examples, opened for reading.

    Args:
        folder: Folder that `prepare_examples` wrote.

    Raises:
        StoreError: There is none, its format is another, or its files are not those that meta.json
            names.
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
        """Refuses texts and steps that are not those of examples."""
        part, path = self.meta["splits"][split], self.folder / f"{split}.firsts"
        firsts = np.fromfile(path, INDEX)
        texts = np.diff(firsts)
        in_order = firsts[0] == 0 and firsts[-1] == part["documents"] and (texts >= 2).all()
        if not in_order or (texts - 2).sum() != part["steps"]:
            raise damaged(
                self.folder, f"{path.name} does not number the texts of {part['examples']} examples"
            )
        examples = self.examples(split)
        if examples.has_foreign_places():
            raise damaged(
                self.folder, f"{split}.places has steps that belong to no token of their query"
            )

    def report(self, split: Split) -> dict[str, int]:
        """Returns the counts of a split, in words for people."""
        return dict(self.meta["splits"][split]["report"])

    def longest(self, split: Split) -> int:
        """Returns the tokens of the longest row of a split; see `EncodedExample.row_length`."""
        return int(self.meta["splits"][split]["longest"])

    def examples(self, split: Split, token_bytes: np.ndarray | None = None) -> "Examples":
        """Returns the examples of a split; `token_bytes` as in `Store.stream`."""
        return Examples(self.stream(split, token_bytes), self.folder, split)


class Examples:
    """The N examples of a split as arrays; memory-mapped, pickled by path.

    Args:
        stream: The texts.
        folder: Folder of the store.
        split: Which split.
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
        """Returns what opens the same files elsewhere; a pickled memory map would copy them."""
        return Examples, (self.stream, self._folder, self._split)

    def __len__(self) -> int:
        """Returns N."""
        return len(self._groups)

    def groups(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the group of each example, int64."""
        return np.asarray(self._groups[numbers])

    def num_steps(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the number of steps of each example, int64."""
        return np.asarray(self._firsts[numbers + 1] - self._firsts[numbers] - 2)

    def queries(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where each query begins in the stream, and its tokens without EOS."""
        return self._spans(self._firsts[numbers])

    def answers(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where each answer begins in the stream, and its tokens without EOS."""
        return self._spans(self._firsts[numbers + 1] - 1)

    def steps(
        self, numbers: np.ndarray, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns of steps where they begin, their tokens without EOS, and where they belong.

        Args:
            numbers: Examples, any shape.
            places: Which of the example's steps, counted from 0, of the same shape.
        """
        starts, lengths = self._spans(self._firsts[numbers] + 1 + places)
        return starts, lengths, np.asarray(self._places[self._step_numbers(numbers) + places])

    def _spans(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = self.stream.starts(texts)
        return starts, self.stream.ends(texts) - 1 - starts

    def _step_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the number of each example's first step; two texts an example are no steps."""
        return np.asarray(self._firsts[numbers] - 2 * numbers)

    def mean_query_and_answer(self) -> float:
        """Returns the tokens of a query and its answer, an EOS each, on average."""
        everything = np.arange(len(self))
        (_, queries), (_, answers) = self.queries(everything), self.answers(everything)
        return float((queries + answers + 2).mean())

    def row_lengths(self, wording: Wording) -> np.ndarray:
        """Returns the tokens of each row (N,), int64; see `EncodedExample.row_length`."""
        everything = np.arange(len(self))
        if not len(everything):
            return np.empty(0, dtype=np.int64)
        first, last = self._firsts[:-1], self._firsts[1:] - 1
        steps = self.num_steps(everything)
        stored = self.stream.ends(last) - self.stream.starts(first)  # with an EOS after each text
        texts = stored - (steps + 2) + steps * len(wording.step_separator)
        return np.asarray(1 + texts + len(wording.answer_prefix) + 1)

    def crossings(self, chunk_size: int) -> int:
        """Returns how many examples have a step that was moved out of its marker's chunk.

        Chunks end with the query: the first one is short where the lengths do not divide.

        Args:
            chunk_size: Tokens of a chunk (c).
        """
        examples, _ = self._all_steps()
        places = self._before_end(examples)
        crosses = places // chunk_size != (places - self._shifts) // chunk_size
        return len(np.unique(examples[crosses]))

    def longest_thought(self, chunk_size: int) -> int:
        """Returns the tokens of the longest thought, 0 where there are no steps.

        A thought is the steps of one chunk, joined by a token of the model; its end does not count.

        Args:
            chunk_size: Tokens of a chunk, as for `crossings`.
        """
        examples, order = self._all_steps()
        if not len(examples):
            return 0
        _, lengths, _ = self.steps(examples, order)
        chunks = self._before_end(examples) // chunk_size
        new = np.diff(examples, prepend=-1) | np.diff(chunks, prepend=chunks[0])
        return int(np.add.reduceat(lengths + 1, np.flatnonzero(new)).max()) - 1

    def has_foreign_places(self) -> bool:
        """Returns whether a step belongs to a token that is not of its query, or its EOS."""
        if not len(self._places):
            return False
        examples, _ = self._all_steps()
        return bool((self._places < 0).any() or (self._before_end(examples) >= 0).any())

    def _all_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the example of each step, and which of that one's steps it is, all (S,)."""
        everything = np.arange(len(self))
        counts = self.num_steps(everything)
        examples = np.repeat(everything, counts)
        return examples, np.arange(len(examples)) - (np.cumsum(counts) - counts)[examples]

    def _before_end(self, examples: np.ndarray) -> np.ndarray:
        """Returns the place of each step, -1 at its query's last token; (S,), negative.

        A chunk's last token is then a multiple of c, less 1.

        Args:
            examples: The example of each step.
        """
        return np.asarray(self._places - (self.queries(examples)[1] + 1))


# ---- the store, written


VERSION = 1
"""Raised with any change in how examples are tokenised, aligned or stored."""


def prepare_examples(
    folder: Path,
    *,
    description: Callable[[], Mapping[str, object]],
    examples: Callable[[Split], Iterable[Example]],
    make_tokenizer: Callable[[], Tokenizer],
    wording: Callable[[Tokenizer], Wording],
    max_length: int | None = None,
    noticed: Callable[[], Mapping[str, int]] = dict,
    check: Callable[[Reports], None] = lambda reports: None,
) -> bool:
    """Writes the store at `folder`, unless it is there already; several processes may ask at once.

    Returns whether this call wrote it.

    Args:
        folder: Final place; its parents are created.
        description: Called once, first; what else goes into meta.json.
        examples: Called once for each split.
        make_tokenizer: Called once, before `examples`.
        wording: Returns the fixed text of rows as ids of that tokenizer.
        max_length: Most tokens of a training example's row; None: no limit.
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
    """Makes an empty folder next to another, and removes it if it is still there at the end."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Writer:
    """Writes the files of a store.

    Attributes:
        reports: Counts of each split, in words.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, wording: Wording, max_length: int | None
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
        places, shifts = [np.empty(0, INDEX)], [np.empty(0, INDEX)]
        bar = tqdm(examples, desc=f"tokenising {split}", unit=" examples", disable=None)
        for batch in encode_examples(bar, self._tokenizer):
            kept = [one for one in (self._sifted(split, one) for one in batch) if one is not None]
            if kept:
                self._section.add(_as_chunk(split, kept, self._tokenizer))
            for one in kept:
                assert one.alignment is not None
                firsts.append(firsts[-1] + len(one.texts))
                groups.append(one.group)
                places.append(one.alignment.places)
                shifts.append(one.alignment.shifts)
                longest = max(longest, one.row_length(self._wording))
        steps = [np.concatenate(parts) for parts in (places, shifts)]
        for name, values in zip(ARRAYS, (firsts, groups, *steps), strict=True):
            # not tofile, whose error on a full disk does not say so
            content = np.asarray(values, dtype=INDEX).tobytes()
            write_whole(self._folder / f"{split}.{name}", content)
        self._sizes[split] = {"examples": len(groups), "steps": len(steps[0]), "longest": longest}

    def _sifted(self, split: Split, example: EncodedExample) -> EncodedExample | None:
        """Returns what is kept of an example, and counts it.

        Only training examples are left out: accuracies on the others must stay comparable.
        """
        report, most = self.reports[split], self._max_length
        training = split == "train"
        report[READ] += 1
        if example.alignment is None:
            report[UNRESTORED if training else NO_STEPS] += 1
            if training:
                return None
            example = example.without_steps()
        if training and most is not None and example.row_length(self._wording) > most:
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
        write_tokenizer(tokenizer, self._folder)
        checksums = self._section.finish()
        splits = {split: self._described(split) for split in SPLITS}
        write_meta(self._folder, description, tokenizer, splits, checksums)

    def _described(self, split: Split) -> dict[str, object]:
        """Returns what meta.json says of a split."""
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
    texts = [text for one in examples for text in one.texts]
    end = np.array([tokenizer.eos_id])
    tokens = np.concatenate([part for text in texts for part in (text, end)])
    covered = None
    if not tokenizer.exact_bytes:
        sizes = [part for one in examples for text in one.token_sizes for part in (text, end * 0)]
        covered = np.concatenate(sizes).astype(SIZE)
    return EncodedChunk(
        splits=[split] * len(texts),
        sizes=np.array([size for one in examples for size in one.sizes], dtype=INDEX),
        lengths=np.array([len(text) + 1 for text in texts], dtype=INDEX),
        tokens=tokens.astype(token_dtype(tokenizer.vocab_size)),
        token_sizes=covered,
    )
