"""Writing a text store: parallel, resumable, and visible only when it is whole.

Shards are written into ``<store>.partial``. A section is a stretch of documents with at most one
shard a split; when its largest shard is full, all are closed and synced, and a line of
``journal.jsonl`` says which documents they hold. A preparation that was killed goes on behind the
last line: finished shards stay as they are, what was begun is thrown away, and the result is the
same to the byte. The folder gets its final name at the end, under a file lock.
"""

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from datamodules import tokenising
from datamodules.store import FORMAT, SPLITS, Counts, Split, Store, counts_of, token_dtype
from datamodules.tokenising import EncodedChunk, encode_in_order
from datamodules.tokenizers import JsonTokenizer, Tokenizer

# A shard is full at the first chunk of documents that reaches this many tokens: minutes of work
# that a kill may cost, and under 600 files for the whole Pile, which an open stream holds open.
SHARD_TOKENS = 2**29

Documents = Callable[[], Iterable[tuple[Split, str]]]


def prepare_store(
    folder: Path,
    *,
    description: Mapping[str, Any],
    documents: Documents,
    make_tokenizer: Callable[[], Tokenizer],
    check: Callable[[Mapping[Split, Counts]], None] = lambda counts: None,
    shard_tokens: int = SHARD_TOKENS,
    train_tokens: int | None = None,
    num_proc: int | None = None,
) -> None:
    """Writes the store at `folder`, unless it is there already; several processes may ask at once.

    Args:
        folder: Final place; its parents are created.
        description: What goes into meta.json beside the counts: source and tokenizer.
        documents: Called once, yields the documents of all splits in an order that never changes.
        make_tokenizer: Called once, before `documents`, unless a killed preparation left a
            tokenizer.json.
        check: Called with the counts of each split before the store gets its name; may raise to
            refuse it.
        shard_tokens: A shard is full at the first chunk of documents that reaches this many tokens.
        train_tokens: Most tokens of the train split: reading stops in front of the first train
            document that would exceed it. None: all documents.
        num_proc: See `tokenising.encode_in_order`.

    Raises:
        StoreError: A store is there and damaged.
    """
    if folder.exists():  # renamed into place, so it was whole; a read-only cache needs no lock
        Store(folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            Store(folder)
            return
        partial = _Partial(folder.with_name(f"{folder.name}.partial"), shard_tokens)
        try:
            tokenizer = partial.tokenizer(make_tokenizer)
            partial.write(documents, tokenizer, train_tokens, num_proc)
        except BaseException:
            if not partial.sections:
                partial.remove()
            raise
        try:
            check(partial.counts())
        except BaseException:
            partial.remove()
            raise
        partial.finish(description, tokenizer)
        partial.folder.rename(folder)


@dataclass(frozen=True, kw_only=True)
class _Section:
    """A finished stretch of documents: a line of the journal.

    Attributes:
        first: Number of its first document, counted over all splits, empty ones included.
        end: Number behind its last document.
        splits: What its shards hold.
    """

    first: int
    end: int
    splits: dict[Split, Counts]

    def line(self) -> str:
        return json.dumps({**vars(self), "splits": {s: asdict(c) for s, c in self.splits.items()}})

    @staticmethod
    def parse(line: str) -> "_Section":
        data = json.loads(line)
        splits = {split: counts_of(part) for split, part in data["splits"].items()}
        return _Section(first=data["first"], end=data["end"], splits=splits)


class _Partial:
    """The folder of a store that is being written, with its journal."""

    def __init__(self, folder: Path, shard_tokens: int) -> None:
        self.folder = folder
        self._journal = folder / "journal.jsonl"
        self._shard_tokens = shard_tokens
        # Everything that decides where shards are cut: with other values they could not go on.
        limits = [shard_tokens, tokenising.CHUNK_DOCUMENTS, tokenising.CHUNK_BYTES]
        self._header = json.dumps({"format": FORMAT, "limits": limits})
        self.sections: list[_Section] = self._read_sections()
        if not self.sections:
            self.remove()
        folder.mkdir(exist_ok=True)
        if not self.sections:
            self._journal.write_text(self._header + "\n", encoding="utf-8")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read_sections(self) -> list[_Section]:
        """Returns the finished sections; the journal then ends behind the last of them."""
        if not self._journal.is_file():
            return []
        lines = self._journal.read_text(encoding="utf-8").split("\n")
        if lines[0] != self._header:
            return []
        sections: list[_Section] = []
        for line in lines[1:-1]:  # behind the last line end is nothing, or half a line
            try:
                sections.append(_Section.parse(line))
            except (ValueError, KeyError, TypeError):
                break
        self._journal.write_text("\n".join([*lines[: len(sections) + 1], ""]), encoding="utf-8")
        return sections

    def tokenizer(self, make: Callable[[], Tokenizer]) -> Tokenizer:
        """Returns the tokenizer that the finished shards were written with, or a new one."""
        path = self.folder / "tokenizer.json"
        if path.is_file():
            return JsonTokenizer(path.name, path.read_text(encoding="utf-8"))
        tokenizer = make()
        if isinstance(tokenizer, JsonTokenizer):
            path.write_text(tokenizer.json_text, encoding="utf-8")
            sync(path)
        return tokenizer

    def write(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        train_tokens: int | None,
        num_proc: int | None,
    ) -> None:
        """Writes all sections that are missing."""
        self._check_sections(token_dtype(tokenizer.vocab_size).itemsize)
        start = self.sections[-1].end if self.sections else 0
        train = self.counts()["train"].tokens
        rest = itertools.islice(documents(), start, None)
        room = math.inf if train_tokens is None else train_tokens - train
        bar = tqdm(
            desc="tokenising",
            unit=" tokens",
            unit_scale=True,
            total=train_tokens,
            initial=sum(counts.tokens for counts in self.counts().values()),
            disable=None,
        )
        # Closing ends the workers at once, whatever else still holds on to the generator.
        with bar, contextlib.closing(encode_in_order(rest, tokenizer, num_proc)) as encoded:
            self._write_sections(_until(encoded, room), start, bar)

    def _write_sections(
        self, encoded: Iterator[EncodedChunk], start: int, bar: "tqdm[Any]"
    ) -> None:
        section = _SectionWriter(self.folder, len(self.sections), start)
        try:
            for chunk in encoded:
                section.add(chunk)
                bar.update(len(chunk.tokens))
                bar.set_postfix(documents=section.end, refresh=False)
                if section.largest() >= self._shard_tokens:
                    self._finish_section(section)
                    section = _SectionWriter(self.folder, len(self.sections), section.end)
            if section.end > section.first:
                self._finish_section(section)
        finally:
            section.close()

    def _finish_section(self, writer: "_SectionWriter") -> None:
        section = writer.finish()
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(section.line() + "\n")
        sync(self._journal)
        self.sections.append(section)

    def _check_sections(self, itemsize: int) -> None:
        """Forgets all sections if one of their files is not as the journal says; drops the rest."""
        sizes = {}
        for i, section in enumerate(self.sections):
            for split, counts in section.splits.items():
                sizes[f"{shard_name(split, i)}.tokens"] = counts.tokens * itemsize
                sizes[f"{shard_name(split, i)}.ends"] = counts.documents * 8
        for path in self.folder.iterdir():
            if path.suffix in (".tokens", ".ends") and path.name not in sizes:
                path.unlink()
        paths = [(self.folder / name, size) for name, size in sizes.items()]
        if any(not path.is_file() or path.stat().st_size != size for path, size in paths):
            for path, _ in paths:
                path.unlink(missing_ok=True)
            self._journal.write_text(self._header + "\n", encoding="utf-8")
            self.sections = []

    def counts(self) -> dict[Split, Counts]:
        """Returns what the finished sections hold of each split."""
        return {
            split: sum((s.splits[split] for s in self.sections if split in s.splits), Counts())
            for split in SPLITS
        }

    def finish(self, description: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        """Writes meta.json: all that is missing but the name."""
        totals = self.counts()
        splits = {
            split: {
                **asdict(totals[split]),
                "shards": [
                    {"name": shard_name(split, i), **asdict(section.splits[split])}
                    for i, section in enumerate(self.sections)
                    if split in section.splits
                ],
            }
            for split in SPLITS
        }
        meta = {
            "format": FORMAT,
            **description,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "dtype": token_dtype(tokenizer.vocab_size).str,
            "splits": splits,
        }
        path = self.folder / "meta.json"
        path.write_text(json.dumps(meta, indent=2), encoding="utf-8")
        sync(path)


def _until(encoded: Iterable[EncodedChunk], room: float) -> Iterator[EncodedChunk]:
    """Yields chunks up to the first train document that does not fit into `room` tokens."""
    for chunk in encoded:
        train = np.array([split == "train" for split in chunk.splits], dtype=bool)
        filled = np.cumsum(np.where(train, chunk.lengths, 0))
        over = np.flatnonzero(train & (filled > room))
        if len(over):
            yield chunk.until(int(over[0]))
            return
        yield chunk
        room -= int(filled[-1]) if len(filled) else 0


class _SectionWriter:
    """Writes a stretch of documents, one shard a split that has any."""

    def __init__(self, folder: Path, number: int, first: int) -> None:
        self._folder, self._number = folder, number
        self.first = self.end = first
        self._counts: dict[Split, Counts] = {}
        self._files: dict[Path, IO[bytes]] = {}

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
        self._files[path].write(values.data)

    def largest(self) -> int:
        """Returns the tokens of the longest shard."""
        return max((counts.tokens for counts in self._counts.values()), default=0)

    def finish(self) -> _Section:
        """Returns the journal's entry; all files are on disk."""
        self.close()
        for path in self._files:
            sync(path)
        return _Section(first=self.first, end=self.end, splits=self._counts)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


def shard_name(split: Split, number: int) -> str:
    """Returns the file name of a shard, without suffix."""
    return f"{split}-{number:05d}"


def sync(path: Path) -> None:
    """Makes sure that a file's content is on disk, not only in the system's memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
