"""Report of a comparison: checks, columns, tables and notes, as Markdown and as an HTML page.

Everything is computed from the table of runs (``run_metrics.runs_frame``).
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from evaluation.output import render
from evaluation.run_metrics import ANSWERS, BITS, NATS
from evaluation.scoring import PERPLEXITY_KEYS
from evaluation.tables import (
    FOUR,
    KINDS,
    THREE,
    TWO,
    WHOLE,
    TableColumn,
    as_markdown,
    escape_markdown,
    show_mean,
    si,
)
from lightning_models.atomic_files import check_folder
from lightning_models.recipe import as_started

# ---- checks: properties that runs share


State = Literal["matched", "differs", "not known"]
Agreement = tuple[State, str]
"""Whether runs share a property, and the shared value or the values with their runs."""

CLOSE_TOKENS, CLOSE_PARAMETERS, CLOSE_FLOPS = 0.01, 0.05, 0.05
"""Largest relative excess of the largest value over the smallest in matched runs."""
MAX_NAMES = 4
NONE = "none"
DEFAULT_PRECISION = "32-true"
"""The trainer's precision if a record has none."""
HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


def make_checks(runs: pd.DataFrame) -> pd.DataFrame:
    """Compares properties of all runs, starting with the ones that make numbers incomparable.

    Returns:
        ``state`` and ``detail`` of each property, see ``Agreement``.
    """
    runs = runs.set_index("run")
    values = runs["same_text"].map({True: "yes", False: "no, it has changed since"})
    checks = {
        "training text": equal(runs["text"]),
        "data order": same_parts(runs["order"]),
        "tokenizer": equal(runs["tokenizer"]),
        "tokens trained on": close(runs["training_tokens"], CLOSE_TOKENS),
        "optimiser steps": equal(runs["steps"], ","),
        "parameters": close(runs["parameters"], CLOSE_PARAMETERS),
        "training FLOPs": close(runs["flops"], CLOSE_FLOPS, ".3g"),
        "decoder": same_parts(runs["decoder"].map(_settings)),
        "optimizer": same_parts(runs["model_recipe"].map(_optimizer)),
        "held-out text that is scored": same_parts(runs["scored"].map(_held_out)),
        "text of the training is still there": equal(values),
        "targets that nats per token count": equal(runs["counted"]),
        "kind of likelihood": equal(runs["likelihood"].map(KINDS)),
        "context when scoring": equal(runs.apply(_context, axis=1)),
        "precision of training": equal(runs.apply(_precision, axis=1)),
        "code version": equal(runs["commit"].map(short_hash)),
        "torch version": equal(runs["torch"]),
    }
    for name in dict.fromkeys(name for tasks in runs["tasks"] for name in tasks):
        task_settings = {run: x[name]["how"] for run, x in runs["tasks"].items() if name in x}
        checks[f"task {name}"] = same_parts(pd.Series(task_settings))
    return pd.DataFrame.from_dict(checks, orient="index", columns=["state", "detail"])


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: "null" if value is None else value for key, value in config.items()}


