"""Reports of analyses: scalars, tables and figures, and their files."""

import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lightning_models.atomic_files import write_whole

DPI = 120
BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d97b29", "#3f9c6b", "#8a8f98"

Shown = Mapping[str, tuple[str | None, Any]]
"""Label and colour of each drawn column; the label is None for columns outside the legend."""


Tables = Mapping[str, pd.DataFrame]
Draw = Callable[[Tables], Any]
"""Function that draws a matplotlib figure from the tables of an analysis."""


@dataclass(frozen=True, kw_only=True)
class AnalysisReport:
    """Report of an analysis at one step."""

    scalars: Mapping[str, float] = field(default_factory=dict)
    """Scalars by tag; non-finite ones are omitted."""
    tables: Tables = field(default_factory=dict)
    """Tables by name; empty ones are omitted."""
    figures: Mapping[str, Draw] = field(default_factory=dict)
    """Functions of the tables, by name; omitted if the table of that name is empty."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Content of other files, by name."""
    markdown: Mapping[str, str] = field(default_factory=dict)
    """Texts for TensorBoard, by tag."""

    @property
    def finite(self) -> dict[str, float]:
        """The scalars that are finite."""
        return {tag: float(value) for tag, value in self.scalars.items() if math.isfinite(value)}

    def drawn(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return {
            name: draw(self.tables)
            for name, draw in self.figures.items()
            if name not in self.tables or len(self.tables[name])
        }

    def files(self) -> dict[str, str]:
        """Returns all text files by name: ``scalars.csv``, a CSV file for each table, and texts."""
        tables = dict(self.tables)
        if self.scalars:
            scalars = pd.Series(self.finite, dtype=np.float64)
            tables = {"scalars": scalars.rename_axis("name").reset_index(name="value"), **tables}
        files = {f"{name}.csv": as_csv(table) for name, table in tables.items() if len(table)}
        return {**files, **self.texts}

    def write(self, folder: Path, prefix: str, drawn: Mapping[str, Any]) -> None:
        """Writes all files as ``<folder>/<prefix><name>``, each atomically.

        The folder is created if necessary; drawn figures are written as PNG.

        Raises:
            OSError: If a file cannot be written.
        """
        contents = {name: text.encode() for name, text in self.files().items()}
        contents |= {f"{name}.png": as_png(figure) for name, figure in drawn.items()}
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_whole(folder / f"{prefix}{name}", content)


def as_csv(table: pd.DataFrame) -> str:
    """Returns a table as CSV with 6 digits; non-finite values are empty fields."""
    # columns of type object would be written with all digits
    finite = table.infer_objects().replace([math.inf, -math.inf], math.nan)
    return finite.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def scalars_of(table: pd.DataFrame, tag: str, names: Iterable[str]) -> dict[str, float]:
    """Returns a scalar for each row of a table and each of some columns.

    Args:
        table: Table of an analysis.
        tag: Format of the tags, such as ``layer_{layer}/{name}``, with ``{name}`` for the column
            and the values of other columns by their names.
        names: Columns with the values.
    """
    return {
        tag.format(name=name, **row): row[name]
        for row in table.to_dict("records")
        for name in names
    }


# ---- figures


def as_png(figure: Any) -> bytes:
    """Returns a matplotlib figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def as_pixels(figure: Any) -> np.ndarray:
    """Returns a matplotlib figure as uint8 (height, width, 3)."""
    figure.set_dpi(DPI)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def as_tiles(figure: Any) -> list[np.ndarray]:
    """Splits a figure into an image for each column of panels, uint8 (height, width, 3).

    Loggers show images in narrow tiles, in which a whole row of panels would be illegible.
    """
    pixels = as_pixels(figure)
    columns: dict[int, list[Any]] = {}
    for ax in figure.axes:
        spec = ax.get_subplotspec()
        # a colour bar is outside the grid, and belongs to the panel on its left
        column = max(columns, default=0) if spec is None else spec.colspan.start
        columns.setdefault(column, []).append(ax.get_tightbbox())
    boxes = [columns[column] for column in sorted(columns)]
    borders = [
        (max(box.x1 for box in left) + min(box.x0 for box in right)) / 2
        for left, right in pairwise(boxes)
    ]
    ends = [0, *(round(border) for border in borders), pixels.shape[1]]
    return [pixels[:, start:end] for start, end in pairwise(ends)]


def say_step(figure: Any, step: int) -> None:
    """Writes the number of optimiser steps at the bottom of a figure."""
    figure.supxlabel(f"after {step:,} optimiser steps", fontsize=7, x=0.99, ha="right")


def panels(
    width: float, height: float, columns: int, rows: int = 1, **options: Any
) -> tuple[Any, list[Any]]:
    """Creates a figure without pyplot and its global state; returns it and its axes row by row.

    Width and height are in inches; ``options`` go to ``Figure.subplots``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(which="both", labelsize=8)
    return figure, axes


def draw_lines(ax: Any, table: pd.DataFrame, x: str, columns: Shown, style: str = "o-") -> None:
    """Draws columns of a table as lines over its column ``x``."""
    for name, (label, color) in columns.items():
        ax.plot(table[x], table[name], style, color=color, label=label)


def draw_bars(ax: Any, table: pd.DataFrame, x: str, columns: Shown) -> None:
    """Draws columns of a table as groups of bars over its column ``x``; nan has height 0."""
    width = 0.8 / len(columns)
    for i, (name, (label, color)) in enumerate(columns.items()):
        center = table[x] + width * (i - (len(columns) - 1) / 2)
        ax.bar(center, table[name].fillna(0), 0.94 * width, color=color, label=label)


def finish(ax: Any, x: str, y: str = "", *, whole: bool = False, **legend: Any) -> None:
    """Labels the axes of a panel and adds a legend if there are labels; ``whole`` for integer x.

    An empty panel gets the text "no values".
    """
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if _is_empty(ax):
        ax.text(0.5, 0.5, "no values", ha="center", va="center", transform=ax.transAxes)
    if whole:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8, **legend)


def _is_empty(ax: Any) -> bool:
    """Returns whether a panel has no finite data."""
    drawn = any(np.isfinite(np.asarray(line.get_ydata(), dtype=float)).any() for line in ax.lines)
    return not (drawn or ax.patches or ax.collections or ax.images)


def shades(count: int) -> list[tuple[float, ...]]:
    """Returns colours from the lowest layer to the highest."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(1, count - 1)) for i in range(count)]
