"""Curves of a result over size, and how much size one model saves against another.

``power``: ``L(x) = (c / x) ** alpha`` with L in nats per token and x the number of tokens of the
training text D or of non-embedding parameters N (Kaplan et al., arXiv 2001.08361; section 3.2 of
the Thought Gestalt paper). It is a line in log-log space, which least squares fit. ``log``: ``y =
intercept - slope * log x``, a line over log x, for what may be negative, such as margins.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Law = Literal["power", "log"]


@dataclass(frozen=True)
class Curve:
    """A fitted line over log x: of log y (``power``), or of y itself (``log``)."""

    law: Law
    slope: float
    """How fast the line falls; alpha of a power law, else in the unit of y per factor e of x."""
    intercept: float
    """Of the line; alpha * log c of a power law."""
    r2: float
    """R^2 of the line; nan where all values are equal."""

    @property
    def constant(self) -> float:
        """The x at which a power law is 1, D_c or N_c, and a line over log x is 0.

        nan or infinite for a curve that is flat or nearly.
        """
        return _exp(self.intercept / self.slope) if self.slope else math.nan

    def value_at(self, x: float) -> float:
        """Returns y at a size."""
        line = self.intercept - self.slope * math.log(x)
        return _exp(line) if self.law == "power" else line

    def size_for(self, value: float) -> float:
        """Returns the x at which the curve has this value; nan where values do not fall with x."""
        if self.slope <= 0:
            return math.nan
        line = math.log(value) if self.law == "power" else value
        return _exp((self.intercept - line) / self.slope)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def fit_curve(x: Sequence[float], values: Sequence[float], law: Law = "power") -> Curve:
    """Returns the least-squares line over log x.

    Args:
        x: sizes, positive, at least two different ones.
        values: one a size; positive for a power law.
        law: what is a line: the logarithms of the values, or the values.
    """
    log_x = [math.log(v) for v in x]
    line = [math.log(v) for v in values] if law == "power" else list(values)
    slope, intercept = statistics.linear_regression(log_x, line)
    mean = statistics.fmean(line)
    total = sum((y - mean) ** 2 for y in line)
    rest = sum((y - intercept - slope * v) ** 2 for v, y in zip(log_x, line, strict=True))
    return Curve(law, -slope, intercept, 1 - rest / total if total else math.nan)


@dataclass(frozen=True)
class Multipliers:
    """How many times its own size a baseline would need for the value of a run (m_D or m_N)."""

    measured: float
    """By the baseline's curve at the run's own value: x_baseline(L(x)) / x."""
    fitted: float
    """By both curves: the run's value is taken from the curve of its group."""


def multipliers(baseline: Curve, own: Curve, x: float, value: float) -> Multipliers:
    """Returns the effective multipliers of a run of size ``x``.

    NOTE(paper): section 3.2 defines them with the achieved loss, but its ranges for parameters
    (1.33 to 1.42) and its example (30M for 21M) are those of two fitted curves; with achieved
    losses Table 2 gives 1.28 to 1.50. Both are reported.
    """
    return Multipliers(baseline.size_for(value) / x, baseline.size_for(own.value_at(x)) / x)
