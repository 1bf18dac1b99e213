"""Analysed text as one HTML file that needs nothing else: each token has a shade and a tooltip."""

import html
import math
from collections.abc import Iterable, Sequence

from callbacks.analysis.token_text import EOS, PART

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


def document(
    title: str,
    table: str,
    meaning: str,
    counts: range,
    rows: Sequence[Sequence[str]],
    unit: str = "tokens",
) -> str:
    """Returns the page.

    Args:
        title: of the page.
        table: HTML of what stands above the text, see ``table``.
        meaning: what a shade says, for the legend.
        counts: from the lightest shade to the darkest, at least one.
        rows: the tokens of each row of text, see ``token``.
        unit: what the parts of a row are called.
    """
    legend = "".join(f'<span class="s{count}">{count}</span>' for count in counts)
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        f"<title>{safe(title)}</title>",
        f"<style>{STYLE}{_shades(counts)}\n</style></head><body>",
        f"<h1>{safe(title)}</h1>",
        table,
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
    return f'<span class="s{count}" title="{title}">{_shown(text)}</span>'


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table of texts; each line begins with its name."""
    cells = [f"<tr>{''.join(f'<th>{safe(name)}</th>' for name in head)}</tr>"]
    for name, *values in lines:
        row = "".join(f"<td>{safe(value)}</td>" for value in values)
        cells.append(f"<tr><th>{safe(name)}</th>{row}</tr>")
    return f"<table>{''.join(cells)}</table>"


def number(value: float) -> str:
    """Returns a number with three digits; nothing where it is not finite."""
    return f"{value:.3g}" if math.isfinite(value) else ""


def safe(text: str) -> str:
    """Returns a text in which nothing is a tag."""
    return html.escape(text, quote=True)


def _shown(text: str) -> str:
    """Returns a token's text for HTML; control characters as their pictures."""
    visible = "".join(_picture(character) for character in text)
    return safe(visible).replace("\n", f"{NEWLINE}\n")


def _picture(character: str) -> str:
    if character in "\n\t" or ord(character) >= 160:
        return character
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    return character if ord(character) < 127 else "\N{SYMBOL FOR DELETE}"


def _shades(counts: range) -> str:
    """Returns a style for each count."""
    last = max(len(counts) - 1, 1)
    return "\n".join(
        f".s{count} {{ {_colors(place / last)} }}" for place, count in enumerate(counts)
    )


def _colors(share: float) -> str:
    mixed = [round(a + (b - a) * share) for a, b in zip(LIGHT, DARK, strict=True)]
    color = "#fff" if share > 0.6 else "#1d2733"
    return f"background: rgb({', '.join(map(str, mixed))}); color: {color};"
