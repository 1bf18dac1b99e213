"""Which candidates survive a fork layer: the paper's top-k, and two strictly causal rules.

Candidates are ordered ``fork_0, keep_0, fork_1, keep_1, ...`` (2 N a row). A rule gets their
scores for selection, in which originals' keeps are +inf and padding is -inf.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.thoughtbubbles.config import ROUNDING, ThoughtbubblesConfig
from lightning_models.thoughtbubbles.streams import Streams

WINDOW_ELEMENTS = 1 << 24
"""Most scores that window_topk unfolds at once."""


class Choice(NamedTuple):
    """Who survives: ``chosen`` bool (B, 2 N), and the most survivors that a row can have."""

    chosen: Tensor
    width: int


def row_budgets(config: ThoughtbubblesConfig, lengths: Tensor) -> Tensor:
    """Returns kappa of each row (int64, the shape of ``lengths``), at least its length.

    NOTE(paper): a padded row has the budget of its own tokens, so that batching changes nothing.
    """
    if config.budget == "fixed":
        return lengths.clamp(min=config.most_streams(0))
    return (lengths.double() * config.ratio - ROUNDING).ceil().long().clamp(min=lengths)


def global_topk(scores: Tensor, budgets: Tensor, width: int) -> tuple[Choice, Tensor]:
    """Returns the best ``budgets`` candidates of each row, and the score of the last of them.

    Args:
        scores: (B, 2 N).
        budgets: int64 (B,), survivors of each row, at most ``width``.
        width: min(kappa, 2 N) of a row without padding.
    """
    # of equal scores the first ones, whatever the padding: topk would make that depend on the width
    values, best = (x[:, :width] for x in scores.sort(dim=1, descending=True, stable=True))
    rank = torch.arange(width, device=scores.device)
    inside = (rank < budgets[:, None]) & (values > -torch.inf)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, inside)
    last = F.pad(values, (1, 0), value=-torch.inf).gather(1, budgets[:, None])[:, 0]
    return Choice(chosen, width), last


def by_threshold(scores: Tensor, threshold: Tensor) -> Choice:
    """Returns the candidates above ``threshold``, a scalar, and all originals."""
    chosen = (scores > threshold) | (scores == torch.inf)
    return Choice(chosen, _widest(chosen))


def window_topk(
    scores: Tensor, streams: Streams, history: Tensor, per_window: int
) -> tuple[Choice, Tensor]:
    """Returns the candidates that rank among the ``per_window`` best of the latest w tokens.

    A candidate of token i is compared with those of tokens i - w + 1 to i: later ones would leak.

    Args:
        scores: (B, 2 N).
        streams: whose candidates these are.
        history: (B, w - 1, G) scores of the tokens before, -inf where there are none; G is the
            most candidates a token can have here.
        per_window: ceil(r w).

    Returns:
        The choice, and the scores (B, w - 1 + T, G) of history and these tokens.
    """
    rows, num_tokens, width = len(scores), streams.num_tokens, history.shape[2]
    place = streams.token[..., None] * width + 2 * streams.slot[..., None]
    place = (place + torch.arange(2, device=scores.device)).flatten(1)
    dump = num_tokens * width  # padding goes after all tokens
    grid = scores.new_full((rows, dump + width), -torch.inf)
    grid = grid.scatter(1, place.clamp(max=dump), scores)
    table = torch.cat((history, grid[:, :dump].view(rows, num_tokens, width)), dim=1)
    borders = _window_borders(table, history.shape[1] + 1, per_window)
    borders = torch.cat((borders, borders.new_zeros(rows, 1)), dim=1)  # of padding
    border = borders.gather(1, streams.token).repeat_interleave(2, dim=1)
    chosen = (scores >= border) & (scores > -torch.inf)
    return Choice(chosen, _widest(chosen)), table


def _window_borders(table: Tensor, window: int, rank: int) -> Tensor:
    """Returns the ``rank``-th score (B, T) of each window of tokens; -inf if it has fewer."""
    rows, length, width = table.shape
    num_tokens = length - window + 1
    if rank > window * width:
        return table.new_full((rows, num_tokens), -torch.inf)
    step = max(1, WINDOW_ELEMENTS // (rows * window * width))
    borders = [
        table[:, start : start + step + window - 1]
        .unfold(1, window, 1)
        .flatten(2)
        .topk(rank, dim=2)
        .values[..., -1]
        for start in range(0, num_tokens, step)
    ]
    return torch.cat(borders, dim=1)


def _widest(chosen: Tensor) -> int:
    return int(chosen.sum(dim=1).max()) if chosen.numel() else 0
