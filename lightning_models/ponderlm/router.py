"""The router of PonderLM-3 (Sec. 3.2.1), its mask scores and the minimum-ponder penalty."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.ponderlm.config import PonderConfig

FLOOR = -1e3
"""Attention bias of absent slots: its exp and the gradient of that are 0 in every precision."""


class Steps(NamedTuple):
    """Distribution of the number of steps each token takes, in float32 or better."""

    log_steps: Tensor
    """log s_k = log Pr(exactly k steps), (..., K+1); -inf for skipped steps outside training."""
    log_tail: Tensor
    """log w_k = log Pr(at least k steps), (..., K+1); 0 at k = 0, non-increasing."""
    executed: Tensor
    """Last step k with w_k >= tau (...) int64; later ones are skipped at inference."""


class Router(nn.Linear):
    """s = softmax(W h0 + b) over 0 to K additional steps, from the post-norm state of slot 0.

    Computed in float32 under autocast too, since tail probabilities are far below bf16 precision.
    """

    def __init__(self, config: PonderConfig) -> None:
        super().__init__(config.dim, config.thinking_steps + 1)
        self.config = config

    def reset(self) -> None:
        """Initialises the weights to zero and the biases to the initial distribution.

        NOTE(paper): the paper has no bias and specifies no initialisation. ``deep`` starts near K
        steps, where all slots are trained, and stays trainable.
        """
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        if self.config.router_init == "deep":
            with torch.no_grad():
                self.bias[-1] = self.config.router_bias

    def distribution(self, h: Tensor) -> Steps:
        """Returns the step distribution of tokens, from the outputs of their slots 0 (..., D).

        Outside of training it is shifted by ``alpha``, and skipped steps have no share.
        """
        with torch.autocast(h.device.type, enabled=False):
            acc_dtype = torch.promote_types(self.weight.dtype, torch.float32)
            logits = F.linear(h.to(acc_dtype), self.weight.to(acc_dtype), self.bias.to(acc_dtype))
        if not self.training and self.config.alpha:
            logits = logits + self.config.alpha * self._shape(logits)
        log_steps, log_tail = step_distribution(logits)  # both (..., K+1)
        executed = executed_steps(log_tail, self.config.tau)  # (...)
        if not self.training:  # the mass of skipped steps is below tau and is not redistributed
            skipped = torch.arange(logits.shape[-1], device=h.device) > executed[..., None]
            log_steps = log_steps.masked_fill(skipped, -math.inf)
        return Steps(log_steps, log_tail, executed)

    def _shape(self, logits: Tensor) -> Tensor:
        # NOTE(paper): alpha on all logits, as printed, cancels in the softmax, so we use a ramp
        if self.config.alpha_shape == "scalar":
            return torch.ones_like(logits)
        steps = logits.shape[-1] - 1
        return torch.arange(steps + 1, device=logits.device, dtype=logits.dtype) / max(1, steps)


def step_distribution(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log s and log w of router logits (..., K+1).

    w_k = sum_{j >= k} s_j is computed in log space as a difference of two log-sums, which is
    accurate where log(cumsum(softmax)) would underflow, and exactly 0 at k = 0.
    """
    tails = logits.flip(-1).logcumsumexp(dim=-1).flip(-1)  # (..., K+1), log sum_{j >= k}
    return logits.log_softmax(dim=-1), tails - tails[..., :1]


def executed_steps(log_tail: Tensor, tau: float) -> Tensor:
    """Returns K_hat = max{k: w_k >= tau} (...) int64 for log w (..., K+1), or K if tau is 0."""
    if tau == 0:
        return torch.full(log_tail.shape[:-1], log_tail.shape[-1] - 1, device=log_tail.device)
    # w is non-increasing and w_0 = 1, so counting the steps above tau gives the last one plus 1
    return (log_tail >= math.log(tau)).sum(dim=-1) - 1


def slot_bias(steps: Steps, config: PonderConfig, truncate: bool) -> Tensor:
    """Returns the attention bias (..., K+1) of each slot as a key (Sec. 3.2.2).

    Slot 0 has bias 0. Slot k >= 1, whose input is the state after step k - 1, has log w_k.

    NOTE(paper): Fig. 7 has w_(k-1) instead (``mask_index: literal``). The first latent would then
    never be attenuated, and the slots skipped at inference (w_k < tau) would differ from the slots
    attenuated in training.

    Args:
        steps: Step distribution of the tokens.
        config: Configuration with ``mask_index``.
        truncate: Whether to hide the slots of skipped steps completely.
    """
    shifted = config.mask_index == "shifted"
    log_w = steps.log_tail[..., 1:] if shifted else steps.log_tail[..., :-1]  # (..., K)
    bias = F.pad(log_w, (1, 0)).clamp(min=FLOOR)  # (..., K+1), 0 at slot 0
    if not truncate:
        return bias
    slots = torch.arange(bias.shape[-1], device=bias.device)
    return bias.masked_fill(slots > steps.executed[..., None], FLOOR)


def integrate(states: Tensor, log_steps: Tensor) -> Tensor:
    """Returns h_hat = sum_k s_k h_k (..., D) for states (..., K+1, D) and log s (Sec. 3.2.3)."""
    return (log_steps.exp()[..., None].to(states.dtype) * states).sum(dim=-2)


