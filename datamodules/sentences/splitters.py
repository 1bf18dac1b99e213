"""Sentence splitters: by rules, by a SaT model, or every N tokens.

| name | splitter | needs |
|---|---|---|
| ``rules`` | the rules of ``sentencex`` for a language | nothing |
| ``sat``, ``sat:NAME``, ``sat:FOLDER`` | ``wtpsplit.SaT`` at its default threshold | weights |
| ``spans:N`` | spans of N tokens instead of sentences; the last one is shorter | nothing |

White space between two sentences belongs to the second, so that " The" stays one token.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from datamodules.tokenizer_base import first_line


class SplitterUnavailableError(ValueError):
    """Raised if a splitter's model cannot be loaded; the message names an alternative."""


class Splitter(ABC):
    """Finds the sentences of texts.

    Attributes:
        name: The requested name, e.g. ``"rules"``.
        gains_from_processes: Whether several processes split faster than one.
    """

    name: str
    gains_from_processes: ClassVar[bool] = True

    @abstractmethod
    def boundaries(self, texts: Sequence[str]) -> Iterator[Sequence[int]]:
        """Yields, for each text, ascending character offsets at which a sentence may end."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Returns everything that determines the sentence ends, in plain values."""

    def load(self) -> None:
        """Loads the model, if there is one; splitting loads it otherwise.

        Raises:
            SplitterUnavailableError: If it cannot be loaded.
        """
        return  # most splitters have no model

    def ends(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns, for each text, the ends of its sentences in characters, int64, ascending.

        The last one is the text's length; no sentence is blank, unless the whole text is.
        """
        return [tidy(text, ends) for text, ends in zip(texts, self.boundaries(texts), strict=True)]


def tidy(text: str, ends: Sequence[int]) -> np.ndarray:
    """Moves trailing whitespace of each sentence into the next one."""
    starts = [0]
    for end in ends:
        stripped = end
        while stripped > starts[-1] and text[stripped - 1].isspace():
            stripped -= 1
        if stripped > starts[-1]:
            starts.append(stripped)
    if len(starts) == 1 or text[starts[-1] :].strip():
        starts.append(len(text))
    starts[-1] = len(text)
    return np.array(starts[1:] if text else [], dtype=np.int64)


# ---- by rules, or every N tokens


KNOWN = "'rules', 'sat', 'sat:' with a model of segment-any-text or a local folder, and 'spans:25'"

# Rules look back over the whole paragraph, so their cost is quadratic in its length.
_LONGEST_PARAGRAPH = 4096  # characters to split together
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


class RuleSplitter(Splitter):
    """The rules of ``sentencex``; a blank line always ends a sentence.

    Args:
        language: Code of the language, e.g. 'en'.

    Raises:
        ValueError: If it is not a language code.
    """

    name = "rules"

    def __init__(self, language: str = "en") -> None:
        if not re.fullmatch(r"[a-z]{2,3}", language):
            raise ValueError(f"language={language!r} must be a code such as 'en' or 'de'.")
        self.language = language

    def identity(self) -> dict[str, Any]:
        """Returns name and language."""
        return {"name": self.name, "language": self.language}

    def boundaries(self, texts: Sequence[str]) -> Iterator[Sequence[int]]:
        """Yields the sentence ends according to the rules."""
        for text in texts:
            ends: list[int] = []
            start = 0
            for blank in _BLANK_LINES.finditer(text):
                ends += self._paragraph(text, start, blank.start())
                start = blank.end()
            yield ends + self._paragraph(text, start, len(text))

    def _paragraph(self, text: str, start: int, stop: int) -> list[int]:
        """Returns the ends in a paragraph; long paragraphs are read in overlapping pieces."""
        ends: list[int] = []
        while start < stop:
            piece = text[start : min(stop, start + _LONGEST_PARAGRAPH)]
            piece_ends = [start + end for end in _rule_ends(self.language, piece)]
            if start + len(piece) < stop and len(piece_ends) > 1:
                # The piece may cut its last sentence, so the next piece starts there.
                piece_ends.pop()
            ends += piece_ends
            start = piece_ends[-1] if piece_ends else stop
        return ends


def _rule_ends(language: str, text: str) -> list[int]:
    """Returns the sentence ends in a text according to ``sentencex``."""
    from sentencex import get_sentence_boundaries

    try:
        return [int(b["end_index"]) for b in get_sentence_boundaries(language, text)]
    except BaseException as error:
        plain = re.sub(r"\s", " ", text)
        # sentencex 1.0 slices within a no-break space, as in "B\u00a0.", and panics (not an
        # Exception)
        if type(error).__name__ != "PanicException" or plain == text:
            raise
        return _rule_ends(language, plain)


class SpanSplitter:
    """Splits every N tokens, without looking at the text.

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
        """Returns the ends of the spans of `count` tokens, int64; the last one is `count`."""
        return np.append(np.arange(self.length, count, self.length, dtype=np.int64), count)


def parse_splitter(name: str, language: str = "en") -> Splitter | SpanSplitter:
    """Returns the splitter of a name; its model is loaded on first use.

    Args:
        name: See the module's docstring.
        language: Code of the language of ``rules``.

    Raises:
        ValueError: If the splitter is unknown; the message lists them.
    """
    method, colon, rest = name.partition(":")
    if name == "rules":
        return RuleSplitter(language)
    if method == "sat" and (rest or not colon):
        return SatSplitter(rest or DEFAULT_SAT)
    if method == "spans" and rest.isdecimal() and int(rest) > 0:
        return SpanSplitter(int(rest))
    raise ValueError(f"splitter={name!r} is unknown. Choose from {KNOWN}.")


# ---- by a model


DEFAULT_SAT = "sat-3l-sm"


class SatSplitter(Splitter):
    """``wtpsplit.SaT`` (Frohmann et al., 2024) at its default threshold.

    A line ending ends a sentence, which is wtpsplit's default.

    Args:
        model: Name of a model of ``segment-any-text`` on the hub, or a local folder with the
            weights and their tokenizer.
    """

    gains_from_processes: ClassVar[bool] = False  # torch uses threads or a GPU

    def __init__(self, model: str = DEFAULT_SAT) -> None:
        folder = Path(model).expanduser()
        self.model = str(folder.absolute()) if folder.is_dir() else model
        self.name = f"sat:{self.model}"
        self._sat: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Omits the model, which another process loads again."""
        return {**vars(self), "_sat": None}

    @property
    def _folder(self) -> Path | None:
        return Path(self.model) if Path(self.model).is_dir() else None

    @property
    def threshold(self) -> float:
        """Minimum probability of a sentence end: wtpsplit's default, which depends on the name."""
        name = Path(self.model).name
        if "sm" in name:
            return 0.25
        return 0.01 if "no-limited-lookahead" in name else 0.025

    def identity(self) -> dict[str, Any]:
        """Returns the name or, for a folder, a hash of its files and the threshold.

        Raises:
            SplitterUnavailableError: If the folder does not exist.
        """
        folder = self._folder
        if folder is None:
            self._check_name()
            return {"name": self.name}
        return {"name": "sat", "files": _hash(folder), "threshold": self.threshold}

    def _check_name(self) -> None:
        if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", self.model):
            raise self._unavailable("the folder does not exist")

    def load(self) -> None:
        """Loads the model, onto a GPU if there is one.

        Raises:
            SplitterUnavailableError: If its files are unavailable or unreadable.
        """
        if self._sat is not None:
            return
        folder = self._folder
        if folder is None:
            self._check_name()
        options: dict[str, Any] = {}
        if folder is not None:
            options = {"tokenizer_name_or_path": str(folder)}
        elif "/" in self.model:
            options = {"hub_prefix": None}
        try:
            self._sat = _load(str(folder or self.model), options)
        except Exception as error:
            raise self._unavailable(f"{type(error).__name__}: {first_line(error)}") from error

    def _unavailable(self, reason: str) -> SplitterUnavailableError:
        return SplitterUnavailableError(
            f"splitter={self.name!r}: its weights are unavailable ({reason}). Set splitter to "
            "'sat:FOLDER', a local folder with model and tokenizer, to 'rules', which needs no "
            "weights, or to 'spans:25', which cuts every 25 tokens."
        )

    def boundaries(self, texts: Sequence[str]) -> Iterator[Sequence[int]]:
        """Yields the sentence ends according to the model, and line endings."""
        self.load()
        split = self._sat.split(list(texts), threshold=self.threshold)
        for text, sentences in zip(texts, split, strict=True):
            yield _ends_of(text, sentences)


def _load(model: str, options: dict[str, Any]) -> Any:
    import torch
    from wtpsplit import SaT

    sat = SaT(model, **options)
    if torch.cuda.is_available():
        sat.to("cuda")
    return sat


def _ends_of(text: str, sentences: Sequence[str]) -> list[int]:
    """Returns the ends of a text's sentences, which may omit only line endings between them."""
    ends, end = [], 0
    for sentence in sentences:
        while sentence and not text.startswith(sentence, end):
            assert text[end : end + 1] == "\n", "wtpsplit changed the text"
            end += 1
        end += len(sentence)
        ends.append(end)
    return ends


def _hash(folder: Path) -> str:
    """Returns a hash of the names and contents of all files of a model."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()[:16]
