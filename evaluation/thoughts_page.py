"""Self-contained HTML page with the per-token traces of models reading a text.

Rows of several models are aligned by characters, so tokenizers may differ.
"""

import hashlib
import json
import math
import string
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.output import check_target, render
from evaluation.thoughts import MEASURES, TokenTrace
from lightning_models.atomic_files import write_whole

LETTERS = string.ascii_uppercase
"""Labels of the models of a page."""
LINE = 72
"""Characters of a line of the page; a single column may be longer."""


def save_page(traces: Sequence[TokenTrace], path: str | Path, key: str = "path") -> Path:
    """Writes the page of one text, see ``page``; ``key`` is the option that names the file.

    Raises:
        ValueError: If the file's name does not end in .html, or its folder is not writable.
    """
    target = check_page(path, key)
    write_whole(target, page(traces))
    return target


def check_page(path: str | Path, key: str = "path") -> Path:
    """Returns the path of a page after checking that its folder can be written to."""
    target = check_target(path, key)
    if target.suffix != ".html":
        raise ValueError(f"{key} ({target}) must end in .html")
    return target


def page(traces: Sequence[TokenTrace]) -> str:
    """Returns a self-contained HTML page with traces of the same text, one below the other.

    A column is the shortest range of characters at whose ends all models have a token boundary.
    """
    text = traces[0].text
    borders = [set(trace.tokens.loc[trace.tokens["kind"] == "text", "end"]) for trace in traces]
    common = sorted(set.intersection(*borders, set(range(len(text) + 1))) | {0, len(text)})
    models = [_page_model(trace, common) for trace in traces]
    widths = [
        max(sum(len(row["text"]) + 1 for row in rows) for rows in zip_columns)
        for zip_columns in zip(*(model["columns"] for model in models), strict=True)
    ]
    text_lines, used = list[list[int]](), 0
    for column, width in enumerate(widths):
        if not width:
            continue
        if not text_lines or used + width > LINE:
            text_lines, used = [*text_lines, []], 0
        text_lines[-1].append(column)
        used += width
    max_nats = max(float(np.nanmax([0.0, *trace.tokens["nats"]])) for trace in traces)
    data = [
        {**model, "letter": letter, "loss": MEASURES["nats"], "columns": None}
        for letter, model in zip(LETTERS, models, strict=False)
    ]
    context = {
        "text": text,
        "models": models,
        "lines": text_lines,
        "data": data,
        "most": max_nats or 1.0,
    }
    nonce = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]  # no text can know it
    return render("thoughts.html", letters=LETTERS, nonce=nonce, **context)


def _page_model(trace: TokenTrace, common: Sequence[int]) -> dict[str, Any]:
    """Returns the template's values for a model: facts, measures with their range, columns."""
    names = trace.measures
    measures = []
    for name in names:
        low, high = trace.tokens[name].min(), trace.tokens[name].max()
        high = max(abs(low), high) if low < 0 else high  # equal amounts have equal depth
        low = -high if low < 0 else 0.0
        measures.append({"label": MEASURES[name], "low": float(low), "high": float(high)})
    columns: list[list[dict[str, Any]]] = [[] for _ in (*common, None)]  # one more, after the text
    tokens, last = [], int((trace.tokens["kind"] == "text").to_numpy().nonzero()[0].max())
    for idx, row in enumerate(trace.tokens.to_dict("records")):
        column = bisect_left(common, row["end"]) if idx <= last else len(common)
        values = [None if math.isnan(row[name]) else row[name] for name in names]
        nats = None if math.isnan(row["nats"]) else row["nats"]
        token = {"kind": row["kind"], "nats": nats}
        columns[column].append({**token, "index": idx, "text": visible(row["text"])})
        tokens.append({**token, "text": row["text"], "values": values, "note": row["note"]})
    described = {"name": trace.name, "facts": trace.facts, "measures": measures}
    return {**described, "columns": columns, "tokens": tokens}


def visible(text: str) -> str:
    """Makes line breaks, tabs, and leading and trailing spaces visible."""
    text = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", "→")
    inner = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    after = len(text) - before - len(inner)
    space = "\N{OPEN BOX}"
    return space * before + inner + space * (after if inner else 0)
