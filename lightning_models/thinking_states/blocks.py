"""Queries in blocks of c places, one a chunk.

The ends of all queries, and of all their chunks, are aligned: a chunk of less than c tokens has
them at its block's end. The places in front are no tokens: they have no positions, and nothing
attends to them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_models.thinking_states.chunks import Grid


class Blocks(NamedTuple):
    """Queries in blocks of c places.

    Attributes:
        tokens: (B, N, c) int64.
        real: Which places hold tokens (B, N, c) bool.
        place: The place of each token in its chunk, as the grid counts (B, N, c) int64; any where
            there is none.
        thinks: Whether a block's chunk thinks behind the last token of its query (B, N) bool.
        last: Index in the query of each block's last token (B, N) int64.
        chunks: Of each query (B,) int64.
    """

    tokens: Tensor
    real: Tensor
    place: Tensor
    thinks: Tensor
    last: Tensor
    chunks: Tensor

    @property
    def number(self) -> int:
        """N, blocks of a row."""
        return self.tokens.shape[1]

    @property
    def positions(self) -> Tensor:
        """Positions of tokens (B, N * c) int64."""
        return (self.real.flatten(1).cumsum(dim=1) - 1).clamp(min=0)


def in_blocks(grid: Grid, query: Tensor, lengths: Tensor) -> Blocks:
    """Returns right-padded queries (B, Q) of ``lengths`` (B,), at least 1, in blocks.

    There are as many blocks as the longest query has chunks.
    """
    c, device = grid.chunk_size, query.device
    chunks, lengths = grid.chunks(lengths), lengths[:, None]
    number = int(chunks.max())
    chunk = torch.arange(number, device=device) - (number - chunks[:, None])
    last = grid.last(chunk, lengths).minimum(lengths - 1)
    before = torch.where(chunk > 0, grid.last(chunk - 1, lengths), -1)
    token = last[..., None] - torch.arange(c - 1, -1, -1, device=device)
    real = (chunk >= 0)[..., None] & (token > before[..., None])
    token = torch.where(real, token, 0)
    return Blocks(
        query.gather(1, token.flatten(1)).view_as(token),
        real,
        grid.place(token, lengths[..., None]).clamp(0, c - 1),
        grid.thinks(chunk, lengths, lengths),
        last,
        chunks,
    )
