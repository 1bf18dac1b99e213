"""Resumable tokenisation of a corpus into a text store, by the processes of one machine.

Documents are cut into parts of 2 GiB of text; a part becomes at most one shard per split. Parts are
written into ``<store>.partial``. Its folder ``parts`` has a record of each finished part: counts,
checksums, and the start of the next part. A killed preparation resumes with the parts without a
record; then meta.json is written from the records alone, and the folder gets its final name.

One command writes a store, under a file lock; others, even on machines that share the folder, wait
for it. The stored bytes do not depend on the number of processes, because encoded documents come
back in order.
"""

import contextlib
import itertools
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from tqdm import tqdm

from datamodules import encoding
from datamodules.encoding import ChunkPosition, EncodedChunk, chunks, encode_in_order
from datamodules.journals import full_disk_named
from datamodules.readers import parse_json
from datamodules.store import (
    FORMAT,
    SPLITS,
    BlockChecksums,
    Counts,
    Split,
    Store,
    all_checksums,
    counts_of,
    token_dtype,
)
from datamodules.tokenizers import JsonTokenizer, Tokenizer
from lightning_models.atomic_files import remove_unfinished, sync, write_whole

_LOG = logging.getLogger("lightning.pytorch")

# The files of a part


def shard_name(split: Split, index: int) -> str:
    """Returns the file name of a shard, without suffix."""
    return f"{split}-{index:05d}"


class SectionWriter:
    """Writes the shards of one part, one per split that has documents.

    Args:
        folder: Folder of the unfinished store.
        index: Index of the part, which the shards have in their names.

    Attributes:
        counts: Counts of each split that has documents.
    """

    def __init__(self, folder: Path, index: int) -> None:
        self._folder, self._index = folder, index
        self.counts: dict[Split, Counts] = {}
        self._files: dict[Path, IO[bytes]] = {}
        self._checksums: dict[str, BlockChecksums] = {}

    def add(self, chunk: EncodedChunk) -> None:
        """Appends the documents of a chunk."""
        for split in dict.fromkeys(chunk.splits):
            in_split = np.array([s == split for s in chunk.splits])
            tokens, sizes = chunk.tokens, chunk.token_sizes
            if not in_split.all():
                inside = np.repeat(in_split, chunk.lengths)
                tokens = tokens[inside]
                sizes = None if sizes is None else sizes[inside]
            previous = self.counts.get(split, Counts())
            self._append(split, "tokens", tokens)
            if sizes is not None:
                self._append(split, "sizes", sizes)
            ends = previous.tokens + np.cumsum(chunk.lengths[in_split], dtype="<i8")
            self._append(split, "ends", ends)
            self.counts[split] = previous + Counts(
                documents=int(in_split.sum()),
                tokens=len(tokens),
                utf8_bytes=int(chunk.sizes[in_split].sum()),
            )

    def _append(self, split: Split, suffix: str, values: np.ndarray) -> None:
        path = self._folder / f"{shard_name(split, self._index)}.{suffix}"
        if path not in self._files:
            self._files[path] = path.open("wb")
            self._checksums[path.name] = BlockChecksums()
        data = values.view(np.uint8).data
        self._files[path].write(data)
        self._checksums[path.name].add(data)

    def finish(self) -> dict[str, str]:
        """Syncs the files to disk and returns their `BlockChecksums.digits` by name."""
        self.close()
        for path in self._files:
            sync(path)
        sync(self._folder)
        return {name: sums.digits() for name, sums in self._checksums.items()}

    def close(self) -> None:
        """Closes all files, even if closing one fails (a full disk)."""
        with contextlib.ExitStack() as files:
            for file in self._files.values():
                files.callback(file.close)


