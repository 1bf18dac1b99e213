"""Loaders whose batch n is a pure function of n, so that a run can stop and go on anywhere.

Lightning recreates torch DataLoaders (to inject a distributed sampler) and replays their batches
after a mid-epoch resume. `BatchLoader` is not a DataLoader: it is an iterable that builds one, from
the batch where training stands.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, Any]


class BatchSource(Protocol):
    """Builds batches by number; must be picklable where workers are spawned."""

    def __len__(self) -> int:
        """Returns the batches of one rank per epoch."""
        ...

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank, n counting on over epochs: a pure function of n."""
        ...


class CountedSource(BatchSource, Protocol):
    """A source that can tell the normalisers of a batch without building it."""

    def counts(self, n: int) -> Mapping[str, float]:
        """Returns the normalisers of batch `n` over all ranks, e.g. ``{"targets": 4096.0}``."""
        ...


class TrainingSource:
    """A source whose batches carry ``step_normalisers``: the counts of the whole optimiser step.

    Args:
        source: Builds batch n and counts it over all ranks.
        epoch_batches: Batches per epoch of the trainer, its limit included.
        accumulate: Micro-batches per optimiser step.
        repeat: Whether every epoch has the batches of the first one (overfitting on purpose).
    """

    def __init__(
        self,
        source: CountedSource,
        *,
        epoch_batches: int,
        accumulate: int = 1,
        repeat: bool = False,
    ) -> None:
        self._source = source
        self._epoch_batches = epoch_batches
        self._accumulate = accumulate
        self._repeat = repeat

    def __len__(self) -> int:
        """Returns the batches of one rank per epoch, before the trainer's limit."""
        return len(self._source)

    def batch(self, n: int) -> Batch:
        """Returns batch `n` with ``step_normalisers``, a dict of floats."""
        if self._repeat:
            n %= self._epoch_batches
        group = accumulation_group(n, self._epoch_batches, self._accumulate)
        totals = {"micro_batches": float(len(group))}
        for m in group:
            for name, count in self._source.counts(m).items():
                totals[name] = totals.get(name, 0.0) + count
        return {**self._source.batch(n), "step_normalisers": totals}


def accumulation_group(n: int, epoch_batches: int, accumulate: int) -> range:
    """Returns the batch numbers that share the optimiser step of batch `n`.

    The trainer steps after every `accumulate` batches of an epoch and after the epoch's last one,
    so the last group of an epoch may be shorter.
    """
    epoch_start = n - n % epoch_batches
    first = n - (n - epoch_start) % accumulate
    return range(first, min(first + accumulate, epoch_start + epoch_batches))


class _ByNumber(Dataset[Batch]):
    """A source as a map-style dataset of whole batches, so that workers build them."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def __getitem__(self, n: int) -> Batch:
        return self._source.batch(n)


def _unchanged(batch: Any) -> Any:
    return batch


_ENDS = (signal.SIGTERM, signal.SIGINT)
_IGNORES_ENDS = hasattr(signal, "sigwaitinfo")  # not on macOS: torch's own handling stays there


@contextmanager
def _ends_deferred() -> Iterator[None]:
    """Holds back SIGTERM and SIGINT; workers started meanwhile begin with both blocked."""
    if not _IGNORES_ENDS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent_only(parent: int, worker_id: int) -> None:
    """Has a worker ignore SIGTERM and SIGINT, unless the SIGTERM is sent by its parent.

    Schedulers, ``timeout`` and terminals signal all processes of a run at once, but training needs
    its workers until the checkpoint. torch stops workers by SIGTERM where joining them fails; once
    the parent has gone, torch's watchdog ends them within 5 s.
    """
    if not _IGNORES_ENDS:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    threading.Thread(target=_await_parent, args=(parent,), daemon=True).start()


def _await_parent(parent: int) -> None:
    """Ends this process on the parent's SIGTERM; blocked signals are only ever seen here."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


class BatchLoader:
    """Iterates over the batches of an epoch, from where training stands.

    Args:
        source: Builds batch n.
        start: Returns the number of the next batch, e.g. the batches that the trainer has
            processed. None: the loader counts what it yields, and `load_state_dict` moves it.
        epoch_batches: Batches per epoch where that is less than ``len(source)`` (a trainer's
            limit); None: all.
        num_workers: Processes that build batches ahead; 0 builds them in this one. The batches are
            the same.
        pin_memory: Whether batches lie in page-locked memory, for copies to a GPU.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        start: Callable[[], int] | None = None,
        epoch_batches: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.source = source
        self._start = start
        self._epoch_batches = len(source) if epoch_batches is None else epoch_batches
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._next = 0

    def __len__(self) -> int:
        """Returns the batches of a whole epoch, before any limit of the trainer."""
        return len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches from the next one to the end of its epoch."""
        first = self._position()
        end = first - first % self._epoch_batches + self._epoch_batches
        with _ends_deferred():
            batches = iter(self._torch_loader(range(first, end)))
        for n, batch in enumerate(batches, start=first):
            self._next = n + 1
            yield batch

    def _position(self) -> int:
        return self._next if self._start is None else self._start()

    def _torch_loader(self, numbers: range) -> DataLoader[Batch]:
        return DataLoader(
            _ByNumber(self.source),
            batch_size=None,
            sampler=numbers,
            collate_fn=_unchanged,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            worker_init_fn=partial(_end_with_parent_only, os.getpid()),
            # A generator of its own: otherwise each epoch, validation too, would draw from the
            # global one.
            generator=torch.Generator(),
        )

    def state_dict(self) -> dict[str, int]:
        """Returns the number of the next batch."""
        return {"next_batch": self._position()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Moves to the saved batch; without effect where `start` tells the position."""
        self._next = state["next_batch"]
