"""Views of ``evaluate.py compare`` that score nothing: curves, compute and result files.

Each returns a table as people read it, and writes its numbers as CSV next to a figure.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.figures import (
    COLOURS,
    LEGEND_COLUMNS,
    MARKS,
    dress_costs,
    table_path,
    write_frame,
    write_picture,
)
from evaluation.load import build_outline
from evaluation.output import read_json
from evaluation.report import aligned
from evaluation.run_metrics import LoggedPoint, logged_points, training_cost
from evaluation.runs import Labels, RunRecord, is_number, label_runs
from lightning_models import LanguageModel

# ---- curves: a logged value over training tokens and FLOPs (Fig. 5 of the Latent-Thought paper)


DASHES = ("-", "--", ":", "-.")
UNITS = {"loss": "nats per token", "bpb": "bits per byte"}


def view_curves(
    runs: Sequence[RunRecord], scalar: str, keys: str | None, picture: Path | None
) -> str:
    """Returns where the curves of a logged value end; draws them where a figure is asked for.

    Args:
        runs: with their logs.
        scalar: tag of the value.
        keys: of the models' config that name the curves; None: those that differ.
        picture: figure to write, with its points next to it.

    Raises:
        ValueError: if a run has not logged the value, or its training tokens are not known.
    """
    curves = [read_curve(run, scalar) for run in runs]
    labels = label_records(runs, [run.outline for run in runs], keys)
    labels = replace(labels, marks=tuple(mark(run.outline, scalar) for run in runs))
    texts = labels.texts()
    points = pd.DataFrame(
        [
            (run.name, text, *point)
            for run, text, curve in zip(runs, texts, curves, strict=True)
            for point in curve
        ],
        columns=["run", "label", "steps", "tokens", "flops", scalar],
        dtype=object,
    )
    ends = [(texts[n], runs[n].name, len(curves[n]), curves[n][-1]) for n in labels.order()]
    table = pd.DataFrame(
        {
            "run": [name for _, name, _, _ in ends],
            "points": [str(count) for _, _, count, _ in ends],
            "tokens": [f"{last.tokens:,.0f}" for *_, last in ends],
            "training FLOPs/token": [f"{last.flops / last.tokens:.4g}" for *_, last in ends],
            "training FLOPs": [f"{last.flops:.4g}" for *_, last in ends],
            scalar: [f"{last.value:.5g}" for *_, last in ends],
        },
        index=[text for text, *_ in ends],
    )
    if picture is not None:
        write_frame(table_path(picture), points)
        write_picture(curves_figure(curves, labels, scalar), picture)
    return _with_note(aligned(table), labels)


def read_curve(run: RunRecord, scalar: str) -> list[LoggedPoint]:
    """Returns what a run has logged of a value, also after its checkpoint.

    Raises:
        ValueError: if it has not, or its training tokens or FLOPs are not known.
    """
    if scalar not in run.scalars:
        known = ", ".join(tag for tag in run.scalars if tag.startswith(("val/", "train/", "test/")))
        where = run.log or run.checkpoint.path
        raise ValueError(
            f"scalar ({scalar}) was not logged by {where}; it has {known or 'nothing'}"
        )
    points = logged_points(training_cost(run), run.scalars[scalar])
    if not points:
        raise ValueError(
            f"runs ({run.log}): its training tokens or FLOPs are not known (questions, text that "
            "has changed since, or no throughput/flops_per_token in the log); leave the run out"
        )
    return points


def label_records(
    runs: Sequence[RunRecord], models: Sequence[LanguageModel], keys: str | None
) -> Labels:
    """Returns a label for each run: named on the command line, else by what configs differ in."""
    names = [run.name for run in runs]
    if keys is None and all(run.row is not None for run in runs):
        return Labels((), tuple((name,) for name in names))
    return label_runs([model.recipe() for model in models], names, keys)


def _with_note(table: str, labels: Labels) -> str:
    return table if labels.note is None else f"{table}\nnote: {labels.note}"


def mark(model: LanguageModel, scalar: str) -> str:
    """Returns the mark of a likelihood that is not exact; else nothing.

    Args:
        model: whose it is.
        scalar: tag of the value; training has no bound, as what is inferred has seen its noise.
    """
    stage, _, name = scalar.rpartition("/")
    if name not in ("loss", "bpb") and not name.startswith("ppl"):
        return ""
    kind = model.likelihood
    if kind == "lower_bound" and stage == "train":
        kind = "estimate"
    return MARKS[kind]


def curves_figure(curves: Sequence[Sequence[LoggedPoint]], labels: Labels, scalar: str) -> Any:
    """Returns a panel over training tokens and one over training FLOPs, both logarithmic.

    The first key of the labels has a colour, from dark to light where it is a number, the second a
    dash; runs of one label share both.

    Args:
        curves: points of the runs.
        labels: of the runs.
        scalar: tag of the value; perplexities have a logarithmic axis too.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    texts, styles = labels.texts(), _styles(labels)
    named: dict[str, Any] = {}
    for number in labels.order():
        for axes, key in zip(panels, ("tokens", "flops"), strict=True):
            points = curves[number]
            x, y = [getattr(point, key) for point in points], [point.value for point in points]
            (line,) = axes.plot(x, y, marker=".", markersize=4, linewidth=1.2, **styles[number])
            named.setdefault(texts[number], line)
    for axes, name in zip(panels, ("training tokens", "training FLOPs"), strict=True):
        dress_costs(axes, name)
    if "ppl" in scalar:
        panels[0].set_yscale("log")
    unit = UNITS.get(scalar.rpartition("/")[2])
    panels[0].set_ylabel(scalar if unit is None else f"{scalar} ({unit})")
    plain = [text.replace("$", r"\$") for text in named]  # it would start a formula
    place: dict[str, Any] = {
        "loc": "outside upper center",
        "ncols": min(len(plain), LEGEND_COLUMNS),
    }
    place |= {"ncols": min(len(plain), LEGEND_COLUMNS), "frameon": False, "fontsize": 9}
    figure.legend(list(named.values()), plain, **place)
    return figure


