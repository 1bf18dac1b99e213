"""Rows of tokens: packing of unequal parts, the grid of chunks, queries in blocks.

Rows are padded on the right for parallel passes, where causal attention never sees the padding, and
on the left for decoding, where their ends are aligned. A row is a query of q tokens and, from index
q on, the prefix and the tokens of the answer. Chunks are index arithmetic: no padding is ever put
between tokens. Chunk k receives the state that chunk k - 1 thought, and thinks after its last
token. All numbers begin with 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_models.runtime import on_device
from lightning_models.thinking_states.config import GridKind


class Packed(NamedTuple):
    """Values moved to the front of their rows.

    Attributes:
        values: (B, T) int64, 0 after a row's end.
        lengths: (B,) int64.
        places: Index of each value in the unpacked row (B, T) int64; 0 after a row's end.
    """

    values: Tensor
    lengths: Tensor
    places: Tensor

    @property
    def valid(self) -> Tensor:
        """Whether a place holds a value (B, T) bool."""
        return within(self.lengths, self.values.shape[1])


def within(lengths: Tensor, width: int) -> Tensor:
    """Returns whether each place of rows of ``width`` lies within the row's length, bool."""
    return torch.arange(width, device=lengths.device) < lengths[..., None]


def pack(values: Tensor, valid: Tensor) -> Packed:
    """Returns the valid values of each row in their order, without the gaps.

    Args:
        values: (B, W) int64.
        valid: (B, W) bool.
    """
    lengths = valid.sum(dim=1)
    width = int(lengths.max()) if len(lengths) else 0
    # sorted by 0 (valid) and 1 (not), stably: the valid ones come first, in their order
    places = (~valid).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # (B, T)
    kept = within(lengths, width)  # (B, T)
    places = torch.where(kept, places, 0)
    return Packed(torch.where(kept, values.gather(1, places), 0), lengths, places)


class Joined(NamedTuple):
    """Segments of each row, one after the other.

    Attributes:
        tokens: (B, T) int64, 0 after a row's end.
        lengths: (B,) int64.
        segment: Number of the segment of each token (B, T) int64; -1 after a row's end.
    """

    tokens: Tensor
    lengths: Tensor
    segment: Tensor


def join(*segments: tuple[Tensor, Tensor]) -> Joined:
    """Returns rows of segments, each given as right-padded tokens (B, W) and lengths (B,)."""
    valid = torch.cat([within(n, tokens.shape[1]) for tokens, n in segments], dim=1)  # (B, all W)
    packed = pack(torch.cat([tokens for tokens, _ in segments], dim=1), valid)
    widths = [tokens.shape[1] for tokens, _ in segments]
    number = torch.repeat_interleave(
        torch.arange(len(segments)), torch.tensor(widths), output_size=sum(widths)
    )
    number = on_device(number, packed.places.device)
    segment = torch.where(packed.valid, number[packed.places], -1)
    return Joined(packed.values, packed.lengths, segment)


