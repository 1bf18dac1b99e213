"""From parts of unequal length to rows: what every layout of query, thoughts and answer is made of.

Rows are padded on the right for parallel passes, where causal attention never sees the padding, and
on the left for decoding, where their ends are aligned.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Values moved to the front of their rows.

    Attributes:
        values: (B, T) int64, 0 behind a row's end.
        lengths: (B,) int64.
        places: Where in the unpacked row each value stood (B, T) int64; 0 behind a row's end.
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
    places = (~valid).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    kept = within(lengths, width)
    places = torch.where(kept, places, 0)
    return Packed(torch.where(kept, values.gather(1, places), 0), lengths, places)


class Joined(NamedTuple):
    """Segments of each row, one behind the other.

    Attributes:
        tokens: (B, T) int64, 0 behind a row's end.
        lengths: (B,) int64.
        segment: Number of the segment of each token (B, T) int64; -1 behind a row's end.
    """

    tokens: Tensor
    lengths: Tensor
    segment: Tensor


def join(*segments: tuple[Tensor, Tensor]) -> Joined:
    """Returns rows of segments, each given as right-padded tokens (B, W) and lengths (B,)."""
    valid = torch.cat([within(n, tokens.shape[1]) for tokens, n in segments], dim=1)
    packed = pack(torch.cat([tokens for tokens, _ in segments], dim=1), valid)
    widths = [tokens.shape[1] for tokens, _ in segments]
    number = torch.repeat_interleave(
        torch.arange(len(segments)), torch.tensor(widths), output_size=sum(widths)
    ).to(packed.places.device)
    segment = torch.where(packed.valid, number[packed.places], -1)
    return Joined(packed.values, packed.lengths, segment)


def constant(ids: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same segment for every row of ``like`` (B, ...)."""
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=like.device)
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
    """Returns the chains of all steps, each behind ``separator``, as a segment."""
    steps, lengths = batch["steps"], batch["step_lengths"]
    if not steps.shape[1]:
        return constant((), steps)
    lead, _ = constant(separator, steps)
    lead = lead[:, None].expand(-1, steps.shape[1], -1)
    valid = within(lengths, steps.shape[2])
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
    start = (width - lengths)[:, None]
    places = torch.arange(width, device=tokens.device) - start
    return tokens.gather(1, places.clamp(min=0)), places >= 0
