"""Figures of a study's page."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from callbacks.analysis.report import BLUE, GREY, ORANGE, draw_lines, finish, panels, shades
from studies.runner import RunFolder
from studies.study import Figure, Run, Study

KIND = "kind of "
"""Prefix of columns with the kind of likelihood, in the table of every run."""
MARKERS = {"": "o", "bound": "x", "not causal": "s"}
Trained = Sequence[tuple[Run, RunFolder]]


def on_page(study: Study, table: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows without extra runs, or all rows if there are only extra runs."""
    extra = table["title"].isin([run.title for run in study.runs.values() if run.extra])
    return table if extra.all() else table[~extra]


def name_seeds(seeds: Iterable[int]) -> str:
    """Returns ``seed 0``, or ``seeds 0, 1``."""
    numbers = sorted({int(seed) for seed in seeds})
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def figure_points(
    figure: Figure, trained: Trained, table: pd.DataFrame, path: Path
) -> pd.DataFrame:
    """Returns the tables of the figure's analysis, preceded by ``run`` and ``seed``.

    Args:
        figure: The declared figure.
        trained: The runs that are trained here.
        table: One row per run and seed, see `evaluations_table`.
        path: Path of the earlier points, which may not exist. Those of runs without a new analysis
            are kept.
    """
    earlier = pd.read_csv(path) if path.is_file() else pd.DataFrame()
    kept = {"run", figure.x, figure.y} <= set(earlier)
    parts = [
        pd.read_csv(file).assign(run=run.folder, seed=run.seed)
        for run, run_dir in trained
        for file in sorted((run_dir.path / figure.analysis).rglob(figure.table))
    ]
    if kept:
        analysed = {name for part in parts for name in part["run"]}
        parts.append(earlier[~earlier["run"].isin(analysed)])
    parts = [part for part in parts if len(part)]  # empty ones would make their columns objects
    first = ["run", "seed", figure.x, figure.y]
    if not parts:
        return pd.DataFrame(columns=first)
    points = pd.concat(parts, ignore_index=True)
    position = {folder: row for row, folder in enumerate(table["run"])}
    points = points[points["run"].isin(position)]
    points = points.sort_values("run", key=lambda runs: runs.map(position), kind="stable")
    return points[[*first, *points.columns.difference(first, sort=False)]]


def draw_figure(study: Study, figure: Figure, points: pd.DataFrame) -> Any:
    """Returns the study's figure: means over seeds, and their range.

    Extra runs are left out, unless there are only extra runs.

    Args:
        study: The declared runs.
        figure: The declared figure.
        points: See `figure_points`.
    """
    drawn, (ax,) = panels(6.4, 3.8, 1)
    names = points["run"].str.rsplit("-", n=1).str[0]
    runs = [run for run in study.runs.values() if run.name in set(names)]
    runs = [run for run in runs if not run.extra] or runs
    seeds = set(points["seed"][names.isin([run.name for run in runs])])
    for run, color in zip(runs, shades(len(runs)), strict=True):
        rows = points[names == run.name]
        label = run.title + (f" ({name_seeds(rows['seed'])})" if set(rows["seed"]) != seeds else "")
        values = rows.groupby(figure.x)[figure.y]
        means = values.mean().reset_index()
        draw_lines(ax, means, figure.x, {figure.y: (label, color)}, "o-")
        ax.fill_between(means[figure.x], values.min(), values.max(), color=color, alpha=0.15)
    if figure.marked is not None:
        ax.axvline(figure.marked, color=GREY, linewidth=0.8)
    title = "mean and range over seeds" if len(seeds) > 1 else None
    whole = pd.api.types.is_integer_dtype(points[figure.x])
    labels = (figure.x_label or figure.x, figure.y_label or figure.y)
    finish(ax, *labels, whole=whole, title=title, title_fontsize=8)
    return drawn


def draw_scores(study: Study, table: pd.DataFrame) -> Any:
    """Returns the figure of a study that declares none: the page's scores of each run and seed.

    Circles are exact, causal likelihoods and other scores.

    Args:
        study: The declared runs and columns; without page columns the first four are drawn.
        table: One row per run and seed; those that are not `on_page` are left out.
    """
    shown = on_page(study, table)
    names = study.page_columns or study.columns
    columns = [name for name in names if shown[name].notna().any()][:4]
    titles = list(dict.fromkeys(shown["title"]))
    count = max(1, len(columns))
    drawn, axes = panels(4.0 + 2.4 * count, 1.0 + 0.2 * len(titles), count, sharey=True)
    axes[0].set_yticks(range(len(titles)), titles)
    axes[0].set_ylim(len(titles) - 0.5, -0.5)
    rows = shown["title"].map(titles.index)
    for ax, name in zip(axes, columns, strict=False):
        kinds = shown.get(KIND + name, pd.Series("", shown.index)).astype(object).fillna("")
        kinds = kinds[shown[name].notna()]
        for kind in sorted({*kinds}):
            marker = MARKERS.get(kind, "+")
            same = kinds.index[kinds == kind]
            look = {"color": ORANGE if kind else BLUE, "markersize": 4, "label": kind or None}
            ax.plot(shown[name][same], rows[same], marker, **look)
        ax.grid(axis="y", alpha=0.3)
        ax.locator_params(axis="x", nbins=5)
        finish(ax, name, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return drawn
