"""Writing a text store: parallel, resumable, and visible only when it is whole.

Shards are written into ``<store>.partial``. A section is a stretch of documents with at most one
shard a split; when its largest shard is full, all are closed and synced, and a line of the journal
says which documents they hold. A preparation that was killed goes on after the last line: finished
shards stay as they are, what was begun is thrown away, and the result is the same to the byte. The
folder gets its final name at the end, under a file lock.

What is in a chunk of documents depends on the documents alone, and encoded chunks come back in
order: the stored bytes do not depend on the number of processes. A worker tokenises on one core;
the thread pools of the tokenizer libraries are used only where there are no workers.

Finished shards are never removed silently: those after a damaged one are made again, a folder that
cannot be continued is moved aside, and one line reports it.
"""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from tqdm import tqdm

from datamodules.journals import Journal, Section, full_disk_named, sync, write_whole
from datamodules.store import (
    FORMAT,
    SPLITS,
    BlockChecksums,
    Counts,
    Split,
    Store,
    all_checksums,
    token_dtype,
)
from datamodules.tokenizers import JsonTokenizer, Tokenizer

# Documents to tokens

CHUNK_DOCUMENTS = 1024  # documents of a chunk, or fewer once they hold
CHUNK_BYTES = 2**20  # this much text
# Text that is tokenised before workers are started: a small corpus is done by then.
BYTES_BEFORE_WORKERS = 2**23
MOST_PROCESSES = 16  # by default: reading and writing, in one process, feed about that many


@dataclass(kw_only=True)
class Chunk:
    """Consecutive documents.

    Attributes:
        splits: Split of each document that has text.
        texts: Those documents, valid UTF-8.
        sizes: UTF-8 bytes of each.
        numbers: Place of each among all documents of the chunk, from 0.
        documents: How many documents were taken, empty ones included.
    """

    splits: list[Split] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    documents: int = 0


@dataclass(frozen=True, kw_only=True)
class EncodedChunk:
    """A chunk as tokens.

    Attributes:
        splits: Split of each document.
        sizes: UTF-8 bytes of each document, int64.
        numbers: See `Chunk`.
        lengths: Tokens of each document, its EOS included, int64.
        tokens: All documents in order, each followed by EOS, in the store's type.
        documents: See `Chunk`.
    """

    splits: list[Split]
    sizes: np.ndarray
    numbers: list[int]
    lengths: np.ndarray
    tokens: np.ndarray
    documents: int

    def until(self, document: int) -> "EncodedChunk":
        """Returns the chunk that ends before its document number `document`."""
        if document == len(self.splits):
            return self
        return EncodedChunk(
            splits=self.splits[:document],
            sizes=self.sizes[:document],
            numbers=self.numbers[:document],
            lengths=self.lengths[:document],
            tokens=self.tokens[: int(self.lengths[:document].sum())],
            documents=self.numbers[document],
        )


