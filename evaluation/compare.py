"""``evaluate.py compare``: any set of runs as one comparison, and views of their logs and FLOPs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from jsonargparse import ArgumentParser, Namespace

from evaluation.arguments import Split, add_run_arguments, add_which_argument, chosen
from evaluation.figures import (
    check_ending,
    check_picture,
    compare_figure,
    write_frame,
    write_picture,
)
from evaluation.load import pick_device
from evaluation.output import write_folder
from evaluation.report import (
    FIGURE,
    FILES,
    ComparisonReport,
    check_folder,
    make_report,
    report_markdown,
    report_page,
    report_text,
    rows_table,
    runs_table,
)
from evaluation.run_metrics import (
    BITS,
    NATS,
    ResultFile,
    ScoringOptions,
    logged_points,
    measure,
    named_results,
    overlaps,
    runs_frame,
    runs_with_loss,
)
from evaluation.runs import RunRecord, find_compared, reason_or_raise
from evaluation.views import view_compute, view_curves, view_results
from lightning_models.checkpoint import Which
from lightning_models.recipe import import_packages

View = Literal["report", "curves", "compute", "results"]
DEFAULT_OUTPUT = "runs/comparison"
OF_RUNS = "report, curves, compute"
"""Views that read runs."""
OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "label": (
        OF_RUNS,
        "Keys of the models' config that name the rows, separated by commas, or model for the "
        "class. Found where models of one class differ in one or two.",
        {"type": str | None, "default": None},
    ),
    "skip_unreadable": (
        OF_RUNS,
        "Leave out runs that cannot be read or scored, and say so, rather than stop.",
        {"action": "store_true", "default": False},
    ),
    "title": ("report", "Heading (null: how many runs).", {"type": str | None, "default": None}),
    "introduction": ("report", "Paragraph below the heading.", {"type": str, "default": ""}),
    "results": (
        "report",
        "JSON files of evaluate.py tasks or perplexity about these checkpoints, or patterns. "
        "Those in the folders of a run are found.",
        {"type": str, "nargs": "*", "default": []},
    ),
    "split": ("report", "Held-out documents to score.", {"type": Split, "default": "val"}),
    "batch_size": (
        "report",
        "Rows per batch (null: as trained).",
        {"type": int | None, "default": None},
    ),
    "limit_batches": (
        "report",
        "Score that many batches only.",
        {"type": int | None, "default": None},
    ),
    "stride": (
        "report",
        "Score windows that begin that many tokens apart, so that each target follows at least "
        "all but that many tokens of a window (null: as trained, mostly windows that do not "
        "overlap). Bounds of whole windows and documents are scored as ever.",
        {"type": int | None, "default": None},
    ),
    "scalar": (
        "curves",
        "Logged value to draw, such as val/ppl.",
        {"type": str, "default": "val/loss"},
    ),
    "context": (
        "compute",
        "Tokens of a sequence; null: those of the windows of the training.",
        {"type": int | None, "default": None},
    ),
}
"""Options: the views that use them, help, and how the parser declares them."""
USED_BY = {
    **{name: (views, how["default"]) for name, (views, _, how) in OPTIONS.items()},
    "which": (OF_RUNS, "last"),
    "device": ("report", "auto"),
    "precision": ("report", "32"),
    "set": ("compute", {}),
}
"""Options: the views that use them, and their default."""


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
    add_run_arguments(parser)
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help=f"Of a report the folder for report.html, report.md, report.csv and what they are "
        f"made of (null: {DEFAULT_OUTPUT}); one of an earlier comparison is replaced. Of curves "
        "and compute a figure, .svg or .png, with its numbers as .csv; of results a .csv file.",
    )
    for name, (views, text, how) in OPTIONS.items():
        of = "" if views == OF_RUNS else f"Of {views}: "
        parser.add_argument(f"--{name}", help=of + text, **how)


def check_options(settings: Namespace) -> None:
    """Checks that no option is given that the view does not use.

    Raises:
        ValueError: if one is; it names the views that use it.
    """
    for name, (views, default) in USED_BY.items():
        if settings.view not in views and settings[name] != default:
            raise ValueError(
                f"{name} is an option of --view {views}; leave it out with --view {settings.view}"
            )


def run(settings: Namespace) -> None:
    """Prints the view that is asked for, and writes its files."""
    check_options(settings)
    import_packages(settings.packages)
    if settings.view == "report":
        _run_report(settings)
        return
    if settings.view == "results":
        target = (
            None if settings.output is None else check_ending(settings.output, "output", (".csv",))
        )
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
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    if picture is not None:
        print(f"written to {picture}")


@dataclass(frozen=True)
class Comparison:
    """Runs that were scored on the same held-out text."""

    runs: pd.DataFrame
    """A line a run, see ``run_metrics.runs_frame``."""
    report: ComparisonReport
    """What they have in common, and tables of means over seeds."""
    records: Sequence[RunRecord]
    """The runs, with what they have logged."""

    def curves(self) -> pd.DataFrame:
        """Returns the points of the figure's lines, see ``curves_frame``."""
        return curves_frame(runs_with_loss(self.runs), self.records)

    def figure(self) -> Any:
        """Returns the matplotlib figure: loss over tokens, training FLOPs and inference FLOPs.

        There is one where ``report.has_figure`` is true.
        """
        drawn = runs_with_loss(self.runs)
        return compare_figure(drawn, self.curves(), loss_key(drawn))


