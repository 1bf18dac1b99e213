"""``evaluate.py compare``: tables, figures and a report of any set of runs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt

from callbacks.analysis.token_text import REPLACEMENT
from datamodules.store import Split
from evaluation.arguments import (
    add_batch_arguments,
    add_device_arguments,
    add_packages_argument,
    add_which_argument,
    chosen,
)
from evaluation.compare_report import (
    COMPUTE_FIGURE,
    FILES,
    LOSS_FIGURE,
    PAGE,
    TABLE,
    ComparisonReport,
    make_checks,
    make_differences,
    make_notes,
    report_folder,
    report_markdown,
    report_page,
    runs_table,
    shown_runs,
    shown_tables,
)
from evaluation.cost import compute_frame, count_compute
from evaluation.devices import pick_device
from evaluation.figures import (
    check_picture,
    compare_figure,
    compute_figure,
    write_frame,
    write_pages,
    write_picture,
)
from evaluation.generate import continue_prompts
from evaluation.load import build_model, build_tokenizer
from evaluation.output import write_folder
from evaluation.run_metrics import (
    BITS,
    NATS,
    RunMetrics,
    ScoringOptions,
    measure,
    overlaps,
    runs_frame,
    runs_with_loss,
)
from evaluation.runs import RunRecord, find_compared, skip_reason
from lightning_models.checkpoint import Which
from lightning_models.generation import SamplingConfig
from lightning_models.recipe import import_packages

DEFAULT_OUTPUT = "runs/comparison"


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add(
        "runs",
        type=str,
        nargs="+",
        help="Checkpoints, folders of runs, or patterns in quotes; a folder stands for the "
        "checkpoint (--which) of every run in it. Methods may be mixed. NAME=PATH names the row.",
    )
    add_which_argument(parser)
    add_device_arguments(parser)
    add_packages_argument(parser)
    add(
        "--output",
        type=str,
        default=DEFAULT_OUTPUT,
        help="Folder for report.html, report.md, runs.csv and the figures; an earlier comparison "
        "in it is replaced. With FILE.pdf only the figures are written, a page each.",
    )
    add(
        "--sample_tokens",
        type=NonNegativeInt,
        default=40,
        help="Length of the sample by the first run of each row, in tokens (0: no samples).",
    )
    add(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name the rows, separated by commas, or model for the "
        "class. Null means NAME=PATH, the run's --name, or its path.",
    )
    add(
        "--skip_unreadable",
        action="store_true",
        default=False,
        help="Leave out runs that cannot be read or scored, with a message, instead of stopping.",
    )
    add("--title", type=str | None, default=None, help="Heading. Null means the number of runs.")
    add("--introduction", type=str, default="", help="Paragraph below the heading.")
    add("--split", type=Split, default="val", help="Held-out documents to score.")
    add_batch_arguments(parser)
    add(
        "--stride",
        type=PositiveInt | None,
        default=None,
        help="Distance in tokens between the starts of overlapping windows, so that each target "
        "has at least the rest of a window before it. Null means as trained, mostly without "
        "overlap. Bounds of whole windows and documents are scored without overlap.",
    )


@dataclass(frozen=True)
class Comparison:
    """Runs that were scored on the same held-out text."""

    runs: pd.DataFrame
    """One row per run, see ``run_metrics.runs_frame``."""
    report: ComparisonReport
    """Checks of shared properties, and tables of means over seeds."""
    records: Sequence[RunRecord]
    """The runs with their logs."""

    def curves(self) -> pd.DataFrame:
        """Returns the points of the figure's lines, see ``curves_frame``."""
        return curves_frame(runs_with_loss(self.runs), self.records)

    def compute(self) -> pd.DataFrame:
        """Returns the FLOPs of each row's model by part, see ``compute_frame``.

        Models without such counts are left out.
        """
        outlines = {record.name: record.outline for record in self.records}
        counts = {}
        for row in self.runs.drop_duplicates("label").itertuples():
            try:
                counts[row.label] = count_compute(outlines[row.run], row.context)
            except ValueError as error:
                print(f"compute.csv: {row.label} is left out: {error}", file=sys.stderr)
        return compute_frame(list(counts.values()), list(counts)) if counts else pd.DataFrame()

    def figures(self) -> dict[str, Any]:
        """Draws the matplotlib figures and returns them by the names of their files.

        One shows loss over tokens, training FLOPs and inference FLOPs, if a run has a loss on text,
        the other the shares of the FLOPs of one pass.
        """
        figures, drawn, compute = {}, runs_with_loss(self.runs), self.compute()
        if not drawn.empty:
            figures[LOSS_FIGURE] = compare_figure(drawn, self.curves(), loss_key(drawn))
        if not compute.empty:
            figures[COMPUTE_FIGURE] = compute_figure(compute)
        return figures


