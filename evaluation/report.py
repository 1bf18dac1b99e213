"""Report of a comparison: checks, columns, tables, figure; as text, Markdown, CSV and HTML."""

import base64
import html
import os
import re
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from evaluation.figures import COLOURS, dress_costs
from evaluation.run_metrics import (
    ANSWERS,
    KINDS,
    LoggedPoint,
    ReportRow,
    RunMetrics,
    logged_points,
    same_seeds,
)
from evaluation.runs import LeftOut
from evaluation.scoring import PERPLEXITY_KEYS

# ---- checks: what the runs have in common


State = Literal["matched", "differs", "not known"]

CLOSE_TOKENS, CLOSE_PARAMETERS, CLOSE_FLOPS = 0.01, 0.05, 0.05
"""How far the largest may be above the smallest where runs are called matched."""
MOST_NAMES = 4
NONE = "none"
DEFAULT_PRECISION = "32-true"
"""Of the trainer, where a record says none."""
HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


@dataclass(frozen=True)
class RunCheck:
    """One property that runs may share."""

    what: str
    state: State
    detail: str
    """The value that all share, or the values with the runs that have them."""

    def as_text(self) -> str:
        """Returns the check in one line."""
        return f"{self.state}: {self.what}: {self.detail}"


Fact = Callable[[RunMetrics], Any]


def make_checks(measured: Sequence[RunMetrics]) -> list[RunCheck]:
    """Returns what the runs share or not, what makes numbers incomparable first."""
    return [
        _equal("training text", measured, lambda one: one.text),
        _parts("data order", measured, lambda one: one.order),
        _equal("tokenizer", measured, lambda one: one.tokenizer),
        _close("tokens trained on", measured, lambda one: one.training.tokens, CLOSE_TOKENS),
        _equal("optimiser steps", measured, lambda one: one.training.steps, ","),
        _close("parameters", measured, lambda one: one.training.parameters, CLOSE_PARAMETERS),
        _close("training FLOPs", measured, lambda one: one.training.flops, CLOSE_FLOPS, ".3g"),
        _parts("held-out text that is scored", measured, _held_out),
        _equal("text of the training is still there", measured, _still_there),
        _equal("targets that nats per token count", measured, lambda one: one.counted),
        _equal("kind of likelihood", measured, lambda one: KINDS[one.likelihood]),
        _equal("context when scoring", measured, _context),
        _equal("precision of training", measured, _precision),
        _equal("code version", measured, lambda one: _version(one, "commit")),
        _equal("torch version", measured, lambda one: _version(one, "torch")),
        *_tasks(measured),
    ]


def _tasks(measured: Sequence[RunMetrics]) -> list[RunCheck]:
    """Returns whether the runs that have a task were asked alike."""
    names = dict.fromkeys(name for one in measured for name in one.tasks)
    return [_task(name, [one for one in measured if name in one.tasks]) for name in names]


def _task(name: str, having: Sequence[RunMetrics]) -> RunCheck:
    return _parts(f"task {name}", having, lambda one: one.tasks[name].how)


def _held_out(one: RunMetrics) -> dict[str, Any]:
    content = one.score.content
    return {"text": one.text, "split": content["data"]["split"], "bytes": content["bytes"]}


def _still_there(one: RunMetrics) -> str:
    return "yes" if one.same_text else "no, it has changed since"


def _context(one: RunMetrics) -> str:
    reads = one.run.outline.reads
    if reads == "windows":
        return f"windows of {one.score.context} tokens"
    return "whole documents" if reads == "sentences" else "questions"


def _precision(one: RunMetrics) -> str | None:
    if not one.run.record.settings:
        return None
    return str(one.run.record.get("trainer", "precision") or DEFAULT_PRECISION)


def _version(one: RunMetrics, name: str) -> str | None:
    """Returns a version, the hash of a commit cut to 12 digits; None where it is not known."""
    version = one.run.record.versions.get(name)
    return None if version is None else HASH.sub(r"\1", version)


