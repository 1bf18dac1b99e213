"""The working memory of decoding: rows write to it, and forget, at their own pace."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_models.thought_gestalt.memory import MemoryAttention


class Shelf:
    """The latest M vectors of every row, (B, M, D), each row's oldest first."""

    def __init__(self, batch: int, size: int) -> None:
        """Starts empty; the first vectors fix width, dtype and device."""
        self.batch, self.size = batch, size
        self.entries: Tensor | None = None

    def push(self, rows: Tensor, counts: Tensor, new: Tensor) -> None:
        """Adds ``new`` (R, D) to ``rows`` (R,), which hold ``counts`` (R,); full rows lose one."""
        if self.entries is None:
            self.entries = new.new_zeros(self.batch, self.size, new.shape[1])
        own, full = self.entries[rows], counts == self.size
        own = torch.where(full[:, None, None], own.roll(-1, dims=1), own)
        slot = counts.clamp(max=self.size - 1)[:, None, None].expand(-1, 1, own.shape[2])
        self.entries[rows] = own.scatter(1, slot, new[:, None])

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices)."""
        self.batch = len(rows)
        if self.entries is not None:
            self.entries = self.entries[rows]


class RowMemory:
    """The working memory of rows that write, and forget, at their own pace.

    As in ``SentenceMemory``, each reader keeps its own projection of every sentence, to which the
    positions are added when it is read.
    """

    def __init__(self, readers: Sequence[MemoryAttention], positions: Tensor, batch: int) -> None:
        """Starts empty.

        Args:
            readers: the layers that read.
            positions: (M, D), of memory slots 1 to M.
            batch: rows.
        """
        size = len(positions)
        self._readers = readers
        self._position_keys = [reader.project_positions(positions) for reader in readers]
        self._vectors = Shelf(batch, size)
        self._shelves = [(Shelf(batch, size), Shelf(batch, size)) for _ in readers]
        self.counts = torch.zeros(batch, dtype=torch.int64, device=positions.device)
        """int64 (B,): sentences that each row remembers."""

    def write(self, rows: Tensor, sentences: Tensor) -> None:
        """Adds a sentence vector (R, D) to each of ``rows`` (R,)."""
        counts = self.counts[rows]
        self._vectors.push(rows, counts, sentences)
        for reader, shelves in zip(self._readers, self._shelves, strict=True):
            for shelf, new in zip(shelves, reader.project(sentences), strict=True):
                shelf.push(rows, counts, new)
        self.counts[rows] = (counts + 1).clamp(max=self._vectors.size)

    def forget(self, rows: Tensor) -> None:
        """Empties the memory of the rows in ``rows``, bool (B,)."""
        self.counts = self.counts.masked_fill(rows, 0)

    def read(self, reader: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Returns keys and values (B, M, D) and which of them are any, bool (B, M).

        None if no row has ever written.
        """
        keys, values = (shelf.entries for shelf in self._shelves[reader])
        if keys is None or values is None:
            return None
        slots = torch.arange(keys.shape[1], device=keys.device)
        positions = self._position_keys[reader].to(keys.dtype)
        return keys + positions, values, slots < self.counts[:, None]

    def latest(self) -> Tensor | None:
        """Returns the last vector of each row (B, D), or None if no row has ever written.

        Rows that remember nothing have anything there.
        """
        vectors = self._vectors.entries
        if vectors is None:
            return None
        return vectors[torch.arange(len(vectors), device=vectors.device), self.counts - 1]

    def vectors(self, rows: Tensor) -> Tensor:
        """Returns the vectors (R, W, D) of ``rows`` (R,); W is the largest of their counts."""
        assert self._vectors.entries is not None
        return self._vectors.entries[rows, : int(self.counts[rows].max())]

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices)."""
        self.counts = self.counts[rows]
        for shelf in (self._vectors, *(shelf for pair in self._shelves for shelf in pair)):
            shelf.select(rows)
