"""``evaluate.py compute``: what the FLOPs of models are spent on."""

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from evaluation.checkpoint.rebuild import build_outline
from evaluation.compute.count import Compute, count_compute, part_names
from evaluation.compute.figure import compute_figure
from evaluation.console import format_columns
from evaluation.picture import check_picture, table_path, write_csv, write_picture
from evaluation.runs.folders import find_checkpoints, short_names
from evaluation.runs.labels import label_runs
from lightning_models.recipe import import_packages


def as_rows(counts: Sequence[Compute], labels: Sequence[str]) -> list[list[Any]]:
    """Returns the table with all digits, a row a model behind a header.

    Training as papers count it has a column where any of the models has such a count, empty for
    the others.
    """
    parts, published = part_names(counts), _any_published(counts)
    sizes = ["context", "parameters", "flops_one_pass", "flops_forward", "flops_training"]
    sizes += ["flops_as_published"] if published else []
    header = ["label", *sizes, *(f"flops_{part}" for part in parts)]
    rows: list[list[Any]] = [[*header, *(f"share_{part}" for part in parts)]]
    for label, count in zip(labels, counts, strict=True):
        values: list[Any] = [count.context, count.parameters]
        values += [count.one_pass, count.forward, count.training]
        values += [count.published] if published else []
        split = [count.parts.get(part, 0.0) for part in parts]
        rows.append([label, *values, *split, *map(count.share, parts)])
    return rows


def as_table(counts: Sequence[Compute], labels: Sequence[str]) -> str:
    """Returns sizes, FLOPs per token and shares of one pass in percent, for people."""
    parts, published = part_names(counts), _any_published(counts)
    sizes = ["parameters", "context", "one pass", "forward", "training FLOPs/token"]
    sizes += ["as published"] if published else []
    rows = [["", *sizes, *(part.replace("_", " ") for part in parts)]]
    for label, count in zip(labels, counts, strict=True):
        totals: list[float | None] = [count.one_pass, count.forward, count.training]
        totals += [count.published] if published else []
        flops = ["-" if value is None else f"{value:.4g}" for value in totals]
        shares = [f"{100 * count.share(part):.1f} %" for part in parts]
        rows.append([label, f"{count.parameters:,}", f"{count.context:,}", *flops, *shares])
    return f"FLOPs per token, and the shares of one pass\n{format_columns(rows)}"


def _any_published(counts: Sequence[Compute]) -> bool:
    return any(count.published is not None for count in counts)


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        help="Checkpoints, folders of runs, or patterns in quotes; of a folder the furthest "
        "checkpoint of every run in it.",
    )
    parser.add_argument(
        "--context",
        type=int | None,
        default=None,
        help="Tokens of a sequence; null: those of the windows that a model was trained on.",
    )
    parser.add_argument(
        "--set",
        type=dict[str, Any],
        default={},
        help="Fields of the models' config to change, also those that decide shapes, e.g. "
        "--set.num_layers 12: no weights are read.",
    )
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name them, separated by commas, or model for the "
        "class. Found where they differ in one or two.",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="Figure to write, .svg or .png; its table is written beside it as .csv.",
    )
    parser.add_argument(
        "--packages",
        type=list[str],
        default=[],
        help="Packages to import first, where models are classes of your own.",
    )


def run(settings: Namespace) -> None:
    """Counts, prints the table and writes the files that are asked for."""
    picture = None if settings.output is None else check_picture(settings.output)
    import_packages(settings.packages)
    checkpoints = find_checkpoints(settings.runs)
    models = [build_outline(checkpoint, settings["set"]) for checkpoint in checkpoints]
    named = label_runs(
        [model.recipe() for model in models],
        short_names([checkpoint.path.resolve() for checkpoint in checkpoints]),
        settings.label,
    )
    labels = named.texts()
    counts = [count_compute(model, settings.context) for model in models]
    print(as_table(counts, labels))
    if named.note is not None:
        print(f"note: {named.note}")
    if picture is not None:
        header, *rows = as_rows(counts, labels)
        write_csv(table_path(picture), header, rows)
        write_picture(compute_figure(counts, labels, part_names(counts)), picture)
