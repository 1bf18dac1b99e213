"""``evaluate.py compare``: any set of runs as one honest comparison."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from evaluation.arguments import Split, add_which_argument
from evaluation.checkpoint.device import Device, Precision, pick_device
from evaluation.figures import write_csv, write_picture
from evaluation.report import (
    FIGURE,
    ComparisonReport,
    as_markdown,
    as_page,
    as_text,
    check_folder,
    compare_figure,
    csv_rows,
    curve_rows,
    drawn_rows,
    make_report,
    run_rows,
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
from lightning_models.recipe import import_packages

DEFAULT_OUTPUT = "runs/comparison"


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        help="Checkpoints, folders of runs, or patterns in quotes; of a folder a checkpoint "
        "of every run in it (--which). Methods may be mixed. NAME=PATH names the row.",
    )
    add_which_argument(parser)
    parser.add_argument(
        "--output",
        type=str,
        default=DEFAULT_OUTPUT,
        help="Folder to write report.html, report.md, report.csv and what they are made of to; one "
        "of an earlier comparison is replaced.",
    )
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
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name the rows, separated by commas, or model for the "
        "class. Found where models of one class differ in one or two.",
    )
    parser.add_argument("--split", type=Split, default="val", help="Held-out documents to score.")
    parser.add_argument(
        "--batch_size", type=int | None, default=None, help="Rows per batch (null: as trained)."
    )
    parser.add_argument(
        "--limit_batches", type=int | None, default=None, help="Score so many batches only."
    )
    parser.add_argument(
        "--device", type=Device, default="auto", help="Where to run; auto takes a GPU if any."
    )
    parser.add_argument(
        "--precision", type=Precision, default="32", help="bf16 rounds the matrix products."
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


def run(settings: Namespace) -> None:
    """Scores every run, prints checks and table, and writes the report."""
    folder = check_folder(settings.output)
    import_packages(settings.packages)
    pick_device(settings.device)  # told before the work
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
        _write_table(place / "curves.csv", curve_rows(rows))
    _write_table(place / "report.csv", csv_rows(rows))
    _write_table(place / "runs.csv", run_rows(rows))
    (place / "report.md").write_text(as_markdown(report), encoding="utf-8")
    (place / "report.html").write_text(as_page(report, svg), encoding="utf-8")


def _write_table(path: Path, rows: Sequence[Sequence[object]]) -> None:
    header, *lines = rows
    write_csv(path, [str(name) for name in header], lines)
