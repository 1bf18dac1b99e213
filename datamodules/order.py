"""Seeded permutations of documents and examples, memory-mapped when large.

`text.WindowSource`, `answers.AnswerSource`, `sentences.batches.StreamSource` and
`reasoning.batches.ReasoningSource` derive the content of batch n from these orders.

All randomness is counter-based (Philox), keyed by seed and row index or epoch. It has no state, so
any row can be computed without the rows before it. Permutations sort raw Philox output, which is
the same in every version of numpy.
"""

import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_warn

from datamodules.store import TokenStream
from lightning_models.atomic_files import whole_file

T = TypeVar("T")

# The document order of an epoch, shared by all processes of a machine, takes 12 bytes per document.
# For a large split it is a memory-mapped file next to the shards, so that all ranks and data
# workers share one copy in the page cache. One of them writes it while the others wait for its
# lock.

SHARED_FROM = 2**20  # documents; a smaller order (12 MB) is not worth a file
_KEPT = 4  # order files to keep per split, over epochs and seeds
_PART = 2**22  # documents to process at once
_SAMPLED = 64  # documents whose lengths are checked when a file is opened
# Second halves of the Philox keys: one stream of random numbers for each purpose.
_DRAWS, _ORDER, _SHUFFLE = 1, 2, 3
_ENDS, _INDEX = np.dtype("<i8"), np.dtype("<u4")


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """Order of a split's documents in an epoch.

    Attributes:
        ends: End of each document in the concatenation, after its EOS; int64, ascending.
        documents: Index of each document in the split, uint32.
    """

    ends: np.ndarray
    documents: np.ndarray


