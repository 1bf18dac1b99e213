"""Reports of analyses: scalars, tables, figures and pages, and the files they become."""

import html
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from callbacks.analysis.token_text import EOS, PART
from callbacks.hooks import write_whole

DPI = 120
MARGIN = 6
"""Pixels around a panel that is cut out of its figure."""
BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d97b29", "#3f9c6b", "#8a8f98"

Shown = Mapping[str, tuple[str | None, Any]]
"""Columns that a figure shows, each with its label (None: not in the legend) and its colour."""


@dataclass(frozen=True, kw_only=True)
class AnalysisReport:
    """What an analysis reports at one step."""

    scalars: Mapping[str, float] = field(default_factory=dict)
    """By tag; those that are not finite are left out."""
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """By name; those without a line are left out."""
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Functions that draw matplotlib figures, by name."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Other files, by name."""
    histograms: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Values whose distribution TensorBoard shows, by tag."""
    markdown: Mapping[str, str] = field(default_factory=dict)
    """Texts for TensorBoard, by tag."""

    @property
    def finite(self) -> dict[str, float]:
        """The scalars that are finite."""
        return {tag: float(value) for tag, value in self.scalars.items() if math.isfinite(value)}

    def drawn(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return {name: draw() for name, draw in self.figures.items()}

    def files(self) -> dict[str, str]:
        """Returns all text files by name: ``scalars.csv``, a CSV file a table, the other texts."""
        tables = dict(self.tables)
        if self.scalars:
            scalars = pd.Series(self.finite, dtype=np.float64)
            tables = {"scalars": scalars.rename_axis("name").reset_index(name="value"), **tables}
        written = {f"{name}.csv": as_csv(table) for name, table in tables.items() if len(table)}
        return {**written, **self.texts}

    def write(self, folder: Path, prefix: str, drawn: Mapping[str, Any]) -> None:
        """Writes all files as ``<folder>/<prefix><name>``, each whole or not at all.

        The folder is made if there is none; drawn figures are written as PNG.

        Raises:
            OSError: if a file cannot be written.
        """
        contents = {name: text.encode() for name, text in self.files().items()}
        contents |= {f"{name}.png": as_png(figure) for name, figure in drawn.items()}
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_whole(folder / f"{prefix}{name}", content)


def as_csv(table: pd.DataFrame) -> str:
    """Returns a table as CSV: numbers of 6 digits, an empty field where one is not finite."""
    # columns of objects would be written with all their digits
    finite = table.infer_objects().replace([math.inf, -math.inf], math.nan)
    return finite.to_csv(index=False, float_format="%.6g", lineterminator="\n")


# ---- figures


def as_png(figure: Any) -> bytes:
    """Returns a matplotlib figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def as_images(figure: Any) -> list[np.ndarray]:
    """Returns each panel of a matplotlib figure, with its colour bar, as uint8 (height, width, 3).

    TensorBoard shows them side by side, and small. A figure whose panels share an axis or a title
    stays whole.
    """
    figure.set_dpi(DPI)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    bars = [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]
    panels = [ax for ax in figure.axes if ax not in bars]
    shared = any(len(ax.get_shared_y_axes().get_siblings(ax)) > 1 for ax in panels)
    if len(panels) == 1 or shared or figure.get_suptitle():
        return [pixels.copy()]
    parts = {ax: [ax.get_tightbbox()] for ax in panels}
    for bar in bars:
        box = bar.get_tightbbox()
        left = min(panels, key=lambda ax: abs(box.x0 - parts[ax][0].x1) + abs(box.y0 - ax.bbox.y0))
        parts[left].append(box)
    height, width = pixels.shape[:2]
    images = []
    for boxes in parts.values():
        x0, y0 = (int(min(getattr(box, side) for box in boxes)) - MARGIN for side in ("x0", "y0"))
        x1, y1 = (int(max(getattr(box, side) for box in boxes)) + MARGIN for side in ("x1", "y1"))
        rows = slice(max(height - y1, 0), min(height - y0, height))
        images.append(pixels[rows, max(x0, 0) : min(x1, width)].copy())
    return images


def panels(
    width: float, height: float, columns: int, rows: int = 1, **options: Any
) -> tuple[Any, list[Any]]:
    """Returns a figure, drawn without pyplot and its global state, and its axes row by row.

    Width and height are in inches; ``options`` are those of ``Figure.subplots``.
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


def draw_lines(ax: Any, table: pd.DataFrame, x: str, shown: Shown, style: str = "o-") -> None:
    """Draws columns of a table as lines over its column ``x``."""
    for name, (label, color) in shown.items():
        ax.plot(table[x], table[name], style, color=color, label=label)


def draw_bars(ax: Any, table: pd.DataFrame, x: str, shown: Shown) -> None:
    """Draws columns of a table as groups of bars over its column ``x``; nan has no height."""
    width = 0.8 / len(shown)
    for i, (name, (label, color)) in enumerate(shown.items()):
        place = table[x] + width * (i - (len(shown) - 1) / 2)
        ax.bar(place, table[name].fillna(0), 0.94 * width, color=color, label=label)


def finish(ax: Any, x: str, y: str = "", *, whole: bool = False, **legend: Any) -> None:
    """Labels an axis, ``whole`` if x has whole numbers, with a legend where there are labels."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if whole:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8, **legend)


