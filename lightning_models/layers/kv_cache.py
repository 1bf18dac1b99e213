"""Cache of keys and values for rows that advance independently.

Rows may have different lengths. The entries of each row start at index 0 and end at the row's
length, so prompts are padded on the right, positions count from 0 in every row, and entries after
a row's length are overwritten by its next ones.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

MIN_ENTRIES = 64
"""Initial size of a cache, so that short texts are not copied often."""


class KVCache:
    """One buffer of keys and one of values for each layer, with shared row lengths.

    A forward pass writes T entries per row through ``layers[i].append`` and then calls
    :meth:`advance` with the number of entries that each row keeps.
    """

    def __init__(
        self, num_layers: int, batch: int, capacity: int, device: torch.device | str | None = None
    ) -> None:
        """Creates a cache for up to ``capacity`` entries per row, whose memory grows on demand."""
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._longest = 0
        self._uniform = True
        self.rows: Tensor | None = None
        """Indices of the rows that are read and written, or None for all. See :meth:`only`."""

    @property
    def longest(self) -> int:
        """Number of entries of the longest row."""
        return self._longest

    @property
    def uniform(self) -> bool:
        """Whether all rows have equal lengths."""
        return self._uniform

    @contextlib.contextmanager
    def only(self, rows: Tensor | None) -> Iterator[None]:
        """Restricts positions, masks, reads and writes to ``rows``, int64 indices, if any."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before

    def positions(self, num_new: int) -> Tensor:
        """Returns the indices (B, num_new) of the next entries of each row."""
        lengths = self.lengths if self.rows is None else self.lengths[self.rows]
        return lengths[:, None] + torch.arange(num_new, device=lengths.device)

    def mask(self, num_new: int, window: int | None = None) -> Tensor | None:
        """Returns the mask of the next entries, bool (B, 1, num_new, N), or None if uniform.

        N is ``longest + num_new``. Uniform rows need no mask beyond causality and window.
        """
        if self._uniform:
            return None
        keys = torch.arange(self._longest + num_new, device=self.lengths.device)  # (N,)
        query = self.positions(num_new)[..., None]  # (B, T, 1), index of each query among the keys
        visible = keys <= query if window is None else (keys <= query) & (keys > query - window)
        return visible[:, None]  # (B, 1, T, N), one mask for all heads

    def advance(self, counts: Tensor | int) -> None:
        """Keeps ``counts`` (B,) of the entries just written, or the same number in every row."""
        if isinstance(counts, int):
            self.lengths = self.lengths + counts
            self._longest += counts
            return
        self.lengths = self.lengths + counts
        self._refresh()

    def keep(self, kept: Tensor) -> Tensor:
        """Removes unmarked entries among the N just written; replaces :meth:`advance`.

        Args:
            kept: Bool (B, N), true for entries to keep.

        Returns:
            The new order (B, N) of the entries: indices of the kept ones, then of the others.
        """
        # a stable sort of 0 (kept) and 1 (not kept) moves the kept ones to the front, in order
        order = torch.sort((~kept).to(torch.int8), dim=1, stable=True).indices
        source, target = self.lengths[:, None] + order, self.positions(kept.shape[1])
        for layer in self.layers:
            layer.move(source, target)
        self.advance(kept.sum(dim=1))
        return order

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.lengths = self.lengths[rows]
        for layer in self.layers:
            layer.select(rows)
        self._refresh()

    def _refresh(self) -> None:
        ends = self.lengths.tolist()
        self._longest = max(ends, default=0)
        self._uniform = len(set(ends)) <= 1


class LayerCache:
    """Keys and values of one layer, (B, G, capacity, C) each."""

    def __init__(self, owner: KVCache) -> None:
        self.owner = owner
        self._buffers: tuple[Tensor, Tensor] | None = None  # shape and dtype of the first entries

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices)."""
        if self._buffers is not None:
            keys, values = self._buffers
            self._buffers = keys[rows], values[rows]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies the entries at ``source`` (B, N) of each row to ``target`` (B, N)."""
        if self._buffers is None:
            return
        for buffer in self._buffers:
            # (B, N) -> (B, G, N, C): the same positions in every head and channel
            from_, to = (
                index[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
                for index in (source, target)
            )
            buffer.scatter_(2, to, buffer.gather(2, from_))

    def read(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values (N, G, C) of the entries at ``rows`` and ``positions`` (N,)."""
        assert self._buffers is not None, "nothing has been written"
        keys, values = self._buffers
        return keys[rows, :, positions], values[rows, :, positions]

    def write(self, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Overwrites entries at ``rows`` and ``positions`` (N,) with k, v (N, G, C).

        With indices (n, 1) and (n, T), k and v are (n, G, T, C) as in :meth:`append`.
        """
        self._buffers = self._grown(k, v, self.owner.longest + 1)
        for buffer, new in zip(self._buffers, (k, v), strict=True):
            # indexed dimensions come first: (N, G, C), or (n, T, G, C)
            buffer[rows, :, positions] = new.transpose(1, 2) if new.dim() == 4 else new

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k, v (B, G, T, C) after each row's entries and returns all entries.

        Raises:
            ValueError: If the cache is full.
        """
        cache, num_new = self.owner, k.shape[2]
        end = cache.longest + num_new
        if end > cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} entries per row, {end} are needed")
        keys, values = self._buffers = self._grown(k, v, end)
        if cache.rows is not None:
            self.write(cache.rows[:, None], cache.positions(num_new), k, v)
            return keys[cache.rows, :, :end], values[cache.rows, :, :end]
        if cache.uniform:
            # one slice for all rows
            keys[:, :, cache.longest : end] = k
            values[:, :, cache.longest : end] = v
        else:
            # ragged rows: each writes after its last entry, (B, T) -> (B, G, T, C)
            index = cache.positions(num_new)[:, None, :, None].expand_as(k)
            keys.scatter_(2, index, k)
            values.scatter_(2, index, v)
        return keys[:, :, :end], values[:, :, :end]

    def _grown(self, k: Tensor, v: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Returns buffers of at least ``end`` entries, doubling their size if necessary."""
        if self._buffers is not None and self._buffers[0].shape[2] >= end:
            return self._buffers
        size = min(self.owner.capacity, max(2 * end, MIN_ENTRIES))
        grown = []
        for index, new in enumerate((k, v)):
            # for all rows, even if only some are written now
            buffer = new.new_zeros(len(self.owner.lengths), new.shape[1], size, new.shape[-1])
            if self._buffers is not None:
                old = self._buffers[index]
                buffer[:, :, : old.shape[2]] = old
            grown.append(buffer)
        return grown[0], grown[1]
