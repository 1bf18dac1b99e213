"""When a token exits: Ouro's learned gate and its two objectives, and Huginn's criteria."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.ponderlm.baselines.recurrent_depth.config import Recurrence

GAIN_SLOPE = 50.0
"""k of Ouro's stage II."""
GAIN_THRESHOLD = 0.005
"""gamma of Ouro's stage II, in nats."""
FIRST_ENTROPY = 100.0
"""What Huginn's code compares the first entropy with, in nats: no token exits there."""


# ---- the gate (Ouro, Sec. 3.2 to 3.4)


def log_exits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log p_t and log S_(t-1) (..., T): exiting after recurrence t, and not before it.

    p_t = lambda_t S_(t-1), with S_t = (1 - lambda_1) .. (1 - lambda_t), and p_T = S_(T-1) (Eq. 3).

    Args:
        logits: The gate's (..., T), of lambda = sigmoid(logit); the last one counts nothing.
    """
    # a factor of 0 gives the gate a gradient where T is 1, which DDP waits for
    last = 0.0 * logits[..., -1:]
    stay = torch.cat((last, F.logsigmoid(-logits[..., :-1])), dim=-1).cumsum(dim=-1)
    leave = torch.cat((F.logsigmoid(logits[..., :-1]), last), dim=-1)
    return stay + leave, stay


def expected_loss(
    logits: Tensor, weighted: Tensor, losses: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sums over targets: sum_t p_t L_t and H(p) of stage I (Eq. 4), and sum_t t p_t.

    Args:
        logits: The gate's (..., T).
        weighted: Sum over t and targets of p_t L_t with the gradient to L_t, p_t constant.
        losses: L_t (..., T) without gradient, 0 where there is no target.
        valid: Bool (...), where there is a target.
    """
    log_p, _ = log_exits(logits)
    p = log_p.exp()
    # the value of `weighted`, and the gradient of sum_t p_t L_t with respect to p_t
    value = weighted + ((p - p.detach()) * losses).sum()
    entropy = -(p * log_p).sum(dim=-1)
    recurrences = (p * torch.arange(1, p.shape[-1] + 1, device=p.device)).sum(dim=-1).detach()
    return value, (entropy * valid).sum(), (recurrences * valid).sum()


def gain_loss(logits: Tensor, losses: Tensor, valid: Tensor) -> Tensor:
    """Returns stage II's loss, summed over targets, in nats: binary cross-entropies (Eq. 5, 6).

    Args:
        logits: The gate's (..., T).
        losses: L_t (..., T) in nats, without gradient.
        valid: Bool (...), where there is a target.
    """
    # NOTE(paper): Eq. 6 holds lambda_t against the gain from t - 1 to t, t = 2..T, but Eq. 3 uses
    # lambda_1 to lambda_(T-1): lambda_1 would learn nothing, and lambda_T for nothing. lambda_t
    # decides whether recurrence t + 1 runs, so here it learns from the gain of t + 1.
    gains = (losses[..., :-1] - losses[..., 1:]).clamp(min=0)  # (..., T-1)
    stay = torch.sigmoid(GAIN_SLOPE * (gains - GAIN_THRESHOLD))
    # 1 - lambda = sigmoid(-logit) is the probability to go on
    each = F.binary_cross_entropy_with_logits(-logits[..., :-1], stay, reduction="none")
    total = (each * valid[..., None]).sum() / logits.shape[-1]  # over T, as printed
    return total + 0.0 * logits[..., -1].sum()


# ---- rules outside training


class ExitRule:
    """Decides for the rows that are still at their token whether they exit; one token long."""

    def __init__(self, shape: Recurrence) -> None:
        self.shape = shape
        self._memory: Tensor | None = None
        self._count: Tensor | None = None

    def __call__(
        self, before: Tensor, after: Tensor, scores: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """Returns which rows exit after this recurrence, bool (n,).

        Args:
            before: S_(i-1) (n, D).
            after: S_i (n, D).
            scores: Logits (n, V), where the rule reads them.
            gate: The gate's logits (n,), where the rule reads them.
        """
        rule, threshold = self.shape.exit, self.shape.threshold
        if rule == "latent":
            return (after - before).norm(dim=-1) / after.norm(dim=-1) < threshold
        if rule == "gate":
            assert gate is not None
            log_stay = F.logsigmoid(-gate) + (0.0 if self._memory is None else self._memory)
            self._memory = log_stay
            return -log_stay.expm1() >= threshold  # 1 - S_t, the cumulated probability
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
        # KL(previous || new), first from the uniform distribution; rounding may make it negative
        return (last.exp() * (last - log_p)).sum(dim=-1).clamp(min=0) < threshold

    def _stable(self, best: Tensor) -> Tensor:
        """Returns for how many recurrences the most likely token (n,) has stayed the same."""
        if self._memory is None or self._count is None:
            self._count = torch.zeros_like(best)
        else:
            self._count = torch.where(best == self._memory, self._count + 1, 0)
        self._memory = best
        return self._count

    def keep(self, stays: Tensor) -> None:
        """Forgets the rows that have exited, bool (n,)."""
        if self._memory is not None:
            self._memory = self._memory[stays]
        if self._count is not None:
            self._count = self._count[stays]
