"""The router of PonderLM-3 (Sec. 3.2.1), its mask scores, and the minimum-ponder penalty."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.ponderlm.config import PonderConfig

FLOOR = -1e3
"""Attention bias of slots that are not there: exp of it is 0 in every precision, gradients too."""


class Steps(NamedTuple):
    """Distribution of the number of steps each token takes, in float32 or better."""

    log_steps: Tensor
    """log s_k = log Pr(exactly k steps), (..., K+1); outside training -inf on skipped steps."""
    log_tail: Tensor
    """log w_k = log Pr(k steps or more), (..., K+1); 0 at k = 0, never increasing."""
    executed: Tensor
    """The last step k with w_k >= tau (...) int64: later ones are skipped at inference."""


class Router(nn.Linear):
    """s = softmax(W h0 + b) over 0..K additional steps, from the post-norm state of slot 0.

    Computed in float32 whatever the autocast dtype: the tail reaches far below bf16's precision.
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
        log_steps, log_tail = step_distribution(logits)  # both (..., K+1)
        executed = executed_steps(log_tail, self.config.tau)  # (...)
        if not self.training:  # what is dropped is below tau, and not given to the others
            skipped = torch.arange(logits.shape[-1], device=h.device) > executed[..., None]
            log_steps = log_steps.masked_fill(skipped, -math.inf)
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
    tails = logits.flip(-1).logcumsumexp(dim=-1).flip(-1)  # (..., K+1), log sum_{j >= k}
    return logits.log_softmax(dim=-1), tails - tails[..., :1]


def executed_steps(log_tail: Tensor, tau: float) -> Tensor:
    """Returns K_hat = max{k: w_k >= tau} (...) int64 of log w (..., K+1); K if tau is 0."""
    if tau == 0:
        return torch.full(log_tail.shape[:-1], log_tail.shape[-1] - 1, device=log_tail.device)
    return (log_tail >= math.log(tau)).sum(dim=-1) - 1


def slot_bias(steps: Steps, config: PonderConfig, truncate: bool) -> Tensor:
    """Returns the attention bias (..., K+1) that each slot gets as a key (Sec. 3.2.2).

    Slot 0 has none. Slot k >= 1, whose input is the state after step k - 1, has log w_k.

    NOTE(paper): its Fig. 7 writes w_(k-1) there; then the first latent would never be damped, and
    what is skipped at inference (slot k where w_k < tau) would not be what training has damped.
    That is ``mask_index: literal``.

    Args:
        steps: Of the tokens.
        config: Which index.
        truncate: Whether slots of skipped steps are hidden altogether.
    """
    shifted = config.mask_index == "shifted"
    damped = steps.log_tail[..., 1:] if shifted else steps.log_tail[..., :-1]  # (..., K)
    bias = F.pad(damped, (1, 0)).clamp(min=FLOOR)  # (..., K+1), 0 at slot 0
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
        states: H (..., K+1, D).
        log_steps: Log s (..., K+1), finite at step 0.
        renormalised: Whether each is divided by its mass sum_{j <= i} s_j.
    """
    shares = log_steps[..., None, :].expand(*log_steps.shape, log_steps.shape[-1])  # (..., i, j)
    if renormalised:
        shares = shares - log_steps.logcumsumexp(dim=-1)[..., None]
    return shares.exp().tril().to(states.dtype) @ states


# ---- the minimum-ponder penalty


PRESETS = {"ours": (100.0, 0.05), "paper": (10.0, 0.5)}
"""beta and theta."""


class Penalty(NamedTuple):
    """The penalty of a micro-batch, and its intermediate values."""

    value: Tensor
    """A scalar with gradient to w: lambda times the sum over steps."""
    ratios: Tensor | None
    """rho_i (K+1,); None for ``expected_steps``."""
    fractions: Tensor | None
    """f_k for k = 1..K, (K,)."""
    counts: Tensor | None
    """n_k (K,), tokens whose w_k is penalised."""


def minimum_ponder_penalty(
    log_tail: Tensor,
    losses: Tensor | None,
    config: PonderConfig,
    valid: Tensor | None = None,
) -> Penalty:
    """Returns the auxiliary minimum-ponder penalty (Sec. 3.4.2) of the configured kind.

        c_i   = CE of the next token after at most i steps, the batch's mean, without gradient
        rho_i = 1 - sigmoid(beta (u_i - theta))
        f_k   = the share of the tokens from which step k is to be taken
        L     = lambda sum_{k=1..K} mean(the smallest f_k n of the values w_k)

    With ``penalty_scale: log`` it is ``penalised_tail`` that is averaged in place of w.

    ``ours``: u_i = c_i - c_K of renormalised partial sums, f_k = rho_{k-1}: as long as depth k - 1
    costs less than theta nats, the tokens that need step k least are pushed to skip it. ``paper``:
    u_i = c_i of partial sums as they are, f_k = max(rho_k - rho_{k-1}, 0).

    NOTE(paper): as printed the penalty is inert or undefined: rho is below 1e-6 at losses of 2 nats
    and more, so that no token is ever in the set, whose mean is then undefined (ours: 0); and where
    it acts, it penalises the steps that help.

    Args:
        log_tail: Log w (N, K+1).
        losses: C_i (K+1,) in nats; expected_steps does not ask for them.
        config: Penalty, its weight, beta and theta.
        valid: Bool (N,), which positions count; None: all.
    """
    tail = penalised_tail(log_tail[:, 1:], config)  # of w_1 to w_K (N, K)
    if valid is None:
        valid = torch.ones_like(tail[:, 0], dtype=torch.bool)
    number = valid.sum()
    if config.penalty == "expected_steps" or losses is None:
        mean = tail.masked_fill(~valid[:, None], 0.0).sum() / number.clamp(min=1)
        return Penalty(config.penalty_weight * mean, None, None, None)
    ratios = _ratios(losses.detach(), config)
    ours = config.penalty == "ours"
    fractions = ratios[:-1] if ours else ratios.diff().clamp(min=0)
    counts = (fractions * number).floor().long()
    tail = tail.masked_fill(~valid[:, None], torch.inf)  # after all others
    value = config.penalty_weight * _bottom_means(tail, counts).sum()
    return Penalty(value, ratios, fractions, counts)


def penalised_tail(log_tail: Tensor, config: PonderConfig) -> Tensor:
    """Returns what the penalty averages, of log w (N, K): 1 where w is 1, never below 0.

    ``linear``: w, as the paper has it. ``log``: 1 - log w / log tau, and 0 from tau down, where
    the step is skipped.

    NOTE(paper): raising the logits of steps k and more raises w_k by w_k (1 - w_k), which vanishes
    with w_k long before that is below tau; it raises log w_k by 1 - w_k.
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

    0 where a count is 0. Nothing waits for the counts, which stay on the device.
    """
    ordered = values.sort(dim=0).values  # (N, K)
    chosen = torch.arange(len(values), device=values.device)[:, None] < counts
    return ordered.where(chosen, 0.0).sum(dim=0) / counts.clamp(min=1)