def _equal(what: str, measured: Sequence[RunMetrics], fact: Fact, form: str = "") -> RunCheck:
    """Returns whether all runs have one value; None is one that is not known."""
    groups: dict[Any, list[str]] = {}
    for one in measured:
        groups.setdefault(fact(one), []).append(one.name)
    known = [value for value in groups if value is not None]
    if len(known) > 1:
        return RunCheck(what, "differs", _listed(groups, form))
    if None in groups:
        return RunCheck(what, "not known", _listed(groups, form) if known else "of any run")
    return RunCheck(what, "matched", _shown(known[0], form))


def _close(
    what: str, measured: Sequence[RunMetrics], fact: Fact, within: float, form: str = ","
) -> RunCheck:
    """Returns whether the values of all runs are nearly the same."""
    exact = _equal(what, measured, fact, form)
    values = [value for value in map(fact, measured) if value is not None]
    if exact.state != "differs" or max(values) > (1 + within) * min(values):
        return exact
    state: State = "not known" if len(values) < len(measured) else "matched"
    return RunCheck(what, state, f"within {within:.0%}: {exact.detail}")


def _parts(what: str, measured: Sequence[RunMetrics], fact: Fact) -> RunCheck:
    """Returns whether all runs have the same values, by key; tells those that differ."""
    every: list[Mapping[str, Any]] = [fact(one) for one in measured]
    keys = list(dict.fromkeys(key for one in every for key in one))
    different = [key for key in keys if len({str(one.get(key)) for one in every}) > 1]
    if not different:
        return RunCheck(what, "matched", _joined(every[0], keys))
    groups: dict[str, list[str]] = {}
    for one, values in zip(measured, every, strict=True):
        groups.setdefault(_joined(values, different), []).append(one.name)
    return RunCheck(what, "differs", _listed(groups))


