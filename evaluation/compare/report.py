"""A comparison in words and tables, whatever it is written as."""

from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.compare.checks import Check, make_checks
from evaluation.compare.columns import Column, make_columns
from evaluation.compare.figure import drawn_rows
from evaluation.compare.found import LeftOut
from evaluation.compare.rows import Row, same_seeds
from evaluation.compare.tables import Table, main_table, runs_table
from evaluation.console import format_columns

FIGURE = "loss.svg"
ALT = "Loss against training tokens, training FLOPs and inference FLOPs per token"
CAPTION = (
    "Lines: what validations have logged, on validation text (they may have read less than all of "
    "it), one for each seed. Large points: the scores of the table, with the range of the seeds. "
    "Filled points and solid lines are exact, causal likelihoods; hollow points and dashed lines "
    "are not."
)


@dataclass(frozen=True)
class Report:
    """What all formats show."""

    title: str
    introduction: str
    """A paragraph, or nothing."""
    notes: list[str]
    """How to read the numbers, a sentence or two each."""
    checks: list[Check]
    table: Table
    runs: Table
    """A line a run: where it lies, and what it was scored on."""
    left_out: list[LeftOut]
    has_figure: bool


def make_report(
    rows: Sequence[Row],
    left_out: Sequence[LeftOut],
    *,
    title: str | None = None,
    introduction: str = "",
) -> Report:
    """Returns the report.

    Args:
        rows: what is compared, in order.
        left_out: runs that could not be read or scored.
        title: its heading; None: how many runs there are.
        introduction: a paragraph.
    """
    members = [member for row in rows for member in row.members]
    runs = "1 run" if len(members) == 1 else f"{len(members)} runs"
    columns = make_columns(rows)
    return Report(
        title=f"Comparison of {runs}" if title is None else title,
        introduction=introduction,
        notes=_notes(rows, columns),
        checks=make_checks(members),
        table=main_table(rows, columns),
        runs=runs_table(rows),
        left_out=list(left_out),
        has_figure=bool(drawn_rows(rows)),
    )


def as_text(report: Report) -> str:
    """Returns checks, table and notes for the terminal."""
    filled = [[cell or "-" for cell in line] for line in report.table.lines]
    parts = [
        "\n".join(check.as_text() for check in report.checks),
        format_columns([report.table.header, *filled]),
        "\n".join(f"note: {note}" for note in report.notes),
        "\n".join(f"left out: {one.name}: {one.reason}" for one in report.left_out),
    ]
    return "\n\n".join(part for part in parts if part)


def as_markdown(report: Report) -> str:
    """Returns the report as Markdown; the figure lies beside it."""
    figure = f"![{ALT}]({FIGURE})\n\n{CAPTION}"
    parts = [
        f"# {report.title}",
        *([report.introduction] if report.introduction else []),
        _markdown(report.table),
        "\n".join(f"- {_escaped(note)}" for note in report.notes),
        *([f"## Loss\n\n{figure}"] if report.has_figure else []),
        "## What the runs have in common",
        "\n".join(f"- **{c.state}**: {c.what}: {_escaped(c.detail)}" for c in report.checks),
        f"## Every run\n\n{_markdown(report.runs)}",
    ]
    if report.left_out:
        lines = (f"- {_escaped(one.name)}: {_escaped(one.reason)}" for one in report.left_out)
        parts.append("## Left out\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _markdown(table: Table) -> str:
    rows = [table.header, ["---"] * len(table.header), *table.lines]
    return "\n".join("| " + " | ".join(map(_escaped, row)) + " |" for row in rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _notes(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """Returns how to read the numbers that are there."""
    several = any(len(row.members) > 1 for row in rows)
    keys = {column.key for column in columns}
    notes = [
        "Means over seeds, in brackets the smallest and the largest value."
        if several
        else "One seed a row: nothing is known about the spread.",
        *same_seeds(rows),
    ]
    kinds = {row.first.likelihood for row in rows}
    if "lower_bound" in kinds:
        notes.append(
            "Bound: the model's likelihood is known from below only, so its loss is at most the "
            "number shown; it has columns of its own and is not to be compared with exact ones."
        )
    if "noncausal" in kinds:
        notes.append(
            "Not causal: a token's score may depend on later tokens; the loss of the text written "
            "from left to right is another (evaluate.py perplexity --mode autoregressive)."
        )
    if len({row.first.counted for row in rows}) > 1:
        notes.append(
            "Nats per token count different targets in different rows, so they have columns of "
            "their own; bits per byte count all targets and the bytes of the text."
        )
    if any(member.score.markers > 1 for row in rows for member in row.members):
        notes.append(
            "Where sentences are marked, tokens are those of the text, and the FLOPs of the "
            "markers are shared among them."
        )
    how = [member.score.settings for row in rows for member in row.members]
    if any(settings["batches"] < settings["of_batches"] for settings in how):
        notes.append(
            "Some runs were scored on a part of the split only: see the table of all runs."
        )
    asked = [task.how for row in rows for member in row.members for task in member.tasks.values()]
    if any((how.get("examples") or 0) < (how.get("of_examples") or 0) for how in asked):
        notes.append("Some tasks were scored on a part of their examples only: see below.")
    if "tokens_per_second" in keys:
        notes.append(
            "Tokens per second are those logged in training, on whatever machine that was."
        )
    return [*notes, "FLOPs are counted, not measured; a multiply-add is two."]
