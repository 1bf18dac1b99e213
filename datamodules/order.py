"""Seeded orders: of a split's documents, of the examples in rows, and of more than memory holds.

What batch n has is decided by `text.WindowSource`, `answers.AnswerSource`,
`sentences.batches.StreamSource` and `reasoning.batches.ReasoningSource`, of these orders.

All randomness is counter-based (Philox), keyed by seed and row number or epoch: no state, so any
row is known without those before it. Permutations sort raw Philox output, which is the same in
every version of numpy.
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

# Documents of an epoch, an order that all processes of a machine share. It takes 12 bytes a
# document. For a large split that is a file next to the shards, memory-mapped: ranks and loading
# processes, however many, hold it once, in the system's cache. One of them writes it, the others
# wait for its lock.

SHARED_FROM = 2**20  # documents: a smaller order (12 MB) is not worth a file
_KEPT = 4  # order files next to a store: of epochs, and of seeds
_PART = 2**22  # documents that are worked on at once
_SAMPLED = 64  # documents whose lengths are compared when a file is opened
# Second halves of the Philox keys: one stream of random numbers for each purpose.
_DRAWS, _ORDER, _SHUFFLE = 1, 2, 3
_ENDS, _NUMBERS = np.dtype("<i8"), np.dtype("<u4")


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The documents of a split, joined in the order of an epoch.

    Attributes:
        ends: Where each ends there, after its EOS; int64, ascending.
        numbers: Its number in the split, uint32.
    """

    ends: np.ndarray
    numbers: np.ndarray


