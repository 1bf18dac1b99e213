"""What the figures of all analyses have in common."""

from typing import Any

BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d97b29", "#3f9c6b", "#8a8f98"


def panels(
    width: float, height: float, columns: int, rows: int = 1, **options: Any
) -> tuple[Any, list[Any]]:
    """Returns a figure without a window, and its axes row by row.

    Args:
        width: in inches.
        height: in inches.
        columns: panels side by side.
        rows: panels above each other.
        **options: see ``Figure.subplots``.
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
