"""The runs that a command line names: their checkpoints, logs and records."""

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.checkpoint.rebuild import build_outline
from evaluation.compare.record import Record, read_record
from evaluation.runs.events import PATTERN, read_scalars
from evaluation.runs.folders import find_checkpoints, short_names, split_name
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Which, place_of

SKIP = "--skip_unreadable"
_LAYOUT = re.compile(r"version_\d+|checkpoints")


@dataclass(frozen=True)
class Run:
    """A checkpoint, with what its run has left behind."""

    name: str
    """What tells it from the others."""
    checkpoint: Checkpoint
    outline: LanguageModel
    """The model without weights."""
    log: Path | None
    """Folder with TensorBoard files; None where there is none beside the checkpoint."""
    record: Record
    scalars: Mapping[str, Mapping[int, float]]
    """What was logged, by tag and step; steps count from 0."""
    row: str | None = None
    """Name of its row that the command line gives, if it does."""

    @property
    def model(self) -> str:
        """Name of the model's class."""
        return type(self.outline).__name__


@dataclass(frozen=True)
class LeftOut:
    """A run that is not compared."""

    name: str
    reason: str


def find_compared(
    words: Sequence[str], *, skip: bool, which: Which = "last"
) -> tuple[list[Run], list[LeftOut]]:
    """Returns the runs that the command line names, each once, in its order; and those left out.

    Args:
        words: checkpoint files, folders of runs (a checkpoint of each run below it), or patterns;
            each may have the name of its row in front (``NAME=PATH``).
        skip: whether a run that cannot be read is left out.
        which: of a folder's run the furthest, or the best.

    Raises:
        ValueError: if nothing is left, or one cannot be read and ``skip`` is false; it names it.
    """
    found: dict[Path, tuple[Path, Checkpoint, LanguageModel, str | None]] = {}
    left_out = []
    for row, place in (each for word in words for each in _places(word)):
        try:
            for checkpoint in find_checkpoints([str(place)], which=which):
                outline = build_outline(checkpoint)
                found.setdefault(checkpoint.path.resolve(), (place, checkpoint, outline, row))
        except ValueError as error:
            left_out.append(left_out_or_raise(str(place), error, skip=skip))
    if not found:
        raise ValueError(f"runs ({' '.join(words)}): none of them can be read")
    names = _names([(path, type(outline)) for path, (_, _, outline, _) in found.items()])
    parts = zip(names, found.values(), strict=True)
    return [_run(name, *part) for name, part in parts], left_out


def left_out_or_raise(name: str, error: ValueError, *, skip: bool) -> LeftOut:
    """Returns the run as left out.

    Raises:
        ValueError: if runs are not to be left out.
    """
    if not skip:
        told = str(error).rstrip(". ")
        raise ValueError(f"runs ({name}): {told}; or leave it out with {SKIP}") from error
    return LeftOut(name, " ".join(str(error).split()))


def _places(word: str) -> list[tuple[str | None, Path]]:
    """Returns checkpoint files and log folders of a word, each with the name of its row.

    If there are none, the word's path, to be complained of.
    """
    row, text = split_name(word)
    path = place_of(text, "runs")
    paths = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    places = [place for found in paths for place in (_logs_below(found) or [found])]
    return [(row, place) for place in places or [path]]


def _logs_below(path: Path) -> list[Path]:
    if not path.is_dir() or any(path.glob(PATTERN)):
        return [path]
    return sorted({file.parent for file in path.rglob(PATTERN)})


def _run(
    name: str, place: Path, checkpoint: Checkpoint, outline: LanguageModel, row: str | None
) -> Run:
    near = (place, checkpoint.path.parent, checkpoint.path.parent.parent)
    log = next((folder for folder in near if folder.is_dir() and any(folder.glob(PATTERN))), None)
    scalars = {} if log is None else read_scalars(log)
    return Run(name, checkpoint, outline, log, read_record(log), scalars, row)


def _names(places: Sequence[tuple[Path, type]]) -> list[str]:
    """Returns what tells checkpoints apart, without the folders that every run has."""
    paths = [path for path, _ in places]
    short = [Path(*_telling(path, kind)) for path, kind in places]
    if len(set(short)) < len(short):
        return short_names(paths)
    return [short[0].name] if len(short) == 1 else short_names(short)


def _telling(path: Path, kind: type) -> list[str]:
    """Returns the parts of a path that a run did not choose by itself."""
    layout = path.parent.name == "checkpoints"
    parts = path.parent.parts if layout else path.with_suffix("").parts
    return [part for part in parts if not (_LAYOUT.fullmatch(part) or part == kind.__name__)]
