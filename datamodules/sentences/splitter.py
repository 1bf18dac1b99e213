"""What every splitter of text can do.

White space between two sentences belongs to the second: " The" stays one token.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np


class SplitterUnavailableError(ValueError):
    """A splitter whose model could not be loaded; the message says what to set instead."""


class Splitter(ABC):
    """Finds the sentences of texts.

    Attributes:
        name: The name it was asked for by, e.g. ``"rules"``.
        gains_from_processes: Whether several processes split faster than one.
    """

    name: str
    gains_from_processes: ClassVar[bool] = True

    @abstractmethod
    def found(self, texts: Sequence[str]) -> Iterator[Sequence[int]]:
        """Yields, for each text, character offsets at which a sentence may end, ascending."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Returns, in plain values, all that decides where sentences end."""

    def load(self) -> None:
        """Loads what it needs; splitting does so too, where that is not done.

        Raises:
            SplitterUnavailableError: It cannot be had.
        """
        return  # most need nothing

    def ends(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns, for each text, where its sentences end in characters, int64, ascending.

        The last one is the text's length; none is only white space, unless the whole text is.
        """
        return [tidy(text, ends) for text, ends in zip(texts, self.found(texts), strict=True)]


def tidy(text: str, ends: Sequence[int]) -> np.ndarray:
    """Returns sentence ends with the white space at each end moved into the next sentence."""
    kept = [0]
    for end in ends:
        stripped = end
        while stripped > kept[-1] and text[stripped - 1].isspace():
            stripped -= 1
        if stripped > kept[-1]:
            kept.append(stripped)
    if len(kept) == 1 or text[kept[-1] :].strip():
        kept.append(len(text))
    kept[-1] = len(text)
    return np.array(kept[1:] if text else [], dtype=np.int64)
