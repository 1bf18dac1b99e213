"""How many steps a token takes: the router of PonderLM-3 (Sec. 3.2.1) and its mask scores."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.ponderlm.config import PonderConfig

FLOOR = -1e3
"""Attention bias of slots that are not there: exp of it is 0 in every precision, gradients too."""


class Steps(NamedTuple):
    """What a router says of tokens, in float32 or better."""

    log_steps: Tensor
    """log s_k = log Pr(exactly k steps), (..., K+1); outside training -inf on skipped steps."""
    log_tail: Tensor
    """log w_k = log Pr(k steps or more), (..., K+1); 0 at k = 0, never increasing."""
    executed: Tensor
    """The last step k with w_k >= tau (...) int64: those behind it are skipped at inference."""


class Router(nn.Linear):
    """s = softmax(W h0 + b) over 0..K additional steps, from the post-norm state of slot 0.

    Computed in float32 whatever autocast says: the tail reaches far below bf16's precision.
    """

    def __init__(self, config: PonderConfig) -> None:
        """Starts without weights: the first distribution is the same for all tokens."""
        super().__init__(config.dim, config.thinking_steps + 1)
        self.config = config

    def reset(self) -> None:
        """Sets the first weights; the biases make the first distribution.

        NOTE(paper): it has no bias and names no initialisation. ``deep`` starts near the full
        number of steps, where the slots are trained, and stays trainable.
        """
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        if self.config.router_init == "deep":
            with torch.no_grad():
                self.bias[-1] = self.config.router_bias

    def distribution(self, h: Tensor) -> Steps:
        """Returns how many steps tokens take, by the outputs of their slots 0 (..., D).

        Outside training ``alpha`` shifts it, and what is skipped has no share.
        """
        with torch.autocast(h.device.type, enabled=False):
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            logits = F.linear(h.to(wide), self.weight.to(wide), self.bias.to(wide))
        if not self.training and self.config.alpha:
            logits = logits + self.config.alpha * self._shape(logits)
        log_steps, log_tail = step_distribution(logits)
        executed = executed_steps(log_tail, self.config.tau)
        if not self.training:  # what is dropped is below tau, and not given to the others
            behind = torch.arange(logits.shape[-1], device=h.device) > executed[..., None]
            log_steps = log_steps.masked_fill(behind, -math.inf)
        return Steps(log_steps, log_tail, executed)

    def _shape(self, logits: Tensor) -> Tensor:
        """NOTE(paper): alpha on all logits, as printed, cancels in the softmax; hence the ramp."""
        if self.config.alpha_shape == "scalar":
            return torch.ones_like(logits)
        most = logits.shape[-1] - 1
        return torch.arange(most + 1, device=logits.device, dtype=logits.dtype) / max(1, most)


def step_distribution(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log s and log w of router logits (..., K+1).

    w_k = sum_{j >= k} s_j in log space, as a difference of two log-sums: exact where
    log(cumsum(softmax)) would underflow, and exactly 0 at k = 0.
    """
    tails = logits.flip(-1).logcumsumexp(dim=-1).flip(-1)
    return logits.log_softmax(dim=-1), tails - tails[..., :1]


def executed_steps(log_tail: Tensor, tau: float) -> Tensor:
    """Returns K_hat = max{k: w_k >= tau} (...) int64 of log w (..., K+1); K if tau is 0."""
    if tau == 0:
        return torch.full(log_tail.shape[:-1], log_tail.shape[-1] - 1, device=log_tail.device)
    return (log_tail >= math.log(tau)).sum(dim=-1) - 1


def slot_bias(steps: Steps, config: PonderConfig, truncate: bool) -> Tensor:
    """Returns the attention bias (..., K+1) that each slot gets as a key (Sec. 3.2.2).

    Slot 0 has none. Slot k >= 1, whose input is the state behind step k - 1, has log w_k.

    NOTE(paper): its Fig. 7 writes w_(k-1) there; then the first latent would never be damped, and
    what is skipped at inference (slot k where w_k < tau) would not be what training has damped.
    That is ``mask_index: literal``.

    Args:
        steps: of the tokens.
        config: which index.
        truncate: whether slots of skipped steps are hidden altogether.
    """
    shifted = config.mask_index == "shifted"
    damped = steps.log_tail[..., 1:] if shifted else steps.log_tail[..., :-1]
    bias = F.pad(damped, (1, 0)).clamp(min=FLOOR)
    if not truncate:
        return bias
    slots = torch.arange(bias.shape[-1], device=bias.device)
    return bias.masked_fill(slots > steps.executed[..., None], FLOOR)


def integrate(states: Tensor, log_steps: Tensor) -> Tensor:
    """Returns h_hat = sum_k s_k h_k (..., D) of states (..., K+1, D) and log s (Sec. 3.2.3)."""
    return (log_steps.exp()[..., None].to(states.dtype) * states).sum(dim=-2)


def partial_states(states: Tensor, log_steps: Tensor, renormalised: bool) -> Tensor:
    """Returns h(<=i) = sum_{j <= i} s_j h_j for i = 0..K, (..., K+1, D).

    Args:
        states: h (..., K+1, D).
        log_steps: log s (..., K+1), finite at step 0.
        renormalised: whether each is divided by its mass sum_{j <= i} s_j.
    """
    shares = log_steps[..., None, :].expand(*log_steps.shape, log_steps.shape[-1])
    if renormalised:
        shares = shares - log_steps.logcumsumexp(dim=-1)[..., None]
    return shares.exp().tril().to(states.dtype) @ states
