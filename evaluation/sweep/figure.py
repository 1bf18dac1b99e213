"""The picture of quality against what it costs (Figs. 3 and 6 of the PonderLM-3 paper)."""

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.curves.figure import COLOURS, COLUMNS
from evaluation.sweep.points import STEPS, SweepPoint, frontier

AXES = {
    "executed_steps": "additional steps per token",
    "flops_per_token_6nd": "FLOPs per token, 6 N (1 + steps)",
    "generation_flops_per_token": "FLOPs per generated token",
    STEPS: "K, additional steps at most",
}
"""What loss is drawn against, and what that is called."""
COSTS = tuple(key for key in AXES if key != STEPS)
"""Axes with a Pareto frontier; over K the loss is that in nats, as in Fig. 6."""
GREY = "#333a44"
DIAL_NAMES = {"alpha": r"$\alpha$", "tau": r"$\tau$"}


def sweep_figure(points: Sequence[SweepPoint], against: Sequence[str]) -> Any:
    """Returns a panel an axis: a line a label, a point a checkpoint and setting.

    Args:
        points: what was measured.
        against: keys of ``AXES``, from left to right.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4 * len(against), 4.4), layout="constrained")
    panels = figure.subplots(1, len(against), squeeze=False)[0]
    named: dict[str, Any] = {}
    for panel, key in zip(panels, against, strict=True):
        for number, (label, members) in enumerate(lines_of(points).items()):
            named[label] = _draw(panel, members, key, COLOURS[number % len(COLOURS)])
        if key in COSTS:
            named["Pareto frontier"] = _draw_frontier(panel, points, key)
        _dress(panel, key)
    plain = [text.replace("$", r"\$") for text in named]  # it would start a formula
    place: dict[str, Any] = {"loc": "outside upper center", "ncols": min(len(plain), COLUMNS)}
    figure.legend(list(named.values()), plain, frameon=False, fontsize=9, **place)
    return figure


def lines_of(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """Returns the points of each line: those of a label, and of one K where dials were turned."""
    lines: dict[str, list[SweepPoint]] = {}
    for point in points:
        turned = f", K = {point.variant.thinking_steps}" if point.variant.dials else ""
        lines.setdefault(point.label + turned, []).append(point)
    return lines


def height(point: SweepPoint, key: str) -> float:
    """Returns what is drawn over an axis: perplexity by its kind, over K nats per token."""
    totals = point.report.totals
    return totals.perplexity if key in COSTS else totals.nats_per_token


def _draw(panel: Any, members: Sequence[SweepPoint], key: str, colour: str) -> Any:
    places = sorted((point.value(key), height(point, key), _note(point)) for point in members)
    x, y, notes = zip(*places, strict=True)
    (line,) = panel.plot(x, y, marker="o", markersize=4, linewidth=1.2, color=colour)
    for left, low, note in zip(x, y, notes, strict=True):
        if key != STEPS or note.startswith("$"):
            offset: dict[str, Any] = {"xytext": (4, 4), "textcoords": "offset points"}
            panel.annotate(note, (left, low), fontsize=7, color=colour, **offset)
    return line


def _note(point: SweepPoint) -> str:
    """Returns what stands beside a point: its dials, or its K."""
    dials: Mapping[str, float] = point.variant.dials
    if dials:
        return ", ".join(f"{DIAL_NAMES[key]} {value:g}" for key, value in dials.items())
    return f"K={point.variant.thinking_steps}" if point.variant.thinking_steps else ""


def _draw_frontier(panel: Any, points: Sequence[SweepPoint], key: str) -> Any:
    """Draws steps through the points that no other one beats, and a ring around each."""
    places = [(point.value(key), height(point, key)) for point in points]
    x, y = zip(*(places[number] for number in frontier(places)), strict=True)
    style: dict[str, Any] = {"color": GREY, "linestyle": ":", "zorder": 0}
    rings: dict[str, Any] = {"marker": "o", "markersize": 9, "markerfacecolor": "none"}
    (line,) = panel.plot(x, y, drawstyle="steps-post", **style, **rings)
    return line


def _dress(panel: Any, key: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    panel.set_xlabel(AXES[key])
    panel.set_ylabel("perplexity" if key in COSTS else "loss (nats per token)")
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=key == STEPS))
    if "flops" in key:
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.margins(0.1)
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.3)
