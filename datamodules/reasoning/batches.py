"""Batches of rows that have a query, its reasoning steps and its answer.

All methods of latent reasoning read the same rows and build their inputs from them. The keys of a
batch, all tensors int64:

| key | shape | what |
|---|---|---|
| ``query`` | (B, Q) | BOS (EOS without one) and the query's tokens, padded with EOS |
| ``query_lengths`` | (B,) | its tokens, including BOS or EOS |
| ``steps`` | (B, R, Z) | the tokens of each step, padded with EOS; R and Z at least 1 |
| ``step_lengths`` | (B, R) | tokens of each step; 0 for missing steps |
| ``step_places`` | (B, R) | index in ``query`` of the token that each step belongs to, else -1 |
| ``targets`` | (B, A) | the answer and an EOS, padded with -100 |
| ``sequence_id`` | (B,) | index of the row; in evaluation, index of its example |
| ``group`` | (B,) | group for accuracies |
| ``num_bytes`` | (B,) | UTF-8 bytes of the targets |
| ``epochs`` | a float | in training, the trainer epochs before this batch's step |

If limit_train_batches shortens the trainer's epochs, ``epochs`` counts the short epochs, and a
curriculum advances with them. With overfit_batches there are no ``epochs``: every epoch repeats the
batches of the first, so a curriculum could not advance, and a model with a curriculum rejects such
batches.

Padding rows of an evaluation's last batch have no targets, no steps, a query of one EOS, and group
-1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.order import NO_GROUP, RowOrder
from datamodules.reasoning.preparation import Examples
from datamodules.sources import Batch, RowSource
from datamodules.text import IGNORE, target_bytes

BatchCounter = Callable[[Batch], dict[str, float]]
"""Counts the normalisers of a model's loss in a batch."""

_KEPT_COUNTS = 1024  # batches whose counts are cached, more than an optimiser step has


