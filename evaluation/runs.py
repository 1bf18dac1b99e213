"""Runs and checkpoints: where they are, what they are called, what they have logged."""

import glob
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from evaluation.load import build_outline
from lightning_models import LanguageModel
from lightning_models.checkpoint import (
    LOGS,
    Checkpoint,
    CheckpointError,
    Recipe,
    Which,
    has_log,
    is_near_meant,
    place_of,
    read_checkpoint,
    started_runs,
)

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
        values[tag] = dict(sorted((values.get(tag, {}) | logged).items()))
    return values


def _csv_scalars(file: Path) -> dict[str, dict[int, float]]:
    table = pd.read_csv(file, on_bad_lines="skip").set_index("step")
    columns = ((tag, table[tag].dropna()) for tag in table.columns)
    return {
        str(tag): {int(step): float(value) for step, value in column.items()}
        for tag, column in columns
    }


def read_record(folder: Path | None) -> dict[str, Any]:
    """Returns what a training run was started with, by ``config.yaml``; None: not known.

    Keys: ``recorded`` (whether there is a record), ``seed_everything``, ``precision`` and
    ``accumulate_grad_batches`` of the trainer, and the versions ``commit`` and ``torch``. A resumed
    run has several records: settings are those of the first, versions those of all.
    """
    files = [] if folder is None else sorted(folder.glob("config*.yaml"))
    settings = {} if folder is None else _settings(folder / "config.yaml")
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
    """Returns the versions of code and libraries on top of a record."""
    versions = {}
    for line in record.read_text(encoding="utf-8").splitlines():
        name, colon, value = line.removeprefix("# ").partition(": ")
        if not (colon and line.startswith("# ")):
            break
        if name not in NO_VERSION:
            versions[name] = value
    return versions


def _settings(file: Path) -> dict[str, Any]:
    """Returns the content of a record; empty where it cannot be read."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


# ---- folders, files and patterns on the command line


def find_checkpoints(
    words: Sequence[str], key: str = "runs", which: Which = "last"
) -> list[Checkpoint]:
    """Returns the checkpoints that the command line names, each once, in its order.

    Words are checkpoint files, folders of runs (a checkpoint of each run below it, see ``which``)
    or patterns, of whose runs those without a checkpoint are left out with a warning if others
    remain; ``key`` is the option that has them, for messages.

    Raises:
        ValueError: if a word leads to no checkpoint, one is damaged, or a run has no best one.
    """
    found: dict[Path, Checkpoint] = {}
    for place in (run for word in words for run in started_runs(_paths(word, key))):
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
    same = (len(set(column)) == 1 for column in zip(*rows, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, same))


def checkpoint_names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Returns what distinguishes checkpoints: their runs' names, else the parts of their paths."""
    names = [checkpoint.run_name for checkpoint in checkpoints]
    paths = short_names([checkpoint.path.resolve() for checkpoint in checkpoints])
    return [
        path if name is None or names.count(name) > 1 or name in paths else name
        for name, path in zip(names, paths, strict=True)
    ]


def matching(path: Path) -> list[Path]:
    """Returns a file or folder that exists, else those that the path matches as a pattern."""
    return [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))


def _paths(word: str, key: str) -> list[Path]:
    place = place_of(word, key)
    found = matching(place)
    if not found:
        hint = is_near_meant(place)
        raise ValueError(f"{key} ({word}): there is no such file or folder{hint}")
    return found


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


# ---- labels


MODEL = "model"
"""Stands among the keys of a config for the class of the model."""
MOST_KEYS = 2
"""More keys make no label."""
ABSENT = ""
"""Value of a key that a model's config does not have."""


