"""Runs and checkpoints: their paths, names and logs."""

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
"""Names in the header of a record that are not versions."""


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Reads the logged values of a run by tag and step; the latest value of a step counts.

    Steps are logged from 0: after n optimiser steps the latest is n - 1.

    The folder has TensorBoard files, a CSV file, or both if a resumed run changed its logger.
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
    """Reads the settings of a training run from ``config.yaml``; unknown ones are None.

    The keys are ``recorded`` (whether there is a record), ``seed_everything``, ``precision`` and
    ``accumulate_grad_batches`` of the trainer, and the versions ``commit`` and ``torch``. A resumed
    run has several records: settings come from the first one, versions from all.
    """
    files = [] if folder is None else sorted(folder.glob("config*.yaml"))
    settings = {} if folder is None else read_settings(folder / "config.yaml")
    trainer = settings.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    versions = [_versions(file) for file in files]
    seen = {
        name: dict.fromkeys(version[name] for version in versions if name in version)
        for name in ("commit", "torch")
    }
    return {
        "recorded": bool(settings),
        "seed_everything": settings.get("seed_everything"),
        "precision": trainer.get("precision"),
        "accumulate_grad_batches": trainer.get("accumulate_grad_batches"),
        **{name: " and ".join(versions) or None for name, versions in seen.items()},
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
    targets: Sequence[str], key: str = "runs", which: Which = "last"
) -> list[Checkpoint]:
    """Returns the checkpoints that the command line names, see ``find_named``."""
    return [checkpoint for _, checkpoint in find_named(targets, key, which)]


def find_named(
    targets: Sequence[str], key: str, which: Which = "last"
) -> list[tuple[str | None, Checkpoint]]:
    """Returns the checkpoints that the command line names, each once, with their names.

    A pattern leaves out runs without a checkpoint, with a warning, if others remain.

    Args:
        targets: Checkpoint files, folders (for a checkpoint of each run in them), or patterns;
            each may begin with a name (``NAME=PATH``).
        key: Option that holds them, for messages.
        which: Checkpoint to take from a run's folder: the latest or the best.

    Returns:
        Pairs of a name, given on the command line or else in training, and a checkpoint.

    Raises:
        ValueError: If a target has no checkpoint, one is damaged, or a run has no best one.
    """
    named: dict[Path, tuple[str | None, Checkpoint]] = {}
    for name, target in map(split_name, targets):
        for path in _run_paths(target, key):
            checkpoint = read_checkpoint(path, which)
            named.setdefault(checkpoint.path.resolve(), (name or checkpoint.run_name, checkpoint))
    return list(named.values())


def split_name(target: str) -> tuple[str | None, str]:
    """Splits ``[NAME=]PATH`` into name and path; an existing path with a ``=`` has no name."""
    name, sign, path = target.partition("=")
    if not sign or not name or "/" in name or Path(target).exists():
        return None, target
    return name, path


def matching(path: Path) -> list[Path]:
    """Returns an existing file or folder, else the ones that match the path as a pattern."""
    return [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))


def _run_paths(target: str, key: str) -> list[Path]:
    """Returns the checkpoint files and run folders of a target, or its path if it has none."""
    path = parse_path(target, key)
    return started_runs(matching(path)) or [path]


# ---- names and labels


