"""The auxiliary minimum-ponder penalty (Sec. 3.4.2) and what it says in words.

    c_i   = CE of the next token behind at most i steps, the batch's mean, without gradient
    rho_i = 1 - sigmoid(beta (u_i - theta))
    f_k   = which share of the tokens step k is to be taken from
    L     = lambda sum_{k=1..K} mean(the smallest f_k n of the values w_k)

``ours``: u_i = c_i - c_K of renormalised partial sums, f_k = rho_{k-1}: as long as depth k - 1
costs less than theta nats, the tokens that need step k least are pushed to skip it. ``paper``:
u_i = c_i of partial sums as they are, f_k = max(rho_k - rho_{k-1}, 0).

NOTE(paper): as printed the penalty is inert or undefined: rho is below 1e-6 at losses of 2 nats and
more, so that no token is ever in the set, whose mean is then undefined (ours: 0); and where it
acts, it penalises the steps that help.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_models.ponderlm.config import PonderConfig

PRESETS = {"ours": (100.0, 0.05), "paper": (10.0, 0.5)}
"""beta and theta."""


class Penalty(NamedTuple):
    """The penalty of a micro-batch, and what led to it."""

    value: Tensor
    """A scalar with gradient to w: lambda times the sum over steps."""
    ratios: Tensor | None
    """rho_i (K+1,); None for ``expected_steps``."""
    fractions: Tensor | None
    """f_k for k = 1..K, (K,)."""
    counts: Tensor | None
    """n_k (K,), tokens whose w_k is penalised."""


def minimum_ponder_penalty(
    log_tail: Tensor, losses: Tensor | None, config: PonderConfig
) -> Penalty:
    """Returns the penalty that the configuration asks for.

    Args:
        log_tail: log w (N, K+1) of the valid positions.
        losses: c_i (K+1,) in nats; expected_steps does not ask for them.
        config: penalty, its weight, beta and theta.
    """
    tail = log_tail[:, 1:].exp()
    if config.penalty == "expected_steps" or losses is None:
        mean = tail.sum() / max(1, len(tail))
        return Penalty(config.penalty_weight * mean, None, None, None)
    ratios = _ratios(losses.detach(), config)
    ours = config.penalty == "ours"
    fractions = ratios[:-1] if ours else ratios.diff().clamp(min=0)
    counts = (fractions * len(tail)).floor().long()
    value = config.penalty_weight * _bottom_means(tail, counts).sum()
    return Penalty(value, ratios, fractions, counts)


def _ratios(losses: Tensor, config: PonderConfig) -> Tensor:
    """Returns rho_i (K+1,)."""
    beta, theta = PRESETS[config.penalty]
    beta = beta if config.penalty_beta is None else config.penalty_beta
    theta = theta if config.penalty_theta is None else config.penalty_theta
    excess = losses - losses[-1] if config.penalty == "ours" else losses
    return torch.sigmoid(-beta * (excess - theta))


def _bottom_means(values: Tensor, counts: Tensor) -> Tensor:
    """Returns the mean of the smallest ``counts`` (K,) of each column of ``values`` (N, K).

    0 where a count is 0. Nothing waits for the counts, which stay on the device.
    """
    ordered = values.sort(dim=0).values
    chosen = torch.arange(len(values), device=values.device)[:, None] < counts
    return ordered.where(chosen, 0.0).sum(dim=0) / counts.clamp(min=1)
