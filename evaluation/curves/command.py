"""``evaluate.py curves``: a logged value of several runs against training tokens and FLOPs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from evaluation.checkpoint.rebuild import build_outline
from evaluation.console import format_columns
from evaluation.curves.figure import curves_figure
from evaluation.curves.points import Curve, read_curve
from evaluation.picture import check_picture, table_path, write_csv, write_picture
from evaluation.runs.folders import find_runs
from evaluation.runs.labels import Labels, label_runs
from lightning_models import LanguageModel
from lightning_models.outputs import Likelihood
from lightning_models.recipe import import_packages

COLUMNS = ("run", "label", "steps", "tokens", "flops")
"""Of the CSV file, in front of the value itself."""
MARKS: dict[Likelihood, str] = {
    "exact": "",
    "lower_bound": "(bound)",
    "estimate": "(estimate)",
    "noncausal": "(noncausal)",
}
"""Behind the labels of likelihoods, by their kind."""


def as_rows(curves: Sequence[Curve], labels: Sequence[str]) -> list[list[Any]]:
    """Returns a row a point, under ``COLUMNS`` and the value."""
    return [
        [curve.name, label, *point]
        for curve, label in zip(curves, labels, strict=True)
        for point in curve.points
    ]


def as_table(curves: Sequence[Curve], labels: Labels, scalar: str) -> str:
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