def path_names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Returns the path of each checkpoint's run under their common folder.

    The class and ``version_0`` are left out if the rest distinguishes the runs. A single run
    without a distinctive path is named by its class.
    """
    folders = [_run_folder(checkpoint) for checkpoint in checkpoints]
    if len(set(folders)) < len(folders):  # several checkpoints of one run
        folders = [checkpoint.path.resolve().with_suffix("") for checkpoint in checkpoints]
    classes = [
        checkpoint.model_recipe["class_path"].rpartition(".")[2] for checkpoint in checkpoints
    ]
    if len(folders) == 1:
        return [_short(folders[0].parts, classes[0]).rpartition("/")[2] or classes[0]]
    common = os.path.commonpath([folder.parent for folder in folders])
    paths = [folder.relative_to(common).parts for folder in folders]
    short = [_short(path, cls) for path, cls in zip(paths, classes, strict=True)]
    unique = all(short) and len(set(short)) == len(short)
    return short if unique else ["/".join(path) for path in paths]


def _run_folder(checkpoint: Checkpoint) -> Path:
    path = checkpoint.path.resolve()
    return path.parents[1] if path.parent.name == "checkpoints" else path.with_suffix("")


def _short(parts: Sequence[str], cls: str) -> str:
    return "/".join(part for part in parts if part not in (cls, "version_0"))


def make_labels(
    names: Sequence[str],
    rows: Sequence[str | None],
    recipes: Sequence[Recipe],
    keys: str | None = None,
) -> list[str]:
    """Returns a unique label for each row of a table.

    Args:
        names: Paths of the runs, see ``path_names``.
        rows: Names of the rows on the command line, or of the runs in training, or None.
        recipes: Recipes of the models.
        keys: Keys of the models' config that form the labels, separated by commas; ``model`` is the
            class. By default the label is the name of the row, else the path.

    Raises:
        ValueError: If no model has such a key.
    """
    texts = [row or name for row, name in zip(rows, names, strict=True)]
    if keys is not None:
        texts = config_labels(recipes, split_names(keys))
    return [
        text if texts.count(text) == 1 else f"{text} ({name})"
        for text, name in zip(texts, names, strict=True)
    ]


def config_labels(recipes: Sequence[Recipe], keys: Sequence[str]) -> list[str]:
    """Returns labels from values of configs, such as ``PonderLM, thinking_steps 3``."""
    configs = [
        {"model": recipe["class_path"].rpartition(".")[2], **recipe["init_args"].get("config", {})}
        for recipe in recipes
    ]
    for key in keys:
        if not any(key in config for config in configs):
            raise ValueError(f"label ({key}) is not a key of the models' config")
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
    """Returns whether a value is a number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- run records


SKIP = "--skip_unreadable"


@dataclass(frozen=True)
class RunRecord:
    """A checkpoint with the logs and settings of its run."""

    name: str
    """Unique path of the run under the common folder."""
    checkpoint: Checkpoint
    outline: LanguageModel
    """The model without weights."""
    log: Path | None
    """Folder of the logs, or None if there are none next to the checkpoint."""
    record: Mapping[str, Any]
    """Settings of its run, see ``read_record``."""
    scalars: Mapping[str, Mapping[int, float]]
    """Logged values by tag and step; steps count from 0."""
    row: str | None = None
    """Name of its row on the command line, else the name of the run in training, if any."""


def find_compared(
    targets: Sequence[str], *, skip: bool, which: Which = "last"
) -> tuple[list[RunRecord], dict[str, str]]:
    """Returns the runs that the command line names, each once, and the ones that are left out.

    Args:
        targets: Checkpoint files, folders (for a checkpoint of each run in them), or patterns;
            each may begin with the name of its row (``NAME=PATH``).
        skip: Whether to leave out runs that cannot be read.
        which: Checkpoint to take from a run's folder: the latest or the best.

    Returns:
        Runs in the order of the targets, and the reason for each path that is left out.

    Raises:
        ValueError: If no run is left, or one, which is named, cannot be read and ``skip`` is false.
    """
    opened: dict[Path, tuple[Path, Checkpoint, LanguageModel, str | None]] = {}
    left_out: dict[str, str] = {}
    for row, target in map(split_name, targets):
        for path in _run_paths(target, "runs"):
            try:
                checkpoint = read_checkpoint(path, which)
                outline = build_outline(checkpoint)
            except ValueError as error:
                left_out[str(path)] = skip_reason(str(path), error, skip=skip)
                continue
            called = row or checkpoint.run_name
            opened.setdefault(checkpoint.path.resolve(), (path, checkpoint, outline, called))
    if not opened:
        raise ValueError(f"runs ({' '.join(targets)}): none of them can be read")
    names = path_names([checkpoint for _, checkpoint, _, _ in opened.values()])
    runs = []
    for name, (path, checkpoint, outline, row) in zip(names, opened.values(), strict=True):
        folders = (path, checkpoint.path.parent, checkpoint.path.parent.parent)
        log = next((folder for folder in folders if folder.is_dir() and has_log(folder)), None)
        scalars = {} if log is None else read_scalars(log)
        runs.append(RunRecord(name, checkpoint, outline, log, read_record(log), scalars, row))
    return runs, left_out


def skip_reason(name: str, error: ValueError, *, skip: bool) -> str:
    """Returns the reason for leaving out a run, in one line.

    Raises:
        ValueError: If ``skip`` is false.
    """
    if not skip:
        reason = str(error).rstrip(". ")
        raise ValueError(f"runs ({name}): {reason}; or skip it with {SKIP}") from error
    return " ".join(str(error).split())
