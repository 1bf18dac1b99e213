"""How fast parallel (Jacobi) iterations come to what sequential inference computes (Fig. 8)."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from callbacks.analysis.batch_parts import real_tokens
from callbacks.hooks import dialled, has_dial

NOISE = 32.0
"""Rounding errors: so many units in the last place of a typical state, and less, mean nothing."""
TF32_EPS = 2.0**-10
LEAST_POINTS = 3
"""That an exponential is fitted to; it goes through any two."""


@dataclass(frozen=True)
class Fit:
    """``start * rate^n``, fitted to the RMSE of iteration n by least squares of its logarithm."""

    start: float
    rate: float
    """L, what an iteration multiplies the RMSE by; below 1 it converges."""
    r2: float
    """Coefficient of determination of log RMSE, at most 1; nan if all are the same."""
    points: int
    """The first so many iterations, from 0, are fitted."""

    def __call__(self, iteration: int) -> float:
        """Returns its RMSE of an iteration."""
        return self.start * self.rate**iteration


class Convergence:
    """Sums over the states h^(n) of iterations and the fixed point h*; ranks' can be merged."""

    def __init__(self) -> None:
        """Starts empty."""
        self.squares: defaultdict[int, float] = defaultdict(float)
        """Of h^(n) - h*, summed over real tokens, slots and coordinates, by iteration n."""
        self.fixed_squares = 0.0
        """Of h*."""
        self.number = 0
        """Coordinates that the sums are over."""
        self.eps = 0.0
        """Of the arithmetic that states were computed in."""

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.squares)

    def merge(self, other: "Convergence") -> None:
        """Adds what was found for other tokens."""
        for iteration, squares in other.squares.items():
            self.squares[iteration] += squares
        self.fixed_squares += other.fixed_squares
        self.number += other.number
        self.eps = max(self.eps, other.eps)

    def rmse(self) -> list[float]:
        """Returns sqrt(mean (h^(n) - h*)^2) for n = 0, 1, ...

        NOTE(paper): the mean is over everything at once; Appendix B's "average RMSE" does not say
        what it is an average over.
        """
        return [math.sqrt(self.squares[n] / self.number) for n in sorted(self.squares)]

    def noise(self) -> float:
        """Returns the RMSE up to which a difference may be rounding."""
        return NOISE * self.eps * math.sqrt(self.fixed_squares / max(self.number, 1))

    def fit(self) -> Fit | None:
        """Returns the exponential through the iterations in front of the first within the noise.

        None for fewer than ``LEAST_POINTS`` of them.
        """
        rmse, noise = self.rmse(), self.noise()
        points = next((n for n, value in enumerate(rmse) if not value > noise), len(rmse))
        if points < LEAST_POINTS:
            return None
        x, y = np.arange(points, dtype=float), np.log(rmse[:points])
        slope, constant = map(float, np.polyfit(x, y, 1))
        rest = y - np.polyval([slope, constant], x)
        r2 = 1 - float(rest.var() / y.var()) if np.ptp(y) else math.nan
        return Fit(math.exp(constant), math.exp(slope), r2, points)


def measure(model: Any, batch: dict[str, Any], iterations: int) -> Convergence | None:
    """Returns how far iterations 0..``iterations`` are from sequential inference.

    No slot is left out meanwhile: ``tau`` is 0 where there is such a setting. States are those of
    all slots, 0 too.

    Args:
        model: in eval mode.
        batch: few and short rows, as sequential inference is slow.
        iterations: refinement passes.

    Returns:
        None for a model that does not have both ways of inference, or records no states.
    """
    if not (has_dial(model, "inference") and has_dial(model, "eval_iterations")):
        return None
    found, mask = Convergence(), torch.from_numpy(real_tokens(batch))
    fixed: list[Tensor] = []

    def take(*, states: Tensor, **_: Any) -> None:
        fixed.append(_real(states, mask))
        found.eps = _eps(states)

    def compare(*, states: Tensor, iteration: int, **_: Any) -> None:
        found.squares[iteration] = float((_real(states, mask) - fixed[0]).square().sum())

    with _settings(model, inference="sequential"):
        model.recorded(batch, states=take)
    if not fixed:
        return None
    found.number, found.fixed_squares = fixed[0].numel(), float(fixed[0].square().sum())
    with _settings(model, inference="jacobi", eval_iterations=iterations):
        model.recorded(batch, states=compare)
    return found


@contextlib.contextmanager
def _settings(model: Any, **values: Any) -> Iterator[None]:
    """Inside, the model's configuration has these values, and stops no token early."""
    if has_dial(model, "tau"):
        values["tau"] = 0.0
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(dialled(model, name, value))
        yield


def _real(states: Tensor, mask: Tensor) -> Tensor:
    """Returns states (B, T, S, D) of real tokens, float64."""
    return states.detach().cpu().double()[mask]


def _eps(states: Tensor) -> float:
    """Returns the machine epsilon of what states are computed in; called while they are."""
    kind = states.device.type
    dtypes = [states.dtype]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    coarse = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return max(eps, TF32_EPS) if coarse and states.dtype == torch.float32 else eps
