"""Tokenises chunks of consecutive documents, in order, in several processes."""

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from datamodules.store import SIZE, Split, token_dtype
from datamodules.tokenizer_base import Tokenizer

# A chunk ends at whichever comes first: this number of documents, or this much text.
CHUNK_DOCUMENTS = 1024
CHUNK_BYTES = 2**20
# A part ends with the first chunk that reaches this much text. A kill then costs minutes of work,
# and the whole Pile has some 400 shards, which an open stream keeps open.
PART_BYTES = 2**31
# Text to tokenise before workers are started; small corpora need no workers.
BYTES_BEFORE_WORKERS = 2**23
MAX_PROCESSES = 16  # default maximum; one process that reads and writes can feed about this many


@dataclass(frozen=True, kw_only=True)
class ChunkPosition:
    """Position of a chunk in the corpus.

    Attributes:
        part: Index of its part.
        documents: Number of documents of the corpus up to its end, including empty ones.
        ends: Whether it is the last chunk of the part.
        last: Whether it is the last chunk of the corpus.
    """

    part: int = 0
    documents: int = 0
    ends: bool = False
    last: bool = False


@dataclass(kw_only=True)
class Chunk:
    """Consecutive documents of a part.

    Attributes:
        splits: Split of each document that has text.
        texts: Texts of these documents, valid UTF-8.
        sizes: UTF-8 bytes of each document.
        position: See `ChunkPosition`.
    """

    splits: list[Split] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    position: ChunkPosition = field(default_factory=ChunkPosition)


@dataclass(frozen=True, kw_only=True)
class EncodedChunk:
    """A tokenised chunk.

    Attributes:
        splits: Split of each document.
        sizes: UTF-8 bytes of each document, int64.
        lengths: Number of tokens of each document, including its EOS; int64.
        tokens: All documents in order, each followed by EOS, in the store's type.
        token_sizes: UTF-8 bytes of text that each token covers, uint32, or None if every id covers
            a fixed number of bytes.
        position: See `ChunkPosition`.
    """

    splits: list[Split]
    sizes: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    token_sizes: np.ndarray | None = None
    position: ChunkPosition = field(default_factory=ChunkPosition)

    def until(self, document: int) -> "EncodedChunk":
        """Returns the chunk up to (without) `document`, marked as the end of the corpus."""
        stop = int(self.lengths[:document].sum())
        return EncodedChunk(
            splits=self.splits[:document],
            sizes=self.sizes[:document],
            lengths=self.lengths[:document],
            tokens=self.tokens[:stop],
            token_sizes=None if self.token_sizes is None else self.token_sizes[:stop],
            position=replace(self.position, ends=True, last=True),
        )


def usable_cores() -> int:
    """Returns the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most_workers() -> int:
    """Returns the maximum number of processes: 8 per usable core, and at least 256."""
    return max(256, 8 * usable_cores())


class Continuation(str):
    """A document that continues the one before it, e.g. an answer: no BOS, no dummy prefix."""


class Encoded(str):
    """A document that was published as tokens: the Latin-1 string of their uint16 bytes.

    As a str it passes through chunks and worker processes like any text, at 2 bytes per token.
    """

    @classmethod
    def of(cls, ids: np.ndarray) -> "Encoded":
        """Returns the document of token ids (N,), without EOS."""
        return cls(ids.astype("<u2").tobytes().decode("latin-1"))

    @property
    def ids(self) -> np.ndarray:
        """Its tokens, (N,) int64."""
        return np.frombuffer(self.encode("latin-1"), dtype="<u2").astype(np.int64)


def as_utf8(text: str) -> tuple[str, int]:
    """Returns `text` with lone surrogates replaced by U+FFFD, and the number of its UTF-8 bytes."""
    try:
        return text, len(text.encode("utf-8"))
    except UnicodeEncodeError:
        clean = type(text)(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return clean, len(clean.encode("utf-8"))


def chunks(
    documents: Iterable[tuple[Split, str]], start: ChunkPosition | None = None
) -> Iterator[Chunk]:
    """Yields documents in chunks; empty documents are counted and left out.

    Args:
        documents: (split, text) pairs, from the first document of a part.
        start: Position of that part in the corpus.
    """
    position = ChunkPosition() if start is None else start
    chunk, count, filled, in_part = Chunk(), 0, 0, 0
    for split, text in documents:
        if count >= CHUNK_DOCUMENTS or filled >= CHUNK_BYTES:
            in_part += filled
            position = replace(
                position, documents=position.documents + count, ends=in_part >= PART_BYTES
            )
            chunk.position = position
            yield chunk
            if position.ends:
                position, in_part = replace(position, part=position.part + 1, ends=False), 0
            chunk, count, filled = Chunk(), 0, 0
        clean, size = as_utf8(text)
        if size:
            chunk.splits.append(split)
            chunk.texts.append(clean)
            chunk.sizes.append(size)
        count, filled = count + 1, filled + size
    documents_in_all = position.documents + count
    chunk.position = replace(position, documents=documents_in_all, ends=True, last=True)
    yield chunk


def encode_chunk(tokenizer: Tokenizer, chunk: Chunk) -> EncodedChunk:
    """Returns the tokens of a chunk: BOS (if the tokenizer has one), ids and EOS per document."""
    measured = _encoded(tokenizer, chunk.texts)
    bos_id = tokenizer.text_bos_id
    without_bos = (Continuation, Encoded)  # no BOS is added to these
    begins = [bos_id is not None and not isinstance(t, without_bos) for t in chunk.texts]
    text_sizes = [
        int(sizes.sum()) if isinstance(text, Encoded) else size
        for text, size, (_, sizes) in zip(chunk.texts, chunk.sizes, measured, strict=True)
    ]
    lengths = np.array(
        [begin + len(ids) + 1 for begin, (ids, _) in zip(begins, measured, strict=True)],
        dtype="<i8",
    )
    ends = np.cumsum(lengths)
    tokens = np.full(int(lengths.sum()), tokenizer.eos_id, dtype=token_dtype(tokenizer.vocab_size))
    covered = None if tokenizer.exact_bytes else np.zeros(len(tokens), dtype=SIZE)
    rows = zip(measured, ends - lengths, ends, begins, text_sizes, strict=True)
    for (ids, sizes), start, end, begin, size in rows:
        if begin:
            tokens[start] = bos_id
        tokens[start + begin : end - 1] = ids
        if covered is not None:
            covered[start + begin : end - 1] = sizes
            covered[end - 1] = size - sizes.sum()  # bytes of a text that normalises to nothing
    return EncodedChunk(
        splits=chunk.splits,
        sizes=np.array(text_sizes, dtype="<i8"),
        lengths=lengths,
        tokens=tokens,
        token_sizes=covered,
        position=chunk.position,
    )


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns ids and bytes of each document; published tokens are kept."""
    written = iter(_tokenised(tokenizer, [t for t in texts if not isinstance(t, Encoded)]))
    return [_published(t, tokenizer) if isinstance(t, Encoded) else next(written) for t in texts]


