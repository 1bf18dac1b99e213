"""Runs and checkpoints that a command line names, by file, folder or pattern."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.runs.events import PATTERN
from lightning_models.checkpoint import (
    Checkpoint,
    CheckpointError,
    Which,
    newest_checkpoint,
    place_of,
    read_checkpoint,
)


@dataclass(frozen=True)
class TrainedRun:
    """A run of ``train.py``."""

    name: str
    """What tells its folder from those of the others."""
    folder: Path
    """Log folder, with TensorBoard files."""
    checkpoint: Checkpoint
    """The furthest one in that folder."""


def find_runs(words: Sequence[str]) -> list[TrainedRun]:
    """Returns the runs that the command line names, each once, in its order.

    Args:
        words: folders or patterns such as ``'runs/steps_*'``; a folder without a log of its own
            stands for all log folders below it.

    Raises:
        ValueError: if a word leads to no log, or a log has no checkpoint beside it.
    """
    folders = list(dict.fromkeys(folder for word in words for folder in _logs_of(word)))
    return [
        TrainedRun(name, folder, _checkpoint_of(folder))
        for name, folder in zip(short_names(folders), folders, strict=True)
    ]


def find_checkpoints(
    words: Sequence[str], key: str = "runs", which: Which = "last"
) -> list[Checkpoint]:
    """Returns the checkpoints that the command line names, each once, in its order.

    Args:
        words: checkpoint files, folders of runs (a checkpoint of each run below it), or patterns.
        key: the option that has them, for messages.
        which: of a folder's run the furthest, or the best.

    Raises:
        ValueError: if a word leads to no checkpoint, one is damaged, or a run has no best one.
    """
    found: dict[Path, Checkpoint] = {}
    for path in (path for word in words for path in _paths(word, key)):
        for place in _logs_below(path) or [path]:
            checkpoint = _checkpoint_at(place, key, which)
            found.setdefault(checkpoint.path.resolve(), checkpoint)
    return list(found.values())


def split_name(word: str) -> tuple[str | None, str]:
    """Returns the two parts of ``[NAME=]PATH``; a word that is a path as it stands has no name."""
    name, sign, path = word.partition("=")
    if not sign or not name or "/" in name or Path(word).exists():
        return None, word
    return name, path


def short_names(paths: Sequence[Path]) -> list[str]:
    """Returns the parts in which paths differ; of a single one its last two."""
    if len(paths) == 1:
        return ["/".join(paths[0].parts[-2:])]
    heads = _shared([path.parts for path in paths])
    rests = [path.parts[heads:] for path in paths]
    tails = _shared([rest[::-1] for rest in rests])
    return [
        "/".join(rest[: len(rest) - tails]) or str(path)
        for path, rest in zip(paths, rests, strict=True)
    ]


def _shared(rows: Sequence[Sequence[str]]) -> int:
    """Returns how many parts all rows begin with in common."""
    count = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


def _paths(word: str, key: str = "runs") -> list[Path]:
    path = place_of(word, key)
    found = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    if not found:
        raise ValueError(f"{key} ({word}): there is no such file or folder")
    return sorted(found)


def _logs_of(word: str) -> list[Path]:
    found = [folder for path in _paths(word) for folder in _logs_below(path)]
    if not found:
        raise ValueError(
            f"runs ({word}): there are no TensorBoard files ({PATTERN}); name the folder of a run, "
            "as train.py writes it"
        )
    return found


def _logs_below(path: Path) -> list[Path]:
    """Returns ``path`` if it has event files itself, else the folders below it that do."""
    path = path.resolve()
    if any(path.glob(PATTERN)):
        return [path]
    return sorted({file.parent for file in path.rglob(PATTERN)})


def _checkpoint_at(path: Path, key: str, which: Which) -> Checkpoint:
    """Returns the checkpoint of a file, or that of a folder."""
    try:
        return read_checkpoint(path, which)
    except CheckpointError as error:
        if not path.is_dir() or which == "best":
            raise
        raise ValueError(
            f"{key} ({path}): there is no whole checkpoint below this folder; name the folder of a "
            "run or a checkpoint file"
        ) from error


def _checkpoint_of(folder: Path) -> Checkpoint:
    if not any(folder.rglob("*.ckpt")):
        raise ValueError(
            f"runs ({folder}) has a log but no checkpoint, which says what the model is; copy one "
            "of the run's into it"
        )
    return newest_checkpoint([folder])
