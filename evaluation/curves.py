"""``evaluate.py curves``: a logged value of several runs against training tokens and FLOPs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from evaluation.checkpoint.rebuild import build_outline
from evaluation.console import format_columns
from evaluation.figures import (
    COLOURS,
    LEGEND_COLUMNS,
    MARKS,
    check_picture,
    dress_costs,
    table_path,
    write_csv,
    write_picture,
)
from evaluation.runs import Labels, LoggedCurve, find_runs, is_number, label_runs, read_curve
from lightning_models import LanguageModel
from lightning_models.recipe import import_packages

# ---- figure (Fig. 5 of the Latent-Thought paper)


DASHES = ("-", "--", ":", "-.")
UNITS = {"loss": "nats per token", "bpb": "bits per byte"}


def curves_figure(curves: Sequence[LoggedCurve], labels: Labels, scalar: str) -> Any:
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
        dress_costs(axes, name)
    if "ppl" in scalar:
        panels[0].set_yscale("log")
    unit = UNITS.get(scalar.rpartition("/")[2])
    panels[0].set_ylabel(scalar if unit is None else f"{scalar} ({unit})")
    plain = [text.replace("$", r"\$") for text in named]  # it would start a formula
    place: dict[str, Any] = {
        "loc": "outside upper center",
        "ncols": min(len(plain), LEGEND_COLUMNS),
    }
    place |= {"ncols": min(len(plain), LEGEND_COLUMNS), "frameon": False, "fontsize": 9}
    figure.legend(list(named.values()), plain, **place)
    return figure


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


# ---- command


COLUMNS = ("run", "label", "steps", "tokens", "flops")
"""Of the CSV file, in front of the value itself."""


def as_rows(curves: Sequence[LoggedCurve], labels: Sequence[str]) -> list[list[Any]]:
    """Returns a row a point, under ``COLUMNS`` and the value."""
    return [
        [curve.name, label, *point]
        for curve, label in zip(curves, labels, strict=True)
        for point in curve.points
    ]


def as_table(curves: Sequence[LoggedCurve], labels: Labels, scalar: str) -> str:
    """Returns a line a run, with where its curve ends, for people."""
    header = ["run", "points", "tokens", "training FLOPs/token", "training FLOPs", scalar]
    rows = [["", *header]] if labels.keys else [header]
    texts = labels.texts()
    for number in labels.order():
        curve = curves[number]
        last = curve.points[-1]
        numbers = (f"{curve.flops_per_token:.4g}", f"{last.flops:.4g}", f"{last.value:.5g}")
        row = [str(len(curve.points)), f"{last.tokens:,}", *numbers]
        rows.append([texts[number], *([curve.name] if labels.keys else []), *row])
    notes = [] if labels.note is None else [f"note: {labels.note}"]
    return "\n".join([format_columns(rows), *notes])


def mark(model: LanguageModel, scalar: str) -> str:
    """Returns what tells a likelihood that is not exact from those that are; else nothing.

    Args:
        model: whose it is.
        scalar: tag of the value; training has no bound, as what is inferred has seen its noise.
    """
    stage, _, name = scalar.rpartition("/")
    if name not in ("loss", "bpb") and not name.startswith("ppl"):
        return ""
    kind = model.likelihood
    if kind == "lower_bound" and stage == "train":
        kind = "estimate"
    return MARKS[kind]


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        help="Folders of runs with log and checkpoint, as train.py writes them, or patterns in "
        "quotes; of a folder with several runs all of them.",
    )
    parser.add_argument(
        "--output",
        type=str,
        required=True,
        help="Figure to write, .svg or .png; its points are written beside it as .csv.",
    )
    parser.add_argument(
        "--scalar", type=str, default="val/loss", help="Logged value, such as val/ppl or val/bpb."
    )
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name the curves, separated by commas, or model for "
        "the class. Found where the runs differ in one or two.",
    )
    parser.add_argument(
        "--tokens_per_step",
        type=int | None,
        default=None,
        help="Tokens of an optimiser step, for runs on sentences. Windows count as batch_size x "
        "block_size x accumulated batches x devices, padding included.",
    )
    parser.add_argument(
        "--packages",
        type=list[str],
        default=[],
        help="Packages to import first, where models are classes of your own.",
    )


def run(settings: Namespace) -> None:
    """Reads the runs, prints where they end, and writes the figure and its points."""
    picture, scalar = check_picture(settings.output), settings.scalar
    import_packages(settings.packages)
    runs = find_runs(settings.runs)
    models = [build_outline(one.checkpoint) for one in runs]
    labels = label_runs(
        [model.recipe() for model in models], [one.name for one in runs], settings.label
    )
    labels = replace(labels, marks=tuple(mark(model, scalar) for model in models))
    curves = [
        read_curve(one, model, scalar, settings.tokens_per_step)
        for one, model in zip(runs, models, strict=True)
    ]
    print(as_table(curves, labels, scalar))
    write_csv(table_path(picture), [*COLUMNS, scalar], as_rows(curves, labels.texts()))
    write_picture(curves_figure(curves, labels, scalar), picture)
