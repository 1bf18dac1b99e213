"""Documents to token arrays, in chunks, on several processes, in the order of the documents.

What is in a chunk depends on the documents alone, and results come back in order: the stored bytes
do not depend on the number of processes. A worker tokenises on one core; the thread pools of the
tokenizer libraries are used only where there are no workers.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from datamodules.store import Split, token_dtype
from datamodules.tokenizers import Tokenizer

CHUNK_DOCUMENTS = 1024  # documents of a chunk, or fewer once they hold
CHUNK_BYTES = 2**20  # this much text
# Text that is tokenised before workers are started: a small corpus is done by then.
BYTES_BEFORE_WORKERS = 2**23
MOST_PROCESSES = 16  # by default: reading and writing, in one process, feed about so many


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
        """Returns the chunk that ends in front of its document number `document`."""
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
        try:
            self._connection.send(chunk)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> EncodedChunk:
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
