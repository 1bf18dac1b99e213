"""Power laws of loss over size, and how much size one model saves against another.

``L(x) = (c / x) ** alpha`` with L in nats per token and x the number of tokens of the training
text D or of non-embedding parameters N (Kaplan et al., arXiv 2001.08361; section 3.2 of the Thought
Gestalt paper). It is a line in log-log space, which least squares fit.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PowerLaw:
    """A fitted curve ``log L = intercept - exponent * log x``."""

    exponent: float
    """alpha; positive where the loss falls with size."""
    intercept: float
    """alpha * log c."""
    r2: float
    """R^2 of the fit in log-log space; nan where all losses are equal."""

    @property
    def constant(self) -> float:
        """D_c or N_c, in the unit of x; nan or infinite for a curve that is flat or nearly."""
        return _exp(self.intercept / self.exponent) if self.exponent else math.nan

    def loss_at(self, x: float) -> float:
        """Returns L(x) in nats per token."""
        return _exp(self.intercept - self.exponent * math.log(x))

    def size_for(self, loss: float) -> float:
        """Returns the x at which the curve has this loss; nan where losses do not fall with x."""
        if self.exponent <= 0:
            return math.nan
        return _exp((self.intercept - math.log(loss)) / self.exponent)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def fit_power_law(x: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Returns the least-squares fit in log-log space.

    Args:
        x: sizes, positive, at least two different ones.
        losses: nats per token, positive, one a size.
    """
    log_x, log_loss = [math.log(v) for v in x], [math.log(v) for v in losses]
    slope, intercept = statistics.linear_regression(log_x, log_loss)
    mean = statistics.fmean(log_loss)
    total = sum((y - mean) ** 2 for y in log_loss)
    rest = sum((y - intercept - slope * v) ** 2 for v, y in zip(log_x, log_loss, strict=True))
    return PowerLaw(-slope, intercept, 1 - rest / total if total else math.nan)


@dataclass(frozen=True)
class Multipliers:
    """How many times its own size a baseline would need for the loss of a run (m_D or m_N)."""

    measured: float
    """By the baseline's curve at the run's own loss: x_baseline(L(x)) / x."""
    fitted: float
    """By both curves: the run's loss is taken from the curve of its group."""


def multipliers(baseline: PowerLaw, own: PowerLaw, x: float, loss: float) -> Multipliers:
    """Returns the effective multipliers of a run of size ``x`` and ``loss`` in nats per token.

    NOTE(paper): section 3.2 defines them with the achieved loss, but its ranges for parameters
    (1.33 to 1.42) and its example (30M for 21M) are those of two fitted curves; with achieved
    losses Table 2 gives 1.28 to 1.50. Both are reported.
    """
    return Multipliers(baseline.size_for(loss) / x, baseline.size_for(own.loss_at(x)) / x)
