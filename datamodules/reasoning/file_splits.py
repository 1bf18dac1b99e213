"""Rows by split: from files of their own, or a share of the training rows."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from datamodules.corpus import split_of
from datamodules.local_corpora import Patterns, files_of_splits, identify
from datamodules.store import SPLITS, Split

KEYS: dict[Split, str] = {"train": "data_files", "val": "val_files", "test": "test_files"}
"""The option that names the files of each split."""

Row = TypeVar("Row")


class FileSplits:
    """Where the rows of each split are.

    Args:
        patterns: Paths and globs of each split; None for all: the rows are not in files.
        check: Raises a ValueError for a file that cannot be read.
        val_fraction: Share of the training rows held out for validation, if it has none of its own.
        test_fraction: The same for the test.
        own: Splits that have rows of their own without files.

    Raises:
        ValueError: There are files of other splits, but none for training.
    """

    def __init__(
        self,
        patterns: Patterns,
        check: Callable[[Path], Any],
        *,
        val_fraction: float,
        test_fraction: float,
        own: Iterable[Split] = (),
    ) -> None:
        self._patterns, self._check = patterns, check
        self._fractions: dict[Split, float] = {"val": val_fraction, "test": test_fraction}
        self.has_files = patterns["train"] is not None
        named = [KEYS[split] for split in SPLITS[1:] if patterns[split] is not None]
        if named and not self.has_files:
            raise ValueError(
                f"{' and '.join(named)} name files, and data_files none. Set data.data_files too: "
                "all splits come from files, or none does."
            )
        found = {split for split in SPLITS if patterns[split] is not None}
        self._own = found if self.has_files else set(own)

    @cached_property
    def files(self) -> dict[Split, list[Path]]:
        """The files of each split, in reading order.

        Raises:
            ValueError: A file is missing, of unknown format, or in two splits.
        """
        return files_of_splits(self._patterns, self._check)

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the training rows that are held out."""
        return {
            f"{split}_fraction": 0.0 if split in self._own else fraction
            for split, fraction in self._fractions.items()
        }

    def source(self) -> dict[str, Any]:
        """Returns what identifies the rows of files: names, sizes, hashes, and shares."""
        if not self.has_files:
            return self.shares
        files = {split: [identify(path) for path in paths] for split, paths in self.files.items()}
        return {**self.shares, "files": files}

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have rows."""
        return split == "train" or split in self._own or self._fractions[split] > 0

    def how_to_get(self, split: Split) -> str:
        """Returns what gives an empty split rows, for messages."""
        if split == "train":
            return "Check data.data_files."
        return (
            f"Set data.{split}_fraction (now {self._fractions[split]}), or data.{KEYS[split]} with "
            "data.data_files."
        )

    def rows(self, split: Split, read: Callable[[Split], Iterable[Row]]) -> Iterator[Row]:
        """Yields the rows of a split.

        Args:
            split: Which.
            read: Yields the rows of a source of its own, in an order that never changes.
        """
        if split != "train" and split in self._own:
            yield from read(split)
            return
        for index, row in enumerate(read("train")):
            if split_of(index, **self.shares) == split:
                yield row
