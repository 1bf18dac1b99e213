"""Views of ``evaluate.py compare`` that score nothing: curves, compute and result files.

Each returns a table as people read it, and writes its numbers as CSV, next to a figure.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.figures import MARKS, compute_figure, curves_figure, write_figure, write_frame
from evaluation.load import build_outline
from evaluation.output import read_json
from evaluation.run_metrics import POINT, logged_points, training_cost
from evaluation.runs import Labels, RunRecord, label_rows, label_runs
from evaluation.tables import (
    FIVE_DIGITS,
    FOUR_DIGITS,
    WHOLE,
    TableColumn,
    as_aligned,
    show_columns,
    title_of,
)
from lightning_models import LanguageModel


def label_records(
    runs: Sequence[RunRecord], models: Sequence[LanguageModel], keys: str | None
) -> Labels:
    """Returns a label for each run: its name if it has one, else what configs differ in.

    Where some runs have names, the others are called by the class of their model, as in a report.
    """
    names = [run.name for run in runs]
    if keys is None and all(run.row is not None for run in runs):
        return Labels((), tuple((name,) for name in names))
    if keys is None and any(run.row is not None for run in runs):
        facts = [
            {"run": r.name, "row": r.row, "model": r.model, "model_recipe": model.recipe()}
            for r, model in zip(runs, models, strict=True)
        ]
        texts = label_rows(pd.DataFrame(facts, dtype=object), None)
        return Labels((), tuple((text,) for text in texts))
    return label_runs([model.recipe() for model in models], names, keys)


def _with_note(table: str, labels: Labels) -> str:
    return table if labels.note is None else f"{table}\nnote: {labels.note}"


# ---- curves: a logged value over training tokens and FLOPs


def view_curves(
    runs: Sequence[RunRecord], scalar: str, keys: str | None, picture: Path | None
) -> str:
    """Returns where the curves of a logged value end; draws them where a figure is asked for.

    ``keys`` of the models' config, separated by commas, name the curves; None: those that differ.
    The figure has its points next to it.

    Raises:
        ValueError: if a run has not logged the value, or its training tokens are not known.
    """
    curves = [read_curve(run, scalar) for run in runs]
    labels = label_records(runs, [run.outline for run in runs], keys)
    for run, text, curve in zip(runs, labels.texts(), curves, strict=True):
        curve["run"], curve["label"] = run.name, f"{text} {mark(run.outline, scalar)}".rstrip()
    points = pd.concat(curves)[["run", "label", *POINT, scalar]]
    ends = points.groupby("run").tail(1).set_index("run").iloc[labels.order()]
    ends["points"] = points.groupby("run").size()
    ends["flops_per_token"] = ends["flops"] / ends["tokens"]
    columns = {
        "run": TableColumn("run"),
        "points": TableColumn("points"),
        "tokens": TableColumn("tokens", WHOLE),
        "flops_per_token": TableColumn("training FLOPs/token", FOUR_DIGITS),
        "flops": TableColumn("training FLOPs", FOUR_DIGITS),
        scalar: TableColumn(scalar, FIVE_DIGITS),
    }
    table = show_columns(ends.reset_index().set_index("label").rename_axis(None), columns)
    if picture is not None:
        write_figure(partial(curves_figure, points, labels, scalar), points, picture)
    return _with_note(as_aligned(table), labels)


def read_curve(run: RunRecord, scalar: str) -> pd.DataFrame:
    """Returns what a run has logged of a value, also after its checkpoint; see ``logged_points``.

    Raises:
        ValueError: if it has not, or its training tokens or FLOPs are not known.
    """
    if scalar not in run.scalars:
        known = ", ".join(tag for tag in run.scalars if tag.startswith(("val/", "train/", "test/")))
        where = run.log or run.checkpoint.path
        raise ValueError(
            f"scalar ({scalar}) was not logged by {where}; it has {known or 'nothing'}"
        )
    points = logged_points(training_cost(run), run.scalars[scalar], scalar)
    if points.empty:
        raise ValueError(
            f"runs ({run.log}): its training tokens or FLOPs are not known (questions, text that "
            "has changed since, or no throughput/flops_per_token in the log); leave the run out"
        )
    return points


def mark(model: LanguageModel, scalar: str) -> str:
    """Returns the mark of a likelihood that is not exact; else nothing.

    Training has no bound, as what is inferred has seen its noise.
    """
    stage, _, name = scalar.rpartition("/")
    if name not in ("loss", "bpb") and not name.startswith("ppl"):
        return ""
    kind = model.likelihood
    return MARKS["estimate" if kind == "lower_bound" and stage == "train" else kind]


# ---- compute: what the FLOPs of models are spent on


PARTS = ("output", "self_attention", "cross_attention", "feed_forward")
"""What most models have; those of a method's own follow."""