def permutation(count: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns the permutation of `count` items for an epoch, a pure function of its arguments.

    It sorts raw Philox output, which is the same in every version of numpy.
    """
    philox = np.random.Philox(key=[seed, _ORDER], counter=[0, 0, 0, epoch])
    return np.argsort(philox.random_raw(count), kind="stable")


def draws(counters: np.ndarray, *, seed: int) -> np.ndarray:
    """Returns a random uint64 for each counter (B,), the first of four in its Philox block."""
    first, last = int(counters.min()), int(counters.max())
    philox = np.random.Philox(key=[seed, _DRAWS], counter=[first, 0, 0, 0])
    return philox.random_raw(4 * (last - first + 1))[::4][counters - first]


def epoch_order(stream: TokenStream, *, seed: int, epoch: int) -> EpochOrder:
    """Returns the order of an epoch, from its file if there is one.

    A large order that cannot be written (a read-only or full disk) is kept in memory, with a
    warning.

    Args:
        stream: Tokens of the split.
        seed: Non-negative seed.
        epoch: Index of the epoch.
    """
    count = stream.num_documents
    if count < SHARED_FROM or count > np.iinfo(_INDEX).max:
        return _in_memory(stream, seed, epoch)
    path = stream.split_file(f"order-{seed}-{epoch}")

    def write(file: BinaryIO) -> None:
        """Writes the ends of all documents, then their indices."""
        documents = permutation(count, seed=seed, epoch=epoch)
        for ends in _ends(stream, documents):
            file.write(ends.data)
        for first in range(0, count, _PART):
            file.write(documents[first : first + _PART].astype(_INDEX).data)
        _remove_old(path)

    order = shared(
        path,
        stream.split_file("order.lock"),
        opened=lambda: _opened(path, stream),
        write=write,
        held=f"the order of {count} documents, 12 bytes each",
    )
    return _in_memory(stream, seed, epoch) if order is None else order


def shared(
    path: Path,
    lock: Path,
    *,
    opened: Callable[[], T | None],
    write: Callable[[BinaryIO], None],
    held: str,
) -> T | None:
    """Returns the content of a file next to the shards, which the first process writes.

    Returns None, with a warning, if it cannot be written (a read-only or full disk).

    Args:
        path: Path of the file.
        lock: Path of the lock to hold while writing.
        opened: Returns the memory-mapped content, or None if there is no file for this split.
        write: Writes the content.
        held: Description of the copy that each process then holds in memory, for the warning.
    """
    content = opened()
    if content is not None:
        return content
    try:
        with FileLock(lock):
            content = opened()
            if content is None:
                with whole_file(path, sole=True) as file:
                    write(file)
                content = opened()
            return content
    except OSError as error:
        rank_zero_warn(
            f"{path} cannot be written ({error}): every process keeps a copy in memory of {held}."
        )
        return None


def _in_memory(stream: TokenStream, seed: int, epoch: int) -> EpochOrder:
    documents = permutation(stream.num_documents, seed=seed, epoch=epoch)
    parts = list(_ends(stream, documents))
    ends = np.concatenate(parts) if parts else np.empty(0, _ENDS)
    small = documents.astype(_INDEX) if len(documents) <= np.iinfo(_INDEX).max else documents
    return EpochOrder(ends=ends, documents=small)


def _ends(stream: TokenStream, documents: np.ndarray) -> Iterator[np.ndarray]:
    """Yields, in parts, the ends of the documents when concatenated in that order."""
    base = 0
    for first in range(0, len(documents), _PART):
        part = documents[first : first + _PART]
        ends = base + np.cumsum(stream.ends(part) - stream.starts(part), dtype=_ENDS)
        base = int(ends[-1])
        yield ends


def _opened(path: Path, stream: TokenStream) -> EpochOrder | None:
    """Returns the order in a file, or None if it is missing or does not match the split."""
    count = stream.num_documents
    try:
        if path.stat().st_size != count * (_ENDS.itemsize + _INDEX.itemsize):
            return None
        ends = np.memmap(path, _ENDS, "r", shape=(count,))
        documents = np.memmap(path, _INDEX, "r", offset=ends.nbytes, shape=(count,))
    except FileNotFoundError:
        return None
    sampled = np.unique(np.linspace(0, count - 1, _SAMPLED, dtype=np.int64))
    sample = documents[sampled].astype(np.int64)
    if ends[-1] != len(stream) or sample.max() >= count:
        return None
    lengths = ends[sampled] - np.where(sampled > 0, ends[np.maximum(sampled - 1, 0)], 0)
    if (lengths != stream.ends(sample) - stream.starts(sample)).any():
        return None
    return EpochOrder(ends=ends, documents=documents)


def _remove_old(path: Path) -> None:
    """Deletes the oldest order files; except on Windows, processes that opened them can go on."""
    orders = set(path.parent.glob(f"{path.name.partition('order-')[0]}order-*")) - {path}
    for old in sorted(orders, key=lambda p: p.stat().st_mtime)[: 1 - _KEPT]:
        old.unlink(missing_ok=True)


# Rows with one whole example each

Order = Literal["packed", "random"]

NO_GROUP = -1
"""Group of padding rows."""


class RowOrder:
    """Maps row n to an example, as a pure function of (seed, n).

    Args:
        count: Number of examples.
        order: 'packed' visits each example once per epoch, in a new order; 'random' draws with
            replacement; None visits them once in stored order (evaluation).
        rows_per_batch: Number of rows per batch over all ranks, or per step. The number of rows in
            a training epoch is a multiple of it.
        seed: Non-negative seed.
        kept: Indices of the examples to evaluate, ascending; all by default.

    Attributes:
        batches: Number of batches per epoch over all ranks.
        rows_per_batch: Number of rows per batch over all ranks.

    Raises:
        ValueError: If training has fewer examples than one batch takes.
    """

    def __init__(
        self,
        count: int,
        *,
        order: Order | None,
        rows_per_batch: int,
        seed: int = 0,
        kept: np.ndarray | None = None,
    ) -> None:
        assert order is None or kept is None
        self._total, count = count, count if kept is None else len(kept)
        self._count, self._order, self._seed, self._kept = count, order, seed, kept
        batches = -(-count // rows_per_batch) if order is None else count // rows_per_batch
        if order is not None and not batches:
            raise ValueError(
                f"batch_size, global_batch: one batch over all devices takes {rows_per_batch} "
                f"examples, but the train split has only {count}. Lower it, or use more examples."
            )
        self.batches = batches
        self.rows_per_batch = rows_per_batch
        self._permutations: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Omits the cached permutations, which data-loading workers recompute."""
        return {**vars(self), "_permutations": {}}

    def __len__(self) -> int:
        """Returns the number of rows per epoch, in whole batches; one per example in evaluation."""
        return self._count if self._order is None else self.batches * self.rows_per_batch

    def examples(self, rows: np.ndarray) -> np.ndarray:
        """Returns the index of each row's example (B,), int64; -1 for padding rows."""
        if self._order is None:
            examples = rows if self._kept is None else self._kept[np.minimum(rows, self._count - 1)]
            return np.where(rows < self._count, examples, -1)
        if self._order == "random":
            return (draws(rows, seed=self._seed) % np.uint64(self._count)).astype(np.int64)
        epochs, offsets = np.divmod(rows, len(self))
        result = np.empty_like(rows)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            result[in_epoch] = self._permutation(int(epoch))[offsets[in_epoch]]
        return result

    def sequence_ids(self, rows: np.ndarray) -> np.ndarray:
        """Returns a unique id for each row (B,); in evaluation, the example's index."""
        if self._kept is None:
            return rows
        examples = self.examples(rows)
        return np.where(examples < 0, rows + self._total - self._count, examples)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            order = permutation(self._count, seed=self._seed, epoch=epoch)
            self._permutations = {epoch: order}
        return self._permutations[epoch]


# Documents that do not fit in memory


def in_order(
    documents: Iterable[str], order: Callable[[int], np.ndarray], folder: Path
) -> Iterator[str]:
    """Yields the documents in an order that depends on their count.

    They are buffered in a temporary file as large as the text; memory holds 8 bytes per document
    and the order.

    Args:
        documents: Texts, read once.
        order: Returns a permutation (count,) for the number of documents.
        folder: Folder of the temporary file, created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        ends = array("q", [0])
        for text in documents:
            ends.append(ends[-1] + file.write(text.encode("utf-8", "surrogatepass")))
        for i in order(len(ends) - 1):
            file.seek(ends[i])
            yield file.read(ends[i + 1] - ends[i]).decode("utf-8", "surrogatepass")


def shuffled(documents: Iterable[str], *, seed: int, folder: Path) -> Iterator[str]:
    """Yields the documents in an order that is a pure function of their count and `seed`.

    The order sorts raw Philox output, which is the same in every version of numpy; see `in_order`
    for the buffering.
    """

    def order(count: int) -> np.ndarray:
        philox = np.random.Philox(key=[seed, _SHUFFLE])
        return np.argsort(philox.random_raw(count), kind="stable")

    return in_order(documents, order, folder)
