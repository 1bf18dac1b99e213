"""Rows of tokens: packing of segments, the grid of chunks, queries in blocks.

Rows are padded on the right for parallel passes, where causal attention never sees the padding, and
on the left for decoding, where their ends are aligned. A row is a query of q tokens and, from index
q on, the prefix and the tokens of the answer. Chunks are index arithmetic: no padding is ever put
between tokens. Chunk k receives the state of chunk k - 1's thought, and thinks after its last
token. All indices begin at 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_models.runtime import on_device
from lightning_models.thinking_states.config import GridMode


class Packed(NamedTuple):
    """Values moved to the front of their rows.

    Attributes:
        values: Values (B, T) int64, 0 after a row's end.
        lengths: Number of values in each row (B,) int64.
        source: Index of each value in the unpacked row (B, T) int64, 0 after a row's end.
    """

    values: Tensor
    lengths: Tensor
    source: Tensor

    @property
    def valid(self) -> Tensor:
        """Mask of the columns that hold a value (B, T) bool."""
        return within(self.lengths, self.values.shape[1])


def within(lengths: Tensor, width: int) -> Tensor:
    """Returns the mask (..., width) bool of the first ``lengths`` (...) columns of each row."""
    return torch.arange(width, device=lengths.device) < lengths[..., None]


def pack(values: Tensor, valid: Tensor) -> Packed:
    """Moves the valid values of each row to its front, in their order.

    Args:
        values: Values (B, W) int64.
        valid: Mask of the valid ones (B, W) bool.
    """
    lengths = valid.sum(dim=1)
    width = int(lengths.max()) if len(lengths) else 0
    # a stable sort by 0 (valid) and 1 (not) puts the valid ones first, in their order
    source = (~valid).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # (B, T)
    kept = within(lengths, width)  # (B, T)
    source = torch.where(kept, source, 0)
    return Packed(torch.where(kept, values.gather(1, source), 0), lengths, source)


class Joined(NamedTuple):
    """Segments of each row, one after the other.

    Attributes:
        tokens: Tokens (B, T) int64, 0 after a row's end.
        lengths: Number of tokens in each row (B,) int64.
        segment: Index of the segment of each token (B, T) int64, -1 after a row's end.
    """

    tokens: Tensor
    lengths: Tensor
    segment: Tensor


def join(*segments: tuple[Tensor, Tensor]) -> Joined:
    """Concatenates segments, each given as right-padded tokens (B, W) and lengths (B,)."""
    valid = torch.cat([within(n, tokens.shape[1]) for tokens, n in segments], dim=1)  # (B, sum W)
    packed = pack(torch.cat([tokens for tokens, _ in segments], dim=1), valid)
    widths = [tokens.shape[1] for tokens, _ in segments]
    index = torch.repeat_interleave(
        torch.arange(len(segments)), torch.tensor(widths), output_size=sum(widths)
    )  # (sum W,), segment of each column
    index = on_device(index, packed.source.device)
    segment = torch.where(packed.valid, index[packed.source], -1)
    return Joined(packed.values, packed.lengths, segment)


def constant(ids: Sequence[int], reference: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same segment for every row of ``reference`` (B, ...)."""
    tokens = on_device(ids, reference.device, torch.int64)
    lengths = torch.full((len(reference),), len(ids), device=reference.device)
    return tokens.expand(len(reference), -1), lengths