def usable_cores() -> int:
    """Returns the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def as_utf8(text: str) -> tuple[str, int]:
    """Returns `text` with lone surrogates replaced by U+FFFD, and the number of its UTF-8 bytes."""
    try:
        return text, len(text.encode("utf-8"))
    except UnicodeEncodeError:
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return clean, len(clean.encode("utf-8"))


def chunks(documents: Iterable[tuple[Split, str]]) -> Iterator[Chunk]:
    """Yields the documents in chunks; those without a character are counted and left out."""
    chunk, filled = Chunk(), 0
    for split, text in documents:
        clean, size = as_utf8(text)
        if size:
            chunk.splits.append(split)
            chunk.texts.append(clean)
            chunk.sizes.append(size)
            chunk.numbers.append(chunk.documents)
            filled += size
        chunk.documents += 1
        if chunk.documents >= CHUNK_DOCUMENTS or filled >= CHUNK_BYTES:
            yield chunk
            chunk, filled = Chunk(), 0
    if chunk.documents:
        yield chunk


def encode_chunk(tokenizer: Tokenizer, chunk: Chunk) -> EncodedChunk:
    """Returns the tokens of a chunk."""
    ids = tokenizer.encode_arrays(chunk.texts)
    lengths = np.array([len(document) + 1 for document in ids], dtype="<i8")
    ends = np.cumsum(lengths)
    tokens = np.full(int(lengths.sum()), tokenizer.eos_id, dtype=token_dtype(tokenizer.vocab_size))
    for document, end in zip(ids, ends, strict=True):
        tokens[end - 1 - len(document) : end - 1] = document
    return EncodedChunk(
        splits=chunk.splits,
        sizes=np.array(chunk.sizes, dtype="<i8"),
        numbers=chunk.numbers,
        lengths=lengths,
        tokens=tokens,
        documents=chunk.documents,
    )


def encode_in_order(
    documents: Iterable[tuple[Split, str]], tokenizer: Tokenizer, num_proc: int | None = None
) -> Generator[EncodedChunk, None, None]:
    """Yields the documents as encoded chunks, in order.

    Args:
        documents: (split, text) in any order of splits.
        tokenizer: Tokenizer of the store.
        num_proc: Processes that tokenise; 1: this one, with the threads of the tokenizer's library;
            None: one a usable core, at most 16.

    Raises:
        WorkerDiedError: A worker process ended before its work was done.
    """
    if num_proc is None:
        num_proc = min(usable_cores(), MOST_PROCESSES)
    rest, done = chunks(documents), 0
    for chunk in rest:
        yield encode_chunk(tokenizer, chunk)
        done += sum(chunk.sizes)
        if num_proc > 1 and tokenizer.gains_from_processes and done >= BYTES_BEFORE_WORKERS:
            break
    else:
        return
    workers = [_Worker(tokenizer) for _ in range(num_proc)]
    try:
        yield from _distribute(rest, workers)
    finally:
        for worker in workers:
            worker.stop()


def _distribute(rest: Iterator[Chunk], workers: list["_Worker"]) -> Iterator[EncodedChunk]:
    """Yields results in order; every worker has one chunk, the next is read while they work."""
    busy: deque[_Worker] = deque()
    for worker, chunk in zip(workers, rest, strict=False):
        worker.send(chunk)
        busy.append(worker)
    while busy:
        worker, following = busy.popleft(), next(rest, None)
        result = worker.receive()
        if following is not None:
            worker.send(following)
            busy.append(worker)
        yield result


class WorkerDiedError(ValueError):
    """A tokenising process ended early; the message says what to change."""


class _Worker:
    """A process that tokenises chunks; it ends when this process does, however that ends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        context = multiprocessing.get_context()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(tokenizer, theirs, self._connection), daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, chunk: Chunk) -> None:
        """Hands the process a chunk; raises if it has died."""
        try:
            self._connection.send(chunk)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> EncodedChunk:
        """Returns the next encoded chunk; raises what the process raised, or that it has died."""
        try:
            result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, EncodedChunk)
        return result

    def _died(self) -> WorkerDiedError:
        self._process.join(5)
        return WorkerDiedError(
            f"A tokenising process ended early (exit code {self._process.exitcode}; -9 is mostly a "
            "lack of memory). Start again, it goes on after the last finished shard; a smaller "
            "data.num_proc needs less memory."
        )

    def stop(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.terminate()
        self._process.join(5)


def _serve(tokenizer: Tokenizer, connection: Connection, other_end: Connection) -> None:
    """Runs in a worker until the other end is closed, be it by the parent's death."""
    other_end.close()  # a forked copy, which would keep the connection open
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer.use_one_core()
    while True:
        try:
            chunk = connection.recv()
        except (EOFError, OSError):
            return
        result: Any
        try:
            result = encode_chunk(tokenizer, chunk)
        except Exception as error:
            result = error
        try:
            connection.send(result)
        except OSError:
            return


# The files of a section


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


# The store

# A shard is full at the first chunk of documents that reaches this many tokens: minutes of work
# that a kill may cost, and under 600 files for the whole Pile, which an open stream holds open.
SHARD_TOKENS = 2**29

Documents = Callable[[], Iterable[tuple[Split, str]]]


class Remote(Protocol):
    """A source of documents that changes with time and is slow to read, asked while it is stored.

    Everything it returns is kept as JSON.
    """

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Settles what is read, e.g. a commit: `stored`, where a killed preparation had that.

        Returns what was settled, for the journal and for meta.json (``origin``).
        """
        ...

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Lets the documents before a place be anything, e.g. empty: they are stored."""
        ...

    def place(self, document: int) -> Mapping[str, Any] | None:
        """Returns a place at or before that document, None where it knows none."""
        ...


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
    remote: Remote | None = None,
    notes: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Writes the store at `folder`, unless it is there already; several processes may ask at once.

    Args:
        folder: Final place; its parents are created.
        description: What goes into meta.json next to counts and checksums: source and tokenizer.
        documents: Called once, yields the documents of all splits in an order that never changes.
        make_tokenizer: Called once, before `documents`, unless a killed preparation left a
            tokenizer.json.
        check: Called with the counts of each split before the store gets its name; may raise to
            refuse it. The shards are kept.
        shard_tokens: A shard is full at the first chunk of documents that reaches this many tokens.
        train_tokens: Most tokens of the train split: reading stops before the first train
            document that would exceed it. None: all documents.
        num_proc: See `encode_in_order`.
        remote: The source of `documents`, where that can change or is slow to read.
        notes: Called once, when the source has settled what is read; goes into meta.json.

    Raises:
        StoreError: A store is there and damaged, or the disk is full.
    """
    if folder.exists():  # renamed into place, so it was whole; a read-only cache needs no lock
        Store(folder)
        return
    unfinished = folder.with_name(f"{folder.name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with full_disk_named(unfinished), FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            Store(folder)
            return
        partial = _Partial(unfinished, shard_tokens)
        with partial.kept_if_begun():
            origin = partial.begin(remote)
            noted = list(notes())
            tokenizer = partial.tokenizer(make_tokenizer)
            partial.write(documents, tokenizer, train_tokens, num_proc, remote)
        with partial.reported_if_refused():
            check(partial.counts())
        partial.finish({**description, "origin": origin, "notes": noted}, tokenizer)
        partial.folder.rename(folder)


class _Partial:
    """The folder of a store that is being written, with its journal."""

    def __init__(self, folder: Path, shard_tokens: int) -> None:
        self.folder = folder
        self._shard_tokens = shard_tokens
        self._limits = [shard_tokens, CHUNK_DOCUMENTS, CHUNK_BYTES]
        self._journal = Journal(folder, self._limits)
        if self._journal.foreign:
            self._move_aside()
        if not self.sections:
            self._remove()
        folder.mkdir(exist_ok=True)

    @property
    def sections(self) -> list[Section]:
        """The parts that are tokenised."""
        return self._journal.sections

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _move_aside(self) -> None:
        """Keeps what another version or other limits wrote under another name."""
        names = (self.folder.with_name(f"{self.folder.name}.old-{n}") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        self.folder.rename(aside)
        rank_zero_warn(
            f"An unfinished preparation of another version, or with other limits of shards, is now "
            f"at {aside}; delete it if you do not need it. The corpus is prepared again."
        )

    @contextlib.contextmanager
    def kept_if_begun(self) -> Iterator[None]:
        """Removes the folder if what is done here fails before anything was finished."""
        try:
            yield
        except BaseException:
            if not self.sections:
                self._remove()
            raise

    @contextlib.contextmanager
    def reported_if_refused(self) -> Iterator[None]:
        """Warns that the finished shards are kept, if what is done here fails."""
        with self.kept_if_begun():
            try:
                yield
            except BaseException:
                if self.sections:
                    tokens = sum(counts.tokens for counts in self.counts().values())
                    rank_zero_warn(
                        f"The {tokens} tokens that were written are kept in {self.folder}. Delete "
                        "it if you change the options of the corpus, or to start again."
                    )
                raise

    def begin(self, remote: Remote | None) -> Mapping[str, Any]:
        """Returns the origin of the text: that of the finished shards, else the present one."""
        if not self.sections:
            self._journal.begin({} if remote is None else remote.pin(None))
        elif remote is not None:
            remote.pin(self._journal.origin)
        assert self._journal.origin is not None
        return self._journal.origin

    def tokenizer(self, make: Callable[[], Tokenizer]) -> Tokenizer:
        """Returns the tokenizer that the finished shards were written with, or a new one."""
        path = self.folder / "tokenizer.json"
        if path.is_file():
            return JsonTokenizer.from_file(path.name, path)
        tokenizer = make()
        if isinstance(tokenizer, JsonTokenizer):
            write_whole(path, tokenizer.json_text)
        return tokenizer

    def write(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        train_tokens: int | None,
        num_proc: int | None,
        remote: Remote | None,
    ) -> None:
        """Writes all sections that are missing."""
        self._check_sections(token_dtype(tokenizer.vocab_size).itemsize)
        start = self._start(remote)
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
            self._write_sections(_until(encoded, room), start, bar, remote)

    def _start(self, remote: Remote | None) -> int:
        """Returns the number of the first missing document; the source goes near it at once."""
        start = self.sections[-1].end if self.sections else 0
        if start:
            rank_zero_info(f"Going on after document {start}, finished in {self.folder}")
        place = self._journal.place
        if remote is not None and place is not None and place["document"] <= start:
            remote.go_to(place)
        return start

    def _write_sections(
        self,
        encoded: Iterator[EncodedChunk],
        start: int,
        bar: "tqdm[Any]",
        remote: Remote | None,
    ) -> None:
        section = SectionWriter(self.folder, len(self.sections), start)
        try:
            for chunk in encoded:
                section.add(chunk)
                bar.update(len(chunk.tokens))
                bar.set_postfix(documents=section.end, refresh=False)
                if section.largest() >= self._shard_tokens:
                    self._finish_section(section, remote)
                    section = SectionWriter(self.folder, len(self.sections), section.end)
            if section.end > section.first:
                self._finish_section(section, remote)
        finally:
            section.close()

    def _finish_section(self, writer: SectionWriter, remote: Remote | None) -> None:
        section = writer.finish()
        self._journal.append(section, None if remote is None else remote.place(section.end))

    def _check_sections(self, itemsize: int) -> None:
        """Forgets the sections from the first on whose files are not as the journal says."""
        sound = [is_whole(self.folder, i, s, itemsize) for i, s in enumerate(self.sections)]
        kept = sound.index(False) if False in sound else len(sound)
        if kept < len(sound):
            rank_zero_warn(
                f"{self.folder}: the shards number {kept} are damaged. They and those after them "
                f"are made again; those before them are kept."
            )
            self._journal.keep(kept)
        known = {shard_name(split, i) for i, s in enumerate(self.sections) for split in s.splits}
        for path in self.folder.iterdir():
            unknown = path.suffix in (".tokens", ".ends") and path.stem not in known
            if unknown or path.suffix == ".tmp" or path.name == "place.json":  # of older versions
                path.unlink()

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
        self._journal.finish()
        known = {name: sums for s in self.sections for name, sums in s.checksums.items()}
        meta = {
            "format": FORMAT,
            **description,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "dtype": token_dtype(tokenizer.vocab_size).str,
            "splits": splits,
            "checksums": all_checksums(self.folder, known),
        }
        write_whole(self.folder / "meta.json", json.dumps(meta, indent=2))


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
