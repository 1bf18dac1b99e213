"""Convergence of parallel (Jacobi) iterations to the result of sequential inference.

``StepAllocation`` reports it as Fig. 8 of *PonderLM-3* (arXiv 2603.02023).
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from callbacks.analysis.base import real_tokens
from callbacks.analysis.report import BLUE, GREY, ORANGE, Tables, draw_lines, finish, panels
from callbacks.dials import dialled, has_dial

NOISE = 32.0
"""Assumed rounding error, in units in the last place of a typical state."""
TF32_EPS = 2.0**-10
MIN_POINTS = 3
"""Minimum number of points for fitting an exponential, which passes through any two."""


def collect_iterations(model: Any, batch: dict[str, Any], iterations: int) -> pd.DataFrame:
    """Returns the distance from iterations 0..``iterations`` to sequential inference (Fig. 8).

    No slot is skipped: ``tau``, if the model has it, is set to 0. Every slot has a state, including
    slot 0. Rows should be few and short, as sequential inference is slow.

    Returns:
        One row per ``iteration`` n: the sums ``squares`` of (h^(n) - h*)^2 and ``fixed`` of h*^2,
        over the coordinates of real tokens and slots; their ``number``; and ``eps``, the machine
        epsilon. Empty for a model without both modes of inference or without recorded states.
    """
    if not (has_dial(model, "inference") and has_dial(model, "eval_iterations")):
        return pd.DataFrame()
    mask = torch.from_numpy(real_tokens(batch))
    fixed: list[Tensor] = []
    rows: list[dict[str, float]] = []
    common: dict[str, float] = {}

    def take(*, states: Tensor, **_: Any) -> None:
        """Records the sequential states (B, T, D), the fixed point of the iterations."""
        fixed.append(states.detach().cpu().double()[mask])
        squares = float(fixed[0].square().sum())
        common.update(fixed=squares, number=fixed[0].numel(), eps=_eps(states))

    def compare(*, states: Tensor, iteration: int, **_: Any) -> None:
        """Adds the squared distance from the states of an iteration to the fixed point."""
        distance = states.detach().cpu().double()[mask] - fixed[0]
        rows.append({"iteration": iteration, "squares": float(distance.square().sum()), **common})

    with _settings(model, inference="sequential"):
        model.recorded(batch, states=take)
    if fixed:
        with _settings(model, inference="jacobi", eval_iterations=iterations):
            model.recorded(batch, states=compare)
    return pd.DataFrame(rows)


@contextlib.contextmanager
def _settings(model: Any, **values: Any) -> Iterator[None]:
    """Sets configuration values within the context, with early exits off."""
    if has_dial(model, "tau"):
        values["tau"] = 0.0
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(dialled(model, name, value))
        yield


def _eps(states: Tensor) -> float:
    """Returns the machine epsilon of the arithmetic that computes states, including autocast."""
    device_type = states.device.type
    dtypes = [states.dtype]
    if torch.is_autocast_enabled(device_type):
        dtypes.append(torch.get_autocast_dtype(device_type))
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    coarse = device_type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return max(eps, TF32_EPS) if coarse and states.dtype == torch.float32 else eps


class IterationFit(NamedTuple):
    """``start * rate^n``, fitted to the RMSE of iteration n by least squares on a log scale."""

    start: float
    rate: float
    """L, by which each iteration multiplies the RMSE; below 1 the iterations converge."""
    r2: float
    """Coefficient of determination of log RMSE, at most 1; nan if all values are equal."""
    points: int
    """Number of fitted iterations, from iteration 0."""


def rmse_by_iteration(rows: pd.DataFrame) -> tuple[np.ndarray, float]:
    """Returns sqrt(mean (h^(n) - h*)^2) for n = 0, 1, ..., and the rounding error.

    NOTE(paper): the mean is over all tokens, slots and coordinates; Appendix B does not define its
    "average RMSE".

    ``rows`` are rows from ``collect_iterations``; rows from several ranks are summed.
    """
    if not len(rows):
        return np.empty(0), 0.0
    sums = rows.groupby("iteration")[["squares", "fixed", "number"]].sum()
    noise = NOISE * rows["eps"].max() * np.sqrt(sums["fixed"] / sums["number"]).iloc[0]
    return np.sqrt(sums["squares"] / sums["number"]).to_numpy(), float(noise)


def fit_iterations(rmse: np.ndarray, noise: float) -> IterationFit | None:
    """Fits an exponential to the iterations before the RMSE first reaches the noise.

    Returns None if there are fewer than ``MIN_POINTS`` of them.
    """
    points = next((n for n, value in enumerate(rmse) if not value > noise), len(rmse))
    if points < MIN_POINTS:
        return None
    x, y = np.arange(points, dtype=float), np.log(rmse[:points])
    slope, constant = map(float, np.polyfit(x, y, 1))
    rest = y - np.polyval([slope, constant], x)
    r2 = 1 - float(rest.var() / y.var()) if np.ptp(y) else math.nan
    return IterationFit(math.exp(constant), math.exp(slope), r2, points)


def convergence(rmse: np.ndarray, fit: IterationFit | None) -> pd.DataFrame:
    """Returns a table with one row per Jacobi iteration (Fig. 8).

    The columns are ``rmse``, the distance to the fixed point, ``fit``, the value of the
    exponential, and ``fitted``, 1 for the points that were fitted.
    """
    n = np.arange(len(rmse))
    fitted, points = np.full(len(rmse), math.nan), 0
    if fit is not None:
        fitted, points = fit.start * fit.rate**n, fit.points
    columns = {"iteration": n, "rmse": rmse, "fit": fitted, "fitted": (n < points).astype(int)}
    return pd.DataFrame(columns)


def convergence_figure(tables: Tables, noise: float = 0.0) -> Any:
    """Draws the distance from Jacobi iterations to the fixed point (Fig. 8).

    Args:
        tables: Tables, including ``convergence``.
        noise: Rounding error from ``rmse_by_iteration``. If 0, no line is drawn for it.
    """
    table = tables["convergence"]
    fitted = table[table["fitted"] == 1]
    fit = fit_iterations(fitted["rmse"].to_numpy(), 0.0)
    figure, (ax,) = panels(6, 3.8, 1)
    if table["rmse"].max() > 0:
        ax.set_yscale("log")
    if noise and table["rmse"].max() > 0:
        ax.axhline(noise, color=GREY, linestyle=":", label="rounding")
    ax.plot(table["iteration"], table["rmse"].replace(0, math.nan), "o", color=BLUE, label="RMSE")
    if fit is not None:
        label = f"fit: L = {fit.rate:.3g}, R² = {fit.r2:.4f}"
        draw_lines(ax, fitted, "iteration", {"fit": (label, ORANGE)}, "-")
    finish(ax, "Jacobi iteration n", "RMSE to sequential inference", whole=True)
    return figure
