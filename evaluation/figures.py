"""Figures of compare, sweep and scaling, drawn from frames; images and CSV files are atomic."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from evaluation.output import check_target
from evaluation.tables import KINDS
from lightning_models.atomic_files import whole_file, write_whole
from lightning_models.outputs import Likelihood

if TYPE_CHECKING:
    from evaluation.scaling import FittedCurve

FORMATS = (".svg", ".png", ".pdf")
DPI = 150
COLOURS = ("#2f6db3", "#d97b29", "#3f9c6b", "#a2518f", "#8a8f98", "#b8a12c", "#4fb0c6", "#c44e52")
"""Colours of lines and points."""
LEGEND_COLUMNS = 4
MARKS: dict[Likelihood, str] = {
    "exact": "",
    "lower_bound": "(bound)",
    "estimate": "(estimate)",
    "noncausal": "(noncausal)",
}
"""Suffix of a label, by the kind of its likelihood."""


# ---- files


def check_picture(target: str, key: str = "output") -> Path:
    """Returns the path of a figure after checking that its folder can be written to.

    Raises:
        ValueError: If the extension is not a known format, or the folder is missing or not
            writable.
    """
    path = check_target(target, key)
    if path.suffix not in FORMATS:
        raise ValueError(f"{key} ({path}) must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    check_target(path.with_suffix(".csv"), key)
    return path


def write_figure(draw: Callable[[], Any], points: pd.DataFrame, path: Path) -> None:
    """Writes points as a CSV file, and the figure drawn from them next to it."""
    write_frame(path.with_suffix(".csv"), points)
    write_picture(draw(), path)


def write_picture(figure: Any, path: Path) -> None:
    """Writes a figure in the format of the path's ending; equal figures give equal files."""
    import matplotlib as mpl

    form: dict[str, Any] = {"format": path.suffix[1:], "dpi": DPI}
    date = "CreationDate" if path.suffix == ".pdf" else "Date"
    with mpl.rc_context({"svg.hashsalt": "evaluation"}), whole_file(path) as file:
        figure.savefig(file, metadata={date: None}, **form)


def write_pages(figures: Sequence[Any], path: Path) -> None:
    """Writes figures as a PDF file, one per page; equal figures give equal files."""
    from matplotlib.backends.backend_pdf import PdfPages

    with whole_file(path) as file, PdfPages(file, metadata={"CreationDate": None}) as pages:
        for figure in figures:
            pages.savefig(figure)


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Writes a table as CSV, atomically; numbers keep all digits, and None is an empty cell."""
    write_whole(path, frame.to_csv(index=False, lineterminator="\n"))


# ---- helpers of all figures


def make_panels(size: tuple[float, float], count: int = 1, **options: Any) -> tuple[Any, list[Any]]:
    """Returns a figure of matplotlib, and its panels from left to right.

    ``size`` is width and height in inches; ``options`` go to ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **options)[0])


def add_legend(figure: Any, handles: Mapping[str, Any], columns: int = LEGEND_COLUMNS) -> None:
    """Adds a legend of artists by name above the panels, in at most ``columns`` columns."""
    layout: dict[str, Any] = {"loc": "outside upper center", "ncols": min(len(handles), columns)}
    figure.legend(
        list(handles.values()), list(map(plain_text, handles)), frameon=False, fontsize=9, **layout
    )


def plain_text(text: str) -> str:
    """Escapes dollar signs, which would start a formula."""
    return text.replace("$", r"\$")