def compare_runs(
    runs: Sequence[str],
    options: ScoringOptions = ScoringOptions(),
    *,
    label: str | None = None,
    title: str | None = None,
    introduction: str = "",
    which: Which = "last",
    skip_unreadable: bool = False,
    sample_tokens: int = 0,
) -> Comparison:
    """Scores and compares runs of any methods; only their results are written.

    Args:
        runs: Checkpoints, folders of runs, or patterns; NAME=PATH names the row.
        options: Split and settings for scoring.
        label: Keys of the models' config that name the rows, separated by commas; by default names
            or paths of the runs.
        title: Heading of the report. Defaults to the number of runs.
        introduction: Paragraph below the heading.
        which: Checkpoint to take from a run's folder: the latest or the best.
        skip_unreadable: Whether to leave out runs that cannot be read or scored.
        sample_tokens: Length of the sample by the first run of each row; 0 for no samples.

    Raises:
        ValueError: If a run cannot be read or scored, or an option applies to none of the runs.
    """
    pick_device(options.device)  # raises before the work
    records, left_out = find_compared(runs, skip=skip_unreadable, which=which)
    if options.stride is not None:
        _check_stride(records, options.stride)
    metrics, more = _measure_all(records, options, skip=skip_unreadable)
    table = runs_frame(metrics, label)
    count = "1 run" if len(table) == 1 else f"{len(table)} runs"
    report = ComparisonReport(
        title=f"Comparison of {count}" if title is None else title,
        introduction=introduction,
        checks=make_checks(table),
        tables=shown_tables(table),
        notes=make_notes(table),
        runs=shown_runs(table),
        left_out=left_out | more,
        differences=make_differences(table),
        samples=make_samples(table, records, options, sample_tokens) if sample_tokens else {},
    )
    return Comparison(table, report, records)


def run(settings: Namespace) -> None:
    """Scores every run, prints the report, and writes it with its figures."""
    pages = check_picture(settings.output) if settings.output.endswith(".pdf") else None
    folder = Path() if pages else report_folder(settings.output)
    import_packages(settings.packages)
    names = ("label", "title", "introduction", "which", "skip_unreadable", "sample_tokens")
    options = {key: settings[key] for key in names}
    comparison = compare_runs(settings.runs, chosen(settings, ScoringOptions), **options)
    if pages is not None:
        write_pages(list(comparison.figures().values()), pages)
        print(f"{report_markdown(comparison.report)}\nwritten to {pages}")
        return
    write_folder(folder, lambda path: write_report(comparison, path), FILES)
    print(f"{report_markdown(comparison.report)}\nwritten to {folder}")


def write_report(comparison: Comparison, folder: Path) -> None:
    """Writes all files of a comparison to an existing folder."""
    pictures = {}
    for name, figure in comparison.figures().items():
        write_picture(figure, folder / name)
        pictures[name] = (folder / name).read_bytes()
    checks = comparison.report.checks.rename_axis("check").reset_index()
    frames = {TABLE: runs_table(comparison.runs), "checks.csv": checks}
    frames["compute.csv"] = comparison.compute()
    if LOSS_FIGURE in pictures:
        frames["curves.csv"] = comparison.curves()
    for name, frame in frames.items():
        if not frame.empty:
            write_frame(folder / name, frame)
    markdown = report_markdown(comparison.report, list(pictures))
    (folder / "report.md").write_text(markdown, encoding="utf-8")
    page = report_page(comparison.report, pictures)
    (folder / PAGE).write_text(page, encoding="utf-8")


