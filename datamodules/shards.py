"""The files of one section of a store: a shard for each split that it has documents of."""

import contextlib
from pathlib import Path
from typing import IO

import numpy as np

from datamodules.journal import Section, sync
from datamodules.store import BlockChecksums, Counts, Split
from datamodules.tokenising import EncodedChunk


def shard_name(split: Split, number: int) -> str:
    """Returns the file name of a shard, without suffix."""
    return f"{split}-{number:05d}"


def is_whole(folder: Path, number: int, section: Section, itemsize: int) -> bool:
    """Returns whether the files of a section have the sizes that its counts give.

    Args:
        folder: Folder of the unfinished store.
        number: Number of the section.
        section: What it holds.
        itemsize: Bytes of a token.
    """
    for split, counts in section.splits.items():
        sizes = {"tokens": counts.tokens * itemsize, "ends": counts.documents * 8}
        for suffix, size in sizes.items():
            path = folder / f"{shard_name(split, number)}.{suffix}"
            if not path.is_file() or path.stat().st_size != size:
                return False
    return True


class SectionWriter:
    """Writes a stretch of documents, one shard a split that has any.

    Args:
        folder: Folder of the unfinished store.
        number: Number of the section, which its shards carry.
        first: Number of its first document.

    Attributes:
        first: The same.
        end: Number after the last document that was added.
    """

    def __init__(self, folder: Path, number: int, first: int) -> None:
        self._folder, self._number = folder, number
        self.first = self.end = first
        self._counts: dict[Split, Counts] = {}
        self._files: dict[Path, IO[bytes]] = {}
        self._checksums: dict[str, BlockChecksums] = {}

    def add(self, chunk: EncodedChunk) -> None:
        """Appends the documents of a chunk."""
        starts = np.cumsum(chunk.lengths) - chunk.lengths
        for split in dict.fromkeys(chunk.splits):
            here = np.array([s == split for s in chunk.splits])
            if here.all():
                tokens = chunk.tokens
            else:
                spans = zip(starts[here], chunk.lengths[here], strict=True)
                tokens = np.concatenate([chunk.tokens[a : a + n] for a, n in spans])
            before = self._counts.get(split, Counts())
            self._append(split, "tokens", tokens)
            ends = before.tokens + np.cumsum(chunk.lengths[here], dtype="<i8")
            self._append(split, "ends", ends)
            self._counts[split] = before + Counts(
                documents=int(here.sum()),
                tokens=len(tokens),
                utf8_bytes=int(chunk.sizes[here].sum()),
            )
        self.end += chunk.documents

    def _append(self, split: Split, suffix: str, values: np.ndarray) -> None:
        path = self._folder / f"{shard_name(split, self._number)}.{suffix}"
        if path not in self._files:
            self._files[path] = path.open("wb")
            self._checksums[path.name] = BlockChecksums()
        data = values.view(np.uint8).data
        self._files[path].write(data)
        self._checksums[path.name].add(data)

    def largest(self) -> int:
        """Returns the tokens of the longest shard."""
        return max((counts.tokens for counts in self._counts.values()), default=0)

    def finish(self) -> Section:
        """Returns the journal's entry; all files are on disk."""
        self.close()
        for path in self._files:
            sync(path)
        sync(self._folder)
        return Section(
            first=self.first,
            end=self.end,
            splits=self._counts,
            checksums={name: sums.digits() for name, sums in self._checksums.items()},
        )

    def close(self) -> None:
        """Closes the files, all of them also where that fails (a full disk)."""
        with contextlib.ExitStack() as files:
            for file in self._files.values():
                files.callback(file.close)