# The store


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files of a tokenizer that its name does not define, tokenizer.json last."""
    if isinstance(tokenizer, JsonTokenizer):
        for name, text in reversed(tokenizer.files().items()):
            write_whole(folder / name, text)


def write_meta(
    folder: Path,
    description: Mapping[str, Any],
    tokenizer: Tokenizer,
    splits: Mapping[Split, Mapping[str, Any]],
    checksums: Mapping[str, str],
) -> None:
    """Writes meta.json.

    Args:
        folder: Folder with the other files of the store.
        description: Source, tokenizer, origin and notes.
        tokenizer: Tokenizer that encoded the text.
        splits: Counts and shards of each split.
        checksums: Checksums that were computed during writing, by file.
    """
    meta = {
        "format": FORMAT,
        **description,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": token_dtype(tokenizer.vocab_size).str,
        **({} if tokenizer.text_bos_id is None else {"bos_id": tokenizer.text_bos_id}),
        **({} if tokenizer.exact_bytes else {"sizes": True}),
        "splits": splits,
        "checksums": all_checksums(folder, checksums),
    }
    write_whole(folder / "meta.json", json.dumps(meta, indent=2))


Documents = Callable[[int], Iterable[tuple[Split, str]]]


def prepare_store(
    folder: Path,
    *,
    description: Mapping[str, Any],
    documents: Documents,
    make_tokenizer: Callable[[], Tokenizer],
    check: Callable[[Mapping[Split, Counts]], None] = lambda counts: None,
    train_tokens: int | None = None,
    num_proc: int | None = None,
    pin: Callable[[Mapping[str, Any] | None], Mapping[str, Any]] = lambda stored: stored or {},
    notes: Callable[[], Iterable[str]] = list,
) -> None:
    """Writes the store at `folder` unless it exists; waits if another process is writing it.

    Args:
        folder: Path of the store; its parents are created.
        description: Source and tokenizer, for meta.json.
        documents: Yields the documents of all splits from a given index on, in an order that never
            changes.
        make_tokenizer: Makes the tokenizer; called before `documents`, unless a killed preparation
            left a tokenizer.json.
        check: Called with the counts of each split before the store gets its name; may raise to
            reject it. The shards are kept.
        train_tokens: Maximum number of training tokens: reading stops before the first train
            document that would exceed it. None means no limit.
        num_proc: See `encode_in_order`.
        pin: Pins the source of `documents`, e.g. to a commit, and returns the pins as JSON values
            for meta.json (``origin``). Gets the pins of a killed preparation, or None.
        notes: Returns notes for meta.json; called once the source is pinned.

    Raises:
        StoreError: If the store exists and is damaged, or the disk is full.
    """
    if folder.exists():  # renamed when complete; a read-only cache needs no lock
        Store(folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = _Partial(folder.with_name(f"{folder.name}.partial"))
    with full_disk_named(partial.folder), _alone(folder):
        if folder.exists():
            Store(folder)
            return
        try:
            origin, noted = partial.begin(pin, notes)
            tokenizer = partial.tokenizer(make_tokenizer)
            if not partial.is_complete():
                partial.write(documents, tokenizer, train_tokens, num_proc)
            check(partial.counts())
            partial.finish({**description, "origin": origin, "notes": noted}, tokenizer)
            partial.folder.rename(folder)
            shutil.rmtree(folder / _PARTS, ignore_errors=True)
        except BaseException:
            partial.give_up()
            raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Locks a store, and logs before it waits for another process."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        acquired = lock.acquire(timeout=0)
    except Timeout:
        # not rank_zero_info, which is silent on the first rank of a second machine
        _LOG.info(
            f"Waiting for another process, on this or another machine, that prepares {folder}"
        )
        acquired = lock.acquire()
    with acquired:
        yield


_PARTS = "parts"  # folder of the records


class _Partial:
    """Folder of an unfinished store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts = folder / _PARTS
        self._begun = self._parts / "begun.json"

    def begin(
        self,
        pin: Callable[[Mapping[str, Any] | None], Mapping[str, Any]],
        notes: Callable[[], Iterable[str]],
    ) -> tuple[Mapping[str, Any], list[str]]:
        """Returns origin and notes of the text, from the unfinished store if it has them."""
        path = self._begun
        remove_unfinished(self.folder)  # files of a killed preparation are not part of the store
        sizes = [encoding.PART_BYTES, encoding.CHUNK_DOCUMENTS, encoding.CHUNK_BYTES]
        limits = {"format": FORMAT, "limits": sizes}
        saved = _parsed(path)
        if saved is not None and limits.items() <= saved.items():
            pin(saved["origin"])
            return saved["origin"], saved["notes"]
        if next(self.folder.glob("*.tokens"), None) is not None:
            self._move_aside()
        saved = {**limits, "origin": dict(pin(None)), "notes": list(notes())}
        shutil.rmtree(self.folder, ignore_errors=True)
        self._parts.mkdir(parents=True)
        write_whole(path, json.dumps(saved))
        return saved["origin"], saved["notes"]

    def _move_aside(self) -> None:
        """Renames an unfinished store of a different version or with different limits."""
        names = (self.folder.with_name(f"{self.folder.name}.old-{n}") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        self.folder.rename(aside)
        rank_zero_warn(
            "An unfinished preparation of a different version, or with parts of a different size, "
            f"is now at {aside}; delete it if you do not need it. The corpus is prepared again."
        )

    def tokenizer(self, make: Callable[[], Tokenizer]) -> Tokenizer:
        """Returns the tokenizer of the finished shards, or a new one."""
        if (self.folder / "tokenizer.json").is_file():
            return JsonTokenizer.from_store("tokenizer.json", self.folder)
        tokenizer = make()
        write_tokenizer(tokenizer, self.folder)
        return tokenizer

    # Records of finished parts

    def _record(self, part: int) -> dict[str, Any] | None:
        return _parsed(self._parts / f"{part:05d}.json")

    def _records(self) -> dict[int, dict[str, Any]]:
        indices = sorted(int(path.stem) for path in self._parts.glob("[0-9]*.json"))
        records = {index: self._record(index) for index in indices}
        return {index: record for index, record in records.items() if record is not None}

    def is_complete(self) -> bool:
        """Returns whether all parts are finished."""
        records = self._records()
        return bool(records) and records[max(records)]["last"] and len(records) == max(records) + 1

    def counts(self) -> dict[Split, Counts]:
        """Returns the counts of each split in the finished parts."""
        parts = [record["splits"] for record in self._records().values()]
        return {s: sum((counts_of(p[s]) for p in parts if s in p), Counts()) for s in SPLITS}

    # Parts

    def write(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        train_tokens: int | None,
        num_proc: int | None,
    ) -> None:
        """Writes the unfinished parts."""
        start = self._start()
        if start.documents:
            rank_zero_info(
                f"Continuing after document {start.documents}, finished in {self.folder}"
            )
        counts = self.counts()
        budget = math.inf if train_tokens is None else train_tokens - counts["train"].tokens
        bar = tqdm(
            desc="tokenising",
            unit=" tokens",
            unit_scale=True,
            total=train_tokens,
            initial=sum(c.tokens for c in counts.values()),
            disable=None,
        )
        finished = self._records().keys()
        parts = chunks(documents(start.documents), start)
        missing = (chunk for chunk in parts if chunk.position.part not in finished)
        with bar, contextlib.closing(encode_in_order(missing, tokenizer, num_proc)) as encoded:
            self._write_parts(_until(encoded, budget), bar)

    def _start(self) -> ChunkPosition:
        """Returns the position of the first unfinished part."""
        records = self._records()
        part = next(index for index in itertools.count() if index not in records)
        return ChunkPosition(part=part, documents=records[part - 1]["documents"] if part else 0)

    def _write_parts(self, encoded: Iterable[EncodedChunk], bar: "tqdm[Any]") -> None:
        with contextlib.ExitStack() as opened:
            writer: SectionWriter | None = None
            for chunk in encoded:
                if writer is None:
                    writer = SectionWriter(self.folder, chunk.position.part)
                    opened.callback(writer.close)
                writer.add(chunk)
                bar.update(len(chunk.tokens))
                if chunk.position.ends:
                    self._finish_part(writer, chunk.position)
                    writer = None

    def _finish_part(self, writer: SectionWriter, position: ChunkPosition) -> None:
        checksums, counts = writer.finish(), {s: asdict(c) for s, c in writer.counts.items()}
        record = {**asdict(position), "splits": counts, "checksums": checksums}
        write_whole(self._parts / f"{position.part:05d}.json", json.dumps(record))

    # The end

    def give_up(self) -> None:
        """Removes the folder if no part is finished; otherwise warns that it is kept."""
        tokens = sum(counts.tokens for counts in self.counts().values())
        if tokens:
            rank_zero_warn(
                f"The {tokens} tokens that were written are kept in {self.folder}. Delete it to "
                "start again, or if you change the options of the corpus."
            )
            return
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, description: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        """Writes meta.json from the records; only the rename remains."""
        records, totals = self._records(), self.counts()
        splits = {
            split: {
                **asdict(totals[split]),
                "shards": [
                    {"name": shard_name(split, index), **record["splits"][split]}
                    for index, record in records.items()
                    if split in record["splits"]
                ],
            }
            for split in SPLITS
        }
        checksums = {name: sums for r in records.values() for name, sums in r["checksums"].items()}
        for path in self.folder.iterdir():  # of a part beyond the cap, or of a killed one
            if path.suffix in (".tokens", ".ends", ".sizes") and path.name not in checksums:
                path.unlink()
        write_meta(self.folder, description, tokenizer, splits, checksums)
        Store(self.folder)


def _parsed(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file, or None if there is none."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _until(encoded: Iterable[EncodedChunk], budget: float) -> Iterator[EncodedChunk]:
    """Yields chunks up to the first train document that does not fit into `budget` tokens."""
    for chunk in encoded:
        train = np.array([split == "train" for split in chunk.splits], dtype=bool)
        filled = np.cumsum(np.where(train, chunk.lengths, 0))
        over = np.flatnonzero(train & (filled > budget))
        if len(over):
            yield chunk.until(int(over[0]))
            return
        yield chunk
        budget -= int(filled[-1]) if len(filled) else 0