@dataclass(frozen=True)
class Labels:
    """One label a run; runs that differ in nothing that is named share one."""

    keys: tuple[str, ...]
    """Keys of the config; empty: the labels are names."""
    values: tuple[tuple[Any, ...], ...]
    """Of each run, one value a key; or its name."""
    note: str | None = None
    """Why names stand in for labels, if they do."""

    def texts(self) -> list[str]:
        """Returns the label of each run, such as ``inner_steps 16, num_layers 3``."""
        if not self.keys:
            return [str(name) for (name,) in self.values]
        return [
            ", ".join(
                _text(key, value)
                for key, value in zip(self.keys, values, strict=True)
                if value != ABSENT
            )
            or "-"
            for values in self.values
        ]

    def order(self) -> list[int]:
        """Returns the numbers of the runs, those of small values first."""
        ranks = [tuple(map(_rank, values)) for values in self.values]
        return sorted(range(len(ranks)), key=ranks.__getitem__)


def label_runs(recipes: Sequence[Recipe], names: Sequence[str], keys: str | None = None) -> Labels:
    """Returns labels from the one or two keys in which the models' configs differ.

    Labels are the ``names`` of the runs where other than one or two keys differ, and no ``keys``,
    separated by commas, are given. A single run is named by the class of its model.

    Raises:
        ValueError: if no model has such a key.
    """
    configs = [_config(recipe) for recipe in recipes]
    if keys is None and len(configs) == 1:
        keys = MODEL
    chosen = tuple(differing(configs)) if keys is None else _split(keys, configs)
    if keys is None and not 0 < len(chosen) <= MOST_KEYS:
        note = (
            f"the models differ in {', '.join(chosen)}; --label KEY,... chooses" if chosen else None
        )
        return Labels((), tuple((name,) for name in names), note)
    return Labels(
        chosen, tuple(tuple(_plain(c.get(key, ABSENT)) for key in chosen) for c in configs)
    )


def differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the keys that all configs have, but not with one value."""
    shared = [key for key in configs[0] if all(key in config for config in configs)]
    return [key for key in shared if any(config[key] != configs[0][key] for config in configs)]


def _config(recipe: Recipe) -> dict[str, Any]:
    name = recipe["class_path"].rpartition(".")[2]
    return {MODEL: name, **recipe["init_args"].get("config", {})}


def _split(keys: str, configs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    chosen = tuple(key.strip() for key in keys.split(","))
    for key in chosen:
        if not any(key in config for config in configs):
            differ = ", ".join(differing(configs)) or "nothing"
            raise ValueError(
                f"label ({key}) is no key of the models' config; they differ in {differ}"
            )
    return chosen


def _plain(value: Any) -> Any:
    """Returns a value that can be counted; of a list, what it looks like."""
    return str(value) if isinstance(value, list | tuple | dict) else value


def _text(key: str, value: Any) -> str:
    shown = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return shown if key == MODEL else f"{key} {shown}"


def is_number(value: Any) -> bool:
    """Whether a value has a place on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rank(value: Any) -> tuple[bool, float, str]:
    """Orders numbers by size, before all else."""
    return (False, float(value), "") if is_number(value) else (True, 0.0, str(value))


def label_rows(firsts: pd.DataFrame, keys: str | None) -> list[str]:
    """Returns a label for each row of a report, all different.

    Args:
        firsts: a run of each row: ``run``, ``row`` (its name on the command line, or None),
            ``model`` and ``model_recipe``.
        keys: of the models' config, separated by commas; None: the name on the command line, else
            the class of the model, and what rows of one class differ in.

    Raises:
        ValueError: if no model has such a key.
    """
    names, recipes = list(firsts["run"]), list(firsts["model_recipe"])
    if keys is not None:
        return _unique(label_runs(recipes, names, keys).texts(), names)
    texts = dict(firsts["row"])
    for _, alike in firsts[firsts["row"].isna()].groupby("model", sort=False):
        found = _of_one_class(list(alike["model_recipe"]), list(alike["run"]))
        texts |= dict(zip(alike.index, found, strict=True))
    return _unique(list(texts.values()), names)


