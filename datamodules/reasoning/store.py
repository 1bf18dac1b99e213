"""The store of tokenised examples: memory-mapped arrays in a folder.

It is a text store (see `datamodules.store`) whose documents are the texts of the examples, each
followed by EOS: query, steps, answer, and the next example's. Next to the shard of each split lie
arrays of int64::

    train.firsts    number of each example's first text, and of the one after the last; (N + 1,)
    train.groups    (N,)
    train.places    index of the token that each step belongs to, EOS in front counted as 0; (S,)
    train.shifts    tokens that it was moved on from its marker's own (see `token_places`); (S,)

meta.json also has, for each split, the number of its examples, the tokens of the longest row, and
counts for people: what was read, kept, left out and why. `preparation` writes it all.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.store import SPLITS, Split, Store, TokenStream, damaged, expect, whole_number

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

    def verify(
        self, sample: int | None = None, checked: Callable[[int], object] = lambda size: None
    ) -> None:
        """Compares the files with their checksums, and their values with what can be.

        Args:
            sample: See `Store.verify`; the arrays are small and looked at in full.
            checked: See `Store.verify`.

        Raises:
            StoreError: A block does not hold what was written; the message names it.
        """
        super().verify(sample, checked)
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

    def examples(self, split: Split) -> "Examples":
        """Returns the examples of a split."""
        return Examples(self.stream(split), self.folder, split)


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
