"""The picture of a scaling fit (Fig. 2 and 5 of the Thought Gestalt paper)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evaluation.picture import label_sizes
from evaluation.scaling.fit import Curve
from evaluation.scaling.runs import LOSS_KEY, Axis, Run

COLOURS = ("#2f6db3", "#d97b29", "#3f9c6b", "#9a5fb0", "#8a8f98", "#b8433f")
MARKERS = "osD^vP"
LABELS = {"tokens": "tokens of the training text D", "parameters": "non-embedding parameters N"}
EXPONENTS = {"tokens": "D", "parameters": "N"}
Y_TICKS = 5


def scaling_figure(
    groups: Mapping[str, Sequence[Run]],
    fits: Mapping[str, Curve],
    axis: Axis,
    y: str = LOSS_KEY,
) -> Any:
    """Returns values over size where their curves are lines: a point a run, a line a group.

    Args:
        groups: runs of each group, smallest first.
        fits: the curve of each group.
        axis: what x is.
        y: key of the values.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    ax = figure.subplots()
    for number, (name, runs) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        sizes, fit = np.array([run.x for run in runs]), fits[name]
        line = np.geomspace(sizes[0], sizes[-1], 50)
        ax.plot(line, [fit.value_at(x) for x in line], linewidth=1.5, color=colour)
        shown = name.replace("$", r"\$")  # would start a formula
        sign = rf"$\alpha_{EXPONENTS[axis]}$" if fit.law == "power" else "slope"
        label = f"{shown}: {sign} = {fit.slope:.3f}"
        style: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "linestyle": ""}
        ax.plot(sizes, [run.y for run in runs], color=colour, label=label, **style)
    ax.set_xscale("log")
    if all(fit.law == "power" for fit in fits.values()):
        _log_values(ax, [run.y for runs in groups.values() for run in runs])
    label_sizes(ax.xaxis)
    ax.set_xlabel(LABELS[axis])
    ax.set_ylabel("loss (nats per token)" if y == LOSS_KEY else y.replace("_", " "))
    ax.tick_params(which="both", labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    return figure


def _log_values(ax: Any, values: Sequence[float]) -> None:
    """Sets a logarithmic scale of y with readable ticks."""
    from matplotlib.ticker import NullLocator

    ax.set_yscale("log")
    ticks = np.unique(np.geomspace(min(values), max(values), Y_TICKS).round(2))
    ax.set_yticks(ticks, [f"{tick:.2f}" for tick in ticks])
    ax.yaxis.set_minor_locator(NullLocator())
