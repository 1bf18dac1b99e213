"""Runs and checkpoints: their places, names and logs."""

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from callbacks.run_record import read_settings
from evaluation.load import build_outline
from evaluation.tables import show_value
from lightning_models import LanguageModel
from lightning_models.checkpoint import (
    LOGS,
    WITHIN,
    Checkpoint,
    Recipe,
    Which,
    has_log,
    parse_path,
    read_checkpoint,
    started_runs,
)
from lightning_models.recipe import split_names

# ---- log and record of a run


PATTERN, CSV_FILE = LOGS
NO_VERSION = ("run", "command")
"""Names on top of a record that are no versions."""


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Returns the logged values of a run by tag and step; of a resumed run those that count.

    Steps are logged from 0: after n optimiser steps the latest is n - 1.

    The folder has TensorBoard files, a CSV file, or both, of which a resumed run may have written
    one after the other.
    """
    values = _csv_scalars(folder / CSV_FILE) if (folder / CSV_FILE).is_file() else {}
    if not any(folder.glob(PATTERN)):
        return values
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        logged = {event.step: event.value for event in events.Scalars(tag)}
        name = tag.removeprefix(WITHIN)
        values[name] = dict(sorted((values.get(name, {}) | logged).items()))
    return values


def _csv_scalars(file: Path) -> dict[str, dict[int, float]]:
    table = pd.read_csv(file, on_bad_lines="skip").set_index("step")
    columns = ((tag, table[tag].dropna()) for tag in table.columns)
    return {
        str(tag): {int(step): float(value) for step, value in column.items()}
        for tag, column in columns
    }


def read_record(folder: Path | None) -> dict[str, Any]:
    """Returns the settings of a training run by ``config.yaml``, None where they are not known.

    Keys: ``recorded`` (whether there is a record), ``seed_everything``, ``precision`` and
    ``accumulate_grad_batches`` of the trainer, and the versions ``commit`` and ``torch``. A resumed
    run has several records: settings come from the first, versions from all.
    """
    files = [] if folder is None else sorted(folder.glob("config*.yaml"))
    settings = {} if folder is None else read_settings(folder / "config.yaml")
    trainer = settings.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    versions = [_versions(file) for file in files]
    seen = {
        name: dict.fromkeys(each[name] for each in versions if name in each)
        for name in ("commit", "torch")
    }
    return {
        "recorded": bool(settings),
        "seed_everything": settings.get("seed_everything"),
        "precision": trainer.get("precision"),
        "accumulate_grad_batches": trainer.get("accumulate_grad_batches"),
        **{name: " and ".join(found) or None for name, found in seen.items()},
    }


def _versions(record: Path) -> dict[str, str]:
    versions = {}
    for line in record.read_text(encoding="utf-8").splitlines():
        name, colon, value = line.removeprefix("# ").partition(": ")
        if not (colon and line.startswith("# ")):
            break
        if name not in NO_VERSION:
            versions[name] = value
    return versions


# ---- folders, files and patterns on the command line


def find_checkpoints(
    words: Sequence[str], key: str = "runs", which: Which = "last"
) -> list[Checkpoint]:
    """Returns the checkpoints that the command line names, see ``find_named``."""
    return [checkpoint for _, checkpoint in find_named(words, key, which)]


def find_named(
    words: Sequence[str], key: str, which: Which = "last"
) -> list[tuple[str | None, Checkpoint]]:
    """Returns the checkpoints that the command line names, each once and with its name.

    A pattern leaves out runs without a checkpoint, with a warning, if others remain.

    Args:
        words: Checkpoint files, folders of runs (a checkpoint of each run below it, see ``which``)
            or patterns; each may begin with a name (``NAME=PATH``).
        key: The option that has them, for messages.
        which: Whether a folder of a run gives its furthest checkpoint or its best.

    Returns:
        Pairs of a name, from the word or else of the run in training, and a checkpoint.

    Raises:
        ValueError: If a word leads to no checkpoint, one is damaged, or a run has no best one.
    """
    found: dict[Path, tuple[str | None, Checkpoint]] = {}
    for name, path in map(split_name, words):
        for place in _places(path, key):
            checkpoint = read_checkpoint(place, which)
            found.setdefault(checkpoint.path.resolve(), (name or checkpoint.run_name, checkpoint))
    return list(found.values())


def split_name(word: str) -> tuple[str | None, str]:
    """Returns the two parts of ``[NAME=]PATH``; a word that is a path as it stands has no name."""
    name, sign, path = word.partition("=")
    if not sign or not name or "/" in name or Path(word).exists():
        return None, word
    return name, path


def matching(path: Path) -> list[Path]:
    """Returns a file or folder that exists, else those that the path matches as a pattern."""
    return [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))


def _places(word: str, key: str) -> list[Path]:
    """Returns the checkpoint files and run folders of a word, or its path if there are none."""
    path = parse_path(word, key)
    return started_runs(matching(path)) or [path]


# ---- names and labels


def path_names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Returns the path of each checkpoint's run below the folder that all of them are in.

    The class and ``version_0`` are left out where the rest distinguishes the runs. A single run
    without a path of its own is called by its class.
    """
    folders = [_run_folder(checkpoint) for checkpoint in checkpoints]
    if len(set(folders)) < len(folders):  # several checkpoints of one run
        folders = [checkpoint.path.resolve().with_suffix("") for checkpoint in checkpoints]
    kinds = [each.model_recipe["class_path"].rpartition(".")[2] for each in checkpoints]
    if len(folders) == 1:
        return [_short(folders[0].parts, kinds[0]).rpartition("/")[2] or kinds[0]]
    common = os.path.commonpath([folder.parent for folder in folders])
    paths = [folder.relative_to(common).parts for folder in folders]
    short = [_short(path, kind) for path, kind in zip(paths, kinds, strict=True)]
    unique = all(short) and len(set(short)) == len(short)
    return short if unique else ["/".join(path) for path in paths]


