"""Sentences by SaT, a model that sees them without punctuation, too (Frohmann et al., 2024)."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datamodules.sentences.splitter import Splitter, SplitterUnavailableError
from datamodules.tokenizers.interface import first_line

DEFAULT_SAT = "sat-3l-sm"


class SatSplitter(Splitter):
    """``wtpsplit.SaT`` (Frohmann et al., 2024) at its default threshold.

    A line end ends a sentence, as by default there.

    Args:
        model: Name of a model of ``segment-any-text`` on the hub, or a local folder that holds the
            weights and their tokenizer.
    """

    gains_from_processes: ClassVar[bool] = False  # torch has its own threads, or a GPU

    def __init__(self, model: str = DEFAULT_SAT) -> None:
        folder = Path(model).expanduser()
        self.model = str(folder.absolute()) if folder.is_dir() else model
        self.name = f"sat:{self.model}"
        self._sat: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what another process needs, which loads the model itself."""
        return {**vars(self), "_sat": None}

    @property
    def _folder(self) -> Path | None:
        return Path(self.model) if Path(self.model).is_dir() else None

    @property
    def threshold(self) -> float:
        """Least probability of a sentence's end: wtpsplit's default, which goes by the name."""
        name = Path(self.model).name
        if "sm" in name:
            return 0.25
        return 0.01 if "no-limited-lookahead" in name else 0.025

    def identity(self) -> dict[str, Any]:
        """Returns name and threshold; of a folder a hash of its files instead of its name.

        Raises:
            SplitterUnavailableError: There is no such folder.
        """
        folder = self._folder
        if folder is None:
            self._check_name()
            return {"name": self.name}
        return {"name": "sat", "files": _hash(folder), "threshold": self.threshold}

    def _check_name(self) -> None:
        if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", self.model):
            raise self._unavailable("there is no such folder")

    def load(self) -> None:
        """Loads the model, onto a GPU where there is one.

        Raises:
            SplitterUnavailableError: Its files cannot be had or read.
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

    def _unavailable(self, why: str) -> SplitterUnavailableError:
        return SplitterUnavailableError(
            f"splitter={self.name!r}: its weights could not be had ({why}). Set splitter to "
            "'sat:FOLDER', a local folder with model and tokenizer, or to another one: 'rules' "
            "needs no weights, 'spans:25' cuts every 25 tokens."
        )

    def found(self, texts: Sequence[str]) -> Iterator[Sequence[int]]:
        """Yields where the model sees the end of a sentence, and line ends."""
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
    """Returns where the sentences of a text end; only line ends may be left out between them."""
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
