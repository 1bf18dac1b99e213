"""Pictures of an analysis. They are drawn without pyplot, so that no global state is touched."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callbacks.analysis.figures import BLUE, GREEN, GREY, ORANGE, panels
from callbacks.gate_analysis.ages import Ages, Findings
from callbacks.gate_analysis.history import (
    FEED_FORWARD,
    MEMORY_ATTENTION,
    SELF_ATTENTION,
    History,
    shares_over,
)

LABELS = {
    SELF_ATTENTION: ("within-sentence self-attention", BLUE),
    MEMORY_ATTENTION: ("working-memory cross-attention", ORANGE),
    FEED_FORWARD: ("feed-forward (MLP)", GREEN),
}


def gates_figure(history: History) -> Any:
    """Returns Fig. 7: g_mem of every layer over training.

    Args:
        history: at least one row of gates.
    """
    figure, (ax,) = panels(6.4, 4.0, 1)
    label, clock = history.clock
    for color, (layer, _), values in zip(
        _shades(len(history.places)), history.places, history.values.T, strict=True
    ):
        marker = "o" if len(clock) == 1 else None
        ax.plot(clock, values, color=color, marker=marker, label=f"layer {layer}")
    ax.axhline(1.0, color=GREY, linewidth=1, linestyle=":", zorder=0)
    ax.set_xlabel(label)
    ax.set_ylabel("memory gate $g_{mem}$")
    ax.legend(frameon=False, fontsize=8)
    return figure


def shares_figure(history: History) -> Any:
    """Returns Fig. 8: the gradient share of each component, mean over the steps, and over training.

    Args:
        history: at least one row of gradient norms.
    """
    figure, (pie, over) = panels(11, 3.8, 2)
    found = {part: values for part, values in shares_over(history).items() if values.any()}
    labels, colors = zip(*(LABELS[part] for part in found), strict=True)
    means = [values.mean() for values in found.values()]
    pie.pie(means, colors=colors, startangle=90, autopct="%.0f%%", wedgeprops={"edgecolor": "w"})
    pie.set_title(f"mean over {len(history.rows)} steps", fontsize=10)
    label, clock = history.clock
    for (name, color), values in zip((LABELS[part] for part in found), found.values(), strict=True):
        over.plot(clock, values, color=color, label=name, marker="o" if len(clock) == 1 else None)
    over.set_ylim(0, 1)
    over.set_xlabel(label)
    over.set_ylabel("share of the gradient")
    figure.legend(
        *over.get_legend_handles_labels(),
        frameon=False,
        fontsize=8,
        ncols=len(labels),
        loc="outside lower center",
    )
    return figure


def reach_figure(reach: Ages, memory_size: int | None) -> Any:
    """Returns Fig. 6 as numbers: how far back the gradient of a sentence's loss reaches.

    Args:
        reach: norms by age, at least of age 1.
        memory_size: M, after which sentences have left memory; None: it is not marked.
    """
    figure, (ax,) = panels(6.4, 4.0, 1)
    means = reach.means
    ages = np.arange(1, len(means) + 1)
    # a logarithm has no place for gradients that are exactly zero
    shown = np.where(means > 0, means, np.nan) if means.any() else means
    ax.plot(ages, shown, "o-", color=BLUE, markersize=3)
    if means.any():
        ax.set_yscale("log")
    if memory_size is not None and len(means) > memory_size:
        ax.axvspan(memory_size + 0.5, len(means) + 0.5, color=GREY, alpha=0.15, linewidth=0)
        ax.axvline(memory_size + 0.5, color=GREY, linewidth=1)
        text = f"beyond memory (M = {memory_size})"
        ax.text(
            memory_size + 1, 0.97, text, fontsize=8, va="top", transform=ax.get_xaxis_transform()
        )
    ax.set_xlabel("age j of the sentence")
    ax.set_ylabel("norm of d nll$_t$ / d s$_{t-j}$" + ("" if means.any() else ", all exactly 0"))
    return figure


def attention_figure(findings: Findings) -> Any:
    """Returns the weight of every age in memory, layer by layer, as a map and as lines.

    Args:
        findings: with attention of at least one layer.
    """
    layers = sorted(findings.attention)
    spreads = [findings.attention[layer].spread for layer in layers]
    figure, (ax, lines) = panels(12, 1.8 + 0.35 * max(6, len(layers)), 2)
    most = max(map(len, spreads))
    grid = np.stack([np.pad(spread, (0, most - len(spread))) for spread in spreads])
    image = ax.imshow(
        grid, cmap="Blues", vmin=0, aspect="auto", extent=(0.5, most + 0.5, len(layers) - 0.5, -0.5)
    )
    ax.set_yticks(range(len(layers)), [f"layer {layer}" for layer in layers])
    figure.colorbar(image, ax=ax, label="attention weight")
    _spread_lines(lines, findings, layers)
    for each in (ax, lines):
        each.set_xlabel("age of the sentence in memory")
    return figure


def _spread_lines(ax: Any, findings: Findings, layers: Sequence[int]) -> None:
    for color, layer in zip(_shades(len(layers)), layers, strict=True):
        spread = findings.attention[layer].spread
        label = f"layer {layer}, mean age {findings.mean_age(layer):.1f}"
        ax.plot(range(1, len(spread) + 1), spread, ".-", color=color, label=label)
    even = findings.attention[layers[0]].even
    ax.plot(range(1, len(even) + 1), even, ":", color=GREY, label="even over what is there")
    ax.set_ylim(bottom=0)
    ax.set_ylabel("attention weight")
    ax.legend(frameon=False, fontsize=8)


def run_pictures(gates: History, norms: History) -> Mapping[str, Any]:
    """Returns the figures of a training so far, by name."""
    drawn = {}
    if gates.rows:
        drawn["gates"] = gates_figure(gates)
    if norms.rows:
        drawn["gradient_share"] = shares_figure(norms)
    return drawn


def pictures(findings: Findings, memory_size: int | None) -> Mapping[str, Any]:
    """Returns the figures of an analysis, by name."""
    drawn = {}
    if findings.reach.number:
        drawn["reach"] = reach_figure(findings.reach, memory_size)
    if findings.attention:
        drawn["attention"] = attention_figure(findings)
    return drawn


def _shades(number: int) -> list[tuple[float, ...]]:
    """Returns colours from the lowest layer to the highest."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(1, number - 1)) for i in range(number)]
