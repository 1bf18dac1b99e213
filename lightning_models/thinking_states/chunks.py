"""Chunks of a row, as index arithmetic: no padding is ever put between tokens.

A row is a query of q tokens and, from index q on, the prefix and the tokens of the answer. Chunk k
receives the state that chunk k - 1 thought, and thinks behind its last token. All numbers begin
with 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.thinking_states.config import GridKind
from lightning_models.thinking_states.rows import pack, within

NOWHERE = 1 << 40
"""Chunk of what belongs to none; above all others."""


@dataclass(frozen=True)
class Grid:
    """How chunks lie on rows (Sec. 3).

    Indices and lengths are int64 of any shapes that broadcast; ``lengths`` are those of queries.

    NOTE(paper): where c does not divide a query, its rest is grouped "along with generated tokens"
    (``absolute``), so that the last thought comes when the answer is half written, or never.
    ``left_align``, the default, lets the first chunk be the short one, so that the query's end is a
    chunk's end; ``partial`` the last one. In both the answer begins a chunk.
    """

    chunk_size: int
    """c, tokens of a chunk."""
    kind: GridKind = "left_align"
    """See the configuration."""
    in_answers: bool = False
    """Whether chunks think that hold no token of the query."""

    def chunks(self, lengths: Tensor) -> Tensor:
        """Returns n, the chunks that hold tokens of queries."""
        return -(-lengths // self.chunk_size)

    def chunk(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Returns the chunk of tokens, given by their indices."""
        behind = (tokens - lengths).div(self.chunk_size, rounding_mode="floor")
        behind = self.chunks(lengths) + behind
        if self.kind == "left_align":
            return behind
        from_start = (tokens // self.chunk_size).expand_as(behind)
        return (
            from_start
            if self.kind == "absolute"
            else torch.where(tokens < lengths, from_start, behind)
        )

    def place(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Returns the place of tokens within their chunks, below c: that of their part of S."""
        return tokens - self.token(self.chunk(tokens, lengths), 0, lengths)

    def token(self, chunks: Tensor, places: Tensor | int, lengths: Tensor) -> Tensor:
        """Returns the index of the token at a place of a chunk.

        A chunk of less than c tokens does not have all places; the index of those it lacks is that
        of another chunk's token, or negative.
        """
        n = self.chunks(lengths)
        behind = lengths + (chunks - n) * self.chunk_size + places
        if self.kind == "left_align":
            return behind
        from_start = (chunks * self.chunk_size + places).expand_as(behind)
        return (
            from_start if self.kind == "absolute" else torch.where(chunks < n, from_start, behind)
        )

    def last(self, chunks: Tensor, lengths: Tensor) -> Tensor:
        """Returns the index of the last token of chunks, in rows that go on for ever."""
        last = self.token(chunks, self.chunk_size - 1, lengths)
        if self.kind != "partial":
            return last
        return torch.where(chunks < self.chunks(lengths), last.minimum(lengths - 1), last)

    def thinks(self, chunks: Tensor, lengths: Tensor, row_lengths: Tensor) -> Tensor:
        """Returns whether chunks think, bool: those that are there to their ends.

        Args:
            chunks: int64.
            lengths: of queries.
            row_lengths: of rows, the answer's tokens included.
        """
        complete = (chunks >= 0) & (self.last(chunks, lengths) < row_lengths)
        return complete if self.in_answers else complete & (chunks < self.chunks(lengths))


class Gold(NamedTuple):
    """The thoughts that a batch's steps make: all of a row one behind the other, without ends.

    Attributes:
        tokens: (B, M) int64, 0 behind a row's end.
        chunk: The chunk of each token (B, M) int64, never decreasing; NOWHERE behind a row's end.
    """

    tokens: Tensor
    chunk: Tensor

    @property
    def valid(self) -> Tensor:
        """Whether there is a token (B, M) bool."""
        return self.chunk < NOWHERE

    @property
    def first(self) -> Tensor:
        """Whether a token begins a thought (B, M) bool."""
        return self.valid & (self.chunk != F.pad(self.chunk, (1, 0), value=-1)[:, :-1])

    @property
    def final(self) -> Tensor:
        """Whether a token is the last one of its thought (B, M) bool."""
        return self.valid & (self.chunk != F.pad(self.chunk, (0, 1), value=NOWHERE)[:, 1:])

    def of(self, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where the thoughts of chunks (B, N) begin in their rows, and their tokens.

        Returns:
            int64 (B, N) both; a number of 0 says that the thought is trivial.
        """
        own, asked = self.chunk.contiguous(), chunks.contiguous()
        start = torch.searchsorted(own, asked)
        return start, torch.searchsorted(own, asked, right=True) - start


def gold_thoughts(
    batch: dict[str, Tensor], grid: Grid, row_lengths: Tensor, separator: int
) -> Gold:
    """Returns the thoughts of a batch's steps (Sec. 3.4, "Token-to-Chunk Alignment").

    A chunk's thought holds the steps of its tokens in their order. Steps of chunks that never come
    to their ends (``absolute``) are left out, as nothing thinks them.

    Args:
        batch: with ``query_lengths``, ``steps``, ``step_lengths`` and ``step_places``.
        grid: its chunks.
        row_lengths: tokens of each row, the answer's included (B,).
        separator: id between two steps of one chunk.
    """
    steps, queries = batch["steps"], batch["query_lengths"][:, None]
    chunk = grid.chunk(batch["step_places"], queries)
    there = grid.thinks(chunk, queries, row_lengths[:, None])
    there = there & (batch["step_lengths"] > 0) & (batch["step_places"] >= 0)
    chunk = torch.where(there, chunk, -1)
    joined = there & (chunk == _highest_before(chunk))
    tokens = F.pad(steps, (1, 0), value=separator)
    valid = within(batch["step_lengths"], steps.shape[2]) & there[..., None]
    packed = pack(tokens.flatten(1), torch.cat((joined[..., None], valid), dim=2).flatten(1))
    own = chunk[..., None].expand_as(tokens).flatten(1).gather(1, packed.places)
    return Gold(packed.values, torch.where(packed.valid, own, NOWHERE))


def _highest_before(values: Tensor) -> Tensor:
    """Returns the maximum of -1 and all values (B, R) in front of each, which are not below -1."""
    return F.pad(values, (1, 0), value=-1).cummax(dim=1).values[:, :-1]
