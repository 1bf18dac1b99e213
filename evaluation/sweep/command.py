"""``evaluate.py sweep``: perplexity of checkpoints against the steps and FLOPs they take."""

from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Mapping, Sequence

from jsonargparse import ArgumentParser, Namespace

from datamodules import LanguageDataModule
from evaluation.arguments import (
    add_data_arguments,
    add_run_arguments,
    check_limits,
    data_recipe,
)
from evaluation.checkpoint.classes import import_packages
from evaluation.checkpoint.corpus import build_data, check_fit, check_tokenizer, prepare
from evaluation.checkpoint.device import pick_device
from evaluation.checkpoint.rebuild import build_model
from evaluation.curves.command import MARKS
from evaluation.perplexity.command import measure_perplexity
from evaluation.perplexity.report import PerplexityReport
from evaluation.perplexity.thinking import price_steps
from evaluation.picture import check_picture, table_path, write_csv, write_picture
from evaluation.runs.folders import find_checkpoints
from evaluation.sweep.figure import AXES, COSTS, sweep_figure
from evaluation.sweep.points import SweepPoint, Variant, find_variants, label_variants
from evaluation.sweep.table import as_rows, as_table
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint
from lightning_models.outputs import Likelihood

DIALS = {"alpha": "alphas", "tau": "taus"}
"""Fields of configs that are swept, and the options that have their values."""


def checkpoints_in(argv: Sequence[str]) -> list[Checkpoint]:
    """Returns the checkpoints that a command line names; needed before it can be parsed."""
    scan = PlainParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--ckpts", nargs="+", default=[])
    scan.add_argument("--packages", default="")
    found, _ = scan.parse_known_args(list(argv))
    if not found.ckpts or {"-h", "--help"} & set(argv):
        return []
    import_packages([name for name in found.packages.strip("[]").split(",") if name])
    return find_checkpoints(found.ckpts, "ckpts")


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options; data options default to those in the first checkpoint."""
    parser.add_argument(
        "--ckpts",
        type=str,
        nargs="+",
        required=True,
        help="Checkpoints, folders of runs, or patterns in quotes; of a folder the furthest "
        "checkpoint of every run in it. All have one tokenizer.",
    )
    add_run_arguments(parser)
    add_data_arguments(parser, argv, lambda words: next(iter(checkpoints_in(words)), None))
    for field, option in DIALS.items():
        parser.add_argument(
            f"--{option}",
            type=str,
            default="",
            help=f"Values of {field} at which every model that has it is scored, separated by "
            f"commas, e.g. --{option}=0.1,0.2 (the sign = lets the first be negative).",
        )
    parser.add_argument(
        "--against",
        type=str,
        default=",".join(COSTS),
        help=f"Panels of the figure, separated by commas: {', '.join(AXES)}.",
    )
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name the lines, separated by commas, or model for "
        "the class. Found where models of one class and K differ in at most one.",
    )
    parser.add_argument(
        "--output",
        type=str,
        required=True,
        help="Figure to write, .svg or .png; its points are written beside it as .csv.",
    )


def run(settings: Namespace) -> None:
    """Scores every checkpoint, prints a table, and writes the figure and its points."""
    check_limits(settings)
    picture, against = check_picture(settings.output), _axes(settings.against)
    dials = {field: _numbers(settings[option], option) for field, option in DIALS.items()}
    import_packages(settings.packages)
    checkpoints = find_checkpoints(settings.ckpts, "ckpts")
    variants = find_variants(checkpoints, settings["set"], dials)
    labels = label_variants(variants, settings.label, list(DIALS))
    data = _shared_data(variants, settings)
    points = [
        _measure(variant, label, data, settings)
        for variant, label in zip(variants, labels.texts(), strict=True)
    ]
    print(as_table(points, labels.note))
    header, *rows = as_rows(points)
    write_csv(table_path(picture), header, rows)
    write_picture(sweep_figure(points, against), picture)


def _axes(typed: str) -> list[str]:
    """Returns the panels that are asked for.

    Raises:
        ValueError: if one is not known.
    """
    chosen = [part.strip() for part in typed.strip("[]").split(",")]
    for key in chosen:
        if key not in AXES:
            raise ValueError(f"against ({key}) is none of {', '.join(AXES)}")
    return chosen


def _numbers(typed: str, option: str) -> list[float]:
    """Returns numbers separated by commas.

    Raises:
        ValueError: if one is no number.
    """
    parts = [part.strip() for part in typed.strip("[]").split(",") if part.strip()]
    try:
        return [float(part) for part in parts]
    except ValueError as error:
        raise ValueError(f"{option} ({typed}) must be numbers separated by commas") from error


def _shared_data(variants: Sequence[Variant], settings: Namespace) -> LanguageDataModule:
    """Returns prepared data that every model can read.

    Raises:
        ValueError: if one of them has another tokenizer, or other rows; it names the checkpoint.
    """
    first = variants[0].checkpoint
    data = build_data(first, data_recipe(settings))
    _check_all(variants, lambda variant: check_fit(variant.outline, data))
    prepare(data, first)
    _check_all(variants, lambda variant: check_tokenizer(data, variant.checkpoint))
    return data


def _check_all(variants: Sequence[Variant], check: Callable[[Variant], None]) -> None:
    for variant in variants:
        try:
            check(variant)
        except ValueError as error:
            raise ValueError(
                f"ckpts ({variant.checkpoint.path}): {error}; all checkpoints are scored on the "
                "same data, those of the first one or of --data"
            ) from error


def _measure(
    variant: Variant, label: str, data: LanguageDataModule, settings: Namespace
) -> SweepPoint:
    model = build_model(variant.checkpoint, variant.changes).to(pick_device(settings.device))
    report = measure_perplexity(
        variant.checkpoint,
        model,
        data,
        split=settings.split,
        precision=settings.precision,
        limit_batches=settings.limit_batches,
    )
    context = data.row_tokens(settings.split)
    thinking = report.thinking or price_steps(model, context, 0.0)
    return SweepPoint(variant, _marked(label, report, model), report, thinking)


def _marked(label: str, report: PerplexityReport, model: LanguageModel) -> str:
    """Returns the label with the kind of the likelihood behind it where that is not exact."""
    marks: Mapping[Likelihood, str] = MARKS
    return f"{label} {marks[model.likelihood]}".rstrip()