def _styles(labels: Labels) -> list[dict[str, Any]]:
    """Returns colour and dash of each run."""
    order = labels.order()
    firsts = list(dict.fromkeys(labels.values[number][0] for number in order))
    rests = list(dict.fromkeys(labels.values[number][1:] for number in order))
    colours = _colours(firsts)
    return [
        {
            "color": colours[firsts.index(values[0])],
            "linestyle": DASHES[rests.index(values[1:]) % len(DASHES)],
        }
        for values in labels.values
    ]


def _colours(values: Sequence[Any]) -> list[Any]:
    """Returns a colour a value."""
    if len(values) > 2 and all(map(is_number, values)):
        from matplotlib import colormaps

        scale = colormaps["viridis"]
        return [scale(0.9 * place / (len(values) - 1)) for place in range(len(values))]
    return [COLOURS[place % len(COLOURS)] for place in range(len(values))]


# ---- compute: what the FLOPs of models are spent on (Fig. 3 of the Latent-Thought paper)


PARTS = ("output", "self_attention", "cross_attention", "feed_forward")
"""What most models have; those of a method's own follow."""


@dataclass(frozen=True)
class ComputeCount:
    """FLOPs of one model, all per token."""

    context: int
    """Tokens of a sequence."""
    parameters: int
    """Trainable numbers."""
    parts: Mapping[str, float]
    """One pass through the network, by what it is spent on; parts that it has not are missing."""
    forward: float
    """Scoring a sequence: as many passes as the method needs."""
    training: float
    """A training step."""
    published: float | None = None
    """A training step as the method's paper counts it; None where that is no other count."""

    @property
    def one_pass(self) -> float:
        """One pass through the network."""
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        """Returns the share of a part in one pass, 0 to 1."""
        return self.parts.get(part, 0.0) / self.one_pass


def count_compute(model: LanguageModel, context: int | None = None) -> ComputeCount:
    """Returns the FLOPs of a model.

    Args:
        model: needs no weights.
        context: tokens of a sequence; None: those of the windows it was trained on.

    Raises:
        ValueError: if the model does not say what its FLOPs are spent on, or reads no windows and
            ``context`` is not given.
    """
    if context is None and model.reads != "windows":
        raise ValueError(
            f"context: {type(model).__name__} reads {model.reads}, of any length; give --context N"
        )
    context = model.config.block_size if context is None else context
    return ComputeCount(
        context=context,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        parts=model.flops_by_part(context),
        forward=model.flops_per_token(context),
        training=model.flops_per_token(context, training=True),
        published=model.published_flops_per_token(context),
    )


def part_names(counts: Sequence[ComputeCount]) -> list[str]:
    """Returns the parts that any of the models has, the common ones first."""
    found = dict.fromkeys(part for count in counts for part in count.parts)
    return [*(part for part in PARTS if part in found), *(p for p in found if p not in PARTS)]


PART_COLOURS = {
    "output": "#8a8f98",
    "self_attention": "#2f6db3",
    "cross_attention": "#d97b29",
    "feed_forward": "#3f9c6b",
}
OTHER_PARTS = ("#a2518f", "#b8a12c", "#4fb0c6", "#c44e52")
LEAST_SHOWN = 0.05
"""Smaller shares have no room for their number."""