def _joined(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Returns the values of a run that it has, with their names."""
    own = [f"{key} {_shown(values[key], ',')}" for key in keys if key in values]
    return ", ".join(own) or NONE


def _listed(groups: Mapping[Any, Sequence[str]], form: str = "") -> str:
    return " | ".join(f"{_shown(value, form)} ({_named(names)})" for value, names in groups.items())


def _named(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _shown(value: Any, form: str = "") -> str:
    if value is None:
        return "not known"
    plain = isinstance(value, bool) or not isinstance(value, int | float)
    return str(value) if plain else format(value, form)


# ---- the table of runs


TOKEN = {"all": "token", "lexical": "lexical token", ANSWERS: "answer token"}
"""What nats are per, by what is counted."""
PREFERRED = ("acc", "acc,none", "acc_norm", "acc_norm,none", "accuracy", "exact_match")
"""The metric of a task that the report shows, if it has one of them; the CSV files have all."""
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
FACTS = ("run", "label", "seed", "checkpoint", "which", "model", "likelihood", "counted", "causal")
"""Columns of a run that are no measured number."""
MOST_COLUMNS = 8
"""Of one table of the report, so that it fits a page."""


def si(value: float) -> str:
    """Returns a number in three digits and a prefix, such as 12.3 G."""
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {PREFIXES[power]}".rstrip()


WHOLE, TWO, THREE, FOUR = "{:,.0f}".format, "{:.2f}".format, "{:.3f}".format, "{:.4f}".format


@dataclass(frozen=True)
class ReportColumn:
    """How a report shows a number of the table of runs."""

    title: str
    show: Callable[[float], str]
    part: str
    """Heading of the table that has it; empty: the CSV files alone have it."""

    def cell(self, values: pd.Series) -> str:
        """Returns the mean, and between which values the seeds lie; empty without a number."""
        if not len(values := values.dropna()):
            return ""
        low, high = self.show(min(values)), self.show(max(values))
        mean = self.show(statistics.mean(values))
        return mean if low == high else f"{mean} ({low} to {high})"


def _ending(counted: str) -> str:
    return "" if counted == "all" else f"_{counted}"


def _likelihood_columns() -> dict[str, ReportColumn]:
    """Returns columns of which none has two kinds of likelihood, or two kinds of tokens."""
    columns, part = {}, "Loss"
    for kind, name in KINDS.items():
        for counted, token in TOKEN.items():
            end = _ending(counted)
            nats = ReportColumn(f"nats/{token} ({name})", FOUR, part)
            columns[f"nats_per_token_{kind}{end}"] = nats
            perplexity = ReportColumn(f"perplexity ({name})", TWO, "")
            columns[f"{PERPLEXITY_KEYS[kind]}{end}"] = perplexity
    for end, of in (("", ""), (f"_{ANSWERS}", " of answers")):
        for kind, name in KINDS.items():
            title = f"bits/byte{of} ({name})"
            columns[f"bits_per_byte_{kind}{end}"] = ReportColumn(title, FOUR, part)
    return columns


SIZE, COST = "Size and training", "Inference"
COLUMNS = {
    "parameters": ReportColumn("parameters", WHOLE, SIZE),
    "non_embedding_parameters": ReportColumn("outside embeddings", WHOLE, ""),
    "steps": ReportColumn("optimiser steps", WHOLE, ""),
    "training_tokens": ReportColumn("training tokens", WHOLE, SIZE),
    "training_flops_per_token": ReportColumn("training FLOPs/token", si, SIZE),
    "training_flops_per_token_published": ReportColumn(
        "training FLOPs/token, as its paper counts", si, SIZE
    ),
    "training_flops": ReportColumn("training FLOPs", si, SIZE),
    "nominal_training_flops_per_token": ReportColumn("planned training FLOPs/token", si, SIZE),
    "nominal_training_flops": ReportColumn("planned training FLOPs", si, SIZE),
    **_likelihood_columns(),
    "executed_steps": ReportColumn("extra steps/token", TWO, COST),
    "inference_flops_per_token": ReportColumn("inference FLOPs/token, generating", si, COST),
    "scoring_flops_per_token": ReportColumn("inference FLOPs/token, scoring", si, COST),
    "tokens_per_second": ReportColumn("training tokens/s", WHOLE, SIZE),
    "val_accuracy": ReportColumn("right answers (val)", THREE, "Loss"),
}
"""Numbers of a run by their keys, in the order of the CSV files; those of tasks follow."""


def generating(one: RunMetrics) -> float:
    """Returns the FLOPs per token of text that a run's model writes."""
    return one.score.generation_flops * one.score.markers


def run_values(one: RunMetrics) -> dict[str, float | int | None]:
    """Returns the numbers of a run under the keys of ``COLUMNS`` and of its tasks."""
    training, content, markers = one.training, one.score.content, one.score.markers
    kind, end = one.likelihood, _ending(one.counted)
    bits_end = end if one.counted == ANSWERS else ""
    scoring = content.get("flops_per_token")
    nominal = "nominal_" if training.planned else ""
    values = {
        "parameters": training.parameters,
        "non_embedding_parameters": training.non_embedding,
        "steps": training.steps,
        "training_tokens": training.tokens,
        f"{nominal}training_flops_per_token": training.flops_per_token,
        "training_flops_per_token_published": training.published_per_token,
        f"{nominal}training_flops": training.flops,
        f"nats_per_token_{kind}{end}": content["nats_per_token"],
        f"{PERPLEXITY_KEYS[kind]}{end}": content[PERPLEXITY_KEYS[kind]],
        f"bits_per_byte_{kind}{bits_end}": content["bits_per_byte"],
        "executed_steps": content.get("executed_steps"),
        "inference_flops_per_token": generating(one),
        "scoring_flops_per_token": None if scoring is None else scoring * markers,
        "tokens_per_second": training.tokens_per_second,
        "val_accuracy": training.accuracy,
    }
    tasks = {
        f"{task}_{metric}": value
        for task, result in one.tasks.items()
        for metric, value in result.metrics.items()
    }
    return {**values, **tasks}


def runs_frame(rows: Sequence[ReportRow]) -> pd.DataFrame:
    """Returns the table of runs: a line a run, ``FACTS`` and the numbers that some run has."""
    lines = [
        {
            "run": member.name,
            "label": row.label,
            "seed": seed,
            "checkpoint": _place(member),
            "which": member.run.checkpoint.which,
            "model": member.run.model,
            "likelihood": member.likelihood,
            "counted": member.counted,
            "causal": member.score.content["causal"],
            **run_values(member),
        }
        for row in rows
        for member, seed in zip(row.members, row.seeds, strict=True)
    ]
    found = dict.fromkeys(key for line in lines for key, v in line.items() if v is not None)
    own = [key for key in COLUMNS if key in found]
    tasks = [key for key in found if key not in COLUMNS and key not in FACTS]
    return pd.DataFrame(lines, columns=[*FACTS, *own, *tasks], dtype=object)


def rows_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns a line a row: its facts, and mean, smallest and largest value of each number."""
    lines = []
    for label, members in runs.groupby("label", sort=False):
        first = members.iloc[0]
        line = {"label": label, "model": first["model"], "runs": " ".join(members["run"])}
        line |= {"seeds": " ".join(members["seed"]), "num_seeds": len(members)}
        line |= {key: first[key] for key in ("likelihood", "counted", "causal")}
        for key in runs.columns.difference(FACTS, sort=False):
            values = members[key].dropna()
            known = len(values) > 0
            line[key] = sum(values) / len(values) if known else None
            line[f"{key}_min"], line[f"{key}_max"] = (
                (min(values), max(values)) if known else (None, None)
            )
        lines.append(line)
    return pd.DataFrame(lines, dtype=object)


def _place(one: RunMetrics) -> str:
    """Returns where its checkpoint lies, relative to the working folder if it lies below."""
    path, here = one.run.checkpoint.path.resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# ---- figure: loss against tokens, training FLOPs and inference FLOPs


PANELS = {
    "tokens": "training tokens",
    "training_flops": "training FLOPs",
    "inference_flops": "inference FLOPs per token",
}
BITS, NATS = "bits_per_byte", "nats_per_token"
SCALARS = {BITS: "val/bpb", NATS: "val/loss"}
"""What is logged of a loss."""
TITLES = {BITS: "loss (bits per byte)", NATS: "loss (nats per token)"}
KIND_DASHES = {"exact": "-", "lower_bound": "--", "estimate": ":", "noncausal": "-."}
LOSS_LEGEND_COLUMNS = 3


def drawn_rows(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Returns the rows that a loss of text can be drawn of: not those that answer questions."""
    return [row for row in rows if row.first.counted != ANSWERS]


def loss_key(rows: Sequence[ReportRow]) -> str:
    """Returns the loss that is drawn: bits per byte where all have it, else nats per token."""
    members = [member for row in rows for member in row.members]
    known = all(member.score.content.get(BITS) is not None for member in members)
    return BITS if known else NATS


def curve_of(one: RunMetrics, key: str) -> list[LoggedPoint]:
    """Returns what validations have logged of a loss, up to the checkpoint."""
    points = logged_points(one.training, one.run.scalars.get(SCALARS[key], {}))
    return [point for point in points if point.steps <= one.training.steps]


def curves_frame(rows: Sequence[ReportRow]) -> pd.DataFrame:
    """Returns the points of the figure's lines: run, label, steps, tokens, FLOPs and loss."""
    drawn = drawn_rows(rows)
    key = loss_key(drawn)
    lines = [
        (member.name, row.label, *point)
        for row in drawn
        for member in row.members
        for point in curve_of(member, key)
    ]
    header = ["run", "label", "steps", "tokens", "training_flops", SCALARS[key]]
    return pd.DataFrame(lines, columns=header, dtype=object)


def compare_figure(rows: Sequence[ReportRow]) -> Any:
    """Returns three panels over one loss; lines are of validations, large points of the scores.

    Runs of a row share a colour, kinds of likelihood have dashes and hollow points of their own.

    Args:
        rows: with a loss of text, at least one.
    """
    from matplotlib.figure import Figure

    key = loss_key(rows)
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    panels = dict(zip(PANELS, figure.subplots(1, len(PANELS), sharey=True), strict=True))
    named: dict[str, Any] = {}
    for number, row in enumerate(rows):
        colour = COLOURS[number % len(COLOURS)]
        for member in row.members:
            _draw_curve(panels, member, key, colour, alone=len(row.members) == 1)
        named[_name(row)] = _draw_scores(panels, row, key, colour)
    for name, panel in panels.items():
        dress_costs(panel, PANELS[name])
    panels["tokens"].set_ylabel(TITLES[key])
    plain = [text.replace("$", r"\$") for text in named]  # it would start a formula
    place: dict[str, Any] = {
        "loc": "outside upper center",
        "ncols": min(len(named), LOSS_LEGEND_COLUMNS),
    }
    figure.legend(list(named.values()), plain, frameon=False, fontsize=9, **place)
    return figure


def _name(row: ReportRow) -> str:
    kind = row.first.likelihood
    return row.label if kind == "exact" else f"{row.label} ({KINDS[kind]})"


def _draw_curve(panels: Any, one: RunMetrics, key: str, colour: str, *, alone: bool) -> None:
    curve = curve_of(one, key)
    if not curve:
        return
    style: dict[str, Any] = {"color": colour, "linestyle": KIND_DASHES[one.likelihood]}
    style |= {"linewidth": 1.4 if alone else 0.8, "alpha": 1.0 if alone else 0.7}
    style |= {"marker": ".", "markersize": 3}
    if len(curve) == 1:  # no line, and the large point of the score may cover it
        style |= {"marker": "x", "markersize": 9, "zorder": 4}
    for name, cost in (("tokens", "tokens"), ("training_flops", "flops")):
        x = [getattr(point, cost) for point in curve]
        panels[name].plot(x, [point.value for point in curve], **style)


def _draw_scores(panels: Any, row: ReportRow, key: str, colour: str) -> Any:
    """Draws the means of a row with the range of its seeds; returns what the legend shows."""
    losses = [float(member.score.content[key]) for member in row.members]
    mean = statistics.fmean(losses)
    error = [[mean - min(losses)], [max(losses) - mean]]
    exact = row.first.likelihood == "exact"
    style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 7, "capsize": 3}
    style |= {"linestyle": KIND_DASHES[row.first.likelihood], "markerfacecolor": colour}
    if not exact:
        style["markerfacecolor"] = "white"
    shown: Any = None
    for name, values in _costs(row).items():
        if values:
            x = [statistics.fmean(values)]
            shown = panels[name].errorbar(x, [mean], yerr=error, zorder=3, **style)
    return shown