def answer_of(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the answers with their EOS as a segment."""
    targets = batch["targets"]
    return targets.clamp(min=0), (targets >= 0).sum(dim=1)


def query_of(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the queries as a segment."""
    return batch["query"], batch["query_lengths"]


def chain_of(batch: dict[str, Tensor], separator: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the chains of steps, each step after ``separator``, as a segment."""
    steps, lengths = batch["steps"], batch["step_lengths"]
    if not steps.shape[1]:
        return constant((), steps)
    lead, _ = constant(separator, steps)
    lead = lead[:, None].expand(-1, steps.shape[1], -1)  # (B, R, tokens of the separator)
    valid = within(lengths, steps.shape[2])  # (B, R, Z)
    shown = (lengths > 0)[..., None].expand(lead.shape)  # an empty step has no separator either
    packed = pack(
        torch.cat((lead, steps), dim=2).flatten(1), torch.cat((shown, valid), dim=2).flatten(1)
    )
    return packed.values, packed.lengths


def next_tokens(joined: Joined, predicted: Tensor) -> Tensor:
    """Returns the targets (B, T) of rows: the next token where it is predicted, else -100.

    Args:
        joined: The rows (B, T).
        predicted: Mask of the tokens that are predicted (B, T) bool.
    """
    following = joined.tokens.roll(-1, dims=1).masked_fill(~predicted.roll(-1, dims=1), -100)
    if following.shape[1]:
        following[:, -1] = -100  # roll moved the first token here
    return following


def aligned_right(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the padding of rows (B, W) to the left; also returns the mask of tokens (B, W) bool."""
    width = tokens.shape[1]
    start = (width - lengths)[:, None]  # (B, 1), column of a row's first token
    source = torch.arange(width, device=tokens.device) - start  # (B, W), negative on padding
    return tokens.gather(1, source.clamp(min=0)), source >= 0


# ---- chunks


NOWHERE = 1 << 40
"""Chunk of tokens that belong to no chunk; it is above all others."""


@dataclass(frozen=True)
class Grid:
    """How chunks lie on rows (Sec. 3).

    Indices and lengths are int64 of any shapes that broadcast; ``lengths`` are lengths of queries.

    NOTE(paper): if c does not divide a query, its rest is grouped "along with generated tokens"
    (``absolute``), so that the last thought comes when the answer is half written, or never. In
    ``left_align``, the default, the first chunk is the short one, so that the query ends with a
    full chunk; in ``partial`` it is the last one. In both the answer begins a new chunk.
    """

    chunk_size: int
    """c, tokens of a chunk."""
    mode: GridMode = "left_align"
    """See the configuration."""
    in_answers: bool = False
    """Whether chunks without a token of the query think."""

    def chunks(self, lengths: Tensor) -> Tensor:
        """Returns n, the number of chunks that hold tokens of a query."""
        return -(-lengths // self.chunk_size)

    def chunk(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Returns the chunks of tokens, given by their indices in the row."""
        # floor: the query's last c tokens are at -1, the answer's first c at 0
        from_end = (tokens - lengths).div(self.chunk_size, rounding_mode="floor")
        from_end = self.chunks(lengths) + from_end
        return self._counted(tokens // self.chunk_size, from_end, tokens < lengths)

    def _counted(self, from_start: Tensor, from_end: Tensor, in_query: Tensor) -> Tensor:
        """Selects the index counted from a row's start or from its query's end, by ``mode``."""
        if self.mode == "left_align":
            return from_end
        from_start = from_start.expand_as(from_end)
        return from_start if self.mode == "absolute" else from_start.where(in_query, from_end)

    def offset(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Returns the offset of tokens within their chunks, below c, which selects the row of S."""
        return tokens - self.token(self.chunk(tokens, lengths), 0, lengths)

    def token(self, chunks: Tensor, offsets: Tensor | int, lengths: Tensor) -> Tensor:
        """Returns the index of the token at an offset within a chunk.

        For the offsets that a short chunk lacks, the index is negative or in another chunk.
        """
        n = self.chunks(lengths)
        from_end = lengths + (chunks - n) * self.chunk_size + offsets
        return self._counted(chunks * self.chunk_size + offsets, from_end, chunks < n)

    def last(self, chunks: Tensor, lengths: Tensor) -> Tensor:
        """Returns the index of the last token of chunks, as if rows had no end."""
        last = self.token(chunks, self.chunk_size - 1, lengths)
        if self.mode != "partial":
            return last
        return torch.where(chunks < self.chunks(lengths), last.minimum(lengths - 1), last)

    def thinks(self, chunks: Tensor, lengths: Tensor, row_lengths: Tensor) -> Tensor:
        """Returns whether chunks think, which needs their last token to be in the row, bool.

        Args:
            chunks: Indices of the chunks, int64.
            lengths: Lengths of the queries.
            row_lengths: Lengths of the rows, with the answer's tokens.
        """
        complete = (chunks >= 0) & (self.last(chunks, lengths) < row_lengths)
        return complete if self.in_answers else complete & (chunks < self.chunks(lengths))


# ---- blocks


class QueryBlocks(NamedTuple):
    """Queries in blocks of c slots, one block per chunk.

    The ends of all queries and chunks are aligned: a chunk of less than c tokens fills the last
    slots of its block. Empty slots take no positions, and nothing attends to them.

    Attributes:
        tokens: Tokens (B, N, c) int64.
        real: Mask of the slots that hold tokens (B, N, c) bool.
        offset: Offset of each token in its chunk (B, N, c) int64, arbitrary in empty slots.
        thinks: Whether a block's chunk thinks after its last token in the query (B, N) bool.
        last: Index in the query of each block's last token (B, N) int64.
        chunks: Number of chunks of each query (B,) int64.
    """

    tokens: Tensor
    real: Tensor
    offset: Tensor
    thinks: Tensor
    last: Tensor
    chunks: Tensor

    @property
    def num_blocks(self) -> int:
        """N, the number of blocks of a row."""
        return self.tokens.shape[1]

    @property
    def positions(self) -> Tensor:
        """Positions of tokens (B, N * c) int64."""
        return (self.real.flatten(1).cumsum(dim=1) - 1).clamp(min=0)  # empty slots take none


def in_blocks(grid: Grid, query: Tensor, lengths: Tensor) -> QueryBlocks:
    """Arranges right-padded queries (B, Q) of ``lengths`` (B,), at least 1, in blocks.

    There are as many blocks as the longest query has chunks.
    """
    c, device = grid.chunk_size, query.device
    chunks, lengths = grid.chunks(lengths), lengths[:, None]
    num_blocks = int(chunks.max())
    # shorter queries begin with empty blocks, whose chunk is negative
    chunk = torch.arange(num_blocks, device=device) - (num_blocks - chunks[:, None])  # (B, N)
    last = grid.last(chunk, lengths).minimum(lengths - 1)  # (B, N)
    before = torch.where(chunk > 0, grid.last(chunk - 1, lengths), -1)  # (B, N), chunk before
    token = last[..., None] - torch.arange(c - 1, -1, -1, device=device)  # (B, N, c)
    real = (chunk >= 0)[..., None] & (token > before[..., None])  # (B, N, c)
    token = torch.where(real, token, 0)
    return QueryBlocks(
        query.gather(1, token.flatten(1)).view_as(token),
        real,
        grid.offset(token, lengths[..., None]).clamp(0, c - 1),
        grid.thinks(chunk, lengths, lengths),
        last,
        chunks,
    )