def _of_one_class(recipes: Sequence[Recipe], names: Sequence[str]) -> list[str]:
    """Returns what distinguishes models of one class: one or two keys, or the names."""
    kind = recipes[0]["class_path"].rpartition(".")[2]
    if len(recipes) == 1:
        return [kind]
    keys = differing([recipe["init_args"].get("config", {}) for recipe in recipes])
    if not 0 < len(keys) <= MOST_KEYS:
        return [f"{kind} ({name})" for name in names]
    return _unique(label_runs(recipes, names, ",".join([MODEL, *keys])).texts(), names)


def _unique(texts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the texts, with the name of a run after those that are not unique."""
    return [
        text if texts.count(text) == 1 else f"{text} ({name})"
        for text, name in zip(texts, names, strict=True)
    ]


# ---- run records


SKIP = "--skip_unreadable"
_LAYOUT = re.compile(r"version_\d+|checkpoints")


@dataclass(frozen=True)
class RunRecord:
    """A checkpoint, with what its run has left."""

    name: str
    """What distinguishes it from the others."""
    checkpoint: Checkpoint
    outline: LanguageModel
    """The model without weights."""
    log: Path | None
    """Folder with TensorBoard files; None where there is none next to the checkpoint."""
    record: Mapping[str, Any]
    """What it was started with, see ``read_record``."""
    scalars: Mapping[str, Mapping[int, float]]
    """What was logged, by tag and step; steps count from 0."""
    row: str | None = None
    """Name of its row that the command line gives, or gave the run in training, if either did."""

    @property
    def model(self) -> str:
        """Name of the model's class."""
        return type(self.outline).__name__


def find_compared(
    words: Sequence[str], *, skip: bool, which: Which = "last"
) -> tuple[list[RunRecord], dict[str, str]]:
    """Returns the runs that the command line names, each once; and why others are left out.

    Args:
        words: checkpoint files, folders of runs (a checkpoint of each run below it), or patterns;
            each may have the name of its row before it (``NAME=PATH``).
        skip: whether a run that cannot be read is left out.
        which: of a folder's run the furthest, or the best.

    Returns:
        Runs in the order of the words; the reason for each path that is left out.

    Raises:
        ValueError: if nothing is left, or one cannot be read and ``skip`` is false; it names it.
    """
    found: dict[Path, tuple[Path, Checkpoint, LanguageModel, str | None]] = {}
    left_out: dict[str, str] = {}
    for row, place in (each for word in words for each in _places(word)):
        try:
            for checkpoint in find_checkpoints([str(place)], which=which):
                outline = build_outline(checkpoint)
                called = row or checkpoint.run_name
                found.setdefault(checkpoint.path.resolve(), (place, checkpoint, outline, called))
        except ValueError as error:
            left_out[str(place)] = reason_or_raise(str(place), error, skip=skip)
    if not found:
        raise ValueError(f"runs ({' '.join(words)}): none of them can be read")
    names = _names([(path, type(outline)) for path, (_, _, outline, _) in found.items()])
    rows = [row for *_, row in found.values()]
    runs = []
    for name, (place, checkpoint, outline, row) in zip(names, found.values(), strict=True):
        if row is not None and rows.count(row) == 1 and row not in names:
            name = row
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


def _places(word: str) -> list[tuple[str | None, Path]]:
    """Returns checkpoint files and log folders of a word, each with the name of its row.

    If there are none, the word's path, which then is refused as a run.
    """
    row, text = split_name(word)
    path = place_of(text, "runs")
    return [(row, place) for place in started_runs(matching(path)) or [path]]


def _names(places: Sequence[tuple[Path, type]]) -> list[str]:
    """Returns what distinguishes checkpoints, without the folders that every run has."""
    paths = [path for path, _ in places]
    short = [Path(*_own_parts(path, kind)) for path, kind in places]
    if len(set(short)) < len(short):
        return short_names(paths)
    return [short[0].name] if len(short) == 1 else short_names(short)


def _own_parts(path: Path, kind: type) -> list[str]:
    """Returns the parts of a path that a run did not choose by itself."""
    layout = path.parent.name == "checkpoints"
    parts = path.parent.parts if layout else path.with_suffix("").parts
    return [part for part in parts if not (_LAYOUT.fullmatch(part) or part == kind.__name__)]