def _costs(row: ReportRow) -> dict[str, list[float]]:
    """Returns what each panel is over, of the members for which it is known."""
    trained = [member.training for member in row.members]
    return {
        "tokens": [float(t.tokens) for t in trained if t.tokens is not None],
        "training_flops": [t.flops for t in trained if t.flops is not None],
        "inference_flops": [generating(member) for member in row.members],
    }


# ---- report, as text and Markdown


FIGURE = "loss.svg"
ALT = "Loss against training tokens, training FLOPs and inference FLOPs per token"
CAPTION = (
    "Lines: what validations have logged, on validation text (they may have read less than all of "
    "it), one for each seed; a run with one validation is a cross. Large points: the scores of the "
    "table, with the range of the seeds. Filled points and solid lines are exact, causal "
    "likelihoods; hollow points and dashed lines are not."
)


@dataclass(frozen=True)
class ComparisonReport:
    """What all formats show."""

    title: str
    introduction: str
    """A paragraph, or nothing."""
    notes: list[str]
    """How to read the numbers, a sentence or two each."""
    checks: list[RunCheck]
    frame: pd.DataFrame
    """The table of runs."""
    tables: dict[str, pd.DataFrame]
    """Means over the seeds of a row, as text; by heading."""
    runs: pd.DataFrame
    """A line a run, as text: where it lies, and what it was scored on."""
    left_out: list[LeftOut]
    has_figure: bool


