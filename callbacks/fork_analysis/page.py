"""The analysed text as one HTML file that needs nothing else."""

import html
import math
from collections.abc import Mapping, Sequence

from callbacks.fork_analysis.pieces import EOS, PART
from callbacks.fork_analysis.statistics import MEASURES, TokenRow

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
LIGHT, DARK = (240, 245, 250), (20, 78, 140)  # of tokens with one stream, and with the most
ARROW = " \N{RIGHTWARDS ARROW} "
NEWLINE = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


def page(
    title: str,
    measures: Sequence[Mapping[str, float]],
    rows: Sequence[TokenRow],
    texts: Sequence[Sequence[str]],
) -> str:
    """Returns the page: a table of measures, and each token shaded by its number of streams.

    Args:
        title: of the page.
        measures: of each fork layer, see ``statistics.MEASURES``.
        rows: the rows to show.
        texts: what each of their tokens stands for.
    """
    most = max((int(row.streams[-1].max()) for row in rows), default=1)
    counts = range(1, most + 1)
    styles = "\n".join(f".s{count} {{ {_colors(count, most)} }}" for count in counts)
    legend = "".join(f'<span class="s{count}">{count}</span>' for count in counts)
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        f"<title>{_safe(title)}</title>",
        f"<style>{STYLE}{styles}\n</style></head><body>",
        f"<h1>{_safe(title)}</h1>",
        _table(measures),
        f"<p class='legend'>Streams of a token behind the last fork layer: {legend}</p>",
        f"<p class='note'>Point at a token for its numbers. {EOS} ends a document, {PART} is part "
        f"of the character behind it, {NEWLINE} a line break.</p>",
    ]
    for number, (row, text) in enumerate(zip(rows, texts, strict=True), start=1):
        parts.append(f"<h2>Row {number}, {len(row.ids)} tokens</h2>")
        parts.append(f"<div class='text'>{_tokens(row, text)}</div>")
    return "\n".join([*parts, "</body></html>", ""])


def _table(measures: Sequence[Mapping[str, float]]) -> str:
    head = "".join(f"<th>{number}</th>" for number in range(1, len(measures) + 1))
    lines = [f"<tr><th>fork layer</th>{head}</tr>"]
    for name, meaning in MEASURES.items():
        values = [layer[name] for layer in measures]
        if any(map(math.isfinite, values)):
            cells = "".join(f"<td>{_number(value)}</td>" for value in values)
            lines.append(f"<tr><th>{meaning}</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _tokens(row: TokenRow, texts: Sequence[str]) -> str:
    """Returns the spans of a row, without anything between them: the text keeps its spaces."""
    spans = []
    for i, text in enumerate(texts):
        streams = row.streams[:, i]
        tip = [
            f"token {i}, id {row.ids[i]}",
            f"streams {ARROW.join(map(str, streams))}",
            f"P {_number(row.original_score[i])} (original)",
        ]
        if math.isfinite(row.fork_score[i]):
            tip[-1] += f", {_number(row.fork_score[i])} (forks)"
        tip.append(f"entropy {_number(row.entropy[i])} nats")
        if row.reference_entropy is not None:
            tip.append(f"reference entropy {_number(row.reference_entropy[i])} nats")
        # &#10; is a line break within a tooltip
        title = "&#10;".join(map(_safe, tip))
        spans.append(f'<span class="s{streams[-1]}" title="{title}">{_shown(text)}</span>')
    return "".join(spans)


def _shown(text: str) -> str:
    """Returns a token's text for HTML; control characters as their pictures."""
    visible = "".join(_picture(character) for character in text)
    return _safe(visible).replace("\n", f"{NEWLINE}\n")


def _picture(character: str) -> str:
    if character in "\n\t" or ord(character) >= 160:
        return character
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    return character if ord(character) < 127 else "\N{SYMBOL FOR DELETE}"


def _colors(count: int, most: int) -> str:
    share = (count - 1) / max(most - 1, 1)
    mixed = [round(a + (b - a) * share) for a, b in zip(LIGHT, DARK, strict=True)]
    color = "#fff" if share > 0.6 else "#1d2733"
    return f"background: rgb({', '.join(map(str, mixed))}); color: {color};"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else ""


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
