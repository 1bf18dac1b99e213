"""Early exits of tokens: Ouro's learned gate with its two objectives, and Huginn's criteria."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.ponderlm.baselines.recurrent_depth.config import Recurrence

GAIN_SLOPE = 50.0
"""k in Ouro's stage II."""
GAIN_THRESHOLD = 0.005
"""gamma in Ouro's stage II, in nats."""
FIRST_ENTROPY = 100.0
"""Value with which Huginn's code compares the first entropy, in nats, so that no token exits."""


# ---- the gate (Ouro, Sec. 3.2 to 3.4)


def log_exits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log p_t, of exiting after recurrence t, and log S_(t-1), of not exiting before it.

    p_t = lambda_t S_(t-1), with S_t = (1 - lambda_1) ... (1 - lambda_t), and p_T = S_(T-1) (Eq. 3).

    Args:
        logits: Gate logits (..., T) with lambda = sigmoid(logit). The last one has no effect.
    """
    # times 0: with T = 1 the gate must still have a gradient, for which DDP waits
    zero = 0.0 * logits[..., -1:]
    # log S_0 = 0 to log S_(T-1), (..., T)
    stay = torch.cat((zero, F.logsigmoid(-logits[..., :-1])), dim=-1).cumsum(dim=-1)
    leave = torch.cat((F.logsigmoid(logits[..., :-1]), zero), dim=-1)  # log lambda_t, 0 at T
    return stay + leave, stay


def expected_loss(
    logits: Tensor, weighted: Tensor, losses: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sum_t p_t L_t and H(p) of stage I (Eq. 4), and sum_t t p_t, all summed over targets.

    Args:
        logits: Gate logits (..., T).
        weighted: Sum over t and targets of p_t L_t, with gradient to L_t and constant p_t.
        losses: L_t (..., T) without gradient, 0 at positions without a target.
        valid: Bool (...), true at positions with a target.
    """
    # NOTE(paper): Ouro's released code mixes logits instead of losses if it is given labels.
    log_p, _ = log_exits(logits)
    p = log_p.exp()  # (..., T)
    # the value of ``weighted``, plus the gradient of sum_t p_t L_t by p_t
    value = weighted + ((p - p.detach()) * losses).sum()
    entropy = -(p * log_p).sum(dim=-1)
    recurrences = (p * torch.arange(1, p.shape[-1] + 1, device=p.device)).sum(dim=-1).detach()
    return value, (entropy * valid).sum(), (recurrences * valid).sum()


def gain_loss(logits: Tensor, losses: Tensor, valid: Tensor) -> Tensor:
    """Returns the binary cross-entropies of stage II (Eqs. 5 and 6), summed over targets, in nats.

    Args:
        logits: Gate logits (..., T).
        losses: L_t (..., T) in nats, without gradient.
        valid: Bool (...), true at positions with a target.
    """
    # NOTE(paper): Eq. 6 compares lambda_t with the gain from t - 1 to t for t = 2 to T, but Eq. 3
    # uses lambda_1 to lambda_(T-1), so lambda_1 would not be trained and lambda_T not be used.
    # lambda_t decides whether recurrence t + 1 runs, so here it learns from the gain of t + 1.
    gains = (losses[..., :-1] - losses[..., 1:]).clamp(min=0)  # (..., T-1)
    stay = torch.sigmoid(GAIN_SLOPE * (gains - GAIN_THRESHOLD))
    # 1 - lambda = sigmoid(-logit) is the probability of continuing
    per_recurrence = F.binary_cross_entropy_with_logits(-logits[..., :-1], stay, reduction="none")
    total = (per_recurrence * valid[..., None]).sum() / logits.shape[-1]  # over T, as printed
    return total + 0.0 * logits[..., -1].sum()


# ---- exit rules outside training


class ExitRule:
    """Decides after each recurrence of one token which of the running rows exit."""

    def __init__(self, shape: Recurrence) -> None:
        self.shape = shape
        self._memory: Tensor | None = None
        self._count: Tensor | None = None

    def __call__(
        self, before: Tensor, after: Tensor, scores: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """Returns the mask (n,) of rows that exit after this recurrence.

        Args:
            before: State s_(i-1) (n, D).
            after: State s_i (n, D).
            scores: Next-token logits (n, V), if the rule reads them.
            gate: Gate logits (n,), if the rule reads them.
        """
        rule, threshold = self.shape.exit, self.shape.threshold
        if rule == "latent":
            return (after - before).norm(dim=-1) / after.norm(dim=-1) < threshold
        if rule == "gate":
            # NOTE(paper): Ouro's released code runs all recurrences whatever the threshold.
            assert gate is not None
            log_stay = F.logsigmoid(-gate) + (0.0 if self._memory is None else self._memory)
            self._memory = log_stay
            # 1 - S_t >= threshold, in logarithms: in float32 1 - S_t rounds to 1, but no token may
            # exit at threshold 1
            limit = math.log1p(-threshold) if threshold < 1 else -math.inf
            return log_stay <= limit
        assert scores is not None
        if rule == "argmax":
            return self._stable(scores.argmax(dim=-1)) >= threshold
        log_p = scores.log_softmax(dim=-1)
        if rule == "entropy":
            entropy = -(log_p.exp() * log_p).sum(dim=-1)
            last = torch.full_like(entropy, FIRST_ENTROPY) if self._memory is None else self._memory
            self._memory = entropy
            return (entropy - last).abs() < threshold
        last = torch.zeros_like(log_p).log_softmax(dim=-1) if self._memory is None else self._memory
        self._memory = log_p
        # KL(previous || new), from the uniform distribution at first; clamped against rounding
        return (last.exp() * (last - log_p)).sum(dim=-1).clamp(min=0) < threshold

    def _stable(self, best: Tensor) -> Tensor:
        """Returns the number of recurrences (n,) since the most likely token last changed."""
        if self._memory is None or self._count is None:
            self._count = torch.zeros_like(best)
        else:
            self._count = torch.where(best == self._memory, self._count + 1, 0)
        self._memory = best
        return self._count

    def keep(self, stays: Tensor) -> None:
        """Keeps only the rows in ``stays``, bool (n,)."""
        if self._memory is not None:
            self._memory = self._memory[stays]
        if self._count is not None:
            self._count = self._count[stays]