def make_report(
    rows: Sequence[ReportRow],
    left_out: Sequence[LeftOut],
    *,
    title: str | None = None,
    introduction: str = "",
) -> ComparisonReport:
    """Returns the report.

    Args:
        rows: what is compared, in order.
        left_out: runs that could not be read or scored.
        title: its heading; None: how many runs there are.
        introduction: a paragraph.
    """
    members = [member for row in rows for member in row.members]
    runs = "1 run" if len(members) == 1 else f"{len(members)} runs"
    frame = runs_frame(rows)
    return ComparisonReport(
        title=f"Comparison of {runs}" if title is None else title,
        introduction=introduction,
        notes=_notes(rows, frame),
        checks=make_checks(members),
        frame=frame,
        tables=shown_tables(frame, members),
        runs=_runs_shown(rows),
        left_out=list(left_out),
        has_figure=bool(drawn_rows(rows)),
    )


def shown_tables(frame: pd.DataFrame, members: Sequence[RunMetrics]) -> dict[str, pd.DataFrame]:
    """Returns tables as people read them, by heading: a line a row of the report.

    Args:
        frame: the table of runs.
        members: its runs; their tasks have one metric each.
    """
    columns = COLUMNS | _task_columns(members)
    parts: dict[str, dict[str, list[str]]] = {}
    groups = [group for _, group in frame.groupby("label", sort=False)]
    for key, column in columns.items():
        if column.part and key in frame:
            part = parts.setdefault(column.part, {})
            part[column.title] = [column.cell(group[key]) for group in groups]
    first = {"seeds": [str(len(group)) for group in groups]}
    causal = {"causal": ["yes" if group["causal"].iloc[0] else "no" for group in groups]}
    parts[SIZE] = {**first, **parts.get(SIZE, {})}
    parts["Loss"] = {**parts.get("Loss", {}), **causal}
    labels = list(dict.fromkeys(frame["label"]))
    return {
        heading: pd.DataFrame(dict(some), index=labels)
        for part, cells in parts.items()
        for heading, some in _pages(part, list(cells.items()))
    }