def partial_states(states: Tensor, log_steps: Tensor, renormalised: bool) -> Tensor:
    """Returns h(<=i) = sum_{j <= i} s_j h_j for i = 0 to K, (..., K+1, D).

    Args:
        states: h (..., K+1, D).
        log_steps: log s (..., K+1), finite at step 0.
        renormalised: Whether to divide each sum by its mass sum_{j <= i} s_j.
    """
    shares = log_steps[..., None, :].expand(*log_steps.shape, log_steps.shape[-1])  # (..., i, j)
    if renormalised:
        shares = shares - log_steps.logcumsumexp(dim=-1)[..., None]
    # the lower triangle keeps j <= i
    return shares.exp().tril().to(states.dtype) @ states


# ---- the minimum-ponder penalty


PRESETS = {"ours": (100.0, 0.05), "paper": (10.0, 0.5)}
"""beta and theta by the name of the penalty."""


class Penalty(NamedTuple):
    """The penalty of a micro-batch and its intermediate values, None for ``expected_steps``."""

    value: Tensor
    """Scalar with gradient to w, lambda times the sum over steps."""
    ratios: Tensor | None
    """rho_i (K+1,)."""
    fractions: Tensor | None
    """f_k for k = 1 to K, (K,)."""
    counts: Tensor | None
    """n_k (K,), number of tokens whose w_k is penalised."""


def minimum_ponder_penalty(
    log_tail: Tensor,
    losses: Tensor | None,
    config: PonderConfig,
    valid: Tensor | None = None,
) -> Penalty:
    """Returns the minimum-ponder penalty (Sec. 3.4.2) of the configured type.

        c_i   = mean CE of the next token after at most i steps in the batch, without gradient
        rho_i = 1 - sigmoid(beta (u_i - theta))
        f_k   = fraction of the tokens that should not take step k
        L     = lambda sum_{k=1..K} mean(the f_k n smallest values of w_k)

    With ``penalty_scale: log``, ``penalised_tail`` replaces w in the mean.

    ``ours``: u_i = c_i - c_K of renormalised partial sums, f_k = rho_{k-1}. As long as depth k - 1
    costs less than theta nats, the tokens that need step k least are pushed to skip it. ``paper``:
    u_i = c_i of unnormalised partial sums, f_k = max(rho_k - rho_{k-1}, 0).

    NOTE(paper): as printed the penalty is inert or undefined. At losses of 2 nats or more rho is
    below 1e-6, so the set of tokens is empty and its mean undefined (0 here); elsewhere it
    penalises the steps that help.

    Args:
        log_tail: log w (N, K+1).
        losses: c_i (K+1,) in nats, not needed for ``expected_steps``.
        config: Penalty, its weight, beta and theta.
        valid: Bool (N,), true for tokens that count. Defaults to all.
    """
    tail = penalised_tail(log_tail[:, 1:], config)  # (N, K), from w_1 to w_K
    if valid is None:
        valid = torch.ones_like(tail[:, 0], dtype=torch.bool)
    num_valid = valid.sum()
    if config.penalty == "expected_steps" or losses is None:
        mean = tail.masked_fill(~valid[:, None], 0.0).sum() / num_valid.clamp(min=1)
        return Penalty(config.penalty_weight * mean, None, None, None)
    ratios = _ratios(losses.detach(), config)
    ours = config.penalty == "ours"
    fractions = ratios[:-1] if ours else ratios.diff().clamp(min=0)
    counts = (fractions * num_valid).floor().long()  # (K,), stays on the device
    tail = tail.masked_fill(~valid[:, None], torch.inf)  # sorted after all valid ones
    value = config.penalty_weight * _bottom_means(tail, counts).sum()
    return Penalty(value, ratios, fractions, counts)


def penalised_tail(log_tail: Tensor, config: PonderConfig) -> Tensor:
    """Returns the penalised quantity for log w (N, K), in [0, 1] and equal to 1 where w is 1.

    ``linear`` is w as in the paper. ``log`` is 1 - log w / log tau, and 0 below tau, where the step
    is skipped.

    NOTE(paper): the derivative of w_k by the logits of steps k and more is w_k (1 - w_k), which
    vanishes long before w_k falls below tau. The derivative of log w_k is 1 - w_k.
    """
    if config.penalty_scale == "linear":
        return log_tail.exp()
    floor = math.log(config.tau) if config.tau else FLOOR
    return (1 - log_tail / floor).clamp(min=0)


def _ratios(losses: Tensor, config: PonderConfig) -> Tensor:
    """Returns rho_i (K+1,)."""
    beta, theta = PRESETS[config.penalty]
    beta = beta if config.penalty_beta is None else config.penalty_beta
    theta = theta if config.penalty_theta is None else config.penalty_theta
    excess = losses - losses[-1] if config.penalty == "ours" else losses
    return torch.sigmoid(-beta * (excess - theta))


def _bottom_means(values: Tensor, counts: Tensor) -> Tensor:
    """Returns the mean of the smallest ``counts`` (K,) of each column of ``values`` (N, K).

    The mean of none is 0. The counts stay on the device, without a synchronisation.
    """
    ordered = values.sort(dim=0).values  # (N, K), ascending
    is_bottom = torch.arange(len(values), device=values.device)[:, None] < counts
    return ordered.where(is_bottom, 0.0).sum(dim=0) / counts.clamp(min=1)
