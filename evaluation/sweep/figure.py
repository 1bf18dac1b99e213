"""The picture of quality against what it costs (Figs. 3 and 6 of the PonderLM-3 paper)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from evaluation.curves.command import MARKS
from evaluation.curves.figure import COLOURS, COLUMNS
from evaluation.picture import label_sizes
from evaluation.sweep.points import STEPS, SweepPoint, frontier, shown_dials

Measure = Literal["perplexity", "loss"]

AXES = {
    "executed_steps": "additional steps per token",
    "flops_per_token_6nd": "FLOPs per token, 6 N (1 + steps)",
    "generation_flops_per_token": "FLOPs per generated token",
    "flops_per_token": "FLOPs per scored token",
    STEPS: "K, additional steps at most",
}
"""What loss is drawn against, and what that is called."""
COSTS = tuple(key for key in AXES if key != STEPS)
"""Axes with a Pareto frontier; over K the loss is that in nats, as in Fig. 6."""
MARKERS = {"exact": "o", "lower_bound": "v", "estimate": "s", "noncausal": "X"}
"""Of points, by the kind of their likelihood."""
GREY = "#333a44"
WIDE = 10.0
"""From this ratio of the largest to the smallest FLOPs on, their axis is logarithmic."""


def sweep_figure(
    points: Sequence[SweepPoint], against: Sequence[str], measure: Measure = "perplexity"
) -> Any:
    """Returns a panel an axis: a line a label, a point a checkpoint and setting.

    Points of different kinds of likelihood share neither line, nor marker, nor frontier.

    Args:
        points: what was measured.
        against: keys of ``AXES``, from left to right.
        measure: what costs are drawn under.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4 * len(against), 4.4), layout="constrained")
    panels = figure.subplots(1, len(against), squeeze=False)[0]
    named: dict[str, Any] = {}
    marks: Mapping[str, str] = {str(kind): mark for kind, mark in MARKS.items()}
    for panel, key in zip(panels, against, strict=True):
        for number, (label, members) in enumerate(lines_of(points).items()):
            named[label] = _draw(panel, members, key, measure, COLOURS[number % len(COLOURS)])
        for kind, members in by_kind(points).items() if key in COSTS else ():
            name = f"Pareto frontier {marks[kind]}".rstrip()
            named[name] = _draw_frontier(panel, members, key, measure, MARKERS[kind])
        _dress(panel, key, measure, [point.value(key) for point in points])
    plain = [text.replace("$", r"\$") for text in named]  # it would start a formula
    place: dict[str, Any] = {"loc": "outside upper center", "ncols": min(len(plain), COLUMNS)}
    figure.legend(list(named.values()), plain, frameon=False, fontsize=9, **place)
    return figure


def by_kind(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """Returns the points by the kind of their likelihood."""
    kinds: dict[str, list[SweepPoint]] = {}
    for point in points:
        kinds.setdefault(point.report.likelihood, []).append(point)
    return kinds


def lines_of(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """Returns the points of each line: those of a label and a kind of likelihood.

    Where dials were turned, a line is one checkpoint along the last of them, at one setting of the
    others and one K; checkpoints that share a label then have their names behind it.
    """
    lines: dict[tuple[str, ...], list[SweepPoint]] = {}
    for point in points:
        variant, name = point.variant, ""
        fixed = dict(list(variant.dials.items())[:-1])
        if variant.dials:
            name = variant.name
            if variant.thinking_steps and STEPS not in variant.dials:
                fixed = {"K =": variant.thinking_steps, **fixed}
        text = ", ".join(part for part in (point.label, shown_dials(fixed)) if part)
        lines.setdefault((text, name, point.report.likelihood), []).append(point)
    texts = [text for text, _, _ in lines]
    return {
        text if texts.count(text) == 1 else f"{text} ({name or kind})": members
        for (text, name, kind), members in lines.items()
    }


def height(point: SweepPoint, key: str, measure: Measure = "perplexity") -> float:
    """Returns what is drawn over an axis: ``measure``, but over K nats per token."""
    totals = point.report.totals
    as_perplexity = key in COSTS and measure == "perplexity"
    return totals.perplexity if as_perplexity else totals.nats_per_token


def _draw(
    panel: Any, members: Sequence[SweepPoint], key: str, measure: Measure, colour: str
) -> Any:
    places = sorted(
        (point.value(key), height(point, key, measure), _note(point)) for point in members
    )
    x, y, notes = zip(*places, strict=True)
    style = {"marker": MARKERS[members[0].report.likelihood], "markersize": 4, "linewidth": 1.2}
    (line,) = panel.plot(x, y, color=colour, **style)
    turned = any(point.variant.dials for point in members)
    for left, low, note in zip(x, y, notes, strict=True):
        if key != STEPS or turned:
            offset: dict[str, Any] = {"xytext": (4, 4), "textcoords": "offset points"}
            panel.annotate(note, (left, low), fontsize=7, color=colour, **offset)
    return line


def _note(point: SweepPoint) -> str:
    """Returns what stands beside a point: its dials, or its K."""
    variant = point.variant
    if variant.dials:
        return shown_dials(variant.dials, variant.outline.config.dials)
    return f"K={variant.thinking_steps}" if variant.thinking_steps else ""


def _draw_frontier(
    panel: Any, points: Sequence[SweepPoint], key: str, measure: Measure, marker: str
) -> Any:
    """Draws steps through the points that no other one beats, and a ring around each."""
    places = [(point.value(key), height(point, key, measure)) for point in points]
    x, y = zip(*(places[number] for number in frontier(places)), strict=True)
    style: dict[str, Any] = {"color": GREY, "linestyle": ":", "zorder": 0}
    rings: dict[str, Any] = {"marker": marker, "markersize": 9, "markerfacecolor": "none"}
    (line,) = panel.plot(x, y, drawstyle="steps-post", **style, **rings)
    return line


def _dress(panel: Any, key: str, measure: Measure, values: Sequence[float]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    as_perplexity = key in COSTS and measure == "perplexity"
    panel.set_xlabel(AXES[key])
    panel.set_ylabel("perplexity" if as_perplexity else "loss (nats per token)")
    panel.margins(0.1)
    if "flops" in key and max(values) >= WIDE * min(values):
        panel.set_xscale("log")
        label_sizes(panel.xaxis)
    else:
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=key == STEPS))
        if "flops" in key:
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.3)