def permutation(count: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns the numbers 0 to `count` - 1 in the order of an epoch: a function of its arguments.

    It sorts raw Philox output, which is the same in every version of numpy.
    """
    philox = np.random.Philox(key=[seed, _ORDER], counter=[0, 0, 0, epoch])
    return np.argsort(philox.random_raw(count), kind="stable")


def draws(numbers: np.ndarray, *, seed: int) -> np.ndarray:
    """Returns a random uint64 for each of the numbers (B,), the first of the four of its block."""
    first, last = int(numbers.min()), int(numbers.max())
    philox = np.random.Philox(key=[seed, _DRAWS], counter=[first, 0, 0, 0])
    return philox.random_raw(4 * (last - first + 1))[::4][numbers - first]


def epoch_order(stream: TokenStream, *, seed: int, epoch: int) -> EpochOrder:
    """Returns the order of an epoch, from its file where there is one.

    A large order that cannot be written (a read-only or full disk) is kept in memory, with a
    warning.

    Args:
        stream: The split.
        seed: Non-negative.
        epoch: Number of the epoch.
    """
    count = stream.num_documents
    if count < SHARED_FROM or count > np.iinfo(_NUMBERS).max:
        return _in_memory(stream, seed, epoch)
    path = stream.split_file(f"order-{seed}-{epoch}")

    def write(file: BinaryIO) -> None:
        """Writes all ends, then all numbers."""
        numbers = permutation(count, seed=seed, epoch=epoch)
        for ends in _ends(stream, numbers):
            file.write(ends.data)
        for first in range(0, count, _PART):
            file.write(numbers[first : first + _PART].astype(_NUMBERS).data)
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
    """Returns the content of a file next to the shards, which the first process to ask for writes.

    Returns None, with a warning, where it cannot be written (a read-only or full disk).

    Args:
        path: The file.
        lock: Locked while it is written.
        opened: Returns the content, memory-mapped; None where there is no file, or one of another
            split.
        write: Writes the content.
        held: What each process then has in memory, for the warning.
    """
    found = opened()
    if found is not None:
        return found
    try:
        with FileLock(lock):
            found = opened()
            if found is None:
                with whole_file(path, sole=True) as file:
                    write(file)
                found = opened()
            return found
    except OSError as error:
        rank_zero_warn(
            f"{path} cannot be written ({error}): every process keeps in its own memory {held}."
        )
        return None


def _in_memory(stream: TokenStream, seed: int, epoch: int) -> EpochOrder:
    numbers = permutation(stream.num_documents, seed=seed, epoch=epoch)
    parts = list(_ends(stream, numbers))
    ends = np.concatenate(parts) if parts else np.empty(0, _ENDS)
    small = numbers.astype(_NUMBERS) if len(numbers) <= np.iinfo(_NUMBERS).max else numbers
    return EpochOrder(ends=ends, numbers=small)


def _ends(stream: TokenStream, numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yields, in parts, where documents end that follow one another in that order."""
    base = 0
    for first in range(0, len(numbers), _PART):
        part = numbers[first : first + _PART]
        ends = base + np.cumsum(stream.ends(part) - stream.starts(part), dtype=_ENDS)
        base = int(ends[-1])
        yield ends


def _opened(path: Path, stream: TokenStream) -> EpochOrder | None:
    """Returns the order in a file, None where there is none, or a sample is not of the split."""
    count = stream.num_documents
    try:
        if path.stat().st_size != count * (_ENDS.itemsize + _NUMBERS.itemsize):
            return None
        ends = np.memmap(path, _ENDS, "r", shape=(count,))
        numbers = np.memmap(path, _NUMBERS, "r", offset=ends.nbytes, shape=(count,))
    except FileNotFoundError:
        return None
    places = np.unique(np.linspace(0, count - 1, _SAMPLED, dtype=np.int64))
    sample = numbers[places].astype(np.int64)
    if ends[-1] != len(stream) or sample.max() >= count:
        return None
    lengths = ends[places] - np.where(places > 0, ends[np.maximum(places - 1, 0)], 0)
    if (lengths != stream.ends(sample) - stream.starts(sample)).any():
        return None
    return EpochOrder(ends=ends, numbers=numbers)


def _remove_old(path: Path) -> None:
    """Makes room for a new file among the newest; who reads an old one keeps it but on Windows."""
    orders = set(path.parent.glob(f"{path.name.partition('order-')[0]}order-*")) - {path}
    for old in sorted(orders, key=lambda p: p.stat().st_mtime)[: 1 - _KEPT]:
        old.unlink(missing_ok=True)


# Rows that hold one whole example each

Order = Literal["packed", "random"]

NO_GROUP = -1
"""Group of rows that only fill up a batch."""


class RowOrder:
    """Which example is row n: a pure function of (seed, n).

    Args:
        count: Number of examples.
        order: 'packed': each once an epoch, in a new order; 'random': drawn with replacement; None:
            as they are stored, once (evaluation).
        rows_per_batch: Rows of a batch of all ranks, or of a step; an epoch of training has a
            multiple of that.
        seed: Non-negative.
        kept: Numbers of the examples that an evaluation takes, ascending; all by default.

    Attributes:
        batches: Batches of all ranks that an epoch has.
        rows_per_batch: As given.

    Raises:
        ValueError: In training, there are fewer examples than one batch takes.
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
                f"examples, the train split has only {count}. Lower it, or use more examples."
            )
        self.batches = batches
        self.rows_per_batch = rows_per_batch
        self._permutations: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a loading process needs; it orders the examples itself."""
        return {**vars(self), "_permutations": {}}

    def __len__(self) -> int:
        """Returns the rows of an epoch: those of its batches; in evaluation one an example."""
        return self._count if self._order is None else self.batches * self.rows_per_batch

    def examples(self, rows: np.ndarray) -> np.ndarray:
        """Returns the number of the example of each row (B,), int64; -1 for rows too many."""
        if self._order is None:
            which = rows if self._kept is None else self._kept[np.minimum(rows, self._count - 1)]
            return np.where(rows < self._count, which, -1)
        if self._order == "random":
            return (draws(rows, seed=self._seed) % np.uint64(self._count)).astype(np.int64)
        epochs, places = np.divmod(rows, len(self))
        out = np.empty_like(rows)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = self._permutation(int(epoch))[places[here]]
        return out

    def sequence_ids(self, rows: np.ndarray) -> np.ndarray:
        """Returns a number for each row (B,) that no other row has; in evaluation its example's."""
        if self._kept is None:
            return rows
        which = self.examples(rows)
        return np.where(which < 0, rows + self._total - self._count, which)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            order = permutation(self._count, seed=self._seed, epoch=epoch)
            self._permutations = {epoch: order}
        return self._permutations[epoch]


# Documents that do not fit into memory


def in_order(
    documents: Iterable[str], order: Callable[[int], np.ndarray], folder: Path
) -> Iterator[str]:
    """Yields the documents in an order that is known once their number is.

    They wait in a temporary file, as large as the text; memory holds 8 bytes a document, and the
    order.

    Args:
        documents: Texts, read once.
        order: Returns the order of as many documents, a permutation (count,).
        folder: Holds the temporary file; made where missing.
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
    """Yields the documents in an order that is a pure function of their number and `seed`.

    The order sorts raw Philox output, which is the same in every version of numpy; see `in_order`
    for where the documents wait.
    """

    def order(count: int) -> np.ndarray:
        philox = np.random.Philox(key=[seed, _SHUFFLE])
        return np.argsort(philox.random_raw(count), kind="stable")

    return in_order(documents, order, folder)
