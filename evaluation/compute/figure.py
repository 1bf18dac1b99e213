"""The picture of compute shares (Fig. 3 of the Latent-Thought paper)."""

import itertools
from collections.abc import Sequence
from typing import Any

from evaluation.compute.count import Compute

COLOURS = {
    "output": "#8a8f98",
    "self_attention": "#2f6db3",
    "cross_attention": "#d97b29",
    "feed_forward": "#3f9c6b",
}
OTHERS = ("#a2518f", "#b8a12c", "#4fb0c6", "#c44e52")
LEAST_TOLD = 0.05
"""Smaller shares have no room for their number."""


def compute_figure(counts: Sequence[Compute], labels: Sequence[str], parts: Sequence[str]) -> Any:
    """Returns a bar a model, divided by what one pass of it is spent on.

    Args:
        counts: of the models, from top to bottom.
        labels: of the models.
        parts: which shares, from left to right.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.4 + 0.5 * len(counts)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(counts)
    for part, colour in zip(parts, _colours(parts), strict=True):
        widths = [count.share(part) for count in counts]
        name = part.replace("_", " ")
        bars = axes.barh(range(len(counts)), widths, 0.7, left, color=colour, label=name)
        texts = [f"{100 * width:.0f} %" if width >= LEAST_TOLD else "" for width in widths]
        axes.bar_label(bars, texts, label_type="center", color="white", fontsize=8)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(counts)), [_name(*pair) for pair in zip(labels, counts, strict=True)])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the FLOPs of one pass")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(parts), frameon=False, fontsize=9)
    return figure


def _name(label: str, count: Compute) -> str:
    from matplotlib.ticker import EngFormatter

    short = EngFormatter(sep="", places=1).format_eng
    plain = label.replace("$", r"\$")  # it would start a formula
    sizes = f"{short(count.parameters)} parameters, {short(count.training)} training FLOPs/token"
    return f"{plain}\n{sizes}"


def _colours(parts: Sequence[str]) -> list[str]:
    """Returns a colour a part; parts of a method's own take the rest in turn."""
    others = itertools.cycle(OTHERS)
    return [COLOURS.get(part) or next(others) for part in parts]
