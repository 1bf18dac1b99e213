"""The figure of a study: validation loss against what it has cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.results import Result

COLOURS = ("#2f6db3", "#d97b29", "#3f9c6b", "#a2518f", "#8a8f98", "#b8a12c", "#4fb0c6", "#c44e52")


def draw_curves(results: Sequence[Result], path: Path, unit: str = "bits per byte") -> None:
    """Writes the loss on the validation text against tokens and against FLOPs, as SVG.

    Runs of one name have one colour, a line for each seed.

    Args:
        results: what to draw.
        path: the file.
        unit: of the loss.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(result.run.name for result in results))
    for result in results:
        place = names.index(result.run.name)
        first = result.run.name not in {line.get_gid() for line in left.get_lines()}
        style = {"color": COLOURS[place % len(COLOURS)], "gid": result.run.name, "linewidth": 1.2}
        style["label"] = result.run.title if first else None
        _line(left, result, 1e-6, style)
        if result.training_flops is not None:
            _line(right, result, result.training_flops * 1e-12, style)
    left.set(xlabel="training tokens (millions)", ylabel=f"validation loss ({unit})")
    right.set(xlabel="training compute (TFLOP)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    with mpl.rc_context({"svg.hashsalt": "study"}):  # the same curves make the same file
        figure.savefig(path, metadata={"Date": None})


def _line(axes: Any, result: Result, factor: float, style: dict[str, Any]) -> None:
    """Draws a curve, its tokens times ``factor``."""
    points = [(tokens * factor, loss) for tokens, loss in result.curve]
    axes.plot(*zip(*points, strict=True), marker=".", markersize=3, **style) if points else None
