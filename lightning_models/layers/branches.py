"""Layout of prefixes with all their continuations in one pass, which reads each prefix once."""

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ATTENDED = 1024
"""Keys that attention reads in the time that the other layers need for a token.

Measured on a CPU at width 256; at width 768 it is 3,600.
"""


class Branches:
    """Trees of continuations after their prefixes, with the interface of a ``KVCache``.

    A network reads ``tokens`` (R, W) in one pass. A tree is ``[prefix | first | second | ...]``,
    where a continuation omits the tokens that it shares with earlier ones, and a row holds one or
    more trees. Positions in each continuation follow the prefix. A token attends to itself and to
    its ancestors in the tree.

    Args:
        batch: Batch with ``prefix``, ``prefix_lengths`` and ``prefix_row`` of
            ``LanguageModel.score``, and right-padded continuations ``tokens`` and ``mask`` (B, T).
            The first token of a continuation is the last one of its prefix, and is read there.
        slots: Number of entries that a token takes.

    Attributes:
        tokens: int64 (R, W).
    """

    def __init__(self, batch: dict[str, Any], slots: int = 1) -> None:
        prefix, lengths, row = batch["prefix"], batch["prefix_lengths"], batch["prefix_row"]
        # (B, T - 1), continuations without the token that they share with their prefix
        rest, real = batch["tokens"][:, 1:], batch["mask"][:, 1:]
        owners = first_alike(row, rest.where(real, -1))
        # a continuation only adds the tokens that no earlier one has
        new = real & (owners == torch.arange(len(row), device=row.device)[:, None])
        added = new.sum(dim=1)  # (B,)
        sizes = lengths.index_add(0, row, added)  # (C,), number of tokens of each tree
        begins, shape = _pack(sizes.tolist())
        size = shape.numel()  # R W; index of an additional entry for values that are not written
        root = torch.tensor(begins, device=row.device)  # (C,), flat index of each tree's start
        earlier = (row[:, None] == row).tril(-1)  # (B, B), earlier continuations of the same tree
        start = (root + lengths)[row] + (earlier * added).sum(dim=1)  # (B,), first added token
        # (B, T - 1), flat index of each token, which for a shared one is its owner's
        index = (start[:, None] + new.cumsum(dim=1) - 1).gather(0, owners)
        self._index = torch.cat(((root + lengths - 1)[row, None], index), dim=1)  # (B, T)

        time = torch.arange(prefix.shape[1], device=row.device).expand_as(prefix)  # (C, P)
        prefix_index = (root[:, None] + time).masked_fill(time >= lengths[:, None], size)
        target = torch.cat((prefix_index.flatten(), index.masked_fill(~new, size).flatten()))

        def lay_out(prefixes: Tensor, rows: Tensor, padding: int = 0) -> Tensor:
            """Scatters values of prefixes (C, P) and of rows (B, T - 1) into the layout (R, W)."""
            flat = rows.new_full((size + 1,), padding)
            values = torch.cat((prefixes.flatten(), rows.flatten()))
            return flat.scatter_(0, target, values)[:-1].view(shape)

        self.tokens = lay_out(prefix, rest)
        later = torch.arange(rest.shape[1], device=row.device) + lengths[row, None]  # (B, T - 1)
        position = lay_out(time, later)
        # The descendants of a token follow it without a gap, up to the end of the last continuation
        # that shares it. The descendants of padding are the padding after it.
        last = (start + added)[:, None].expand_as(owners)
        last = torch.zeros_like(owners).scatter_reduce(0, owners, last, "amax")
        end = lay_out((root + sizes)[:, None].expand_as(prefix), last, size)
        # (R, N = W slots), flat index after the last descendant of each entry
        self._end = (end * slots).repeat_interleave(slots, dim=1)
        slot = torch.arange(slots, device=row.device)
        self._position = (position[..., None] * slots + slot).flatten(1)
        self.layers = _SameLayer()

    def positions(self, num_new: int) -> Tensor:
        """Returns the positions (R, num_new) of the entries in their texts."""
        return self._position

    def mask(self, num_new: int, window: int | None = None) -> Tensor:
        """Returns the attention mask, bool (R, 1, num_new, num_new)."""
        entry = torch.arange(self._end.numel(), device=self._end.device).view_as(self._end)
        query, key = entry[..., None], entry[:, None]
        # a key is visible if the query is the key or one of its descendants
        visible = (key <= query) & (query < self._end[:, None])
        if window is not None:
            visible &= self._position[:, None] > self._position[..., None] - window
        return visible[:, None]  # one mask for all heads

    def rows(self, states: Tensor) -> Tensor:
        """Gathers states (R, W, ...) of the laid-out tokens into rows (B, T, ...)."""
        return states.flatten(0, 1)[self._index]


class _SameLayer:
    """Replaces the cache of every layer, since all keys and values are in the pass."""

    def __getitem__(self, index: int) -> "_SameLayer":
        return self

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the pass."""
        return k, v


def first_alike(prefix_row: Tensor, *values: Tensor) -> Tensor:
    """Returns for each row and column the first row that is equal up to the column, int64 (B, T).

    All rows in between are equal as well.

    Args:
        prefix_row: int64 (B,); rows with different values are never equal.
        values: Tensors (B, T) to compare.
    """
    differs = (prefix_row.diff() != 0)[:, None]
    for value in values:
        differs = differs | (value.diff(dim=0) != 0)
    # (B - 1, T), whether a row differs from the previous one up to a column
    differs = differs.cumsum(dim=1) > 0
    # the index of each row that differs; the running maximum is the start of a run of equal rows
    starts = torch.arange(1, len(prefix_row), device=differs.device)[:, None] * differs
    return torch.nn.functional.pad(starts, (0, 0, 1, 0)).cummax(dim=0).values


def _pack(sizes: Sequence[int]) -> tuple[list[int], torch.Size]:
    """Packs trees into rows and returns their flat starts in R * W and the shape (R, W).

    For each R, the largest remaining tree goes to the emptiest row. The R of least cost is chosen:
    few rows have little padding, many have little attention, which grows with W.
    """
    largest_first = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    total, largest = sum(sizes), max(sizes)

    def least_cost(count: int) -> float:
        """Returns a lower bound: rows without padding, or as wide as the largest tree."""
        return max(total, count * largest) * (_ATTENDED + max(total / count, largest))

    best: tuple[float, int, int, list[tuple[int, int]]] | None = None
    for count in sorted(range(1, len(sizes) + 1), key=least_cost):
        if best is not None and least_cost(count) >= best[0]:
            break  # no later count can cost less
        ends = [(0, row) for row in range(count)]  # a heap
        begins = [(0, 0)] * len(sizes)
        for tree in largest_first:
            end, row = ends[0]
            begins[tree] = row, end
            heapq.heapreplace(ends, (end + sizes[tree], row))
        width = max(ends)[0]
        layout = count * width * (_ATTENDED + width), count, width, begins
        best = layout if best is None else min(best, layout)
    assert best is not None
    _, count, width, begins = best
    return [row * width + end for row, end in begins], torch.Size((count, width))
