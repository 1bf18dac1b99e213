"""Loss against tokens, training FLOPs and inference FLOPs: a line a run, a point a score."""

import statistics
from collections.abc import Sequence
from typing import Any

from evaluation.compare.columns import generating
from evaluation.compare.measured import ANSWERS, Measured
from evaluation.compare.rows import KINDS, Row
from evaluation.curves.figure import COLOURS
from evaluation.picture import label_sizes

PANELS = {
    "tokens": "training tokens",
    "training_flops": "training FLOPs",
    "inference_flops": "inference FLOPs per token",
}
BITS, NATS = "bits_per_byte", "nats_per_token"
SCALARS = {BITS: "val/bpb", NATS: "val/loss"}
"""What is logged of a loss."""
TITLES = {BITS: "loss (bits per byte)", NATS: "loss (nats per token)"}
DASHES = {"exact": "-", "lower_bound": "--", "estimate": ":", "noncausal": "-."}
LEGEND_COLUMNS = 3

Point = tuple[float, float]


def drawn_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that a loss of text can be drawn of: not those that answer questions."""
    return [row for row in rows if row.first.counted != ANSWERS]


def loss_key(rows: Sequence[Row]) -> str:
    """Returns the loss that is drawn: bits per byte where all have it, else nats per token."""
    members = [member for row in rows for member in row.members]
    known = all(member.score.content.get(BITS) is not None for member in members)
    return BITS if known else NATS


def curve_of(one: Measured, key: str) -> list[tuple[int, float, float, float]]:
    """Returns (steps, tokens, training FLOPs, loss) for what was logged in validations.

    Empty where nothing was, or how much a run was trained on is not known; tokens are taken to be
    even over the steps.
    """
    training = one.training
    logged = one.run.scalars.get(SCALARS[key], {})
    if training.tokens is None or training.flops is None or not training.steps:
        return []
    shares = ((step + 1, (step + 1) / training.steps, value) for step, value in logged.items())
    return [
        (steps, share * training.tokens, share * training.flops, value)
        for steps, share, value in sorted(shares)
        if share <= 1  # the log may go on behind the checkpoint
    ]


def compare_figure(rows: Sequence[Row]) -> Any:
    """Returns three panels over one loss; lines are of validations, large points of the scores.

    Runs of a row share a colour, kinds of likelihood have dashes and hollow points of their own.

    Args:
        rows: with a loss of text, at least one.
    """
    from matplotlib.figure import Figure

    key = loss_key(rows)
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    panels = dict(zip(PANELS, figure.subplots(1, len(PANELS), sharey=True), strict=True))
    named: dict[str, Any] = {}
    for number, row in enumerate(rows):
        colour = COLOURS[number % len(COLOURS)]
        for member in row.members:
            _draw_curve(panels, member, key, colour, alone=len(row.members) == 1)
        named[_name(row)] = _draw_scores(panels, row, key, colour)
    for name, panel in panels.items():
        _dress(panel, PANELS[name])
    panels["tokens"].set_ylabel(TITLES[key])
    plain = [text.replace("$", r"\$") for text in named]  # it would start a formula
    place: dict[str, Any] = {
        "loc": "outside upper center",
        "ncols": min(len(named), LEGEND_COLUMNS),
    }
    figure.legend(list(named.values()), plain, frameon=False, fontsize=9, **place)
    return figure


def _name(row: Row) -> str:
    kind = row.first.likelihood
    return row.label if kind == "exact" else f"{row.label} ({KINDS[kind]})"


def _draw_curve(panels: Any, one: Measured, key: str, colour: str, *, alone: bool) -> None:
    curve = curve_of(one, key)
    style: dict[str, Any] = {"color": colour, "linestyle": DASHES[one.likelihood]}
    style |= {"linewidth": 1.4 if alone else 0.8, "alpha": 1.0 if alone else 0.7}
    for name, place in (("tokens", 1), ("training_flops", 2)):
        points = [(point[place], point[3]) for point in curve]
        if points:
            x, y = zip(*points, strict=True)
            panels[name].plot(x, y, marker=".", markersize=3, **style)


def _draw_scores(panels: Any, row: Row, key: str, colour: str) -> Any:
    """Draws the means of a row with the range of its seeds; returns what the legend shows."""
    losses = [float(member.score.content[key]) for member in row.members]
    mean = statistics.fmean(losses)
    error = [[mean - min(losses)], [max(losses) - mean]]
    exact = row.first.likelihood == "exact"
    style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 7, "capsize": 3}
    style |= {"linestyle": DASHES[row.first.likelihood], "markerfacecolor": colour}
    if not exact:
        style["markerfacecolor"] = "white"
    shown: Any = None
    for name, values in _costs(row).items():
        if values:
            x = [statistics.fmean(values)]
            shown = panels[name].errorbar(x, [mean], yerr=error, zorder=3, **style)
    return shown


def _costs(row: Row) -> dict[str, list[float]]:
    """Returns what each panel is over, of the members for which it is known."""
    trained = [member.training for member in row.members]
    return {
        "tokens": [float(t.tokens) for t in trained if t.tokens is not None],
        "training_flops": [t.flops for t in trained if t.flops is not None],
        "inference_flops": [generating(member) for member in row.members],
    }


def _dress(panel: Any, name: str) -> None:
    panel.set_xscale("log")
    panel.set_xlabel(name)
    panel.margins(0.08)
    label_sizes(panel.xaxis)
    panel.tick_params(which="both", labelsize=8)
    panel.grid(alpha=0.3)
