"""The figure of a study: validation curves against what they have cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.results import Result

COLOURS = ("#2f6db3", "#d97b29", "#3f9c6b", "#a2518f", "#8a8f98", "#b8a12c", "#4fb0c6", "#c44e52")


def draw_curves(
    results: Sequence[Result],
    path: Path,
    label: str = "validation loss (bits per byte)",
    unit: str = "tokens",
) -> None:
    """Writes validation curves against tokens and against FLOPs, as SVG.

    Runs of one name have one colour, a line for each seed. Of a task there is one panel, against
    questions: FLOPs are counted per token.

    Args:
        results: what to draw.
        path: the file.
        label: of the vertical axis.
        unit: what curves are over, tokens or questions.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    compute = unit == "tokens"
    figure = Figure(figsize=(10 if compute else 6, 4), layout="constrained")
    panels = figure.subplots(1, 2 if compute else 1, sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(result.run.name for result in results))
    for result in results:
        place = names.index(result.run.name)
        first = result.run.name not in {line.get_gid() for line in panels[0].get_lines()}
        style = {"color": COLOURS[place % len(COLOURS)], "gid": result.run.name, "linewidth": 1.2}
        style["label"] = result.run.title if first else None
        _line(panels[0], result, 1e-6, style)
        if compute and result.training_flops is not None:
            _line(panels[1], result, result.training_flops * 1e-12, style)
    panels[0].set(xlabel=f"training {unit} (millions)", ylabel=label)
    if compute:
        panels[1].set(xlabel="training compute (TFLOP)")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    with mpl.rc_context({"svg.hashsalt": "study"}):  # the same curves make the same file
        figure.savefig(path, metadata={"Date": None})


def _line(axes: Any, result: Result, factor: float, style: dict[str, Any]) -> None:
    """Draws a curve, its tokens times ``factor``."""
    points = [(tokens * factor, loss) for tokens, loss in result.curve]
    axes.plot(*zip(*points, strict=True), marker=".", markersize=3, **style) if points else None
