"""``evaluate.py sweep``: perplexity of checkpoints against the steps and FLOPs they take.

Dials of thinking are turned at test time; what they are is declared by the configs of the methods
(``SequenceConfig.dials``).
"""

from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Mapping, Sequence

from jsonargparse import ArgumentParser, Namespace

from datamodules import LanguageDataModule
from evaluation.arguments import (
    add_data_arguments,
    add_run_arguments,
    add_which_argument,
    data_recipe,
)
from evaluation.checkpoint.corpus import build_data, check_fit, check_tokenizer, prepare
from evaluation.checkpoint.device import pick_device
from evaluation.checkpoint.rebuild import build_model
from evaluation.curves.command import MARKS
from evaluation.perplexity import measure_perplexity
from evaluation.picture import check_picture, table_path, write_csv, write_picture
from evaluation.runs.folders import find_checkpoints
from evaluation.sweep.dials import add_dial_arguments, typed_dials
from evaluation.sweep.figure import AXES, COSTS, Measure, sweep_figure
from evaluation.sweep.points import Skipped, SweepPoint, Variant, find_variants, label_variants
from evaluation.sweep.table import as_rows, as_table
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint
from lightning_models.outputs import Likelihood
from lightning_models.recipe import import_packages


def checkpoints_in(argv: Sequence[str]) -> list[Checkpoint]:
    """Returns the checkpoints that a command line names; needed before it can be parsed."""
    scan = PlainParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--ckpts", nargs="+", default=[])
    scan.add_argument("--which", default="last")
    scan.add_argument("--packages", default="")
    found, _ = scan.parse_known_args(list(argv))
    if not found.ckpts or {"-h", "--help"} & set(argv):
        return []
    import_packages(found.packages)
    return find_checkpoints(found.ckpts, "ckpts", found.which)


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options; data options default to those in the first checkpoint."""
    parser.add_argument(
        "--ckpts",
        type=str,
        nargs="+",
        required=True,
        help="Checkpoints, folders of runs, or patterns in quotes; of a folder a checkpoint "
        "of every run in it (--which). All have one tokenizer.",
    )
    add_which_argument(parser)
    add_run_arguments(parser)
    add_data_arguments(parser, argv, lambda words: next(iter(checkpoints_in(words)), None))
    add_dial_arguments(parser)
    parser.add_argument(
        "--against",
        type=str,
        default=",".join(COSTS),
        help=f"Panels of the figure, separated by commas: {', '.join(AXES)}.",
    )
    parser.add_argument(
        "--measure",
        type=Measure,
        default="perplexity",
        help="What is drawn over costs: perplexity, or the loss in nats per token.",
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
    picture, against = check_picture(settings.output), _axes(settings.against)
    dials = typed_dials(settings)
    import_packages(settings.packages)
    checkpoints = find_checkpoints(settings.ckpts, "ckpts", settings.which)
    variants, skipped = find_variants(checkpoints, settings["set"], dials)
    labels = label_variants(variants, settings.label, list(dials))
    data = _shared_data(variants, settings)
    points: list[SweepPoint] = []
    for variant, label in zip(variants, labels.texts(), strict=True):
        found = _measure(variant, label, data, settings)
        points += [found] if isinstance(found, SweepPoint) else []
        skipped += [found] if isinstance(found, Skipped) else []
    if not points:
        raise ValueError(skipped[-1].reason)
    print(as_table(points, labels.note, skipped))
    header, *rows = as_rows(points)
    write_csv(table_path(picture), header, rows)
    write_picture(sweep_figure(points, against, settings.measure), picture)


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


def _shared_data(variants: Sequence[Variant], settings: Namespace) -> LanguageDataModule:
    """Returns prepared data that every model can read.

    Raises:
        ValueError: if one of them has another tokenizer, or other rows; it names the checkpoint.
    """
    first = variants[0].checkpoint
    _check_rows(variants)
    data = build_data(first, data_recipe(settings))
    _check_all(variants, lambda variant: check_fit(variant.outline, data))
    prepare(data, first)
    _check_all(variants, lambda variant: check_tokenizer(data, variant.checkpoint))
    return data


def _check_rows(variants: Sequence[Variant]) -> None:
    """Raises a ValueError if models do not read data of one kind: windows, sentences, reasoning."""
    first = variants[0]
    for variant in variants:
        if variant.outline.reads != first.outline.reads:
            raise ValueError(
                f"ckpts: {type(first.outline).__name__} ({first.name}) reads "
                f"{first.outline.reads} and {type(variant.outline).__name__} ({variant.name}) "
                f"reads {variant.outline.reads}; a sweep scores all on the same data, so make one "
                "of each kind"
            )


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
) -> SweepPoint | Skipped:
    """Returns a point, or why a checkpoint whose dials were turned cannot be scored there.

    Raises:
        ValueError: if one that was left as it is cannot be scored.
    """
    model = build_model(variant.checkpoint, variant.changes).to(pick_device(settings.device))
    try:
        report = measure_perplexity(
            variant.checkpoint,
            model,
            data,
            split=settings.split,
            precision=settings.precision,
            limit_batches=settings.limit_batches,
        )
    except ValueError as error:
        if not variant.dials:
            raise
        return Skipped(variant.name, variant.dials, str(error))
    return SweepPoint(variant, _marked(label, model), report)


def _marked(label: str, model: LanguageModel) -> str:
    """Returns the label with the kind of the likelihood behind it where that is not exact."""
    marks: Mapping[Likelihood, str] = MARKS
    return f"{label} {marks[model.likelihood]}".rstrip()
