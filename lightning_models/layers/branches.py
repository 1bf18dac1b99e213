"""Rows that hold prefixes once, with all their continuations, which do not see each other."""

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ATTENDED = 1024
"""Keys that attention reads in the time that the other layers take for a token: at width 256.

Measured on a CPU; 3,600 at width 768.
"""


class Branches:
    """Trees of continuations laid out behind their prefixes, with the interface of a ``KVCache``.

    A network reads ``tokens`` (R, W) in one pass. A tree is ``[prefix | first | second | ...]``,
    where a continuation leaves out what it begins with as those before it; a row holds one tree or
    several. Positions go on from the prefix in each continuation. A token sees itself and what
    leads to it in its tree.

    Args:
        batch: Has ``prefix``, ``prefix_lengths`` and ``prefix_row`` of ``LanguageModel.score``,
            and ``tokens`` and ``mask`` (B, T) of the continuations, right-padded. The first token
            of each is the last one of its prefix, and is read there.
        slots: Entries of a row that a token takes.

    Attributes:
        tokens: (R, W) int64.
    """

    def __init__(self, batch: dict[str, Any], slots: int = 1) -> None:
        prefix, lengths, row = batch["prefix"], batch["prefix_lengths"], batch["prefix_row"]
        # (B, T - 1): continuations without the token that they share with their prefix
        rest, real = batch["tokens"][:, 1:], batch["mask"][:, 1:]
        owners = first_alike(row, rest.where(real, -1))
        new = real & (owners == torch.arange(len(row), device=row.device)[:, None])
        added = new.sum(dim=1)  # (B,)
        sizes = lengths.index_add(0, row, added)  # (C,), tokens of a tree
        begins, shape = _pack(sizes.tolist())
        size = shape.numel()  # index of an entry more, which takes what is not written
        root = torch.tensor(begins, device=row.device)  # (C,), where trees begin in the flat rows
        earlier = (row[:, None] == row).tril(-1)  # (B, B), continuations before it in its tree
        start = (root + lengths)[row] + (earlier * added).sum(dim=1)  # (B,)
        place = (start[:, None] + new.cumsum(dim=1) - 1).gather(0, owners)
        self._place = torch.cat(((root + lengths - 1)[row, None], place), dim=1)  # (B, T)

        time = torch.arange(prefix.shape[1], device=row.device).expand_as(prefix)  # (C, P)
        of_prefix = (root[:, None] + time).masked_fill(time >= lengths[:, None], size)
        target = torch.cat((of_prefix.flatten(), place.masked_fill(~new, size).flatten()))

        def laid_out(of_prefix: Tensor, of_rows: Tensor, padding: int = 0) -> Tensor:
            flat = of_rows.new_full((size + 1,), padding)
            values = torch.cat((of_prefix.flatten(), of_rows.flatten()))
            return flat.scatter_(0, target, values)[:-1].view(shape)

        self.tokens = laid_out(prefix, rest)
        later = torch.arange(rest.shape[1], device=row.device) + lengths[row, None]  # (B, T - 1)
        position = laid_out(time, later)
        # In a tree, what a token leads to stands behind it without a gap: up to the last of the
        # continuations that own it. Padding leads to the padding behind it.
        last = (start + added)[:, None].expand_as(owners)
        last = torch.zeros_like(owners).scatter_reduce(0, owners, last, "amax")
        end = laid_out((root + sizes)[:, None].expand_as(prefix), last, size)
        # (R, N = W slots)
        self._end = (end * slots).repeat_interleave(slots, dim=1)
        slot = torch.arange(slots, device=row.device)
        self._position = (position[..., None] * slots + slot).flatten(1)
        self.layers = _SameLayer()

    def positions(self, num_new: int) -> Tensor:
        """Returns the places (R, num_new) of the entries in their own texts."""
        return self._position

    def mask(self, num_new: int, window: int | None = None) -> Tensor:
        """Returns which keys the entries may see, bool (R, 1, num_new, num_new)."""
        entry = torch.arange(self._end.numel(), device=self._end.device).view_as(self._end)
        query, key = entry[..., None], entry[:, None]
        seen = (key <= query) & (query < self._end[:, None])
        if window is not None:
            seen &= self._position[:, None] > self._position[..., None] - window
        return seen[:, None]  # one mask for all heads

    def rows(self, states: Tensor) -> Tensor:
        """Gathers states (R, W, ...) of the laid-out tokens into rows (B, T, ...)."""
        return states.flatten(0, 1)[self._place]


class _SameLayer:
    """Stands for the cache of every layer: keys and values are all in the pass."""

    def __getitem__(self, index: int) -> "_SameLayer":
        return self

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the pass."""
        return k, v


def first_alike(prefix_row: Tensor, *values: Tensor) -> Tensor:
    """Returns the first row that agrees with each up to each column, int64 (B, T).

    Rows between the two agree as well.

    Args:
        prefix_row: (B,); rows agree nowhere where these differ.
        values: (B, T) each.
    """
    differs = (prefix_row.diff() != 0)[:, None]
    for value in values:
        differs = differs | (value.diff(dim=0) != 0)
    # (B - 1, T): whether a row differs from the one before up to a column
    differs = differs.cumsum(dim=1) > 0
    numbers = torch.arange(1, len(prefix_row), device=differs.device)[:, None] * differs
    return torch.nn.functional.pad(numbers, (0, 0, 1, 0)).cummax(dim=0).values


def _pack(sizes: Sequence[int]) -> tuple[list[int], torch.Size]:
    """Returns where trees of these sizes begin in flat rows (R * W), and (R, W).

    For each R, the largest tree left goes to the emptiest row. The R that costs least is taken:
    few rows have little padding, many have little attention, which grows with W.
    """
    largest_first = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    total, largest = sum(sizes), max(sizes)

    def least_cost(count: int) -> float:
        """Returns the cost of rows without padding, or of the largest tree in each."""
        return max(total, count * largest) * (_ATTENDED + max(total / count, largest))

    best: tuple[float, int, int, list[tuple[int, int]]] | None = None
    for count in sorted(range(1, len(sizes) + 1), key=least_cost):
        if best is not None and least_cost(count) >= best[0]:
            break  # nor can any later count cost less
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
