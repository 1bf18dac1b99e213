"""Data sets of a folder of yours, for the task files in ``configs/tasks``.

The environment variable ``DATA`` names the folder; ``docs/tasks.md`` shows what lies in it. The
harness calls ``load`` (it does not expand variables in YAML).
"""

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from datamodules.readers import parse_json, read_lines

LAYOUT = "see docs/tasks.md for what lies in that folder"

Row = dict[str, Any]
Splits = dict[str, list[Row]]


class TaskDataError(ValueError):
    """Local data of a task that are missing or of another form; the message says which."""


def load(folder: str, **metadata: Any) -> dict[str, Any]:
    """Returns the splits of a local data set as ``datasets.Dataset``, by their names.

    Args:
        folder: of a data set within ``DATA``: lambada, hellaswag, piqa, blimp, arc_easy or
            arc_challenge.
        **metadata: what else the harness hands over: of BLiMP the ``paradigm``.

    Raises:
        TaskDataError: if ``DATA`` is not set, or files are missing or of another form.
    """
    from datasets import Dataset

    place = data_folder(folder)
    if folder == "blimp":
        splits = {"train": _paradigm(place, str(metadata["paradigm"]))}
    else:
        splits = _READERS[folder](place)
    return {name: Dataset.from_list(rows) for name, rows in splits.items()}


def data_folder(name: str) -> Path:
    """Returns a folder within ``DATA``.

    Raises:
        TaskDataError: if the variable is not set, or there is no such folder.
    """
    data = os.environ.get("DATA")
    if not data:
        raise TaskDataError(
            "tasks of configs/tasks read local files: set the environment variable DATA to their "
            f"folder, as in DATA=data/eval python evaluate.py tasks ...; {LAYOUT}"
        )
    root = Path(data).expanduser()
    if not root.is_dir():
        raise TaskDataError(f"DATA ({data}) is no folder; {LAYOUT}")
    if not (root / name).is_dir():
        raise TaskDataError(f"DATA ({data}) has no folder {name}; {LAYOUT}")
    return root / name


# ---- data sets


def _lambada(place: Path) -> Splits:
    return {"test": _rows(_only(place, "*test*.jsonl"), {"text": str})}


def _hellaswag(place: Path) -> Splits:
    """Rows as the harness makes them of the published ones, or those."""
    path = _only(place, "*val*.jsonl")
    if "query" in _first(path):
        return {"validation": _rows(path, {"query": str, "choices": list, "gold": int})}
    from datasets import Dataset
    from lm_eval.tasks.hellaswag.utils import process_docs

    published = {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list}
    rows = [
        {key: row[key] for key in (*published, "label")}
        for row in _rows(path, {**published, "label": (int, str)})
    ]
    kept = ("query", "choices", "gold")
    processed = process_docs(Dataset.from_list(rows))
    return {"validation": [{key: row[key] for key in kept} for row in processed]}


def _piqa(place: Path) -> Splits:
    """Rows with labels, or the two published files."""
    fields = {"goal": str, "sol1": str, "sol2": str}
    joined = sorted(place.glob("*labeled*.jsonl"))
    if joined:
        return {"validation": _rows(joined[0], {**fields, "label": int})}
    rows, labels = _rows(_only(place, "valid.jsonl"), fields), _only(place, "valid-labels.lst")
    numbers = " ".join(read_lines(labels)).split()
    if len(numbers) != len(rows) or not set(numbers) <= {"0", "1"}:
        raise TaskDataError(
            f"{labels} must have a label, 0 or 1, for each of the {len(rows)} lines of valid.jsonl"
        )
    pairs = zip(rows, numbers, strict=True)
    return {"validation": [{**row, "label": int(number)} for row, number in pairs]}


def _arc(place: Path) -> Splits:
    fields = {"question": str, "choices": dict, "answerKey": str}
    names = ("test", "validation")
    return {name: _rows(_only(place, f"{name}.jsonl"), fields) for name in names}


_READERS: dict[str, Callable[[Path], Splits]] = {
    "lambada": _lambada,
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "arc_easy": _arc,
    "arc_challenge": _arc,
}


def _paradigm(place: Path, name: str) -> list[Row]:
    """Returns a paradigm of BLiMP: of the published archive, or else of a file of that name."""
    fields = {"sentence_good": str, "sentence_bad": str}
    archive = place / "BLiMP.zip"
    if archive.is_file():
        try:
            with zipfile.ZipFile(archive) as opened:
                inside = [n for n in opened.namelist() if n.endswith(f"/{name}.jsonl")]
                lines = opened.read(inside[0]).decode("utf-8").split("\n") if inside else []
        except (zipfile.BadZipFile, UnicodeDecodeError) as error:
            raise TaskDataError(f"{archive} cannot be read ({error}); get it again") from error
        return _parsed(lines, f"{archive}/{name}.jsonl", fields)
    found = sorted(place.rglob(f"{name}.jsonl"))
    if not found:
        raise TaskDataError(f"{place} has neither BLiMP.zip nor {name}.jsonl; {LAYOUT}")
    return _rows(found[0], fields)


# ---- files


def _only(place: Path, pattern: str) -> Path:
    found = sorted(place.glob(pattern))
    if len(found) != 1:
        named = ", ".join(path.name for path in found) or "none"
        raise TaskDataError(f"{place} must have one file {pattern}, not {named}; {LAYOUT}")
    return found[0]


def _first(path: Path) -> Row:
    return next(_objects(read_lines(path), str(path)), {})


def _rows(path: Path, fields: dict[str, Any]) -> list[Row]:
    return _parsed(read_lines(path), str(path), fields)


def _parsed(lines: Iterable[str], source: str, fields: dict[str, Any]) -> list[Row]:
    """Returns the fields of each line, in order.

    Raises:
        TaskDataError: if there are none, or one lacks a field.
    """
    rows = []
    for number, row in enumerate(_objects(lines, source), 1):
        for key, kind in fields.items():
            if not isinstance(row.get(key), kind):
                raise TaskDataError(f"{source}: row {number} has no {key} of its kind; {LAYOUT}")
        rows.append({key: row[key] for key in fields})
    if not rows:
        raise TaskDataError(f"{source} has no rows; {LAYOUT}")
    return rows


def _objects(lines: Iterable[str], source: str) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise TaskDataError(f"{source}: line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise TaskDataError(f"{source}: line {number} is no JSON object; {LAYOUT}")
        yield row