def label_sizes(axis: Any) -> None:
    """Labels a logarithmic x axis at two or more ticks, such as 2k, once its points are drawn."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    for steps in ((1,), (1, 2, 5)):  # within two decades powers of ten are too few
        locator: Any = LogLocator(subs=steps)
        # counted here, since tick_values takes linear ticks instead of a single one
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        if sum(low <= tick <= high for tick in ticks) > 1:
            break
    else:
        locator = MaxNLocator(3, min_n_ticks=2)
    axis.set_major_locator(locator)
    axis.set_minor_locator(LogLocator(subs="auto") if steps == (1,) else NullLocator())
    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_minor_formatter(NullFormatter())


def set_costs(axes: Any, name: str) -> None:
    """Sets up a logarithmic x axis and a grid, in a panel whose points are drawn."""
    axes.set_xscale("log")
    axes.set_xlabel(name)
    axes.margins(x=0.08, y=0.08)
    label_sizes(axes.xaxis)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.3)


# ---- comparison: loss against tokens, training FLOPs and inference FLOPs


COSTS_OF_LOSS = {
    "training_tokens": ("training tokens", "tokens"),
    "flops": ("training FLOPs", "training_flops"),
    "inference_flops_per_token": ("inference FLOPs per token", None),
}
"""Columns of the table of runs: title of the panel, and column of the curves."""
LOSS_TITLES = {
    "bits_per_byte": "loss (bits per byte)",
    "nats_per_token": "loss (nats per token)",
}
KIND_DASHES = {"exact": "-", "lower_bound": "--", "estimate": ":", "noncausal": "-."}
LOSS_LEGEND_COLUMNS = 3


def compare_figure(runs: pd.DataFrame, curves: pd.DataFrame, key: str) -> Any:
    """Draws a loss against three costs: validations as lines, scores as large points.

    Each row has a colour, the mean over its seeds and their range as a band or bars; kinds of
    likelihood differ in dashes, and only exact ones have filled points. If validations read other
    text than the scores, lines and points are in separate panels.

    Args:
        runs: Runs with a loss on text, at least one.
        curves: ``run``, ``tokens``, ``training_flops`` and, as the last column, the loss.
        key: Column of the loss in ``runs``, a key of ``LOSS_TITLES``.
    """
    figure, axes = make_panels((12, 4.8), len(COSTS_OF_LOSS), sharey=True)
    panels: dict[str, Any] = dict(zip(COSTS_OF_LOSS, axes, strict=True))
    handles: dict[str, Any] = {}
    pointed = panels
    if on_other_text(runs, curves, key):
        pointed = {name: panels[name] for name, (_, cost) in COSTS_OF_LOSS.items() if not cost}
        for column, panel in panels.items():
            source = "scores of the table" if column in pointed else "validations, on other text"
            panel.set_title(source, fontsize=9)
    for idx, (label, row) in enumerate(runs.groupby("label", sort=False)):
        colour = COLOURS[idx % len(COLOURS)]
        likelihood = row["likelihood"].iloc[0]
        look = {"color": colour, "linestyle": KIND_DASHES[likelihood]}
        _draw_curve(panels, curves[curves["run"].isin(row["run"])], **look)
        exact = likelihood == "exact"
        title = label if exact else f"{label} ({KINDS[likelihood]})"
        handles[title] = _draw_scores(pointed, row, row[key], hollow=not exact, **look)
    for column, panel in panels.items():
        set_costs(panel, COSTS_OF_LOSS[column][0])
    axes[0].set_ylabel(LOSS_TITLES[key])
    add_legend(figure, handles, LOSS_LEGEND_COLUMNS)
    return figure


OTHER_TEXT = 0.002
"""Largest relative difference, by rounding and order, between score and validation of a text."""
ENDED = 0.9
"""Share of a run's tokens from which a validation counts as its end."""


def on_other_text(runs: pd.DataFrame, curves: pd.DataFrame, key: str) -> bool:
    """Returns whether the loss of a run's last validation differs from its score.

    Validations may read a part of the text, and windows with other starts. Training after the last
    validation explains a lower score, unless it is a tenth of the run at most, but not a higher.
    """
    last = curves.groupby("run").last() if len(curves) else curves
    scores = runs.set_index("run")
    for run in scores.index.intersection(last.index):
        logged, score = float(last.loc[run].iloc[-1]), float(scores.loc[run, key])
        share = float(last.loc[run, "tokens"]) / float(scores.loc[run, "training_tokens"])
        gap = score - logged if share < ENDED else abs(score - logged)
        if gap > OTHER_TEXT * score:
            return True
    return False


def _draw_curve(panels: Mapping[str, Any], curves: pd.DataFrame, **style: Any) -> None:
    """Draws the mean and range of the runs of a row at the steps that all have validated."""
    style |= {"linewidth": 1.4, "marker": ".", "markersize": 3}
    for column, (_, cost) in COSTS_OF_LOSS.items():
        if cost is None or curves.empty:
            continue
        points = curves.groupby(curves["steps"].astype(int)).agg(
            x=(cost, "mean"),
            mean=(curves.columns[-1], "mean"),
            low=(curves.columns[-1], "min"),
            high=(curves.columns[-1], "max"),
            runs=("run", "size"),
        )
        points = points[points["runs"] == points["runs"].max()].astype(float)
        if len(points) == 1:  # no line, and the large point of the score may cover it
            style |= {"marker": "x", "markersize": 9, "zorder": 4}
        panels[column].plot(points["x"], points["mean"], **style)
        if points["runs"].max() > 1:
            band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
            panels[column].fill_between(points["x"], points["low"], points["high"], **band)


