"""The picture of training curves (Fig. 5 of the Latent-Thought paper)."""

from collections.abc import Sequence
from typing import Any

from evaluation.curves.points import Curve
from evaluation.picture import label_sizes
from evaluation.runs.labels import Labels, is_number

COLOURS = ("#2f6db3", "#d97b29", "#3f9c6b", "#a2518f", "#8a8f98", "#b8a12c", "#4fb0c6", "#c44e52")
COLUMNS = 4
"""Of the legend."""
DASHES = ("-", "--", ":", "-.")
UNITS = {"loss": "nats per token", "bpb": "bits per byte"}


def curves_figure(curves: Sequence[Curve], labels: Labels, scalar: str) -> Any:
    """Returns a panel over training tokens and one over training FLOPs, both logarithmic.

    The first key of the labels has a colour, from dark to light where it is a number, the second a
    dash; runs of one label share both.

    Args:
        curves: of the runs.
        labels: of the runs.
        scalar: tag of the value; perplexities have a logarithmic axis too.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    texts, styles = labels.texts(), _styles(labels)
    named: dict[str, Any] = {}
    for number in labels.order():
        for axes, key in zip(panels, ("tokens", "flops"), strict=True):
            points = curves[number].points
            x, y = [getattr(point, key) for point in points], [point.value for point in points]
            (line,) = axes.plot(x, y, marker=".", markersize=4, linewidth=1.2, **styles[number])
            named.setdefault(texts[number], line)
    for axes, name in zip(panels, ("training tokens", "training FLOPs"), strict=True):
        _dress(axes, name)
    if "ppl" in scalar:
        panels[0].set_yscale("log")
    unit = UNITS.get(scalar.rpartition("/")[2])
    panels[0].set_ylabel(scalar if unit is None else f"{scalar} ({unit})")
    plain = [text.replace("$", r"\$") for text in named]  # it would start a formula
    place: dict[str, Any] = {"loc": "outside upper center", "ncols": min(len(plain), COLUMNS)}
    figure.legend(list(named.values()), plain, frameon=False, fontsize=9, **place)
    return figure


def _dress(axes: Any, name: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(name)
    label_sizes(axes.xaxis)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.3)


def _styles(labels: Labels) -> list[dict[str, Any]]:
    """Returns colour and dash of each run."""
    order = labels.order()
    firsts = list(dict.fromkeys(labels.values[number][0] for number in order))
    rests = list(dict.fromkeys(labels.values[number][1:] for number in order))
    colours = _colours(firsts)
    return [
        {
            "color": colours[firsts.index(values[0])],
            "linestyle": DASHES[rests.index(values[1:]) % len(DASHES)],
        }
        for values in labels.values
    ]


def _colours(values: Sequence[Any]) -> list[Any]:
    """Returns a colour a value."""
    if len(values) > 2 and all(map(is_number, values)):
        from matplotlib import colormaps

        scale = colormaps["viridis"]
        return [scale(0.9 * place / (len(values) - 1)) for place in range(len(values))]
    return [COLOURS[place % len(COLOURS)] for place in range(len(values))]
