"""The order of a split's documents in an epoch, which all processes of a machine share.

It takes 12 bytes a document. For a large split that is a file next to the shards, memory-mapped:
ranks and loading processes, however many, hold it once, in the system's cache. One of them writes
it, the others wait for its lock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_warn

from datamodules.store import TokenStream

SHARED_FROM = 2**20  # documents: a smaller order (12 MB) is not worth a file
_KEPT = 4  # order files next to a store: of epochs, and of seeds
_PART = 2**22  # documents that are worked on at once
_SAMPLED = 64  # documents whose lengths are compared when a file is opened
_ORDER = 2  # second half of the Philox key; `windows` and `shuffling` have the others
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
    path = stream.beside(f"order-{seed}-{epoch}")
    order = _opened(path, stream)
    if order is not None:
        return order
    try:
        with FileLock(stream.beside("order.lock")):
            order = _opened(path, stream)
            if order is None:
                _write(path, stream, permutation(count, seed=seed, epoch=epoch))
                order = _opened(path, stream)
                _remove_old(path)
    except OSError as error:
        rank_zero_warn(
            f"{path} cannot be written ({error}): every process keeps the order of {count} "
            "documents in its own memory, 12 bytes each."
        )
    return _in_memory(stream, seed, epoch) if order is None else order


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


def _write(path: Path, stream: TokenStream, numbers: np.ndarray) -> None:
    """Writes all ends, then all numbers, to a file that is there only when it is whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for ends in _ends(stream, numbers):
                file.write(ends.data)
            for first in range(0, len(numbers), _PART):
                file.write(numbers[first : first + _PART].astype(_NUMBERS).data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


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
    """Removes all but the newest files; who still reads one keeps it (but on Windows)."""
    orders = list(path.parent.glob(f"{path.name.partition('order-')[0]}order-*"))
    for old in sorted(orders, key=lambda p: p.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)
