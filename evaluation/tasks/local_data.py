"""Datasets of a local folder, for the task files in ``configs/tasks``.

The environment variable ``DATA`` names the folder. The harness can read local files with
``dataset_path: json`` too, but it expands no variables, accepts rows without a field and truncated
compressed files, and scores an old copy of a file that was replaced.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from datamodules.files import files_like
from datamodules.readers import read_rows

LAYOUT = "see docs/tasks.md for the layout of that folder"


class TaskDataError(ValueError):
    """Local data of a task are missing or have the wrong form; the message names the file."""


def load(
    files: Mapping[str, str], row: Mapping[str, Any], optional: Sequence[str] = (), **metadata: Any
) -> dict[str, Dataset]:
    """Reads the splits of a local dataset.

    Args:
        files: File of each split within ``DATA``, as a pattern; ``{key}`` stands for a value of the
            metadata. Files may be compressed.
        row: An example row with names and types of the fields to keep.
        optional: Splits that are empty if their file is missing.
        **metadata: The task's ``metadata``, as the harness passes it.

    Raises:
        TaskDataError: If ``DATA`` is not set, a file is missing, or a row lacks a field or has a
            value of another type.
    """
    schema = pa.Table.from_pylist([dict(row)]).schema
    paths = {
        split: _only(pattern.format(**metadata), split in optional)
        for split, pattern in files.items()
    }
    empty = Dataset(schema.empty_table())
    return {split: _read(path, schema) if path else empty for split, path in paths.items()}


def _only(pattern: str, optional: bool) -> Path | None:
    """Returns the only file of a pattern within ``DATA``, or None if it is missing and optional."""
    data = os.environ.get("DATA")
    if not data:
        raise TaskDataError(
            "tasks of configs/tasks read local files: set the environment variable DATA to their "
            f"folder, as in DATA=data/eval python evaluate.py tasks ...; {LAYOUT}"
        )
    root = Path(data).expanduser()
    if not root.is_dir():
        raise TaskDataError(f"DATA ({data}) is not a folder; {LAYOUT}")
    folder, _, name = pattern.rpartition("/")
    folders = root.glob(folder) if folder else [root]
    result = sorted(p for path in folders if path.is_dir() for p in files_like(path, name))
    if optional and not result:
        return None
    if len(result) != 1:
        listed = ", ".join(str(path.relative_to(root)) for path in result) or "none"
        raise TaskDataError(f"DATA ({data}) must have one file {pattern}, not {listed}; {LAYOUT}")
    return result[0]


def _read(path: Path, schema: pa.Schema) -> Dataset:
    """Reads the fields of the schema from each row; other fields are left out."""
    try:
        table = pa.Table.from_pylist(list(_checked(path, schema)), schema=schema)
    except OSError as error:
        raise TaskDataError(f"{path}: {error.strerror or error}; {LAYOUT}") from error
    except ValueError as error:  # the message names file and line
        raise TaskDataError(f"{' '.join(str(error).split())[:300]}; {LAYOUT}") from error
    if not len(table):
        raise TaskDataError(f"{path} has no rows; {LAYOUT}")
    return Dataset(table)


def _checked(path: Path, schema: pa.Schema) -> Iterator[dict[str, Any]]:
    for where, row in read_rows(path):
        for field in schema:
            if not isinstance(row, dict) or row.get(field.name) is None:
                raise ValueError(f"{where} has no {field.name}")
            try:
                kept = pa.array([row[field.name]], field.type)[0].as_py()
            except (TypeError, pa.ArrowException) as error:
                raise ValueError(f"{where} has another type of {field.name} ({error})") from error
            if not _keeps(row[field.name], kept):
                raise ValueError(f"{where} has another type of {field.name} ({row[field.name]!r})")
        yield row


def _keeps(value: Any, kept: Any) -> bool:
    """Returns whether Arrow kept a value: it rounds numbers and fills missing fields of objects."""
    if isinstance(kept, dict):
        return all(key in value and _keeps(value[key], kept[key]) for key in kept)
    if isinstance(kept, list):
        return all(map(_keeps, value, kept))
    return type(value) is type(kept) and bool(value == kept)
