"""Which example is row n, where each row holds one whole example.

All randomness is counter-based (Philox), keyed by seed and row number or epoch: no state, so any
row is known without those before it.
"""

from typing import Any, Literal

import numpy as np

from datamodules.document_order import permutation

Order = Literal["packed", "random"]

NO_GROUP = -1
"""Group of rows that only fill up a batch."""

_DRAWS = 1  # second half of the Philox key, as in `windows`


class RowOrder:
    """Which example is row n: a pure function of (seed, n).

    Args:
        count: Number of examples.
        order: 'packed': each once an epoch, in a new order; 'random': drawn with replacement; None:
            as they are stored, once (evaluation).
        rows_per_batch: Rows of a batch of all ranks; an epoch of training has a multiple of that.
        seed: Non-negative.

    Attributes:
        batches: Batches of all ranks that an epoch has.
        rows_per_batch: As given.

    Raises:
        ValueError: In training, there are fewer examples than one batch takes.
    """

    def __init__(
        self, count: int, *, order: Order | None, rows_per_batch: int, seed: int = 0
    ) -> None:
        self._count, self._order, self._seed = count, order, seed
        batches = -(-count // rows_per_batch) if order is None else count // rows_per_batch
        if order is not None and not batches:
            raise ValueError(
                f"batch_size: one batch over all devices takes {rows_per_batch} examples, the "
                f"train split has only {count}. Lower batch_size, or use more examples."
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
            return np.where(rows < self._count, rows, -1)
        if self._order == "random":
            return (self._draws(rows) % np.uint64(self._count)).astype(np.int64)
        epochs, places = np.divmod(rows, len(self))
        out = np.empty_like(rows)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = self._permutation(int(epoch))[places[here]]
        return out

    def _draws(self, rows: np.ndarray) -> np.ndarray:
        """Returns a random uint64 for each row, the first of the four of that Philox block."""
        first, last = int(rows.min()), int(rows.max())
        philox = np.random.Philox(key=[self._seed, _DRAWS], counter=[first, 0, 0, 0])
        return philox.random_raw(4 * (last - first + 1))[::4][rows - first]

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            order = permutation(self._count, seed=self._seed, epoch=epoch)
            self._permutations = {epoch: order}
        return self._permutations[epoch]