def _pages(part: str, cells: list[tuple[str, list[str]]]) -> list[tuple[str, list[Any]]]:
    """Returns columns in tables of at most ``MOST_COLUMNS``, with a heading each."""
    starts = range(0, len(cells), MOST_COLUMNS)
    return [
        (part if not start else f"{part}, continued {number}", cells[start : start + MOST_COLUMNS])
        for number, start in enumerate(starts)
    ]


def _task_columns(members: Sequence[RunMetrics]) -> dict[str, ReportColumn]:
    """Returns a column a task, of the metric that the report shows."""
    metrics: dict[str, dict[str, None]] = {}
    for one in members:
        for task, result in one.tasks.items():
            metrics.setdefault(task, {}).update(dict.fromkeys(result.metrics))
    chosen = {
        task: next((name for name in PREFERRED if name in names), next(iter(names)))
        for task, names in metrics.items()
    }
    return {f"{t}_{m}": ReportColumn(f"{t} ({m})", THREE, "Tasks") for t, m in chosen.items()}


def _runs_shown(rows: Sequence[ReportRow]) -> pd.DataFrame:
    lines = {
        member.name: {
            "row": row.label,
            "seed": seed,
            "steps": f"{member.training.steps:,}",
            "held-out text that was scored": _scored_on(member),
            "scores": member.score.source,
            "checkpoint": _place(member),
        }
        for row in rows
        for member, seed in zip(row.members, row.seeds, strict=True)
    }
    return pd.DataFrame.from_dict(lines, orient="index")


def _scored_on(one: RunMetrics) -> str:
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


def aligned(table: pd.DataFrame) -> str:
    """Returns a table of texts in aligned columns, ``-`` where a cell is empty."""
    return table.replace("", "-").to_markdown(
        tablefmt="plain", disable_numparse=True, stralign="left"
    )


