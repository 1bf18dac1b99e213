"""The report as one HTML file that needs nothing else: no network, no script, no other file."""

import base64
import html

from evaluation.compare.report import ALT, CAPTION, Report
from evaluation.compare.tables import Table

GENERATOR = "evaluate.py compare"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing but what is in it."""
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff;
       max-width: 84rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .35rem .9rem .35rem 0; text-align: right; vertical-align: top;
         font-variant-numeric: tabular-nums; }
thead th { border-bottom: 2px solid #c4cdd6; vertical-align: bottom; font-weight: 600;
           min-width: 4.5rem; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
tbody tr + tr { border-top: 1px solid #e3e8ee; }
tbody th { font-weight: 600; white-space: nowrap; }
.range { display: block; color: #5d6b7a; font-size: .8rem; white-space: nowrap; }
.checks { list-style: none; padding: 0; } .checks li { margin: .2rem 0; }
.state { display: inline-block; min-width: 5.6rem; margin-right: .6rem; padding: 0 .5rem;
         border-radius: 4px; font-size: .8rem; text-align: center; }
.matched { background: #e2f2e8; color: #1c5a36; } .differs { background: #fbe5d6; color: #8a3d0c; }
.not-known { background: #e9edf1; color: #47535f; }
.note, figcaption { color: #47535f; font-size: .88rem; }
figure { margin: 1rem 0; } figure img { width: 100%; height: auto; }
"""


def as_page(report: Report, svg: bytes | None) -> str:
    """Returns the HTML.

    Args:
        report: what it shows.
        svg: the figure; None: there is none.
    """
    notes = "".join(f"<li>{_safe(note)}</li>" for note in report.notes)
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f'<meta name="generator" content="{GENERATOR}">',
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{_safe(report.title)}</title>\n<style>{STYLE}</style></head><body>",
        f"<h1>{_safe(report.title)}</h1>",
        *([f"<p>{_safe(report.introduction)}</p>"] if report.introduction else []),
        _table(report.table),
        f"<ul class='note'>{notes}</ul>",
        *([] if svg is None else ["<h2>Loss</h2>", _figure(svg)]),
        "<h2>What the runs have in common</h2>",
        _checks(report),
        "<h2>Every run</h2>",
        _table(report.runs, "text"),
        *([_left_out(report)] if report.left_out else []),
    ]
    return "\n".join([*parts, "</body></html>", ""])


def _table(table: Table, kind: str = "numbers") -> str:
    """Returns a table that scrolls by itself where the page is narrower; the range below a mean."""
    head = "".join(f"<th scope='col'>{_safe(title)}</th>" for title in table.header)
    body = ""
    for name, *cells in table.lines:
        shown = map(_cell, cells) if kind == "numbers" else map(_safe, cells)
        row = "".join(f"<td>{cell}</td>" for cell in shown)
        body += f"<tr><th scope='row'>{_safe(name)}</th>{row}</tr>\n"
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>"
    return f"<div class='wide'><table class='{kind}'>{inside}</table></div>"


def _cell(text: str) -> str:
    mean, bracket, rest = text.partition(" (")
    spread = f"<span class='range'>({_safe(rest)}</span>" if bracket else ""
    return _safe(mean) + spread


def _figure(svg: bytes) -> str:
    data = base64.b64encode(svg).decode("ascii")
    image = f'<img alt="{_safe(ALT)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{_safe(CAPTION)}</figcaption></figure>"


def _checks(report: Report) -> str:
    lines = (
        f"<li><span class='state {check.state.replace(' ', '-')}'>{check.state}</span>"
        f"<b>{_safe(check.what)}</b>: {_safe(check.detail)}</li>"
        for check in report.checks
    )
    return "<ul class='checks'>" + "\n".join(lines) + "</ul>"


def _left_out(report: Report) -> str:
    lines = (f"<li><b>{_safe(x.name)}</b>: {_safe(x.reason)}</li>" for x in report.left_out)
    return "<h2>Left out</h2><ul>" + "\n".join(lines) + "</ul>"


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
