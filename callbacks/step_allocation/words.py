"""Where tokens stand in words that consist of several of them (Table 4).

NOTE(paper): Table 4 does not say what its compound words are. Here a word is a run of letters, and
a token belongs to the same word as the token before it if it begins with a letter and that one ends
with a letter; combining marks count as letters. So white space, digits, punctuation (hyphens and
apostrophes too) and the end of a document separate words, and a text without spaces is one word up
to its next mark. Of a character that several tokens share, as of bytes, each token counts as that
character.
"""

import unicodedata
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from callbacks.analysis.token_text import PART

ELSEWHERE, INTERNAL, FINAL = range(3)
"""A word of one token, or none; within a word of several tokens; the last token of such a word."""


def word_places(texts: Sequence[str]) -> np.ndarray:
    """Returns int8 (T,): where each token of a row stands, one of the three places.

    Whether a word goes on after the row is not known, so the last token is nowhere.

    Args:
        texts: what each token stands for, see ``token_text.pieces``; empty where it is no text.
    """
    texts = _with_characters(texts)
    goes_on = [_is_letter(before[-1:]) and _is_letter(text[:1]) for before, text in pairwise(texts)]
    places = np.full(len(texts), ELSEWHERE, dtype=np.int8)
    for i, inside in enumerate(goes_on):
        if inside:
            places[i] = INTERNAL
        elif i and goes_on[i - 1]:
            places[i] = FINAL
    return places


def _with_characters(texts: Sequence[str]) -> list[str]:
    """Returns the texts, with the character for each token that is part of one."""
    found: list[str] = []
    character = ""
    for text in reversed(texts):
        if text != PART:
            character = text[:1]
        found.append(character if text == PART else text)
    return found[::-1]


def _is_letter(character: str) -> bool:
    return character.isalpha() or unicodedata.category(character or " ").startswith("M")
