"""Text of single tokens."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

EOS = "\N{END OF PROOF}"
"""Text shown for the end of a document, and for the BOS that begins one."""
PART = "\N{WHITE VERTICAL RECTANGLE}"
"""Text of a token that is part of the following character."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_BYTES = 4  # of a character in UTF-8
LABEL_CHARACTERS = 10


def pieces(tokenizer: Any, ids: Iterable[int], *, begins: bool = True) -> list[str]:
    """Returns the text of each token of a sequence; without marks, they concatenate to its text.

    A character that spans several tokens, as in byte-level vocabularies, belongs to the last one;
    the others are ``PART``.

    Args:
        tokenizer: Tokenizer of the data.
        ids: Token ids of the sequence.
        begins: Whether it begins a document. If not, a space before its first token is kept.
    """

    def cached(read: Callable[[list[int]], str]) -> Callable[..., str]:
        # pairs of tokens repeat in a long text
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
        broken = len(pending) > MAX_BYTES  # no further byte can complete it
        new = (text if broken else sound)[len(shown) :]
        out.append(new or PART)
        if broken or sound == text:
            context, pending, shown = ([] if broken else pending), [], ""
        else:
            shown = sound
    return out


def short_label(text: str) -> str:
    """Returns a token's text in characters of matplotlib's default font."""
    text = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", "→")
    text = text.replace(" ", "\N{OPEN BOX}" if text.isspace() else " ")
    characters = [
        c if c.isprintable() and (c < "\u0590" or c in "␣↵→∎▯") else "\N{MIDDLE DOT}" for c in text
    ]
    return "".join(characters).strip()[:LABEL_CHARACTERS]
