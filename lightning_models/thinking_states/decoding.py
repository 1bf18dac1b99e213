"""What all of them keep while they write: the backbone's cache, with rows that end together."""

from typing import Any

import torch
from torch import Tensor

from lightning_models.thinking_states.backbone import Backbone, Hidden, causal_mask, new_cache


class AnswerCache:
    """Keys and values of everything read so far; rows are padded on the left.

    Attributes:
        past: The transformers cache.
        real: Whether each cached place holds a token (B, N) bool.
        lengths: Tokens read by each row (B,) int64: the position of the next one.
        pending: Tokens (P,) that are read before what was chosen, once: the answer's prefix.
    """

    def __init__(self, rows: int, device: torch.device, pending: tuple[int, ...] = ()) -> None:
        """Starts empty."""
        self.past: Any = new_cache()
        self.real = torch.zeros(rows, 0, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.pending = torch.tensor(pending, dtype=torch.int64, device=device)

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.past.batch_select_indices(rows)
        self.real, self.lengths = self.real[rows], self.lengths[rows]

    def place(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """Takes in which of the next t places are tokens (B, t); returns their positions and mask.

        Returns:
            positions (B, t) int64, and the mask (B, 1, t, N + t) of `Backbone.forward`.
        """
        positions = (self.lengths[:, None] + real.cumsum(dim=1) - 1).clamp(min=0)
        self.real = torch.cat((self.real, real), dim=1)
        self.lengths = self.lengths + real.sum(dim=1)
        return positions, causal_mask(self.real, real.shape[1])

    def crop(self, length: int) -> None:
        """Forgets what is behind the first ``length`` places."""
        if length == self.real.shape[1]:
            return
        self.past.crop(length - self.real.shape[1])  # a negative number: places to remove
        self.lengths = self.lengths - self.real[:, length:].sum(dim=1)
        self.real = self.real[:, :length]

    def next_inputs(self, tokens: Tensor) -> Tensor:
        """Returns what is read next (B, t): the prefix, once, in place of the tokens (B,)."""
        if not len(self.pending):
            return tokens[:, None]
        pending, self.pending = self.pending, self.pending[:0]
        return pending.expand(len(tokens), -1)


def read(
    backbone: Backbone, cache: AnswerCache, h: Tensor, real: Tensor | None = None, **taps: Any
) -> Hidden:
    """Returns the hidden states of the next t places, and caches them.

    Args:
        backbone: of any model.
        cache: extended in place.
        h: embeddings (B, t, D).
        real: which places are tokens (B, t) bool; None: all.
        **taps: state and layers, see `Backbone.forward`.
    """
    if real is None:
        real = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
    positions, mask = cache.place(real)
    hidden: Hidden = backbone(h, positions, mask=mask, cache=cache.past, **taps)
    return hidden
