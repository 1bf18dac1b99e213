"""Pictures of thoughts. They are drawn without pyplot, so that no global state is touched."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callbacks.analysis.figures import BLUE, GREEN, GREY, ORANGE, panels

Lines = Sequence[Mapping[str, Any]]


def chunks_figure(lines: Lines) -> Any:
    """Returns the accuracy of each chunk, how often it has no thought, and where errors begin.

    Args:
        lines: see ``measures.chunks``, at least one.
    """
    figure, (accuracy, trivial, wrong) = panels(12, 3.6, 3)
    place = [line["chunk"] for line in lines]
    accuracy.plot(place, [line["accuracy"] for line in lines], "o-", color=BLUE)
    accuracy.set_ylabel("share of right thoughts")
    shown = {"trivial": ("model", BLUE), "gold_trivial": ("gold", GREY)}
    for name, (label, color) in shown.items():
        trivial.plot(place, [line[name] for line in lines], "o-", color=color, label=label)
    trivial.set_ylabel("share without a thought")
    trivial.legend(frameon=False, fontsize=8)
    wrong.bar(place, [line["first_wrong_share"] for line in lines], 0.7, color=ORANGE)
    rest = 1 - sum(line["first_wrong_share"] for line in lines)
    wrong.set_title(f"{rest:.1%} of the queries have none", fontsize=10)
    wrong.set_ylabel("share of queries: first wrong thought")
    for ax in (accuracy, trivial):
        ax.set_ylim(-0.03, 1.03)
    for ax in (accuracy, trivial, wrong):
        _whole(ax, "chunk of the query")
    return figure


def thoughts_figure(lines: Lines) -> Any:
    """Returns the accuracy of gold thoughts by their order in the query.

    Args:
        lines: see ``measures.thoughts``, at least one.
    """
    figure, (ax,) = panels(5.6, 3.6, 1)
    ax.plot(*_points(lines, "thought", "accuracy"), "o-", color=GREEN)
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel("share that is thought so")
    _whole(ax, "gold thought, in the query's order")
    return figure


def rounds_figure(lines: Lines) -> Any:
    """Returns how many rounds queries take.

    Args:
        lines: see ``measures.rounds``, at least one.
    """
    figure, (ax,) = panels(5.6, 3.6, 1)
    ax.bar(*_points(lines, "rounds", "share"), 0.7, color=BLUE)
    ax.set_ylabel("share of queries")
    _whole(ax, "rounds of reading a query")
    return figure


def groups_figure(lines: Lines, name: str) -> Any:
    """Returns accuracy and rounds by group.

    Args:
        lines: see ``measures.groups``, at least one.
        name: what a group counts.
    """
    figure, (accuracy, passes) = panels(9, 3.6, 2)
    shown = {"accuracy_nontrivial": ("gold thoughts", BLUE), "all_right": ("whole queries", ORANGE)}
    for key, (label, color) in shown.items():
        accuracy.plot(*_points(lines, "group", key), "o-", color=color, label=label)
    accuracy.set_ylim(-0.03, 1.03)
    accuracy.set_ylabel("share that is right")
    accuracy.legend(frameon=False, fontsize=8)
    passes.plot(*_points(lines, "group", "rounds"), "o-", color=BLUE, label="rounds")
    passes.plot(*_points(lines, "group", "nontrivial"), "o--", color=GREY, label="thoughts")
    passes.set_ylabel("per query")
    passes.legend(frameon=False, fontsize=8)
    for ax in (accuracy, passes):
        _whole(ax, name)
    return figure


def _points(lines: Lines, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    return np.array([line[x] for line in lines]), np.array([float(line[y]) for line in lines])


def _whole(ax: Any, label: str) -> None:
    """Labels an axis of whole numbers."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