def compare_runs(
    runs: Sequence[str],
    options: ScoringOptions = ScoringOptions(),
    *,
    label: str | None = None,
    title: str | None = None,
    introduction: str = "",
    results: Sequence[str] = (),
    which: Which = "last",
    skip_unreadable: bool = False,
) -> Comparison:
    """Returns runs of any methods, scored and compared; nothing is written.

    Args:
        runs: checkpoints, folders of runs, or patterns; NAME=PATH names the row.
        options: split and settings of the scoring.
        label: keys of the models' config that name the rows, separated by commas; None: found.
        title: heading of the report; None: how many runs.
        introduction: paragraph below it.
        results: JSON files of other evaluations of these checkpoints, or patterns.
        which: of a folder's run the furthest checkpoint, or the best.
        skip_unreadable: whether to leave out runs that cannot be read or scored.

    Raises:
        ValueError: if a run cannot be read or scored, or an option does not fit any.
    """
    pick_device(options.device)  # refused before the work
    records, left_out = find_compared(runs, skip=skip_unreadable, which=which)
    if options.stride is not None:
        _check_stride(records, options.stride)
    named = named_results(results, records)
    lines, more = _measure_all(records, options, named, skip=skip_unreadable)
    table = runs_frame(lines, label)
    report = make_report(table, left_out | more, title=title, introduction=introduction)
    return Comparison(table, report, records)


def _run_report(settings: Namespace) -> None:
    """Scores every run, prints checks and tables, and writes the report."""
    folder = check_folder(settings.output or DEFAULT_OUTPUT)
    named = ("label", "title", "introduction", "results", "which", "skip_unreadable")
    how = {key: settings[key] for key in named}
    comparison = compare_runs(settings.runs, chosen(settings, ScoringOptions), **how)
    report, runs = comparison.report, comparison.runs
    print(report_text(report))

    def write(place: Path) -> None:
        """Writes all files of the report to a folder."""
        svg = None
        if report.has_figure:
            write_picture(comparison.figure(), place / FIGURE)
            write_frame(place / "curves.csv", comparison.curves())
            svg = (place / FIGURE).read_bytes()
        write_frame(place / "report.csv", rows_table(runs))
        write_frame(place / "runs.csv", runs_table(runs))
        (place / "report.md").write_text(report_markdown(report), encoding="utf-8")
        (place / "report.html").write_text(report_page(report, svg), encoding="utf-8")

    write_folder(folder, write, FILES)
    print(f"\nwritten to {folder}")


def _check_stride(runs: Sequence[RunRecord], stride: int) -> None:
    """Checks a stride before anything is scored.

    Raises:
        ValueError: if it is longer than a run's windows, or rows of no run overlap.
    """
    strided = [run for run in runs if overlaps(run)]
    if not strided:
        raise ValueError(f"stride ({stride}): rows of none of the runs can overlap; leave it out")
    for run in strided:
        size = run.outline.config.block_size
        if stride > size:
            raise ValueError(f"stride ({stride}) must be at most the window of {run.name}, {size}")


def _measure_all(
    runs: Sequence[RunRecord], options: ScoringOptions, named: Sequence[ResultFile], *, skip: bool
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the line of each run, and the runs that are left out with the reason.

    Raises:
        ValueError: if one cannot be scored and ``skip`` is false, or none can.
    """
    lines, left_out = [], {}
    for number, one in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {one.name}", file=sys.stderr)
        path = str(one.checkpoint.path)
        try:
            lines.append(measure(one, options, named))
        except ValueError as error:
            left_out[path] = reason_or_raise(path, error, skip=skip)
    if not lines:
        reason = next(iter(left_out.values()))
        raise ValueError(f"runs: none of them can be scored; {reason}")
    return lines, left_out


# ---- figure


SCALARS = {BITS: "val/bpb", NATS: "val/loss"}
"""What is logged of a loss."""


def loss_key(runs: pd.DataFrame) -> str:
    """Returns the loss that is drawn: bits per byte where all have it, else nats per token."""
    return BITS if runs[BITS].notna().all() else NATS


def curves_frame(runs: pd.DataFrame, records: Sequence[RunRecord]) -> pd.DataFrame:
    """Returns the points of the figure's lines: what validations logged up to the checkpoint.

    ``runs`` are those with a loss of text, ``records`` theirs and maybe those of others.

    Returns:
        ``run``, ``label``, ``steps``, ``tokens``, ``training_flops`` and the logged loss.
    """
    scalar, logs = SCALARS[loss_key(runs)], {record.name: record.scalars for record in records}
    curves = []
    for line in runs.to_dict("records"):
        points = logged_points(line, logs[line["run"]].get(scalar, {}), scalar)
        points = points[points["steps"] <= line["steps"]].rename(
            columns={"flops": "training_flops"}
        )
        points.insert(0, "run", line["run"])
        points.insert(1, "label", line["label"])
        curves.append(points)
    return pd.concat(curves)
