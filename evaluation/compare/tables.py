"""The tables of a report: as people read them, and with all digits for CSV files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.compare.columns import Column, make_columns
from evaluation.compare.figure import SCALARS, curve_of, drawn_rows, loss_key
from evaluation.compare.measured import Measured
from evaluation.compare.rows import Row


@dataclass(frozen=True)
class Table:
    """Cells as people read them."""

    header: list[str]
    lines: list[list[str]]


def main_table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Returns a line a row: means over its seeds, and the range."""
    shown = [column for column in columns if column.in_table]
    header = ["", "seeds", *(column.title for column in shown), "causal"]
    lines = [
        [
            row.label,
            str(len(row.members)),
            *(column.cell(row) for column in shown),
            "yes" if row.first.score.content["causal"] else "no",
        ]
        for row in rows
    ]
    return Table(header, lines)


def runs_table(rows: Sequence[Row]) -> Table:
    """Returns a line a run: where it lies, and what it was scored on."""
    header = [
        "run",
        "row",
        "seed",
        "steps",
        "held-out text that was scored",
        "scores",
        "checkpoint",
    ]
    lines = [
        [
            member.name,
            row.label,
            seed,
            f"{member.training.steps:,}",
            _scored_on(member),
            member.score.source,
            _place(member),
        ]
        for row in rows
        for member, seed in zip(row.members, row.seeds, strict=True)
    ]
    return Table(header, lines)


def csv_rows(rows: Sequence[Row]) -> list[list[Any]]:
    """Returns the table with all digits and columns behind a header: mean, smallest, largest."""
    columns = make_columns(rows)
    ends = ("", "_min", "_max")
    header = ["label", "model", "runs", "seeds", "num_seeds", "likelihood", "counted", "causal"]
    lines: list[list[Any]] = [[*header, *(c.key + end for c in columns for end in ends)]]
    for row in rows:
        first, names = row.first, " ".join(member.name for member in row.members)
        line: list[Any] = [row.label, first.run.model, names, " ".join(row.seeds)]
        line += [len(row.members), first.likelihood, first.counted]
        line.append(first.score.content["causal"])
        lines.append(line + [cell for column in columns for cell in _spread(column.values(row))])
    return lines


def run_rows(rows: Sequence[Row]) -> list[list[Any]]:
    """Returns a line a run with all digits and columns, behind a header."""
    columns = make_columns(rows)
    lines: list[list[Any]] = [
        ["run", "label", "seed", "checkpoint", "which", *(c.key for c in columns)]
    ]
    for row in rows:
        for member, seed in zip(row.members, row.seeds, strict=True):
            cells = [column.value(member) for column in columns]
            place = [_place(member), member.run.checkpoint.which]
            lines.append([member.name, row.label, seed, *place, *cells])
    return lines


def curve_rows(rows: Sequence[Row]) -> list[list[Any]]:
    """Returns the points of the figure's lines, behind a header."""
    drawn = drawn_rows(rows)
    key = loss_key(drawn)
    lines: list[list[Any]] = [["run", "label", "steps", "tokens", "training_flops", SCALARS[key]]]
    for row in drawn:
        for member in row.members:
            lines += [[member.name, row.label, *point] for point in curve_of(member, key)]
    return lines


def _spread(values: Sequence[float]) -> list[Any]:
    if not values:
        return [None, None, None]
    return [sum(values) / len(values), min(values), max(values)]


def _place(one: Measured) -> str:
    """Returns where its checkpoint lies, seen from here if it lies below."""
    path, here = one.run.checkpoint.path.resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _scored_on(one: Measured) -> str:
    """Returns which text a score is of, and how it was cut."""
    content, settings = one.score.content, one.score.settings
    part = f"{settings['batches']} of {settings['of_batches']} batches"
    reads = {"windows": f"windows of {one.score.context}", "sentences": "whole documents"}
    size = "" if content["bytes"] is None else f", {content['bytes']:,} bytes"
    return (
        f"{one.text}, {content['data']['split']}: {part}, "
        f"{reads.get(one.run.outline.reads, 'questions')}, {content['tokens']:,} targets "
        f"({one.counted}){size}, precision {settings['precision']}"
    )