def _tokenised(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns ids and bytes of each text; bytes are empty if every id has a fixed size."""
    continued = [isinstance(text, Continuation) for text in texts]
    if tokenizer.exact_bytes:
        # such tokenizers add no dummy prefix, so continuations need no special treatment
        return [(ids, _NO_SIZES) for ids in tokenizer.encode_arrays(texts)]
    later = iter(
        tokenizer.measure_continuations([t for t, c in zip(texts, continued, strict=True) if c])
    )
    first = iter(
        tokenizer.encode_measured([t for t, c in zip(texts, continued, strict=True) if not c])
    )
    return [next(later if c else first) for c in continued]


def _published(document: Encoded, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns a document's ids and their bytes by `token_bytes`, (N,) int64 each.

    Raises:
        ValueError: If an id is outside the vocabulary.
    """
    ids = document.ids
    if ids.size and ids.max() >= tokenizer.vocab_size:
        raise ValueError(
            f"The corpus has the token {ids.max()}, but the tokenizer has only "
            f"{tokenizer.vocab_size} ids: set data.tokenizer to the corpus's tokenizer."
        )
    return ids, tokenizer.token_bytes.numpy()[ids]


_NO_SIZES = np.empty(0, dtype=np.int64)


class WorkerDiedError(ValueError):
    """Raised when a tokenising process ended early; the message names the cure."""


class _Encoding(Dataset[EncodedChunk | Exception]):
    """A dataset that is indexed by chunks and encodes them; errors are returned, not raised."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getitem__(self, chunk: Chunk) -> EncodedChunk | Exception:
        try:
            return encode_chunk(self._tokenizer, chunk)
        except Exception as error:
            return error

    def start(self, worker: int) -> None:
        """Initialises a worker."""
        self._tokenizer.use_one_core()


def unchanged(item: Any) -> Any:
    """Returns the item unchanged, as the `collate_fn` of a `DataLoader` of whole chunks."""
    return item


def encode_in_order(
    source: Iterable[Chunk], tokenizer: Tokenizer, num_proc: int | None = None
) -> Generator[EncodedChunk, None, None]:
    """Yields the chunks encoded, in order.

    Args:
        source: Chunks, read in this process when needed.
        tokenizer: Tokenizer of the store.
        num_proc: Number of processes that tokenise. 1 tokenises in this process, with the threads
            of the tokenizer's library. None uses one per usable core, at most 16.

    Raises:
        WorkerDiedError: If a worker process ended before its work was done.
    """
    if num_proc is None:
        num_proc = min(usable_cores(), MAX_PROCESSES)
    rest, done = iter(source), 0
    for chunk in rest:
        yield encode_chunk(tokenizer, chunk)
        done += sum(chunk.sizes)
        if num_proc > 1 and tokenizer.gains_from_processes and done >= BYTES_BEFORE_WORKERS:
            break
    else:
        return
    encoding = _Encoding(tokenizer)
    loader: Iterable[EncodedChunk | Exception] = DataLoader(
        encoding,
        batch_size=None,
        sampler=rest,
        num_workers=num_proc,
        collate_fn=unchanged,
        worker_init_fn=encoding.start,
        generator=torch.Generator(),  # leaves the run's global generator alone
    )
    try:
        for result in loader:
            if isinstance(result, Exception):
                raise result
            yield result
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise WorkerDiedError(
            f"A tokenising process ended early ({error}; 'Killed' usually means too little "
            "memory). Start again: finished parts are kept, and a smaller data.num_proc needs "
            "less memory."
        ) from error
