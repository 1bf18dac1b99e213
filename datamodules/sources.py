"""Sources of batches by index, the division of a step among devices, and the loader.

Lightning recreates torch DataLoaders (to inject a distributed sampler) and replays their batches
after a mid-epoch resume. `BatchLoader` is not a DataLoader but an iterable that builds one,
starting at the current batch of training.
"""

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NotRequired, Protocol, Self, TypedDict

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from datamodules.encoding import unchanged

Batch = dict[str, Any]


class BatchSource(Protocol):
    """Builds batches by index; it must be picklable if workers are spawned."""

    def __len__(self) -> int:
        """Returns the number of batches per rank and epoch."""
        ...

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank, a pure function of n; n continues over epochs."""
        ...


class CountedSource(BatchSource, Protocol):
    """A source that knows the normalisers of a batch without building it."""

    def counts(self, n: int) -> Mapping[str, float]:
        """Returns the normalisers of batch `n` over all ranks, e.g. ``{"targets": 4096.0}``."""
        ...


class Ranks(TypedDict):
    """Rank of this process and number of processes that share the batches."""

    rank: int
    world_size: int


class Rows(Ranks):
    """Arguments of `RowSource`."""

    batch_size: int
    accumulate: NotRequired[int]


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The batch of an optimiser step, and its division among devices.

    Attributes:
        size: Size of the step over all devices and micro-batches; for sentences, the maximum.
        micro: Size of a device's micro-batch; for sentences, the maximum.
        accumulate: Number of micro-batches per step.
        devices: Number of processes that share the step.
        unit: Unit of the sizes.
    """

    size: int
    micro: int
    accumulate: int
    devices: int
    unit: str = "rows"

    def within(self, epoch: float) -> Self:
        """Returns the step of a trial with only `epoch` micro-batches per epoch."""
        if epoch >= self.accumulate:
            return self
        size = min(self.size, self.micro * int(epoch) * self.devices)
        return replace(self, size=size, accumulate=int(epoch))