def as_text(report: ComparisonReport) -> str:
    """Returns checks, tables and notes for the terminal."""
    parts = [
        "\n".join(check.as_text() for check in report.checks),
        *(f"{heading}\n{aligned(table)}" for heading, table in report.tables.items()),
        "\n".join(f"note: {note}" for note in report.notes),
        "\n".join(f"left out: {one.name}: {one.reason}" for one in report.left_out),
    ]
    return "\n\n".join(part for part in parts if part)


def as_markdown(report: ComparisonReport) -> str:
    """Returns the report as Markdown; the figure is a file next to it."""
    figure = f"![{ALT}]({FIGURE})\n\n{CAPTION}"
    parts = [
        f"# {report.title}",
        *([report.introduction] if report.introduction else []),
        *(f"## {heading}\n\n{_markdown(table)}" for heading, table in report.tables.items()),
        "\n".join(f"- {_escaped(note)}" for note in report.notes),
        *([f"## Curves\n\n{figure}"] if report.has_figure else []),
        "## What the runs have in common",
        "\n".join(f"- **{c.state}**: {c.what}: {_escaped(c.detail)}" for c in report.checks),
        f"## Every run\n\n{_markdown(report.runs)}",
    ]
    if report.left_out:
        lines = (f"- {_escaped(one.name)}: {_escaped(one.reason)}" for one in report.left_out)
        parts.append("## Left out\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _markdown(table: pd.DataFrame) -> str:
    texts = table.rename(index=_escaped).map(_escaped)
    return texts.to_markdown(disable_numparse=True, stralign="left")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _notes(rows: Sequence[ReportRow], frame: pd.DataFrame) -> list[str]:
    """Returns how to read the numbers that are there."""
    several = any(len(row.members) > 1 for row in rows)
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
    if "nominal_training_flops" in frame:
        notes.append(
            "Planned FLOPs: where texts decide what a training step computes, training FLOPs are "
            "those of a full budget of streams; the step may have computed less."
        )
    if "tokens_per_second" in frame:
        notes.append(
            "Tokens per second are those logged in training, on whatever machine that was."
        )
    return [*notes, "FLOPs are counted, not measured; a multiply-add is two."]


# ---- HTML page


GENERATOR = "evaluate.py compare"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing but what is in it."""
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff;
       max-width: 80rem; margin: 2rem auto; padding: 0 1.2rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .35rem .9rem .35rem 0; text-align: right; vertical-align: top;
         font-variant-numeric: tabular-nums; overflow-wrap: normal; }
thead th { border-bottom: 2px solid #c4cdd6; vertical-align: bottom; font-weight: 600; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
.text td, tbody th { overflow-wrap: anywhere; }
tbody tr + tr { border-top: 1px solid #e3e8ee; }
tbody th { font-weight: 600; min-width: 8rem; max-width: 18rem; }
.range { display: block; color: #5d6b7a; font-size: .8rem; white-space: nowrap; }
.checks { list-style: none; padding: 0; } .checks li { margin: .2rem 0; }
.state { display: inline-block; min-width: 5.6rem; margin-right: .6rem; padding: 0 .5rem;
         border-radius: 4px; font-size: .8rem; text-align: center; }
.matched { background: #e2f2e8; color: #1c5a36; } .differs { background: #fbe5d6; color: #8a3d0c; }
.not-known { background: #e9edf1; color: #47535f; }
.note, figcaption { color: #47535f; font-size: .88rem; }
figure { margin: 1rem 0; } figure img { width: 100%; height: auto; }
"""


def as_page(report: ComparisonReport, svg: bytes | None) -> str:
    """Returns the report as one HTML file: no network, no script, no other file.

    Args:
        report: what it shows.
        svg: the figure; None: there is none.
    """
    notes = "".join(f"<li>{_safe(note)}</li>" for note in report.notes)
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f'<meta name="generator" content="{GENERATOR}">',
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{_safe(report.title)}</title>\n<style>{STYLE}</style></head><body>",
        f"<h1>{_safe(report.title)}</h1>",
        *([f"<p>{_safe(report.introduction)}</p>"] if report.introduction else []),
        *(f"<h2>{_safe(heading)}</h2>{_table(t, _cell)}" for heading, t in report.tables.items()),
        f"<ul class='note'>{notes}</ul>",
        *([] if svg is None else ["<h2>Curves</h2>", _figure(svg)]),
        "<h2>What the runs have in common</h2>",
        _checks(report),
        "<h2>Every run</h2>",
        _table(report.runs, _safe, "text"),
        *([_left_out(report)] if report.left_out else []),
    ]
    return "\n".join([*parts, "</body></html>", ""])


