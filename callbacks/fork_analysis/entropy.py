"""Forks against the entropy of the output, in windows of tokens (Fig. 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from callbacks.fork_analysis.statistics import TokenRow

WINDOW = 4
"""Tokens of a window, as in the paper."""


@dataclass(frozen=True)
class Windows:
    """Stretches of ``WINDOW`` tokens, without overlap; those at the end of a row are left out."""

    entropy: np.ndarray
    """float64 (windows,): mean output entropy of the tokens, in nats."""
    forks: np.ndarray
    """float64 (windows,): mean forks of the tokens after the last fork layer."""

    @property
    def normalised(self) -> np.ndarray:
        """float64 (windows,): forks as a multiple of the mean over all windows; 0 without forks.

        NOTE(paper): Fig. 4 does not say what its forks are normalised by.
        """
        mean = self.forks.mean() if len(self.forks) else 0.0
        return self.forks / mean if mean else self.forks


def windows(rows: Sequence[TokenRow], reference: bool = False) -> Windows:
    """Returns the windows of all rows.

    Args:
        rows: analysed rows.
        reference: whether the entropies are the reference model's.
    """
    entropies = [row.reference_entropy if reference else row.entropy for row in rows]
    known = [
        (row, entropy) for row, entropy in zip(rows, entropies, strict=True) if entropy is not None
    ]
    return Windows(
        entropy=np.concatenate([np.empty(0), *(_means(entropy) for _, entropy in known)]),
        forks=np.concatenate([np.empty(0), *(_means(row.forks) for row, _ in known)]),
    )


def _means(values: np.ndarray) -> np.ndarray:
    whole = len(values) - len(values) % WINDOW
    return values[:whole].reshape(-1, WINDOW).mean(axis=1)


@dataclass(frozen=True)
class Parabola:
    """``curvature x^2 + slope x + constant``, fitted by least squares."""

    curvature: float
    slope: float
    constant: float
    r2: float
    """Coefficient of determination, at most 1."""

    @property
    def concave(self) -> bool:
        """Whether it opens downwards, as the paper's does."""
        return self.curvature < 0

    @property
    def vertex(self) -> float:
        """The x of its highest or lowest point; nan for a line."""
        return -self.slope / (2 * self.curvature) if self.curvature else float("nan")

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Returns its values at ``x``."""
        return np.polyval([self.curvature, self.slope, self.constant], x)


def fit_parabola(x: np.ndarray, y: np.ndarray) -> Parabola | None:
    """Returns the best parabola; None for fewer than three different x, or for equal y."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(np.unique(x)) < 3 or np.ptp(y) == 0:
        return None
    coefficients = np.polyfit(x, y, 2)
    rest = y - np.polyval(coefficients, x)
    curvature, slope, constant = map(float, coefficients)
    return Parabola(curvature, slope, constant, r2=float(1 - rest.var() / y.var()))