def _draw_scores(
    panels: Mapping[str, Any], row: pd.DataFrame, losses: pd.Series, *, hollow: bool, **style: Any
) -> Any:
    """Draws the mean of a row with the range over its seeds; returns the artist of the legend."""
    mean = statistics.fmean(losses)
    style |= {"marker": "o", "markersize": 7}
    style |= {"markerfacecolor": "white" if hollow else style["color"]}
    if len(losses) > 1:
        style |= {"yerr": [[mean - min(losses)], [max(losses) - mean]], "capsize": 3}
    handle: Any = None
    for column, panel in panels.items():
        costs = row[column].dropna()
        if len(costs):
            draw = panel.errorbar if len(losses) > 1 else panel.plot
            handle = draw([statistics.fmean(costs)], [mean], zorder=3, **style)
            handle = handle if len(losses) > 1 else handle[0]
    return handle


# ---- compute: FLOPs of models by part (Fig. 3 of the Latent-Thought paper)


PART_COLOURS = {
    "output": "#8a8f98",
    "self_attention": "#2f6db3",
    "cross_attention": "#d97b29",
    "feed_forward": "#3f9c6b",
}
OTHER_PARTS = ("#a2518f", "#b8a12c", "#4fb0c6", "#c44e52")
"""Colours of parts that only one method has, in turn."""
MIN_SHOWN = 0.05
"""Smallest share with room for its label."""


def compute_figure(counts: pd.DataFrame) -> Any:
    """Draws a bar for each model, from top to bottom, divided by the parts of one pass.

    ``counts`` has ``label``, ``parameters``, ``flops_training`` and, for each part from left to
    right, ``share_PART`` between 0 and 1.
    """
    from matplotlib.ticker import EngFormatter

    figure, (axes,) = make_panels((8, 1.4 + 0.5 * len(counts)))
    left, others = [0.0] * len(counts), itertools.cycle(OTHER_PARTS)
    shares = [key for key in counts if key.startswith("share_")]
    for key in shares:
        part, widths = key.removeprefix("share_"), list(counts[key])
        look = {"color": PART_COLOURS.get(part) or next(others), "label": part.replace("_", " ")}
        bars = axes.barh(range(len(counts)), widths, 0.7, left, **look)
        texts = [f"{100 * width:.0f} %" if width >= MIN_SHOWN else "" for width in widths]
        axes.bar_label(bars, texts, label_type="center", color="white", fontsize=8)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    short = EngFormatter(sep="", places=1).format_eng
    names = [
        f"{plain_text(model.label)}\n{short(model.parameters)} parameters, "
        f"{short(model.flops_training)} training FLOPs/token"
        for model in counts.itertuples()
    ]
    axes.set_yticks(range(len(counts)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the FLOPs of one pass")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(shares), frameon=False, fontsize=9)
    return figure


# ---- sweep: perplexity of checkpoints against steps and FLOPs


SWEEP_COSTS = {
    "executed_steps": "additional steps per token",
    "flops_per_token_6nd": "FLOPs per token, 6 N (1 + steps)",
    "generation_flops_per_token": "FLOPs per generated token",
    "flops_per_token": "FLOPs per scored token",
}
"""Axes with a Pareto frontier, and their titles."""
STEPS = "thinking_steps"
"""Field of a model's config: K, the additional steps that a token may take at most."""
SWEEP_AXES = {**SWEEP_COSTS, STEPS: "thinking steps K (additional steps per token at most)"}
"""Possible x axes; against K the loss is drawn in nats (Fig. 6 of the PonderLM-3 paper)."""
MARKERS = {"exact": "o", "lower_bound": "v", "estimate": "s", "noncausal": "X"}
"""Markers of points, by the kind of their likelihood."""
GREY = "#333a44"
WIDE = 10.0
"""Smallest ratio of the largest to the smallest FLOPs with a logarithmic axis."""


def sweep_figure(points: pd.DataFrame, against: Sequence[str], measure: str = "perplexity") -> Any:
    """Draws a panel for each x axis, with a point for each checkpoint and setting.

    Points with the same ``line`` are connected. Points of different kinds of likelihood share
    neither line, nor marker, nor frontier.

    Args:
        points: See ``sweep.sweep_frame``.
        against: The x axes, keys of ``SWEEP_AXES``.
        measure: The y axis over costs, perplexity or nats_per_token.
    """
    figure, panels = make_panels((1 + 4 * len(against), 4.4), len(against))
    handles: dict[str, Any] = {}
    for panel, key in zip(panels, against, strict=True):
        height = measure if key in SWEEP_COSTS else "nats_per_token"
        for idx, (line, members) in enumerate(points.groupby("line", sort=False)):
            colour = COLOURS[idx % len(COLOURS)]
            handles[str(line)] = _draw_line(panel, members, key, height, colour)
        kinds = points.groupby("likelihood", sort=False) if key in SWEEP_COSTS else ()
        for likelihood, members in kinds:
            best = members[members[f"frontier_{key}"]].sort_values([key, height])
            look = {"color": GREY, "linestyle": ":", "zorder": 0, "drawstyle": "steps-post"}
            rings = {"marker": MARKERS[likelihood], "markersize": 9, "markerfacecolor": "none"}
            (drawn,) = panel.plot(list(best[key]), list(best[height]), **look, **rings)
            handles[f"Pareto frontier {MARKS[likelihood]}".rstrip()] = drawn
        _set_axes(panel, key, height, points[key])
    add_legend(figure, handles)
    return figure


def _draw_line(panel: Any, members: pd.DataFrame, key: str, height: str, colour: str) -> Any:
    members = members.sort_values([key, height, "note"])
    marker = MARKERS[members["likelihood"].iloc[0]]
    style = {"marker": marker, "markersize": 4, "linewidth": 1.2, "color": colour}
    (line,) = panel.plot(list(members[key]), list(members[height]), **style)
    if key != STEPS or any(members["dials"]):
        offset: dict[str, Any] = {"xytext": (4, 4), "textcoords": "offset points"}
        for x, y, note in members[[key, height, "note"]].itertuples(index=False):
            panel.annotate(note, (x, y), fontsize=7, color=colour, **offset)
    return line


def _set_axes(panel: Any, key: str, height: str, values: pd.Series) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    panel.set_xlabel(SWEEP_AXES[key])
    panel.set_ylabel("perplexity" if height == "perplexity" else "loss (nats per token)")
    panel.margins(0.1)
    if "flops" in key and max(values) >= WIDE * min(values):
        panel.set_xscale("log")
        label_sizes(panel.xaxis)
    else:
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=key == STEPS))
        if "flops" in key:
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.3)


