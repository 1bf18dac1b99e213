"""Where sentences end in a text: by rules, by a SaT model, or every N tokens.

| name | splitter | needs |
|---|---|---|
| ``rules`` | the rules of ``sentencex`` for a language | nothing |
| ``sat``, ``sat:NAME``, ``sat:FOLDER`` | ``wtpsplit.SaT`` at its default threshold | weights |
| ``spans:N`` | no sentences: spans of N tokens, the last one shorter | nothing |
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from datamodules.sentences.sat import DEFAULT_SAT, SatSplitter
from datamodules.sentences.splitter import Splitter

KNOWN = "'rules', 'sat', 'sat:' with a model of segment-any-text or a local folder, and 'spans:25'"

# Rules look back over their whole paragraph: the cost grows with its square.
_LONGEST_PARAGRAPH = 4096  # characters that are looked at together
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


class RuleSplitter(Splitter):
    """The rules of ``sentencex``; a blank line always ends a sentence.

    Args:
        language: Code of the language, e.g. 'en'.

    Raises:
        ValueError: No such code.
    """

    name = "rules"

    def __init__(self, language: str = "en") -> None:
        if not re.fullmatch(r"[a-z]{2,3}", language):
            raise ValueError(f"language={language!r} must be a code such as 'en' or 'de'.")
        self.language = language

    def identity(self) -> dict[str, Any]:
        """Returns name and language."""
        return {"name": self.name, "language": self.language}

    def found(self, texts: Sequence[str]) -> Iterator[Sequence[int]]:
        """Yields where the rules see the end of a sentence."""
        for text in texts:
            ends: list[int] = []
            start = 0
            for blank in _BLANK_LINES.finditer(text):
                ends += self._paragraph(text, start, blank.start())
                start = blank.end()
            yield ends + self._paragraph(text, start, len(text))

    def _paragraph(self, text: str, start: int, stop: int) -> list[int]:
        """Returns the ends in a paragraph; a long one is read in overlapping pieces."""
        from sentencex import get_sentence_boundaries

        ends: list[int] = []
        while start < stop:
            piece = text[start : min(stop, start + _LONGEST_PARAGRAPH)]
            here = [
                start + int(b["end_index"]) for b in get_sentence_boundaries(self.language, piece)
            ]
            if start + len(piece) < stop and len(here) > 1:
                here.pop()  # the piece may have cut its last sentence: the next one begins there
            ends += here
            start = here[-1] if here else stop
        return ends


class SpanSplitter:
    """Every N tokens; tokens are its only borders, so it needs no text.

    Args:
        length: N.
    """

    gains_from_processes: ClassVar[bool] = True

    def __init__(self, length: int) -> None:
        self.length = length
        self.name = f"spans:{length}"

    def identity(self) -> dict[str, Any]:
        """Returns the name."""
        return {"name": self.name}

    def load(self) -> None:
        """Does nothing."""

    def token_ends(self, count: int) -> np.ndarray:
        """Returns where the spans of `count` tokens end, int64; the last one ends at `count`."""
        return np.append(np.arange(self.length, count, self.length, dtype=np.int64), count)


def parse_splitter(name: str, language: str = "en") -> Splitter | SpanSplitter:
    """Returns the splitter of that name; its model is loaded when it is used.

    Args:
        name: See the module.
        language: Code of the language of ``rules``.

    Raises:
        ValueError: Not a splitter; the message lists them.
    """
    kind, colon, rest = name.partition(":")
    if name == "rules":
        return RuleSplitter(language)
    if kind == "sat" and (rest or not colon):
        return SatSplitter(rest or DEFAULT_SAT)
    if kind == "spans" and rest.isdecimal() and int(rest) > 0:
        return SpanSplitter(int(rest))
    raise ValueError(f"splitter={name!r} is not known. Possible are {KNOWN}.")
