"""The text that each token stands for."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

EOS = "\N{END OF PROOF}"
"""Shown for the end of a document, and for the BOS that begins one."""
PART = "\N{WHITE VERTICAL RECTANGLE}"
"""Shown for a token that is part of the character after it."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MOST_BYTES = 4  # of a character in UTF-8
LABEL_CHARACTERS = 10


def pieces(tokenizer: Any, ids: Iterable[int], *, begins: bool = True) -> list[str]:
    """Returns the text of each token id of a sequence; joined, without marks, it is the whole text.

    A character that several tokens share, as in byte-level vocabularies, stands at the last of
    them; the others are ``PART``.

    Args:
        tokenizer: The data's.
        ids: The sequence.
        begins: Whether it begins a document. Elsewhere a space before its first token stays.
    """

    def cached(read: Callable[[list[int]], str]) -> Callable[..., str]:
        # a long text repeats pairs of tokens
        return lru_cache(maxsize=2**16)(lambda *parts: str(read(list(parts))))

    out = []
    ends = (tokenizer.eos_id, tokenizer.text_bos_id)
    beginning = cached(tokenizer.decode)
    decode = beginning if begins else cached(tokenizer.decode_continuation)
    context: list[int] = []  # some tokenizers drop the space before a text's first token
    pending: list[int] = []
    shown = ""
    for i in ids:
        if i in ends:
            out.append(EOS)
            context, pending, shown, decode = [], [], "", beginning
            continue
        pending.append(int(i))
        text = decode(*context, *pending)[len(decode(*context)) :]
        sound = text.rstrip(REPLACEMENT)
        broken = len(pending) > MOST_BYTES  # nothing will complete it
        new = (text if broken else sound)[len(shown) :]
        out.append(new or PART)
        if broken or sound == text:
            context, pending, shown = ([] if broken else pending), [], ""
        else:
            shown = sound
    return out


def short_label(text: str) -> str:
    """Returns a token's text in the characters that matplotlib's own font has."""
    text = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", "→")
    text = text.replace(" ", "\N{OPEN BOX}" if text.isspace() else " ")
    characters = [
        c if c.isprintable() and (c < "\u0590" or c in "␣↵→∎▯") else "\N{MIDDLE DOT}" for c in text
    ]
    return "".join(characters).strip()[:LABEL_CHARACTERS]