# ---- scaling: curves fitted to results of several sizes


SIZES = {
    "train_tokens": ("tokens of the training text D", "D"),
    "parameters": ("non-embedding parameters N", "N"),
}
"""Title of the axis of each size, and the letter of its exponent."""
GROUP_MARKERS = "osD^vP"
Y_TICKS = 5


def scaling_figure(
    runs: pd.DataFrame, fits: Mapping[str, "FittedCurve"], size: str, value: str
) -> Any:
    """Draws a value against size: a point for each run, and the fitted curve of each group.

    Args:
        runs: ``group``, ``x`` (the size) and ``y`` (the value), sorted by size within a group.
        fits: The curve of each group.
        size: Title of the x axis, a key of ``SIZES``.
        value: Name of the value.
    """
    figure, (axes,) = make_panels((5.6, 4.2))
    title, letter = SIZES[size]
    for idx, (name, members) in enumerate(runs.groupby("group", sort=False)):
        colour, fit = COLOURS[idx % len(COLOURS)], fits[str(name)]
        line = np.geomspace(members["x"].iloc[0], members["x"].iloc[-1], 50)
        axes.plot(line, [fit.value_at(x) for x in line], linewidth=1.5, color=colour)
        sign = rf"$\alpha_{letter}$" if fit.law == "power" else "slope"
        label = f"{plain_text(str(name))}: {sign} = {fit.slope:.3f}"
        style: dict[str, Any] = {"marker": GROUP_MARKERS[idx % len(GROUP_MARKERS)]}
        axes.plot(members["x"], members["y"], linestyle="", color=colour, label=label, **style)
    axes.set_xscale("log")
    if all(fit.law == "power" for fit in fits.values()):
        _log_values(axes)
    label_sizes(axes.xaxis)
    axes.set_xlabel(title)
    axes.set_ylabel(
        LOSS_TITLES["nats_per_token"] if value == "nats_per_token" else value.replace("_", " ")
    )
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _log_values(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = MaxNLocator(Y_TICKS, steps=[1, 2, 5, 10]).tick_values(low, high)
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