def divide_rows(rows: int, devices: int, maximum: int) -> StepBatch:
    """Divides the rows of a step among devices, in as few micro-batches as possible.

    Args:
        rows: Number of rows per step.
        devices: Number of processes that share them equally.
        maximum: Maximum number of rows per device and micro-batch. The largest divisor of a
            device's share up to this number is used.

    Raises:
        ValueError: If the devices cannot share the rows equally.
    """
    share, rest = divmod(rows, devices)
    if rest:
        fitting = [n for n in range(1, rows + 1) if rows % n == 0]
        fewer, more = ([n for n in fitting if n < devices], [n for n in fitting if n > devices])
        nearest = [*fewer[-1:], *more[:1]]
        raise ValueError(
            f"global_batch={rows} cannot be divided among {devices} devices (trainer.devices x "
            f"trainer.num_nodes). Use {' or '.join(map(str, nearest))} devices, or a different "
            "global_batch."
        )
    micro = next(n for n in range(min(maximum, share), 0, -1) if share % n == 0)
    return StepBatch(size=rows, micro=micro, accumulate=share // micro, devices=devices)


def step_rows(*, batch_size: int, accumulate: int = 1, world_size: int = 1, rank: int = 0) -> int:
    """Returns the rows of a step over all ranks; an epoch has a whole number of steps."""
    return batch_size * accumulate * world_size


class RowSource:
    """Batches of one rank: batch n has the rows (n * world_size + rank) * batch_size + b.

    Step s thus has the R = accumulate * world_size * batch_size rows from s * R on, for any number
    of ranks and size of micro-batches.

    Args:
        batch_size: B, the number of rows per rank and micro-batch.
        accumulate: Number of micro-batches per step. An epoch has a whole number of steps.
        rank: Rank of this process.
        world_size: Number of processes that share the rows.
    """

    def __init__(
        self, *, batch_size: int, accumulate: int = 1, rank: int = 0, world_size: int = 1
    ) -> None:
        self._batch_size, self._accumulate, self._rank = batch_size, accumulate, rank
        self._rows_per_batch = batch_size * world_size  # over all ranks
        self._rows_per_step = self._rows_per_batch * accumulate

    def _indices(self, n: int) -> np.ndarray:
        """Returns the indices of this rank's rows in batch `n`, int64 (B,)."""
        first = n * self._rows_per_batch + self._rank * self._batch_size
        return np.arange(first, first + self._batch_size)

    def _all_indices(self, n: int) -> np.ndarray:
        """Returns the indices of all ranks' rows in batch `n`, int64."""
        return np.arange(n * self._rows_per_batch, (n + 1) * self._rows_per_batch)


class TrainingSource:
    """A source that adds ``step_normalisers`` to batches: counts over the whole optimiser step.

    A run that resumes with a different accumulation may start in the middle of a group of batches.
    Its first step, from batch `first` on, then has fewer micro-batches.

    Args:
        source: Source of the batches and their counts over all ranks.
        epoch_batches: Number of batches per trainer epoch, after the trainer's limit.
        accumulate: Number of micro-batches per optimiser step.
        repeat: Whether every epoch repeats the batches of the first (for deliberate overfitting).
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
        self.first = 0
        """First batch of the resumed run's first optimiser step."""

    def __len__(self) -> int:
        """Returns the number of batches per rank and epoch, before the trainer's limit."""
        return len(self._source)

    def batch(self, n: int) -> Batch:
        """Returns batch `n` with ``step_normalisers``, a dict of floats."""
        group = self.group(n)
        totals = {"micro_batches": float(len(group))}
        for m in group:
            for name, count in self._source.counts(self._batch_index(m)).items():
                totals[name] = totals.get(name, 0.0) + count
        return {**self._source.batch(self._batch_index(n)), "step_normalisers": totals}

    def group(self, n: int) -> range:
        """Returns the indices of the batches in the optimiser step of batch `n`."""
        group = accumulation_group(n, self._epoch_batches, self._accumulate)
        return range(self.first, group.stop) if group.start < self.first <= n else group

    def _batch_index(self, n: int) -> int:
        return n % self._epoch_batches if self._repeat else n


def accumulation_group(n: int, epoch_batches: int, accumulate: int) -> range:
    """Returns the indices of the batches in the optimiser step of batch `n`.

    The trainer steps after every `accumulate` batches of an epoch and after the epoch's last one,
    so the last group of an epoch may be shorter.
    """
    epoch_start = n - n % epoch_batches
    first = n - (n - epoch_start) % accumulate
    return range(first, min(first + accumulate, epoch_start + epoch_batches))


class _ByIndex(Dataset[Batch]):
    """A source as a map-style dataset of whole batches, for data-loading workers."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def __getitem__(self, n: int) -> Batch:
        return self._source.batch(n)


_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IGNORES_ENDS = hasattr(signal, "sigwaitinfo")  # not on macOS, where torch's handling stays


@contextmanager
def _ends_deferred() -> Iterator[None]:
    """Blocks the signals in ``_ENDS``; workers that start meanwhile inherit the mask."""
    if not _IGNORES_ENDS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent_only(parent: int, worker_id: int) -> None:
    """Makes a worker ignore the signals in ``_ENDS``, except for a SIGTERM from its parent.

    Schedulers, ``timeout`` and terminals signal all processes of a run at once, but training needs
    its workers until the checkpoint. torch stops workers by SIGTERM if joining them fails; once the
    parent is gone, torch's watchdog ends them within 5 s.
    """
    if not _IGNORES_ENDS:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    threading.Thread(target=_await_parent, args=(parent,), daemon=True).start()


def _await_parent(parent: int) -> None:
    """Ends this process on a SIGTERM from the parent; other signals stay blocked."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


class BatchLoader:
    """Iterates over the batches of an epoch, starting at training's current batch.

    Args:
        source: Source of the batches.
        start: Returns the index of the next batch, e.g. the number that the trainer has processed.
            If None, the loader counts the batches it yields, and `load_state_dict` moves it.
        epoch_batches: Number of batches per epoch, if the trainer limits it below ``len(source)``.
        num_workers: Number of processes that build batches ahead. 0 builds the same batches in this
            process.
        pin_memory: Whether to put batches in page-locked memory, for copies to a GPU.
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
        """Returns the number of batches of a whole epoch, before any limit of the trainer."""
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

    def _torch_loader(self, indices: range) -> DataLoader[Batch]:
        return DataLoader(
            _ByIndex(self.source),
            batch_size=None,
            sampler=indices,
            collate_fn=unchanged,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            worker_init_fn=partial(_end_with_parent_only, os.getpid()),
            # A separate generator; otherwise each epoch, including validation, would draw from the
            # global one.
            generator=torch.Generator(),
        )

    def state_dict(self) -> dict[str, int]:
        """Returns the index of the next batch."""
        return {"next_batch": self._position()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Moves to the saved batch; has no effect if `start` gives the position."""
        self._next = state["next_batch"]


# Prompts for `predict`


class DealtPrompts(RowSource, ABC):
    """Batches of prompts, with the list of texts in ``prompt``; row n is prompt n of the file.

    Rows beyond the last prompt are omitted, but every rank has the same number of batches, so the
    last batch may repeat a prompt.

    Args:
        prompts: Texts of the prompts.
        **rows: See `RowSource`.
    """

    def __init__(self, prompts: Sequence[str], **rows: int) -> None:
        super().__init__(**rows)
        self._prompts = prompts

    def __len__(self) -> int:
        """Returns the number of batches per rank."""
        return -(-len(self._prompts) // self._rows_per_batch)

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank."""
        last = len(self._prompts) - 1
        indices = [i for i in self._indices(n).tolist() if i <= last] or [last]
        return {**self._built(indices), "prompt": [self._prompts[i] for i in indices]}

    @abstractmethod
    def _built(self, indices: list[int]) -> Batch:
        """Returns the batch of the prompts with the given indices."""


# Arguments outside their range
