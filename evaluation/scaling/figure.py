"""The picture of a scaling fit (Fig. 2 of the Thought Gestalt paper)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evaluation.picture import label_sizes
from evaluation.scaling.fit import PowerLaw
from evaluation.scaling.runs import Axis, Run

COLOURS = ("#2f6db3", "#d97b29", "#3f9c6b", "#9a5fb0", "#8a8f98", "#b8433f")
MARKERS = "osD^vP"
LABELS = {"tokens": "tokens of the training text D", "parameters": "non-embedding parameters N"}
EXPONENTS = {"tokens": "D", "parameters": "N"}
Y_TICKS = 5


def scaling_figure(
    groups: Mapping[str, Sequence[Run]], fits: Mapping[str, PowerLaw], axis: Axis
) -> Any:
    """Returns loss over size in log-log space: a point a run, a line a group.

    Args:
        groups: runs of each group, smallest first.
        fits: the curve of each group.
        axis: what x is.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    ax = figure.subplots()
    for number, (name, runs) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        sizes, fit = np.array([run.x for run in runs]), fits[name]
        line = np.geomspace(sizes[0], sizes[-1], 50)
        ax.plot(line, [fit.loss_at(x) for x in line], linewidth=1.5, color=colour)
        shown = name.replace("$", r"\$")  # would start a formula
        label = rf"{shown}: $\alpha_{EXPONENTS[axis]}$ = {fit.exponent:.3f}"
        style: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "linestyle": ""}
        ax.plot(sizes, [run.loss for run in runs], color=colour, label=label, **style)
    _dress(ax, [run for runs in groups.values() for run in runs], axis)
    return figure


def _dress(ax: Any, runs: Sequence[Run], axis: Axis) -> None:
    """Sets logarithmic scales with readable ticks, and labels."""
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log")
    ax.set_yscale("log")
    losses = [run.loss for run in runs]
    ticks = np.unique(np.geomspace(min(losses), max(losses), Y_TICKS).round(2))
    ax.set_yticks(ticks, [f"{tick:.2f}" for tick in ticks])
    ax.yaxis.set_minor_locator(NullLocator())
    label_sizes(ax.xaxis)
    ax.set_xlabel(LABELS[axis])
    ax.set_ylabel("loss (nats per token)")
    ax.tick_params(which="both", labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