class ReasoningSource(RowSource):
    """Batches of questions, steps and answers; see the module's docstring for their keys.

    Args:
        examples: Examples of one split.
        order: Order of the examples in rows.
        eos_id: Token after answers and in padding.
        start_id: Token before queries, BOS or EOS.
        counter: Counts the model's normalisers in a batch. Defaults to the number of targets.
        epoch_batches: Number of batches per rank and epoch, the unit of ``epochs``. If None,
            batches have no ``epochs``.
        **rows: See `RowSource`.
    """

    def __init__(
        self,
        examples: Examples,
        order: RowOrder,
        *,
        eos_id: int,
        start_id: int,
        counter: BatchCounter | None = None,
        epoch_batches: int | None = None,
        **rows: int,
    ) -> None:
        super().__init__(**rows)
        assert order.rows_per_batch == self._rows_per_step
        self._examples, self._order = examples, order
        self._eos_id, self._start_id = eos_id, start_id
        self._counter, self._epoch_batches = counter, epoch_batches
        self._counts: dict[int, dict[str, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Omits the cached counts, which data-loading workers recompute."""
        return {**vars(self), "_counts": {}}

    def __len__(self) -> int:
        """Returns the number of batches per rank and epoch."""
        return self._order.batches * self._accumulate

    def counts(self, n: int) -> dict[str, float]:
        """Returns the model's normalisers of batch `n` over all ranks, or ``targets``."""
        if n not in self._counts:
            if len(self._counts) >= _KEPT_COUNTS:
                self._counts.clear()
            self._counts[n] = self._count(n)
        return self._counts[n]

    def _count(self, n: int) -> dict[str, float]:
        rows = self._all_indices(n)
        if self._counter is not None:
            counted = self._counter(self._built(n, rows))
            return {name: float(count) for name, count in counted.items()}
        indices = self._order.examples(rows)
        _, answers = self._examples.answers(indices[indices >= 0])
        return {"targets": float((answers + 1).sum())}

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank; see the module's docstring for its keys."""
        return self._built(n, self._indices(n))

    def _built(self, n: int, rows: np.ndarray) -> Batch:
        batch = reasoning_batch(
            self._examples,
            self._order.examples(rows),
            self._order.sequence_ids(rows),
            eos_id=self._eos_id,
            start_id=self._start_id,
        )
        if self._epoch_batches is not None:
            first = n - n % self._accumulate  # a step has one stage of a curriculum
            batch["epochs"] = first / self._epoch_batches
        return batch


def reasoning_batch(
    examples: Examples, example_ids: np.ndarray, rows: np.ndarray, *, eos_id: int, start_id: int
) -> Batch:
    """Returns the batch dict of examples; see the module's docstring for its keys.

    Args:
        examples: Examples of one split, at least one.
        example_ids: Index of each row's example (B,), or -1 for none.
        rows: Index of each row (B,), its ``sequence_id``.
        eos_id: Token after answers and in padding.
        start_id: Token before queries, BOS or EOS.
    """
    real, indices = example_ids >= 0, example_ids.clip(min=0)
    query, query_lengths = _queries(examples, indices, real, eos_id, start_id)
    starts, lengths = examples.answers(indices)
    lengths = np.where(real, lengths + 1, 0)  # plus the EOS stored after it
    targets = torch.from_numpy(_padded(examples, starts, lengths, IGNORE))
    positions, inside = _positions(starts, lengths)
    tokens = np.where(inside, targets.numpy(), 0)
    sizes = np.where(inside, examples.stream.bytes_at(positions, tokens), 0)
    groups = np.where(real, examples.groups(indices), NO_GROUP)
    return {
        "query": torch.from_numpy(query),
        "query_lengths": torch.from_numpy(query_lengths),
        **_steps(examples, indices, real, eos_id),
        "targets": targets,
        "sequence_id": torch.from_numpy(rows),
        "group": torch.from_numpy(groups),
        "num_bytes": target_bytes(targets, sizes),
    }


def _queries(
    examples: Examples, indices: np.ndarray, real: np.ndarray, eos_id: int, start_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns queries that begin with BOS or EOS (B, Q), and their lengths (B,)."""
    starts, lengths = examples.queries(indices)
    lengths = np.where(real, lengths, 0)
    query = _padded(examples, starts, lengths, eos_id, min_width=0)
    return np.pad(query, ((0, 0), (1, 0)), constant_values=start_id), lengths + 1


def _steps(
    examples: Examples, indices: np.ndarray, real: np.ndarray, eos_id: int
) -> dict[str, Tensor]:
    """Returns ``steps``, ``step_lengths`` and ``step_places``."""
    counts = np.where(real, examples.num_steps(indices), 0)
    order = np.arange(max(1, counts.max()))
    is_step = order < counts[:, None]  # (B, R)
    starts, lengths, positions = (np.zeros(is_step.shape, dtype=np.int64) for _ in range(3))
    row, step = np.nonzero(is_step)  # (S,) each, in row-major order as `is_step` selects
    starts[is_step], lengths[is_step], positions[is_step] = examples.steps(indices[row], step)
    return {
        "steps": torch.from_numpy(_padded(examples, starts, lengths, eos_id)),
        "step_lengths": torch.from_numpy(lengths),
        "step_places": torch.from_numpy(np.where(is_step, positions, -1)),
    }


def _padded(
    examples: Examples, starts: np.ndarray, lengths: np.ndarray, fill: int, min_width: int = 1
) -> np.ndarray:
    """Gathers texts (..., N) of the stream, int64, padded to the longest or `min_width` tokens."""
    positions, inside = _positions(starts, lengths, min_width)
    return np.where(inside, examples.stream.gather(positions), fill)


def _positions(
    starts: np.ndarray, lengths: np.ndarray, min_width: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Returns stream positions of the texts' tokens (..., N), and a mask of the real ones."""
    offsets = np.arange(max(min_width, lengths.max()))
    inside = offsets < lengths[..., None]
    return np.where(inside, starts[..., None] + offsets, 0), inside
