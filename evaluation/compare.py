"""``evaluate.py compare``: any set of runs as one comparison, and views of their logs and FLOPs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from evaluation.arguments import Split, add_which_argument
from evaluation.figures import check_csv, check_picture, write_frame, write_picture
from evaluation.load import Device, Precision, pick_device
from evaluation.report import (
    FIGURE,
    ComparisonReport,
    as_markdown,
    as_page,
    as_text,
    check_folder,
    compare_figure,
    curves_frame,
    drawn_rows,
    make_report,
    rows_frame,
    write_folder,
)
from evaluation.run_metrics import (
    ReportRow,
    ResultFile,
    RunMetrics,
    ScoringOptions,
    make_rows,
    measure,
    named_results,
)
from evaluation.runs import SKIP, LeftOut, RunRecord, find_compared, left_out_or_raise
from evaluation.views import view_compute, view_curves, view_results
from lightning_models.recipe import import_packages

View = Literal["report", "curves", "compute", "results"]
DEFAULT_OUTPUT = "runs/comparison"


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        help="Checkpoints, folders of runs, or patterns in quotes; of a folder a checkpoint "
        "of every run in it (--which). Methods may be mixed. NAME=PATH names the row. "
        "With --view results: JSON files that other commands wrote with --output.",
    )
    parser.add_argument(
        "--view",
        type=View,
        default="report",
        help="report: score all, and check what they have in common. curves: a logged value over "
        "tokens and FLOPs. compute: what FLOPs are spent on. results: result files side by side.",
    )
    add_which_argument(parser)
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help=f"Of a report the folder for report.html, report.md, report.csv and what they are "
        f"made of (null: {DEFAULT_OUTPUT}); one of an earlier comparison is replaced. Of curves "
        "and compute a figure, .svg or .png, with its numbers as .csv; of results a .csv file.",
    )
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name the rows, separated by commas, or model for the "
        "class. Found where models of one class differ in one or two.",
    )
    parser.add_argument(
        SKIP,
        action="store_true",
        help="Leave out runs that cannot be read or scored, and say so, rather than stop.",
    )
    parser.add_argument(
        "--packages",
        type=list[str],
        default=[],
        help="Packages to import first, where models or data are classes of your own.",
    )
    _add_report_arguments(parser)
    parser.add_argument(
        "--scalar", type=str, default="val/loss", help="Of curves: logged value, such as val/ppl."
    )
    parser.add_argument(
        "--context",
        type=int | None,
        default=None,
        help="Of compute: tokens of a sequence; null: those of the windows of the training.",
    )
    parser.add_argument(
        "--set",
        type=dict[str, Any],
        default={},
        help="Of compute: fields of the models' config to change, also those that decide shapes, "
        "e.g. --set.num_layers 12: no weights are read.",
    )


def _add_report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--title",
        type=str | None,
        default=None,
        help="Heading of the report (null: how many runs).",
    )
    parser.add_argument(
        "--introduction", type=str, default="", help="A paragraph to stand below the heading."
    )
    parser.add_argument(
        "--results",
        type=str,
        nargs="*",
        default=[],
        help="JSON files of evaluate.py tasks or perplexity about these checkpoints, or patterns. "
        "Those in the folders of a run are found.",
    )
    parser.add_argument("--split", type=Split, default="val", help="Held-out documents to score.")
    parser.add_argument(
        "--batch_size", type=int | None, default=None, help="Rows per batch (null: as trained)."
    )
    parser.add_argument(
        "--limit_batches", type=int | None, default=None, help="Score that many batches only."
    )
    parser.add_argument(
        "--device", type=Device, default="auto", help="Where to run; auto takes a GPU if any."
    )
    parser.add_argument(
        "--precision", type=Precision, default="32", help="bf16 rounds the matrix products."
    )


def run(settings: Namespace) -> None:
    """Prints the view that is asked for, and writes its files."""
    import_packages(settings.packages)
    if settings.view == "report":
        _run_report(settings)
        return
    if settings.view == "results":
        target = None if settings.output is None else check_csv(settings.output)
        print(view_results(settings.runs, target))
        return
    picture = None if settings.output is None else check_picture(settings.output)
    skip = settings.skip_unreadable
    runs, left_out = find_compared(settings.runs, skip=skip, which=settings.which)
    if settings.view == "curves":
        print(view_curves(runs, settings.scalar, settings.label, picture))
    else:
        changes, context = settings["set"], settings.context
        print(view_compute(runs, changes, context, settings.label, picture))
    for one in left_out:
        print(f"left out: {one.name}: {one.reason}")


def _run_report(settings: Namespace) -> None:
    """Scores every run, prints checks and tables, and writes the report."""
    folder = check_folder(settings.output or DEFAULT_OUTPUT)
    pick_device(settings.device)  # refused before the work
    how = ScoringOptions(
        settings.split,
        settings.limit_batches,
        settings.batch_size,
        settings.precision,
        settings.device,
    )
    skip = settings.skip_unreadable
    runs, left_out = find_compared(settings.runs, skip=skip, which=settings.which)
    measured, more = _measure_all(runs, how, named_results(settings.results, runs), skip=skip)
    rows = make_rows(measured, settings.label)
    report = make_report(
        rows, [*left_out, *more], title=settings.title, introduction=settings.introduction
    )
    print(as_text(report))
    write_folder(folder, lambda place: _write(place, report, rows))
    print(f"\nwritten to {folder}")


def _measure_all(
    runs: Sequence[RunRecord], how: ScoringOptions, named: Sequence[ResultFile], *, skip: bool
) -> tuple[list[RunMetrics], list[LeftOut]]:
    """Returns what is known of each run, and the runs that are left out.

    Raises:
        ValueError: if one cannot be scored and ``skip`` is false, or none can.
    """
    measured, left_out = [], []
    for number, one in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {one.name}", file=sys.stderr)
        try:
            measured.append(measure(one, how, named))
        except ValueError as error:
            left_out.append(left_out_or_raise(str(one.checkpoint.path), error, skip=skip))
    if not measured:
        raise ValueError(f"runs: none of them can be scored; {left_out[0].reason}")
    return measured, left_out


def _write(place: Path, report: ComparisonReport, rows: Sequence[ReportRow]) -> None:
    svg = None
    if report.has_figure:
        write_picture(compare_figure(drawn_rows(rows)), place / FIGURE)
        svg = (place / FIGURE).read_bytes()
        write_frame(place / "curves.csv", curves_frame(rows))
    write_frame(place / "report.csv", rows_frame(report.frame))
    write_frame(place / "runs.csv", report.frame)
    (place / "report.md").write_text(as_markdown(report), encoding="utf-8")
    (place / "report.html").write_text(as_page(report, svg), encoding="utf-8")
