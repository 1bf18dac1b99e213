"""The picture of the reversal probe (bottom panels of Fig. 5 of the Thought Gestalt paper)."""

from typing import Any

import numpy as np

from evaluation.reversal.probe import CANDIDATES, CONDITIONS, Answers

COLOURS = {"target": "#3f9c6b", "distractor": "#c0443c"}
MOST_POINTS = 500
WIDTH = 0.5  # of the cloud of points


def reversal_figure(answers: Answers, title: str) -> Any:
    """Returns a panel a condition: NLL of targets (green) and distractors (red).

    A point a pair, means with their standard errors on top; the axis is inverted, so that what
    stands higher is likelier.

    Args:
        answers: of one model.
        title: its name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for ax, condition, nll in zip(panels, CONDITIONS, answers.nll.numpy(), strict=True):
        for place, (candidate, values) in enumerate(zip(CANDIDATES, nll, strict=True)):
            _draw(ax, place, values, COLOURS[candidate])
        ax.set_xticks(range(2), CANDIDATES)
        ax.set_xlim(-0.6, 1.6)
        ax.set_title(condition, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=9)
    panels[0].set_ylabel("NLL of the first answer token (nats, inverted)")
    panels[0].invert_yaxis()
    figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def _draw(ax: Any, place: int, values: np.ndarray, colour: str) -> None:
    """Draws evenly many of the pairs, and their mean with its standard error."""
    shown = values[:: -(-len(values) // MOST_POINTS)]
    # spread by rank, which needs no random numbers
    x = place + WIDTH * (np.arange(len(shown)) * 0.618034 % 1 - 0.5)
    ax.scatter(x, shown, s=8, alpha=0.35, color=colour, linewidths=0)
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    style = {"fmt": "D", "markersize": 7, "capsize": 4, "markeredgecolor": "white"}
    ax.errorbar([place], [values.mean()], yerr=[error], color=colour, **style)