def _table(table: pd.DataFrame, show: Callable[[str], str], kind: str = "numbers") -> str:
    """Returns a table that scrolls by itself where the page is narrower."""
    safe = table.map(show).rename(index=_safe, columns=_safe)
    with pd.option_context("display.max_colwidth", None):
        return f"<div class='wide'>{safe.to_html(escape=False, border=0, classes=kind)}</div>"


def _cell(text: str) -> str:
    """Returns a mean with the range of the seeds in a line below."""
    mean, bracket, rest = text.partition(" (")
    spread = f"<span class='range'>({_safe(rest)}</span>" if bracket else ""
    return _safe(mean) + spread


def _figure(svg: bytes) -> str:
    data = base64.b64encode(svg).decode("ascii")
    image = f'<img alt="{_safe(ALT)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{_safe(CAPTION)}</figcaption></figure>"


def _checks(report: ComparisonReport) -> str:
    lines = (
        f"<li><span class='state {check.state.replace(' ', '-')}'>{check.state}</span>"
        f"<b>{_safe(check.what)}</b>: {_safe(check.detail)}</li>"
        for check in report.checks
    )
    return "<ul class='checks'>" + "\n".join(lines) + "</ul>"


def _left_out(report: ComparisonReport) -> str:
    lines = (f"<li><b>{_safe(x.name)}</b>: {_safe(x.reason)}</li>" for x in report.left_out)
    return "<h2>Left out</h2><ul>" + "\n".join(lines) + "</ul>"


def _safe(text: str) -> str:
    return html.escape(text, quote=True)


# ---- output folder


PAGE = "report.html"
FILES = (FIGURE, "report.md", "report.csv", "runs.csv", "curves.csv", PAGE)
"""What is written; the page last, as it says whose folder it is."""


def check_folder(target: str) -> Path:
    """Returns the folder that a report is to be written to, having tried that it can be.

    Args:
        target: a folder that does not exist, is empty or has an earlier report; others above it
            are made.

    Raises:
        ValueError: if it is something else, or refuses files.
    """
    folder = Path(target).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output ({folder}) is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not _is_ours(folder):
        raise ValueError(
            f"output ({folder}) has other files, and no report of an earlier comparison; name "
            "another folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        trial = _beside(folder)
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise ValueError(
            f"output ({folder}): cannot write to {folder.parent} ({error.strerror}); choose "
            "another folder"
        ) from error
    return folder


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a report: first all of it next to its place, then there.

    A new folder appears whole. In one of an earlier report each file is replaced whole, those that
    are not written any more go, and files of others stay.

    Args:
        folder: as ``check_folder`` returned it.
        write: writes some of ``FILES``, the page among them, to the folder that it is given.
    """
    unfinished = _beside(folder)
    unfinished.mkdir()
    try:
        write(unfinished)
        if not folder.exists():
            os.rename(unfinished, folder)
            return
        for name in FILES:
            if (unfinished / name).exists():
                os.replace(unfinished / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Whether a folder has a page that this command wrote."""
    page = folder / PAGE
    try:
        with page.open(encoding="utf-8", errors="replace") as file:
            return f'content="{GENERATOR}"' in file.read(2000)
    except OSError:
        return False


def _beside(folder: Path) -> Path:
    resolved = folder.resolve()
    return resolved.with_name(f".{resolved.name}.{os.getpid()}.tmp")
