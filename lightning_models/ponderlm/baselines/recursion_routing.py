"""Who goes on to the next recursion of Mixture-of-Recursions: by rank, or by a threshold."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Routing = Literal["threshold", "topk"]

WIDTH_STEP = 64
"""Threshold routing computes a multiple of so many tokens a row, so that shapes seldom change."""

ROUNDING = 1e-9
"""Taken off before rounding up: 0.55 * 100 in float64 is 55.00000000000001, and means 55."""


class Choice(NamedTuple):
    """Of one recursion: who takes it, and how well the threshold alone would have told."""

    chosen: Tensor
    """Bool (B, T)."""
    router_loss: Tensor
    """Summed cross-entropy, in nats, of sigmoid(logit) against having been chosen."""
    decisions: Tensor
    """Number of its summands: who took the recursion before, where not all of them go on."""


def quota(capacity: float, tokens: int) -> int:
    """Returns ceil(capacity * tokens)."""
    return math.ceil(capacity * tokens - ROUNDING)


def choose(
    logit: Tensor, candidates: Tensor, quotas: Tensor | None, *, everyone: bool = False
) -> Choice:
    """Returns which candidates take a recursion.

    Args:
        logit: the router's, float32 or better (B, T).
        candidates: who took the recursion before, bool (B, T).
        quotas: how many of a row are chosen, int64 (B,), those of the highest logits, of equals
            the earlier; None: all with sigmoid(logit) > 0.5.
        everyone: whether all candidates go on, whatever their logits.
    """
    if everyone or quotas is None:
        nothing = logit.new_zeros(())
        chosen = candidates if everyone else candidates & (logit > 0)
        return Choice(chosen, nothing, nothing)
    order = logit.detach().masked_fill(~candidates, -math.inf)
    order = order.argsort(dim=1, descending=True, stable=True)
    chosen = candidates & (order.argsort(dim=1) < quotas[:, None])
    nats = F.binary_cross_entropy_with_logits(logit, chosen.to(logit.dtype), reduction="none")
    loss = nats.masked_fill(~candidates, 0.0).sum()
    return Choice(chosen, loss, candidates.sum().to(logit.dtype))


def quotas_of(capacity: float, tokens: Tensor) -> Tensor:
    """Returns ``quota`` of each number of tokens, int64 (B,)."""
    return (capacity * tokens.double() - ROUNDING).ceil().long()


def places_of(chosen: Tensor, width: int) -> Tensor:
    """Returns indices (B, width) of the chosen tokens of each row in order, then of others.

    Being behind the chosen ones, the others are hidden from them by causality.
    """
    order = torch.sort((~chosen).to(torch.int8), dim=1, stable=True).indices
    return order[:, :width]


def width_of(chosen: Tensor) -> int:
    """Returns a width that all chosen tokens of the fullest row fit in; 0 if there are none."""
    most = int(chosen.sum(dim=1).max()) if chosen.numel() else 0
    return min(chosen.shape[1], math.ceil(most / WIDTH_STEP) * WIDTH_STEP)
