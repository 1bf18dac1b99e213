"""Rows that hold a prefix once and all its continuations after it, which do not see each other."""

from typing import Any

import torch
from torch import Tensor


class Branches:
    """Continuations laid out behind their prefixes, with the interface of a ``KVCache``.

    A network reads ``tokens`` (C, W) in one pass, without padding between a prefix and its
    continuations: ``[prefix | first | second | ...]``. Positions go on from the prefix in each
    continuation, which sees the prefix and itself.

    Args:
        batch: Has ``prefix``, ``prefix_lengths`` and ``prefix_row`` of ``LanguageModel.score``,
            and ``tokens`` and ``mask`` (B, T) of the continuations, right-padded. The first token
            of each is the last one of its prefix, and is read there.
        slots: Entries of a row that a token takes.

    Attributes:
        tokens: (C, W) int64, one row a prefix.
    """

    def __init__(self, batch: dict[str, Any], slots: int = 1) -> None:
        prefix, lengths, row = batch["prefix"], batch["prefix_lengths"], batch["prefix_row"]
        time = torch.arange(batch["tokens"].shape[1], device=row.device)  # (T,)
        more = batch["mask"].sum(dim=1) - 1  # (B,), tokens after the shared one
        earlier = (row[:, None] == row).tril(-1)  # (B, B), continuations before it in its row
        start = lengths[row] + (earlier * more).sum(dim=1)  # (B,), column of the second token
        width = max(prefix.shape[1], int((start + more).max()))
        # (B, T): where tokens stand in the flat rows; the first is the last of the prefix
        column = torch.where(time > 0, start[:, None] + time - 1, (lengths[row] - 1)[:, None])
        real = time <= more[:, None]
        self._place = (row[:, None] * width + column).masked_fill(~real, 0)
        # one entry more takes what is not written
        target = self._place.masked_fill(~real | (time == 0), len(prefix) * width)
        shape = (len(prefix), width)
        columns = torch.arange(width, device=row.device).expand(shape)
        inside = columns < lengths[:, None]

        def laid_out(of_prefix: Tensor, of_rows: Tensor) -> Tensor:
            flat = torch.cat((of_prefix.reshape(-1), of_prefix.new_zeros(1)))
            return flat.scatter_(0, target.reshape(-1), of_rows.reshape(-1))[:-1].view(shape)

        padding = width - prefix.shape[1]
        self.tokens = laid_out(torch.nn.functional.pad(prefix, (0, padding)), batch["tokens"])
        position = laid_out(columns * inside, (lengths[row] - 1)[:, None] + time)
        # 0: the prefix, -1: padding, which sees itself
        own_branch = torch.arange(1, len(row) + 1, device=row.device)[:, None].expand_as(real)
        branch = laid_out(inside.long() - 1, own_branch)
        # (C, W slots)
        self._branch = branch.repeat_interleave(slots, dim=1)
        slot = torch.arange(slots, device=row.device)
        self._position = (position[..., None] * slots + slot).flatten(1)
        self.layers = _SameLayer()

    def positions(self, num_new: int) -> Tensor:
        """Returns the places (C, num_new) of the entries in their own texts."""
        return self._position

    def mask(self, num_new: int, window: int | None = None) -> Tensor:
        """Returns which keys the entries may see, bool (C, 1, num_new, num_new)."""
        query, key = self._position[..., None], self._position[:, None]
        seen = key <= query if window is None else (key <= query) & (key > query - window)
        branch = self._branch[:, None]  # (C, 1, N), of keys
        seen &= (branch == self._branch[..., None]) | (branch == 0)
        return seen[:, None]  # one mask for all heads

    def rows(self, states: Tensor) -> Tensor:
        """Gathers states (C, W, ...) of the laid-out tokens into rows (B, T, ...)."""
        return states.flatten(0, 1)[self._place]


class _SameLayer:
    """Stands for the cache of every layer: keys and values are all in the pass."""

    def __getitem__(self, index: int) -> "_SameLayer":
        return self

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the pass."""
        return k, v
