"""Figures and their CSV tables as whole files; colours, marks and axes that figures share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.output import check_target, write_atomically
from lightning_models.outputs import Likelihood

FORMATS = (".svg", ".png")
DPI = 150
COLOURS = ("#2f6db3", "#d97b29", "#3f9c6b", "#a2518f", "#8a8f98", "#b8a12c", "#4fb0c6", "#c44e52")
"""Of lines and points."""
LEGEND_COLUMNS = 4
MARKS: dict[Likelihood, str] = {
    "exact": "",
    "lower_bound": "(bound)",
    "estimate": "(estimate)",
    "noncausal": "(noncausal)",
}
"""What follows the label of a likelihood, by its kind."""


def check_picture(target: str, key: str = "output") -> Path:
    """Returns the path of a figure to be written, having tried its folder.

    Args:
        target: the file; its ending is the format.
        key: the option that names it, for messages.

    Raises:
        ValueError: if the ending is not known, or the folder is missing or refuses files.
    """
    path = check_target(target, key)
    if path.suffix not in FORMATS:
        raise ValueError(f"{key} ({path}) must end in {' or '.join(FORMATS)}")
    check_target(table_path(path), key)
    return path


def check_csv(target: str, key: str = "output") -> Path:
    """Returns the path of a CSV file to be written, having tried its folder.

    Raises:
        ValueError: if it does not end in .csv, or the folder is missing or refuses files.
    """
    path = check_target(target, key)
    if path.suffix != ".csv":
        raise ValueError(f"{key} ({path}) must end in .csv")
    return path


def table_path(picture: Path) -> Path:
    """Returns where the table of a figure lies: next to it."""
    return picture.with_suffix(".csv")


def label_sizes(axis: Any) -> None:
    """Labels a logarithmic x axis of sizes, such as 2k or 10M, at least twice.

    Args:
        axis: of matplotlib, logarithmic and with all its points.
    """
    from matplotlib.ticker import (
        EngFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        NullLocator,
    )

    low, high = axis.get_view_interval()
    for steps in ((1,), (1, 2, 5)):  # within two decades powers of ten are too few
        locator: Any = LogLocator(subs=steps)
        if sum(low <= tick <= high for tick in locator.tick_values(low, high)) > 1:
            break
    else:
        locator = MaxNLocator(3, min_n_ticks=2)
    axis.set_major_locator(locator)
    axis.set_minor_locator(LogLocator(subs="auto") if steps == (1,) else NullLocator())
    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_minor_formatter(NullFormatter())


def dress_costs(axes: Any, name: str) -> None:
    """Sets up a logarithmic x axis of sizes and a grid.

    Args:
        axes: panel with all its points.
        name: of the x axis.
    """
    axes.set_xscale("log")
    axes.set_xlabel(name)
    axes.margins(x=0.08, y=0.08)
    label_sizes(axes.xaxis)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.3)


def write_picture(figure: Any, path: Path) -> None:
    """Writes a figure; the same one makes the same file.

    Args:
        figure: of matplotlib.
        path: where to; its ending is the format.
    """
    import matplotlib as mpl

    form: dict[str, Any] = {"format": path.suffix.removeprefix("."), "dpi": DPI}
    with mpl.rc_context({"svg.hashsalt": "evaluation"}):
        write_atomically(path, lambda file: figure.savefig(file, metadata={"Date": None}, **form))


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes rows as CSV, see ``write_frame``."""
    write_frame(path, pd.DataFrame(rows, columns=list(header), dtype=object))


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Writes a table as CSV, atomically; numbers keep all their digits, None is an empty cell."""
    write_atomically(path, lambda target: frame.to_csv(target, index=False, lineterminator="\n"))