def constant(ids: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same segment for every row of ``like`` (B, ...)."""
    tokens = on_device(ids, like.device, torch.int64)
    lengths = torch.full((len(like),), len(ids), device=like.device)
    return tokens.expand(len(like), -1), lengths


def answer_of(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the answers with their EOS as a segment."""
    targets = batch["targets"]
    return targets.clamp(min=0), (targets >= 0).sum(dim=1)


def query_of(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the queries as a segment."""
    return batch["query"], batch["query_lengths"]


def chain_of(batch: dict[str, Tensor], separator: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the chains of all steps, each after ``separator``, as a segment."""
    steps, lengths = batch["steps"], batch["step_lengths"]
    if not steps.shape[1]:
        return constant((), steps)
    lead, _ = constant(separator, steps)
    lead = lead[:, None].expand(-1, steps.shape[1], -1)  # (B, R, tokens of the separator)
    valid = within(lengths, steps.shape[2])  # (B, R, Z)
    shown = (lengths > 0)[..., None].expand(lead.shape)
    packed = pack(
        torch.cat((lead, steps), dim=2).flatten(1), torch.cat((shown, valid), dim=2).flatten(1)
    )
    return packed.values, packed.lengths


def next_tokens(joined: Joined, predicted: Tensor) -> Tensor:
    """Returns targets (B, T) of rows of tokens: the next one where that is predicted, else -100.

    Args:
        joined: tokens (B, T).
        predicted: whether each token is predicted (B, T) bool.
    """
    following = joined.tokens.roll(-1, dims=1).masked_fill(~predicted.roll(-1, dims=1), -100)
    if following.shape[1]:
        following[:, -1] = -100
    return following


def aligned_right(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns right-padded rows (B, W) as left-padded ones, and which places are real, bool."""
    width = tokens.shape[1]
    start = (width - lengths)[:, None]  # (B, 1), column of a row's first token
    places = torch.arange(width, device=tokens.device) - start  # (B, W), negative on padding
    return tokens.gather(1, places.clamp(min=0)), places >= 0


# ---- chunks


NOWHERE = 1 << 40
"""Chunk of tokens that belong to none; above all others."""


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
        # floor: the query's last c tokens are at -1, the answer's first c at 0
        from_end = (tokens - lengths).div(self.chunk_size, rounding_mode="floor")
        from_end = self.chunks(lengths) + from_end
        return self._counted(tokens // self.chunk_size, from_end, tokens < lengths)

    def _counted(self, from_start: Tensor, from_end: Tensor, in_query: Tensor) -> Tensor:
        """Returns indices counted from a row's start or from its query's end, by ``kind``."""
        if self.kind == "left_align":
            return from_end
        from_start = from_start.expand_as(from_end)
        return from_start if self.kind == "absolute" else from_start.where(in_query, from_end)

    def place(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Returns the place of tokens within their chunks, below c: that of their part of S."""
        return tokens - self.token(self.chunk(tokens, lengths), 0, lengths)

    def token(self, chunks: Tensor, places: Tensor | int, lengths: Tensor) -> Tensor:
        """Returns the index of the token at a place of a chunk.

        A chunk of less than c tokens does not have all places; the index of those it lacks is that
        of another chunk's token, or negative.
        """
        n = self.chunks(lengths)
        from_end = lengths + (chunks - n) * self.chunk_size + places
        return self._counted(chunks * self.chunk_size + places, from_end, chunks < n)

    def last(self, chunks: Tensor, lengths: Tensor) -> Tensor:
        """Returns the index of the last token of chunks, in rows without an end."""
        last = self.token(chunks, self.chunk_size - 1, lengths)
        if self.kind != "partial":
            return last
        return torch.where(chunks < self.chunks(lengths), last.minimum(lengths - 1), last)

    def thinks(self, chunks: Tensor, lengths: Tensor, row_lengths: Tensor) -> Tensor:
        """Returns whether chunks think, bool: those whose last token is in the row.

        Args:
            chunks: int64.
            lengths: of queries.
            row_lengths: of rows, the answer's tokens included.
        """
        complete = (chunks >= 0) & (self.last(chunks, lengths) < row_lengths)
        return complete if self.in_answers else complete & (chunks < self.chunks(lengths))


# ---- blocks


class QueryBlocks(NamedTuple):
    """Queries in blocks of c places, one a chunk.

    The ends of all queries, and of all their chunks, are aligned: a chunk of less than c tokens has
    them at its block's end. The places before are no tokens: they have no positions, and nothing
    attends to them.

    Attributes:
        tokens: (B, N, c) int64.
        real: Which places hold tokens (B, N, c) bool.
        place: The place of each token in its chunk, as the grid counts (B, N, c) int64;
            arbitrary where there is no token.
        thinks: Whether a block's chunk thinks after the last token of its query (B, N) bool.
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


def in_blocks(grid: Grid, query: Tensor, lengths: Tensor) -> QueryBlocks:
    """Returns right-padded queries (B, Q) of ``lengths`` (B,), at least 1, in blocks.

    There are as many blocks as the longest query has chunks.
    """
    c, device = grid.chunk_size, query.device
    chunks, lengths = grid.chunks(lengths), lengths[:, None]
    number = int(chunks.max())
    chunk = torch.arange(number, device=device) - (number - chunks[:, None])  # (B, N), < 0: none
    last = grid.last(chunk, lengths).minimum(lengths - 1)  # (B, N)
    before = torch.where(chunk > 0, grid.last(chunk - 1, lengths), -1)  # of the chunk before
    token = last[..., None] - torch.arange(c - 1, -1, -1, device=device)  # (B, N, c)
    real = (chunk >= 0)[..., None] & (token > before[..., None])  # (B, N, c)
    token = torch.where(real, token, 0)
    return QueryBlocks(
        query.gather(1, token.flatten(1)).view_as(token),
        real,
        grid.place(token, lengths[..., None]).clamp(0, c - 1),
        grid.thinks(chunk, lengths, lengths),
        last,
        chunks,
    )