def view_compute(
    runs: Sequence[RunRecord],
    changes: Mapping[str, Any],
    context: int | None,
    keys: str | None,
    picture: Path | None,
) -> str:
    """Returns sizes, FLOPs per token and the shares of one pass; draws them where asked.

    No weights are read. ``changes`` are of the models' config; ``context`` is in tokens, None: of
    the windows that a model was trained on; ``keys`` of the config, separated by commas, name the
    models, None: those that differ. The figure has its numbers next to it.
    """
    models = [build_outline(run.checkpoint, changes) for run in runs]
    labels = label_records(runs, models, keys)
    counts = compute_frame([count_compute(model, context) for model in models], labels.texts())
    if picture is not None:
        write_figure(partial(compute_figure, counts), counts, picture)
    table = show_columns(counts.set_index("label").rename_axis(None), _compute_columns(counts))
    return f"FLOPs per token, and the shares of one pass\n{_with_note(as_aligned(table), labels)}"


def count_compute(model: LanguageModel, context: int | None = None) -> dict[str, Any]:
    """Returns sizes and FLOPs per token of a model, under the keys of the CSV file.

    ``flops_one_pass`` is one pass through the network, ``flops_PART`` what it is spent on;
    ``flops_forward`` scores a sequence, with as many passes as the method needs;
    ``flops_as_published`` is a training step as the method's paper counts it, None where that is no
    other count.

    The model needs no weights; without ``context`` a sequence has the tokens of its training's
    windows.

    Raises:
        ValueError: if the model does not say what its FLOPs are spent on, or reads no windows and
            ``context`` is not given.
    """
    if context is None and model.reads != "windows":
        raise ValueError(
            f"context: {type(model).__name__} reads {model.reads}, of any length; give --context N"
        )
    context = model.config.block_size if context is None else context
    parts = model.flops_by_part(context)
    return {
        "context": context,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_one_pass": sum(parts.values()),
        "flops_forward": model.flops_per_token(context),
        "flops_training": model.flops_per_token(context, training=True),
        "flops_as_published": model.published_flops_per_token(context),
        "parts": parts,
    }


def compute_frame(counts: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> pd.DataFrame:
    """Returns all numbers, a line a model; as papers count training where one of them does.

    Counts are those of ``count_compute``.

    Returns:
        ``label``, the numbers, and ``flops_PART`` and ``share_PART`` (0 to 1) of the parts that any
        of the models has, the common ones first.
    """
    found = dict.fromkeys(part for count in counts for part in count["parts"])
    names = [*(part for part in PARTS if part in found), *(p for p in found if p not in PARTS)]
    frame = pd.DataFrame(list(counts), dtype=object)
    spent = {part: [float(c["parts"].get(part, 0)) for c in counts] for part in names}
    parts = pd.DataFrame(spent)
    shares = parts.div(frame["flops_one_pass"].astype(float), axis=0)
    frame = pd.concat(
        [frame.drop(columns="parts"), parts.add_prefix("flops_"), shares.add_prefix("share_")],
        axis=1,
    )
    frame.insert(0, "label", list(labels))
    unknown = frame["flops_as_published"].isna().all()
    return frame.drop(columns="flops_as_published") if unknown else frame


def _compute_columns(counts: pd.DataFrame) -> dict[str, TableColumn]:
    columns = {
        "parameters": TableColumn("parameters", WHOLE),
        "context": TableColumn("context", WHOLE),
        "flops_one_pass": TableColumn("one pass", FOUR_DIGITS),
        "flops_forward": TableColumn("forward", FOUR_DIGITS),
        "flops_training": TableColumn("training FLOPs/token", FOUR_DIGITS),
        "flops_as_published": TableColumn("as published", FOUR_DIGITS),
    }
    for key in counts.filter(like="share_"):
        title = title_of(key.removeprefix("share_"))
        columns[key] = TableColumn(title, lambda share: f"{100 * share:.1f} %")
    return columns


# ---- results: result files of other commands side by side


NO_NUMBER = (
    "checkpoint",
    "data",
    "settings",
    "bytes",
    "tokens",
    "likelihood",
    "model",
    "train_tokens",
    "label",
    "baseline",
)
"""Keys of a result that are no number to compare; perplexities carry their likelihood's name."""


def view_results(files: Sequence[str], target: Path | None) -> str:
    """Returns one row a result, and a column for every number that any of them has.

    Files are those that other commands wrote with ``--output``; the CSV file has all digits.

    Raises:
        ValueError: if a file is missing or holds no result.
    """
    paths = [Path(file) for file in files]
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [path.parent.name for path in paths]
    lines = [
        {
            "result": f"{name} {result.get('label', '') if several else ''}".strip(),
            **_numbers(result),
        }
        for name, path in zip(names, paths, strict=True)
        for several, result in _results_in(path)
    ]
    frame = pd.DataFrame(lines, dtype=object)
    if target is not None:
        write_frame(target, frame)
    columns = {key: TableColumn(title_of(key)) for key in frame.columns[1:]}
    return as_aligned(show_columns(frame.set_index("result").rename_axis(None), columns))


def _results_in(path: Path) -> list[tuple[bool, Mapping[str, Any]]]:
    """Returns the results of a file, and whether they are of several models."""
    content = read_json(path, "runs")
    several = content.get("results") if isinstance(content, dict) else [content]
    if not isinstance(several, list):
        return [(False, content)]
    if not all(isinstance(one, dict) for one in several):
        raise ValueError(f"runs ({path}) holds no result; write one with evaluate.py --output")
    return [(True, result) for result in several]


def _numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    kinds = str | int | float | bool | None
    return {k: v for k, v in result.items() if k not in NO_NUMBER and isinstance(v, kinds)}