def compute_figure(
    counts: Sequence[ComputeCount], labels: Sequence[str], parts: Sequence[str]
) -> Any:
    """Returns a bar a model, divided by what one pass of it is spent on.

    Args:
        counts: of the models, from top to bottom.
        labels: of the models.
        parts: which shares, from left to right.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.4 + 0.5 * len(counts)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(counts)
    for part, colour in zip(parts, _part_colours(parts), strict=True):
        widths = [count.share(part) for count in counts]
        name = part.replace("_", " ")
        bars = axes.barh(range(len(counts)), widths, 0.7, left, color=colour, label=name)
        texts = [f"{100 * width:.0f} %" if width >= LEAST_SHOWN else "" for width in widths]
        axes.bar_label(bars, texts, label_type="center", color="white", fontsize=8)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    names = [_sized_name(*pair) for pair in zip(labels, counts, strict=True)]
    axes.set_yticks(range(len(counts)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the FLOPs of one pass")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(parts), frameon=False, fontsize=9)
    return figure


def _sized_name(label: str, count: ComputeCount) -> str:
    from matplotlib.ticker import EngFormatter

    short = EngFormatter(sep="", places=1).format_eng
    plain = label.replace("$", r"\$")  # it would start a formula
    sizes = f"{short(count.parameters)} parameters, {short(count.training)} training FLOPs/token"
    return f"{plain}\n{sizes}"


def _part_colours(parts: Sequence[str]) -> list[str]:
    """Returns a colour a part; parts of a method's own take the rest in turn."""
    others = itertools.cycle(OTHER_PARTS)
    return [PART_COLOURS.get(part) or next(others) for part in parts]


def view_compute(
    runs: Sequence[RunRecord],
    changes: Mapping[str, Any],
    context: int | None,
    keys: str | None,
    picture: Path | None,
) -> str:
    """Returns sizes, FLOPs per token and the shares of one pass; draws them where asked.

    Args:
        runs: whose models; no weights are read.
        changes: fields of the models' config to change.
        context: tokens of a sequence; None: those of the windows that a model was trained on.
        keys: of the models' config that name them; None: those that differ.
        picture: figure to write, with its numbers next to it.
    """
    models = [build_outline(run.checkpoint, changes) for run in runs]
    labels = label_records(runs, models, keys)
    counts = [count_compute(model, context) for model in models]
    frame = compute_frame(counts, labels.texts())
    if picture is not None:
        write_frame(table_path(picture), frame)
        write_picture(compute_figure(counts, labels.texts(), part_names(counts)), picture)
    table = _with_note(aligned(_compute_shown(frame)), labels)
    return f"FLOPs per token, and the shares of one pass\n{table}"


SIZES = {
    "parameters": "parameters",
    "context": "context",
    "flops_one_pass": "one pass",
    "flops_forward": "forward",
    "flops_training": "training FLOPs/token",
    "flops_as_published": "as published",
}


def compute_frame(counts: Sequence[ComputeCount], labels: Sequence[str]) -> pd.DataFrame:
    """Returns all numbers, a line a model; as papers count training where one of them does."""
    parts = part_names(counts)
    lines = [
        {
            "label": label,
            "context": count.context,
            "parameters": count.parameters,
            "flops_one_pass": count.one_pass,
            "flops_forward": count.forward,
            "flops_training": count.training,
            "flops_as_published": count.published,
            **{f"flops_{part}": count.parts.get(part, 0.0) for part in parts},
            **{f"share_{part}": count.share(part) for part in parts},
        }
        for label, count in zip(labels, counts, strict=True)
    ]
    frame = pd.DataFrame(lines, dtype=object)
    unknown = frame["flops_as_published"].isna().all()
    return frame.drop(columns="flops_as_published") if unknown else frame


def _compute_shown(frame: pd.DataFrame) -> pd.DataFrame:
    sizes = {
        title: [
            "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            for value in frame[key]
        ]
        for key, title in SIZES.items()
        if key in frame
    }
    shares = {
        key.removeprefix("share_").replace("_", " "): [f"{100 * v:.1f} %" for v in frame[key]]
        for key in frame
        if key.startswith("share_")
    }
    return pd.DataFrame(sizes | shares, index=list(frame["label"]))


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

    Args:
        files: JSON files that other commands wrote with ``--output``.
        target: CSV file to write, with all digits.

    Raises:
        ValueError: if a file is missing or holds no result.
    """
    paths = [Path(file) for file in files]
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [path.parent.name for path in paths]
    found = [
        (f"{name} {label}".strip(), result)
        for name, path in zip(names, paths, strict=True)
        for label, result in _results_in(path)
    ]
    lines = [{key: v for key, v in result.items() if _is_compared(key, v)} for _, result in found]
    columns = list(dict.fromkeys(key for line in lines for key in line))
    frame = pd.DataFrame(lines, [name for name, _ in found], columns, dtype=object)
    if target is not None:
        write_frame(target, frame.rename_axis("result").reset_index())
    shown = frame.map(_readable)
    return aligned(shown.rename(columns=lambda key: key.replace("_", " ")))


def _results_in(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the results of a file with their labels: those of several models, or a plain one."""
    content = read_json(path, "runs")
    several = content.get("results") if isinstance(content, dict) else [content]
    if not isinstance(several, list):
        return [("", content)]
    if not all(isinstance(one, dict) for one in several):
        raise ValueError(f"runs ({path}) holds no result; write one with evaluate.py --output")
    return [(str(result.get("label", "")), result) for result in several]


def _is_compared(key: str, value: Any) -> bool:
    return key not in NO_NUMBER and isinstance(value, str | int | float | bool | None)


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value != value:  # nan: not in this file
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
