"""Steps of tokens inside and at the end of multi-token words (Table 4 of PonderLM-3).

The paper is arXiv 2603.02023; ``StepAllocation`` reports it.
"""

import math
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from callbacks.analysis.report import BLUE, GREY, Tables, draw_bars, finish, panels
from callbacks.analysis.token_text import PART

ELSEWHERE, INTERNAL, FINAL = range(3)
"""Not in a multi-token word; inside one, before its last token; its last token."""
PLACES = {"internal": INTERNAL, "final": FINAL}


def word_places(texts: Sequence[str]) -> np.ndarray:
    """Returns the position of each token in multi-token words, int8 (T,) (Table 4).

    The last token of a row is ``ELSEWHERE``, as its word may continue.

    NOTE(paper): Table 4 does not define its compound words. Here a word is a run of letters, and a
    token belongs to the same word as the previous token if it begins with a letter and the previous
    one ends with a letter; combining marks count as letters. So whitespace, digits, punctuation
    (hyphens and apostrophes too) and the end of a document separate words, and a text without
    spaces is one word up to its next mark. If several tokens share a character, as bytes do,
    each counts as that character.

    ``texts`` come from ``token_text.pieces`` and are empty for tokens without text.
    """
    texts = _with_characters(texts)
    continues = [
        _is_letter(before[-1:]) and _is_letter(text[:1]) for before, text in pairwise(texts)
    ]
    positions = np.full(len(texts), ELSEWHERE, dtype=np.int8)
    for i, inside in enumerate(continues):
        if inside:
            positions[i] = INTERNAL
        elif i and continues[i - 1]:
            positions[i] = FINAL
    return positions


def _with_characters(texts: Sequence[str]) -> list[str]:
    """Replaces ``PART`` with the character that the token is part of."""
    result: list[str] = []
    character = ""
    for text in reversed(texts):
        if text != PART:
            character = text[:1]
        result.append(character if text == PART else text)
    return result[::-1]


def _is_letter(character: str) -> bool:
    return character.isalpha() or unicodedata.category(character or " ").startswith("M")


def by_place(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Returns executed steps of tokens within words and tokens that end words."""
    if "place" not in table:
        return dict.fromkeys(PLACES, table["executed"][:0])
    return {name: table.loc[table["place"] == code, "executed"] for name, code in PLACES.items()}


def words(table: pd.DataFrame, max_steps: int) -> pd.DataFrame:
    """Returns a table with one row per number of executed steps (Table 4); empty without words.

    ``internal`` counts tokens inside multi-token words, and ``final`` tokens that end such words,
    see ``word_places``; ``..._share`` is the share of all such tokens.

    ``table`` comes from ``collect_tokens``.
    """
    executed = by_place(table)
    if not any(map(len, executed.values())):
        return pd.DataFrame()
    counts = pd.DataFrame({"steps": range(max_steps + 1)})
    for name, values in executed.items():
        counts[name] = values.value_counts().reindex(counts["steps"], fill_value=0).to_numpy()
        counts[f"{name}_share"] = counts[name] / (len(values) or math.nan)
    return counts


def words_figure(tables: Tables) -> Any:
    """Draws the steps of tokens within words and tokens that end words (Table 4)."""
    table = tables["words"]
    figure, (ax,) = panels(5.6, 3.6, 1)
    names = {"internal": ("within a word", GREY), "final": ("end of a word", BLUE)}
    columns = {
        f"{name}_share": (f"{label} ({table[name].sum()} tokens)", color)
        for name, (label, color) in names.items()
    }
    draw_bars(ax, table, "steps", columns)
    ax.set_ylim(0, 1.25)  # room for the legend
    finish(ax, "executed additional steps", "share of such tokens", whole=True)
    return figure