def make_samples(
    runs: pd.DataFrame, records: Sequence[RunRecord], options: ScoringOptions, tokens: int
) -> dict[str, str]:
    """Returns a deterministic sample from the start of a document by the first run of each row.

    Models that answer questions have none.
    """
    by_name, samples = {record.name: record for record in records}, {}
    for run in runs.drop_duplicates("label").itertuples():
        record = by_name[run.run]
        if record.outline.reads == "reasoning" or pd.isna(getattr(run, NATS)):
            continue  # the model needs a question, or the run has diverged
        limit = record.outline.context_limit
        max_tokens = tokens if limit is None else min(tokens, limit - 1)
        try:
            tokenizer = build_tokenizer(record.checkpoint)
            model = build_model(record.checkpoint).to(pick_device(options.device))
            ((_, text),) = continue_prompts(
                model,
                tokenizer,
                [""],
                max_new_tokens=max_tokens,
                sampling=SamplingConfig(),
                precision=options.precision,
            )
        except ValueError as error:
            text = f"(none: {error})"
        printable = (c if c.isprintable() or c in "\n\t" else REPLACEMENT for c in text)
        samples[run.label] = "".join(printable)
    return samples


def _check_stride(runs: Sequence[RunRecord], stride: int) -> None:
    strided = [run for run in runs if overlaps(run)]
    if not strided:
        raise ValueError(f"stride ({stride}): no run has windows that can overlap; leave it out")
    for run in strided:
        size = run.outline.config.block_size
        if stride > size:
            raise ValueError(f"stride ({stride}) must be at most the window of {run.name}, {size}")


def _measure_all(
    runs: Sequence[RunRecord], options: ScoringOptions, *, skip: bool
) -> tuple[list[RunMetrics], dict[str, str]]:
    """Returns the metrics of each run, and the reason for each run that is left out.

    Raises:
        ValueError: If a run cannot be scored and ``skip`` is false, or none can.
    """
    metrics, left_out = [], {}
    for idx, run in enumerate(runs, start=1):
        print(f"run {idx} of {len(runs)}: {run.name}", file=sys.stderr)
        path = str(run.checkpoint.path)
        try:
            metrics.append(measure(run, options))
        except ValueError as error:
            left_out[path] = skip_reason(path, error, skip=skip)
    if not metrics:
        reason = next(iter(left_out.values()))
        raise ValueError(f"runs: none of them can be scored; {reason}")
    return metrics, left_out


# ---- figure


SCALARS = {BITS: "val/bpb", NATS: "val/loss"}
"""Logged scalar of each loss."""


def loss_key(runs: pd.DataFrame) -> str:
    """Returns the loss to draw: bits per byte if all runs have it, else nats per token."""
    return BITS if runs[BITS].notna().all() else NATS


def curves_frame(runs: pd.DataFrame, records: Sequence[RunRecord]) -> pd.DataFrame:
    """Returns the points of the figure's lines: logged validations up to the checkpoint.

    All ``runs`` need a loss on text; ``records`` may include other runs.

    Returns:
        ``run``, ``label``, ``steps``, ``tokens``, ``training_flops`` and the logged loss.
    """
    scalar, logs = SCALARS[loss_key(runs)], {record.name: record.scalars for record in records}
    points = []
    for run in runs.to_dict("records"):
        tokens, flops, steps = (run[key] for key in ("training_tokens", "flops", "steps"))
        if tokens is None or flops is None or not steps:
            continue
        for step, value in sorted(logs[run["run"]].get(scalar, {}).items()):  # counted from 0
            share = (step + 1) / steps  # assumes equal tokens and FLOPs in each step
            if share <= 1:
                cost = (step + 1, share * tokens, share * flops)
                points.append((run["run"], run["label"], *cost, value))
    columns = ["run", "label", "steps", "tokens", "training_flops", scalar]
    return pd.DataFrame(points, columns=columns, dtype=object)