def shades(number: int) -> list[tuple[float, ...]]:
    """Returns colours from the lowest layer to the highest."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(1, number - 1)) for i in range(number)]


# ---- pages

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin-bottom: 0; } h2 { font-size: 1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: .85rem; }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; font-weight: normal; }
tr + tr { border-top: 1px solid #e3e8ee; }
.text { font: 14px/1.9 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
        overflow-wrap: anywhere; border: 1px solid #e3e8ee; border-radius: 6px; padding: 1rem; }
.text span { border-radius: 3px; padding: 2px 0; box-shadow: inset -1px 0 #fff; }
.text span:hover { outline: 2px solid #d97b29; }
.legend span { border-radius: 3px; padding: 2px 9px; margin-right: 4px; }
.note { color: #5d6b7a; font-size: .85rem; }
"""
LIGHT, DARK = (240, 245, 250), (20, 78, 140)  # of tokens with the lowest count, and the highest
NEWLINE = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


def page(
    title: str,
    table: pd.DataFrame,
    meaning: str,
    counts: range | Mapping[str, str],
    rows: Iterable[Sequence[str]],
    unit: str = "tokens",
) -> str:
    """Returns analysed text as one HTML file that needs nothing else.

    Args:
        title: of the page.
        table: shown above the text; not if it has no line.
        meaning: of a shade, for the legend.
        counts: from the lightest shade to the darkest, at least one; of kinds, which have no
            order, the background of each by its name.
        rows: the tokens of each row of text, see ``token``.
        unit: what the parts of a row are called.
    """
    if isinstance(counts, range):
        last = max(len(counts) - 1, 1)
        styles = [_shade(place / last) for place in range(len(counts))]
        names = {f"s{count}": str(count) for count in counts}
    else:
        styles = [f"background: {color}; color: #1d2733;" for color in counts.values()]
        names = {f"s{place}": safe(name) for place, name in enumerate(counts)}
    sheet = "\n".join(f".{key} {{ {style} }}" for key, style in zip(names, styles, strict=True))
    legend = "".join(f'<span class="{key}">{name}</span>' for key, name in names.items())
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        f"<title>{safe(title)}</title>",
        f"<style>{STYLE}{sheet}\n</style></head><body>",
        f"<h1>{safe(title)}</h1>",
        _html_table(table) if len(table) else "",
        f"<p class='legend'>{safe(meaning)}: {legend}</p>",
        f"<p class='note'>Point at a token for its numbers. {EOS} ends a document, {PART} is part "
        f"of the character after it, {NEWLINE} a line break.</p>",
    ]
    for place, tokens in enumerate(rows, start=1):
        parts.append(f"<h2>Row {place}, {len(tokens)} {safe(unit)}</h2>")
        # nothing between the spans: the text keeps its spaces
        parts.append(f"<div class='text'>{''.join(tokens)}</div>")
    return "\n".join([*parts, "</body></html>", ""])


def token(count: int, tip: Iterable[str], text: str) -> str:
    """Returns a token of the text in the shade of its count, with lines that show on hovering."""
    title = "&#10;".join(map(safe, tip))  # a line break within a tooltip
    visible = safe("".join(map(_picture, text))).replace("\n", f"{NEWLINE}\n")
    return f'<span class="s{count}" title="{title}">{visible}</span>'


def number(value: float) -> str:
    """Returns a number with three digits; nothing where it is not finite."""
    return f"{value:.3g}" if math.isfinite(value) else ""


def safe(text: str) -> str:
    """Returns a text in which nothing is a tag."""
    return html.escape(text, quote=True)


def _html_table(table: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return table.to_html(index=False, border=0, na_rep="", float_format=number)


def _picture(character: str) -> str:
    """Returns a character, or the picture of a control character."""
    if character in "\n\t" or ord(character) >= 160:
        return character
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    return character if ord(character) < 127 else "\N{SYMBOL FOR DELETE}"


def _shade(share: float) -> str:
    """Returns the style of a shade, 0 the lightest and 1 the darkest."""
    mixed = [round(a + (b - a) * share) for a, b in zip(LIGHT, DARK, strict=True)]
    color = "#fff" if share > 0.6 else "#1d2733"
    return f"background: rgb({', '.join(map(str, mixed))}); color: {color};"
