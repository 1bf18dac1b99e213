"""``evaluate.py compute``: what the FLOPs of models are spent on."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from evaluation.checkpoint.rebuild import build_outline
from evaluation.console import format_columns
from evaluation.figures import (
    check_picture,
    table_path,
    write_csv,
    write_picture,
)
from evaluation.runs import find_checkpoints, label_runs, short_names
from lightning_models import LanguageModel
from lightning_models.recipe import import_packages

# ---- counts


PARTS = ("output", "self_attention", "cross_attention", "feed_forward")
"""What most models have; those of a method's own follow."""


@dataclass(frozen=True)
class Compute:
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


def count_compute(model: LanguageModel, context: int | None = None) -> Compute:
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
    return Compute(
        context=context,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        parts=model.flops_by_part(context),
        forward=model.flops_per_token(context),
        training=model.flops_per_token(context, training=True),
        published=model.published_flops_per_token(context),
    )


def part_names(counts: Sequence[Compute]) -> list[str]:
    """Returns the parts that any of the models has, the common ones first."""
    found = dict.fromkeys(part for count in counts for part in count.parts)
    return [*(part for part in PARTS if part in found), *(p for p in found if p not in PARTS)]


# ---- figure (Fig. 3 of the Latent-Thought paper)


PART_COLOURS = {
    "output": "#8a8f98",
    "self_attention": "#2f6db3",
    "cross_attention": "#d97b29",
    "feed_forward": "#3f9c6b",
}
OTHER_PARTS = ("#a2518f", "#b8a12c", "#4fb0c6", "#c44e52")
LEAST_TOLD = 0.05
"""Smaller shares have no room for their number."""


def compute_figure(counts: Sequence[Compute], labels: Sequence[str], parts: Sequence[str]) -> Any:
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
        texts = [f"{100 * width:.0f} %" if width >= LEAST_TOLD else "" for width in widths]
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


def _sized_name(label: str, count: Compute) -> str:
    from matplotlib.ticker import EngFormatter

    short = EngFormatter(sep="", places=1).format_eng
    plain = label.replace("$", r"\$")  # it would start a formula
    sizes = f"{short(count.parameters)} parameters, {short(count.training)} training FLOPs/token"
    return f"{plain}\n{sizes}"


def _part_colours(parts: Sequence[str]) -> list[str]:
    """Returns a colour a part; parts of a method's own take the rest in turn."""
    others = itertools.cycle(OTHER_PARTS)
    return [PART_COLOURS.get(part) or next(others) for part in parts]


# ---- command


def as_rows(counts: Sequence[Compute], labels: Sequence[str]) -> list[list[Any]]:
    """Returns the table with all digits, a row a model behind a header.

    Training as papers count it has a column where any of the models has such a count, empty for
    the others.
    """
    parts, published = part_names(counts), _any_published(counts)
    sizes = ["context", "parameters", "flops_one_pass", "flops_forward", "flops_training"]
    sizes += ["flops_as_published"] if published else []
    header = ["label", *sizes, *(f"flops_{part}" for part in parts)]
    rows: list[list[Any]] = [[*header, *(f"share_{part}" for part in parts)]]
    for label, count in zip(labels, counts, strict=True):
        values: list[Any] = [count.context, count.parameters]
        values += [count.one_pass, count.forward, count.training]
        values += [count.published] if published else []
        split = [count.parts.get(part, 0.0) for part in parts]
        rows.append([label, *values, *split, *map(count.share, parts)])
    return rows


def as_table(counts: Sequence[Compute], labels: Sequence[str]) -> str:
    """Returns sizes, FLOPs per token and shares of one pass in percent, for people."""
    parts, published = part_names(counts), _any_published(counts)
    sizes = ["parameters", "context", "one pass", "forward", "training FLOPs/token"]
    sizes += ["as published"] if published else []
    rows = [["", *sizes, *(part.replace("_", " ") for part in parts)]]
    for label, count in zip(labels, counts, strict=True):
        totals: list[float | None] = [count.one_pass, count.forward, count.training]
        totals += [count.published] if published else []
        flops = ["-" if value is None else f"{value:.4g}" for value in totals]
        shares = [f"{100 * count.share(part):.1f} %" for part in parts]
        rows.append([label, f"{count.parameters:,}", f"{count.context:,}", *flops, *shares])
    return f"FLOPs per token, and the shares of one pass\n{format_columns(rows)}"


def _any_published(counts: Sequence[Compute]) -> bool:
    return any(count.published is not None for count in counts)


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        help="Checkpoints, folders of runs, or patterns in quotes; of a folder the furthest "
        "checkpoint of every run in it.",
    )
    parser.add_argument(
        "--context",
        type=int | None,
        default=None,
        help="Tokens of a sequence; null: those of the windows that a model was trained on.",
    )
    parser.add_argument(
        "--set",
        type=dict[str, Any],
        default={},
        help="Fields of the models' config to change, also those that decide shapes, e.g. "
        "--set.num_layers 12: no weights are read.",
    )
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name them, separated by commas, or model for the "
        "class. Found where they differ in one or two.",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="Figure to write, .svg or .png; its table is written beside it as .csv.",
    )
    parser.add_argument(
        "--packages",
        type=list[str],
        default=[],
        help="Packages to import first, where models are classes of your own.",
    )


def run(settings: Namespace) -> None:
    """Counts, prints the table and writes the files that are asked for."""
    picture = None if settings.output is None else check_picture(settings.output)
    import_packages(settings.packages)
    checkpoints = find_checkpoints(settings.runs)
    models = [build_outline(checkpoint, settings["set"]) for checkpoint in checkpoints]
    named = label_runs(
        [model.recipe() for model in models],
        short_names([checkpoint.path.resolve() for checkpoint in checkpoints]),
        settings.label,
    )
    labels = named.texts()
    counts = [count_compute(model, settings.context) for model in models]
    print(as_table(counts, labels))
    if named.note is not None:
        print(f"note: {named.note}")
    if picture is not None:
        header, *rows = as_rows(counts, labels)
        write_csv(table_path(picture), header, rows)
        write_picture(compute_figure(counts, labels, part_names(counts)), picture)