def _run_folder(checkpoint: Checkpoint) -> Path:
    path = checkpoint.path.resolve()
    return path.parents[1] if path.parent.name == "checkpoints" else path.with_suffix("")


def _short(parts: Sequence[str], kind: str) -> str:
    return "/".join(part for part in parts if part not in (kind, "version_0"))


def make_labels(
    names: Sequence[str],
    rows: Sequence[str | None],
    recipes: Sequence[Recipe],
    keys: str | None = None,
) -> list[str]:
    """Returns a label for each row of a table, all different.

    Args:
        names: Paths of the runs, see ``path_names``.
        rows: Names that the command line gives the rows, or gave the runs in training, or None.
        recipes: Recipes of the models.
        keys: Keys of the models' config that make the labels, separated by commas, ``model`` being
            the class. By default the label is the name of the row, else the path.

    Raises:
        ValueError: if no model has such a key.
    """
    texts = [row or name for row, name in zip(rows, names, strict=True)]
    if keys is not None:
        texts = config_labels(recipes, split_names(keys))
    return [
        text if texts.count(text) == 1 else f"{text} ({name})"
        for text, name in zip(texts, names, strict=True)
    ]


def config_labels(recipes: Sequence[Recipe], keys: Sequence[str]) -> list[str]:
    """Returns values of configs, such as ``PonderLM, thinking_steps 3``."""
    configs = [
        {"model": recipe["class_path"].rpartition(".")[2], **recipe["init_args"].get("config", {})}
        for recipe in recipes
    ]
    for key in keys:
        if not any(key in config for config in configs):
            raise ValueError(f"label ({key}) is no key of the models' config")
    return [
        ", ".join(
            str(config[key]) if key == "model" else f"{key} {show_value(config[key])}"
            for key in keys
            if key in config
        )
        or "-"
        for config in configs
    ]


def is_number(value: Any) -> bool:
    """Whether a value has a place on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- run records


SKIP = "--skip_unreadable"


@dataclass(frozen=True)
class RunRecord:
    """A checkpoint, with what its run has left."""

    name: str
    """Unique path of the run below the common folder."""
    checkpoint: Checkpoint
    outline: LanguageModel
    """The model without weights."""
    log: Path | None
    """Folder of the logs, or None without any next to the checkpoint."""
    record: Mapping[str, Any]
    """The settings that it was started with, see ``read_record``."""
    scalars: Mapping[str, Mapping[int, float]]
    """Logged values by tag and step; steps count from 0."""
    row: str | None = None
    """Name of its row on the command line, else the name of the run in training, if any."""


def find_compared(
    words: Sequence[str], *, skip: bool, which: Which = "last"
) -> tuple[list[RunRecord], dict[str, str]]:
    """Returns the runs that the command line names, each once; and why others are left out.

    Args:
        words: Checkpoint files, folders of runs (a checkpoint of each run below it), or patterns;
            each may have the name of its row before it (``NAME=PATH``).
        skip: Whether a run that cannot be read is left out.
        which: Of a folder's run the furthest, or the best.

    Returns:
        Runs in the order of the words; the reason for each path that is left out.

    Raises:
        ValueError: if nothing is left, or one cannot be read and ``skip`` is false; it names it.
    """
    found: dict[Path, tuple[Path, Checkpoint, LanguageModel, str | None]] = {}
    left_out: dict[str, str] = {}
    for row, path in map(split_name, words):
        for place in _places(path, "runs"):
            try:
                checkpoint = read_checkpoint(place, which)
                outline = build_outline(checkpoint)
            except ValueError as error:
                left_out[str(place)] = reason_or_raise(str(place), error, skip=skip)
                continue
            called = row or checkpoint.run_name
            found.setdefault(checkpoint.path.resolve(), (place, checkpoint, outline, called))
    if not found:
        raise ValueError(f"runs ({' '.join(words)}): none of them can be read")
    names = path_names([checkpoint for _, checkpoint, _, _ in found.values()])
    runs = []
    for name, (place, checkpoint, outline, row) in zip(names, found.values(), strict=True):
        near = (place, checkpoint.path.parent, checkpoint.path.parent.parent)
        log = next((path for path in near if path.is_dir() and has_log(path)), None)
        scalars = {} if log is None else read_scalars(log)
        runs.append(RunRecord(name, checkpoint, outline, log, read_record(log), scalars, row))
    return runs, left_out


def reason_or_raise(name: str, error: ValueError, *, skip: bool) -> str:
    """Returns why a run is left out.

    Raises:
        ValueError: if runs are not to be left out.
    """
    if not skip:
        reason = str(error).rstrip(". ")
        raise ValueError(f"runs ({name}): {reason}; or leave it out with {SKIP}") from error
    return " ".join(str(error).split())