def _optimizer(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return _settings(recipe["init_args"].get("optimizer", {}))


def _held_out(scored: Mapping[str, Any]) -> dict[str, Any]:
    return {key: scored[key] for key in ("text", "split", "bytes")}


def _context(run: pd.Series) -> str:
    if run["reads"] == "windows":
        return _windows(run)
    return "whole documents" if run["reads"] == "sentences" else "questions"


def _windows(run: pd.Series) -> str:
    """Describes windows: their size and, if they overlap, the tokens before each target."""
    size, stride = run["context"], run["stride"]
    before = "" if stride in (None, size) else f", at least {size - stride} before each target"
    return f"windows of {size} tokens{before}"


def _precision(run: pd.Series) -> str | None:
    return str(run["precision"] or DEFAULT_PRECISION) if run["recorded"] else None


def short_hash(commit: str | None) -> str | None:
    """Shortens the hash in a recorded commit, or in each of several, to 12 digits."""
    return None if commit is None else HASH.sub(r"\1", commit)


def equal(values: pd.Series, form: str = "") -> Agreement:
    """Checks whether all runs, by name, have the same value; None stands for an unknown one."""
    groups: dict[Any, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(None if pd.isna(value) else value, []).append(str(name))
    present = [value for value in groups if value is not None]
    if len(present) > 1:
        return "differs", _listed(groups, form)
    if None in groups:
        return "not known", _listed(groups, form) if present else "of any run"
    return "matched", _shown(present[0], form)


def close(values: pd.Series, within: float, form: str = ",") -> Agreement:
    """Checks whether the values of all runs are within a relative distance of each other."""
    state, detail = equal(values, form)
    present = values.dropna()
    if state != "differs" or max(present) > (1 + within) * min(present):
        return state, detail
    state = "not known" if len(present) < len(values) else "matched"
    return state, f"within {within:.0%}: {detail}"


def same_parts(values: pd.Series) -> Agreement:
    """Checks whether all runs, by name, have the same dict, and names the keys that differ."""
    keys = list(dict.fromkeys(key for value in values for key in value))
    different = [key for key in keys if len({str(value.get(key)) for value in values}) > 1]
    if not different:
        return "matched", _joined(values.iloc[0], keys)
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(_joined(value, different), []).append(str(name))
    return "differs", _listed(groups)


def _joined(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    parts = [f"{key} {_shown(values[key], ',')}" for key in keys if key in values]
    return ", ".join(parts) or NONE


def _listed(groups: Mapping[Any, Sequence[str]], form: str = "") -> str:
    return " | ".join(f"{_shown(value, form)} ({_named(names)})" for value, names in groups.items())


def _named(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _shown(value: Any, form: str = "") -> str:
    if value is None:
        return "not known"
    plain = isinstance(value, bool) or not isinstance(value, int | float)
    return str(value) if plain else format(value, form)


# ---- columns


TOKEN = {"all": "token", "lexical": "lexical token", ANSWERS: "answer token"}
"""Denominator of nats, by the targets that are counted."""
PREFERRED = ("acc", "acc,none", "acc_norm", "acc_norm,none", "accuracy", "exact_match")
"""Metrics of a task to show in the report, the first that exists; the CSV files have all."""
FACTS = (
    *("run", "label", "seed", "checkpoint", "which", "model"),
    *("likelihood", "counted", "causal", "context", "stride"),
)
"""Columns of ``runs.csv`` that are not measured."""
MAX_COLUMNS = 8
"""Maximum number of columns of a table, so that it fits a page."""
LOSS, SIZE, COST, TASKS = "Loss", "Size and training", "Inference", "Tasks"


def _likelihood_columns() -> dict[str, TableColumn]:
    """Returns separate columns for each kind of likelihood and each kind of counted targets."""
    columns = {}
    for likelihood, name in KINDS.items():
        for counted, token in TOKEN.items():
            end = "" if counted == "all" else f"_{counted}"
            columns[f"{NATS}_{likelihood}{end}"] = TableColumn(f"nats/{token} ({name})", FOUR, LOSS)
            perplexity = f"{PERPLEXITY_KEYS[likelihood]}{end}"
            columns[perplexity] = TableColumn(f"perplexity ({name})", TWO)
    for end, of in (("", ""), (f"_{ANSWERS}", " of answers")):
        for likelihood, name in KINDS.items():
            key = f"{BITS}_{likelihood}{end}"
            columns[key] = TableColumn(f"bits/byte{of} ({name})", FOUR, LOSS)
    return columns


COLUMNS = {
    "parameters": TableColumn("parameters", WHOLE, SIZE),
    "non_embedding_parameters": TableColumn("outside embeddings", WHOLE),
    "steps": TableColumn("optimiser steps", WHOLE),
    "training_tokens": TableColumn("training tokens", WHOLE, SIZE),
    "training_flops_per_token": TableColumn("training FLOPs/token", si, SIZE),
    "training_flops_per_token_published": TableColumn(
        "training FLOPs/token, as its paper counts", si, SIZE
    ),
    "training_flops": TableColumn("training FLOPs", si, SIZE),
    "nominal_training_flops_per_token": TableColumn("planned training FLOPs/token", si, SIZE),
    "nominal_training_flops": TableColumn("planned training FLOPs", si, SIZE),
    **_likelihood_columns(),
    "executed_steps": TableColumn("extra steps/token", TWO, COST),
    "expected_steps": TableColumn("expected extra steps/token", TWO, COST),
    "inference_flops_per_token": TableColumn("inference FLOPs/token, generating", si, COST),
    "scoring_flops_per_token": TableColumn("inference FLOPs/token, scoring", si, COST),
    "tokens_per_second": TableColumn("training tokens/s", WHOLE, SIZE),
    "val_accuracy": TableColumn("right answers (val)", THREE, LOSS),
}
"""Measured columns in the order of the CSV files, before the scores of tasks."""


def number_keys(runs: pd.DataFrame) -> list[str]:
    """Returns the columns of ``COLUMNS`` and of tasks in which some run has a value."""
    present = runs.columns[runs.notna().any()]
    tasks = [f"{task}_{key}" for task, names in _metrics(runs).items() for key in names]
    return [key for key in COLUMNS if key in present] + list(dict.fromkeys(tasks))


def runs_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the content of ``runs.csv``: one row per run, ``FACTS`` and the measured columns."""
    return runs[[*FACTS, *number_keys(runs)]]


def _metrics(runs: pd.DataFrame) -> dict[str, list[str]]:
    """Returns the metrics of each task that any run has."""
    metrics: dict[str, dict[str, None]] = {}
    for tasks in runs["tasks"]:
        for task, result in tasks.items():
            metrics.setdefault(task, {}).update(dict.fromkeys(result["metrics"]))
    return {task: list(names) for task, names in metrics.items()}


# ---- tables


def shown_tables(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns readable tables of the report by heading: means over the runs of each label."""
    columns = dict(COLUMNS)
    for task, names in _metrics(runs).items():
        metric = next((name for name in PREFERRED if name in names), names[0])
        columns[f"{task}_{metric}"] = TableColumn(f"{task} ({metric})", THREE, TASKS)
    rows = runs.groupby("label", sort=False)
    parts = {SIZE: {"seeds": rows.size().astype(str)}}
    for key in number_keys(runs):
        if key in columns and (column := columns[key]).part:
            cells = {label: show_mean(row, column.show) for label, row in rows[key]}
            parts.setdefault(column.part, {})[column.title] = pd.Series(cells)
    parts.setdefault(LOSS, {})["causal"] = rows["causal"].first().map({True: "yes", False: "no"})
    tables = {}
    for part, cells in parts.items():
        table = pd.DataFrame(cells, index=runs["label"].unique())
        for start in range(0, table.shape[1], MAX_COLUMNS):
            heading = f"{part}, continued {start // MAX_COLUMNS}" if start else part
            tables[heading] = table.iloc[:, start : start + MAX_COLUMNS]
    return tables


def shown_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per run, as text: its checkpoint, and the text that it was scored on."""
    return pd.DataFrame(
        {
            "row": runs["label"],
            "seed": runs["seed"],
            "steps": runs["steps"].map("{:,}".format),
            "held-out text that was scored": runs.apply(_scored_on, axis=1),
            "scores": runs["source"],
            "checkpoint": runs["checkpoint"],
        }
    ).set_axis(list(runs["run"]))


def _scored_on(run: pd.Series) -> str:
    scored = run["scored"]
    part = f"{scored['batches']} of {scored['of_batches']} batches"
    size = "" if scored["bytes"] is None else f", {scored['bytes']:,} bytes"
    return (
        f"{scored['text']}, {scored['split']}: {part}, "
        f"{_context(run)}, {scored['tokens']:,} targets "
        f"({run['counted']}){size}, precision {scored['precision']}"
    )


# ---- notes: how to read the numbers


SEVERAL_SEEDS = "Means over seeds, in brackets the smallest and the largest value."
ONE_SEED = "One seed per row: the spread over seeds is unknown."
BOUND = (
    "Bound: only a lower bound of the model's likelihood is known, so its loss is at most the "
    "number shown; it has separate columns and must not be compared with exact losses."
)
NOT_CAUSAL = (
    "Not causal: a token's score may depend on later tokens; the loss of the text written from "
    "left to right is another (evaluate.py perplexity --mode autoregressive)."
)
OTHER_TARGETS = (
    "Nats per token count different targets in different rows, so they have separate columns; "
    "bits per byte count all targets and the bytes of the text."
)
OTHER_TEXT = "Rows were scored on different text: their losses must not be compared."
MARKERS = (
    "If sentences are marked, only tokens of the text count, and the FLOPs of the markers are "
    "distributed over them."
)
PART_OF_SPLIT = "Some runs were scored on a part of the split only: see the table of all runs."
PART_OF_TASK = "Some tasks were scored on a part of their examples only: see below."
PLANNED = (
    "Planned FLOPs: if the compute of a training step depends on its text, training FLOPs assume a "
    "full budget of streams; the step may have computed less."
)
SPEED = "Tokens per second were logged in training, on the machine of each run."
COUNTED = "FLOPs are counted, not measured; a multiply-add is two."


def make_notes(runs: pd.DataFrame) -> list[str]:
    """Returns explanatory notes for the columns present."""
    rows, keys = runs.groupby("label", sort=False), number_keys(runs)
    kinds = set(runs["likelihood"])
    tasks = [task["how"] for scores in runs["tasks"] for task in scores.values()]
    doubled = [_same_seeds(str(label), list(row["seed"])) for label, row in rows]
    notes = {
        SEVERAL_SEEDS if max(rows.size()) > 1 else ONE_SEED: True,
        **{note: True for note in doubled if note},
        **dict.fromkeys(_text_changes(runs), True),
        BOUND: "lower_bound" in kinds,
        NOT_CAUSAL: "noncausal" in kinds,
        OTHER_TEXT: len({str(_held_out(scored)) for scored in runs["scored"]}) > 1,
        OTHER_TARGETS: runs["counted"].nunique() > 1,
        MARKERS: any(runs["markers"] > 1),
        PART_OF_SPLIT: any(scored["batches"] < scored["of_batches"] for scored in runs["scored"]),
        PART_OF_TASK: any(
            (task.get("examples") or 0) < (task.get("of_examples") or 0) for task in tasks
        ),
        PLANNED: "nominal_training_flops" in keys,
        SPEED: "tokens_per_second" in keys,
        COUNTED: True,
    }
    return [as_started(note) for note, holds in notes.items() if holds]


def _text_changes(runs: pd.DataFrame) -> list[str]:
    """Returns a note for each row whose tokenizer cannot reproduce its text."""
    if "text_changes" not in runs:
        return []
    changed = runs.dropna(subset=["text_changes"]).groupby("label", sort=False)
    return [
        f"{label}: the tokenizer {row['text_changes'].iloc[0]}; bits per byte divide by the bytes "
        "of the source text."
        for label, row in changed
    ]


def _same_seeds(label: str, seeds: Sequence[str]) -> str:
    """Returns a sentence if two runs of a row have the same known seed."""
    known_seeds = [seed for seed in seeds if not seed.startswith("?")]
    if len(set(known_seeds)) == len(known_seeds):
        return ""
    return (
        f"{label}: two of its runs have the same seed ({', '.join(seeds)}), so their spread says "
        "nothing about seeds."
    )


def make_differences(runs: pd.DataFrame) -> list[str]:
    """Returns sentences on the difference in mean loss between each row and the first.

    If both have runs of the same seeds, the range of the differences by seed follows. Rows that
    were scored on different text, targets or kinds of likelihood have the reason instead.
    """
    key = BITS if runs[BITS].notna().all() else NATS
    unit = "bits per byte" if key == BITS else "nats per token"
    rows = [row.dropna(subset=[key]) for _, row in runs.groupby("label", sort=False)]
    rows = [row for row in rows if len(row)]
    sentences = []
    for row in rows[1:]:
        pair, (first, other) = pd.concat([rows[0], row]), (rows[0].iloc[0], row.iloc[0])
        texts = {str(_held_out(scored)) for scored in pair["scored"]}
        kinds = [KINDS[kind] for kind in dict.fromkeys(pair["likelihood"])]
        reason = "scored on different text" if len(texts) > 1 else ""
        if len(kinds) > 1:
            reason = f"the likelihoods differ in kind ({', '.join(kinds)})"
        elif pair["counted"].nunique() > 1:
            reason = "different targets are counted"
        if reason:
            sentences.append(f"{other['label']} minus {first['label']}: not comparable, {reason}")
            continue
        difference = row[key].mean() - rows[0][key].mean()
        better = "better" if difference < 0 else "worse"
        sentences.append(
            f"{other['label']} minus {first['label']}: {difference:+.4f} {unit}"
            f"{'' if difference == 0 else f', {better}'} (lower is better)"
            f"{_paired(rows[0], row, key)}"
        )
    return sentences


def _paired(first: pd.DataFrame, other: pd.DataFrame, key: str) -> str:
    """Returns the range of a row's differences from the first row, seed by seed, if they pair."""
    first_scores, other_scores = (row.set_index("seed")[key] for row in (first, other))
    seeds = [
        seed
        for seed in first_scores.index.intersection(other_scores.index)
        if not seed.startswith("?")
    ]
    if len(seeds) < 2 or first_scores.index.has_duplicates or other_scores.index.has_duplicates:
        return ""
    differences = other_scores[seeds] - first_scores[seeds]
    return (
        f"; paired by seed, {differences.min():+.4f} to {differences.max():+.4f} "
        f"over {len(seeds)} seeds"
    )


# ---- report, as Markdown and as one HTML page


SAMPLES = "A sample of each model, from the start of a document"

LOSS_FIGURE, COMPUTE_FIGURE = "loss.svg", "compute.svg"
LOSS_ALT = "Loss against training tokens, training FLOPs and inference FLOPs per token"
LOSS_CAPTION = (
    "Lines: logged validation losses, possibly on a part of the validation text, means over seeds; "
    "a run with one validation is a cross. Large points: the scores of the table. Bands and bars "
    "are the range over seeds. Filled points and solid lines are exact, causal likelihoods; hollow "
    "points and dashed lines are not."
)
COMPUTE_ALT = "Shares of the FLOPs of one pass through each model"
COMPUTE_CAPTION = "FLOPs of one pass by part of the model, at the context of the scores."


@dataclass(frozen=True)
class ComparisonFigure:
    """A figure of the report."""

    heading: str
    file: str
    alt: str
    caption: str


FIGURES = (
    ComparisonFigure("Curves", LOSS_FIGURE, LOSS_ALT, LOSS_CAPTION),
    ComparisonFigure("Where FLOPs go", COMPUTE_FIGURE, COMPUTE_ALT, COMPUTE_CAPTION),
)


@dataclass(frozen=True)
class ComparisonReport:
    """Content of a report, independent of its format."""

    title: str
    introduction: str
    """A paragraph, or an empty string."""
    checks: pd.DataFrame
    tables: Mapping[str, pd.DataFrame]
    """Means over the seeds of a row as text, by heading."""
    notes: Sequence[str]
    runs: pd.DataFrame
    """One row per run, as text."""
    left_out: Mapping[str, str]
    """Reason for each run that could not be read or scored."""
    differences: Sequence[str] = ()
    """Loss difference between each row and the first one, one sentence per row."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """Text written by the first run of each row."""


def report_markdown(report: ComparisonReport, figures: Sequence[str] = ()) -> str:
    """Returns the report as Markdown; ``figures`` are the names of the files next to it."""
    safe, checks, tables = escape_markdown, report.checks.itertuples(), report.tables.items()
    drawn = [figure for figure in FIGURES if figure.file in figures]
    parts = [
        f"# {safe(report.title)}",
        *([html.escape(report.introduction, quote=False)] if report.introduction else []),
        *(["\n".join(f"- {safe(d)}" for d in report.differences)] if report.differences else []),
        *(f"## {safe(heading)}\n\n{as_markdown(table)}" for heading, table in tables),
        "\n".join(f"- {safe(note)}" for note in report.notes),
        *(f"## {f.heading}\n\n![{f.alt}]({f.file})\n\n{f.caption}" for f in drawn),
        "## What the runs have in common",
        "\n".join(
            f"- **{state}**: {safe(check)}: {safe(detail)}" for check, state, detail in checks
        ),
        f"## Every run\n\n{as_markdown(report.runs)}",
    ]
    if report.samples:
        texts = {name: " ".join(text.split()) for name, text in report.samples.items()}
        notes = "\n".join(f"- **{safe(name)}**: {safe(text)}" for name, text in texts.items())
        parts.append(f"## {SAMPLES}\n\n{notes}")
    if report.left_out:
        lines = (f"- {safe(name)}: {safe(reason)}" for name, reason in report.left_out.items())
        parts.append("## Left out\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def report_page(report: ComparisonReport, pictures: Mapping[str, bytes]) -> str:
    """Returns the report as one HTML file without scripts or links; ``pictures`` are SVG."""
    figures = [
        {**asdict(figure), "data": base64.b64encode(pictures[figure.file]).decode("ascii")}
        for figure in FIGURES
        if figure.file in pictures
    ]
    return render("report.html", report=report, figures=figures, samples=SAMPLES)


# ---- output folder


PAGE, TABLE = "report.html", "runs.csv"
FILES = (
    *("report.md", PAGE, TABLE, "checks.csv", "curves.csv", "compute.csv"),
    "report.csv",  # of older versions, which goes with the rest of an earlier report
    *(figure.file for figure in FIGURES),
)


FILE_ENDINGS = (".png", ".svg", ".html", ".md", ".csv", ".json")


def report_folder(target: str) -> Path:
    """Returns the output folder of a report, after checking that its parent can be written to.

    Raises:
        ValueError: If it is a file or named as one, holds anything but an earlier report, or is not
            writable.
    """
    folder = Path(target).expanduser()
    if folder.suffix in FILE_ENDINGS or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"output ({folder}) is a file; name a folder, or FILE.pdf for its figures")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / PAGE).is_file():
        raise ValueError(
            f"output ({folder}) has other files, and no {PAGE} of an earlier comparison; name "
            "another folder"
        )
    check_folder("output", folder.parent, folder)
    return folder
