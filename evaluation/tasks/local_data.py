"""Data sets of a folder of yours, for the task files in ``configs/tasks``.

The environment variable ``DATA`` names the folder; ``docs/tasks.md`` shows what lies in it. The
harness calls ``load`` (it does not expand variables in YAML).
"""

import contextlib
import os
import zipfile
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from datasets import Dataset
from pyarrow import json as arrow_json

from datamodules.files import files_like, open_bytes, open_text

LAYOUT = "see docs/tasks.md for what lies in that folder"

_TEXT, _TEXTS, _NUMBER = pa.string(), pa.list_(pa.string()), pa.int64()
_FIELDS: dict[str, dict[str, pa.DataType]] = {
    "lambada": {"text": _TEXT},
    "hellaswag": {"query": _TEXT, "choices": _TEXTS, "gold": _NUMBER},
    "piqa": {"goal": _TEXT, "sol1": _TEXT, "sol2": _TEXT, "label": _NUMBER},
    "blimp": {"sentence_good": _TEXT, "sentence_bad": _TEXT},
    "arc_easy": {
        "question": _TEXT,
        "choices": pa.struct({"text": _TEXTS, "label": _TEXTS}),
        "answerKey": _TEXT,
    },
}
_FIELDS["arc_challenge"] = _FIELDS["arc_easy"]
_FIELDS["winogrande"] = dict.fromkeys(("sentence", "option1", "option2", "answer"), _TEXT)
_FIELDS["race"] = dict.fromkeys(("article", "problems"), _TEXT)
_FIELDS["sciq"] = dict.fromkeys(
    ("question", "support", "distractor1", "distractor2", "distractor3", "correct_answer"), _TEXT
)
_SPLITS = {"winogrande": ("validation",), "race": ("test",)}
"""Splits with a file each, where they are not ``test`` and ``validation``."""
_PUBLISHED = {"activity_label": _TEXT, "ctx_a": _TEXT, "ctx_b": _TEXT, "endings": _TEXTS}
"""Fields of the published HellaSwag, without its label."""
_BLOCK = 2**26  # bytes; an object must be in one block


class TaskDataError(ValueError):
    """Local data of a task that are missing or of another form; the message says which."""


def load(folder: str, **metadata: Any) -> dict[str, Dataset]:
    """Returns the splits of a local data set by their names.

    Args:
        folder: of a data set within ``DATA``: lambada, hellaswag, piqa, blimp, arc_easy,
            arc_challenge, winogrande, sciq or race.
        **metadata: what else the harness hands over: of BLiMP the ``paradigm``.

    Raises:
        TaskDataError: if ``DATA`` is not set, or files are missing or of another form.
    """
    place, fields = data_folder(folder), _FIELDS[folder]
    if folder == "lambada":
        return {"test": _rows(_only(place, "*test*.jsonl"), fields)}
    if folder == "hellaswag":
        return {"validation": _hellaswag(_only(place, "*val*.jsonl"))}
    if folder == "piqa":
        return {"validation": _piqa(place)}
    if folder == "blimp":
        return {"train": _paradigm(place, str(metadata["paradigm"]))}
    splits = _SPLITS.get(folder, ("test", "validation"))
    return {split: _rows(_only(place, f"{split}.jsonl"), fields) for split in splits}


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


# ---- data sets that come in several forms


def _hellaswag(path: Path) -> Dataset:
    """Returns the rows as the harness makes them of the published ones, or those."""
    fields = _FIELDS["hellaswag"]
    queries = _table(path, path, {"query": _TEXT})["query"]
    if queries.null_count < len(queries):
        return _rows(path, fields)
    from lm_eval.tasks.hellaswag.utils import process_docs

    try:  # labels are numbers, or their digits
        published = _rows(path, {**_PUBLISHED, "label": _NUMBER})
    except TaskDataError:
        published = _rows(path, {**_PUBLISHED, "label": _TEXT})
    return process_docs(published).select_columns(list(fields))


def _piqa(place: Path) -> Dataset:
    """Returns the rows with labels, or those of the two published files."""
    joined, fields = files_like(place, "*labeled*.jsonl"), dict(_FIELDS["piqa"])
    if joined:
        return _rows(joined[0], fields)
    fields.pop("label")
    rows, labels = _rows(_only(place, "valid.jsonl"), fields), _only(place, "valid-labels.lst")
    try:
        with open_text(labels) as file:
            numbers = file.read().decode().split()
    except (OSError, ValueError) as error:
        raise TaskDataError(f"{labels} cannot be read ({error}); get it again") from error
    if len(numbers) != len(rows) or not set(numbers) <= {"0", "1"}:
        raise TaskDataError(
            f"{labels} must have a label, 0 or 1, for each of the {len(rows)} lines of valid.jsonl"
        )
    return rows.add_column("label", [int(number) for number in numbers])


def _paradigm(place: Path, name: str) -> Dataset:
    """Returns a paradigm of BLiMP: of the published archive, or else of a file of that name."""
    archive, fields = place / "BLiMP.zip", _FIELDS["blimp"]
    if not archive.is_file():
        folders = [place, *sorted(path for path in place.rglob("*") if path.is_dir())]
        found = [path for folder in folders for path in files_like(folder, f"{name}.jsonl")]
        if not found:
            raise TaskDataError(f"{place} has neither BLiMP.zip nor {name}.jsonl; {LAYOUT}")
        return _rows(found[0], fields)
    try:
        with zipfile.ZipFile(archive) as opened:
            inside = [n for n in opened.namelist() if n.endswith(f"/{name}.jsonl")]
            if not inside:
                raise TaskDataError(f"{archive} has no {name}.jsonl; {LAYOUT}")
            with opened.open(inside[0]) as file:
                return _rows(file, fields, f"{archive}/{name}.jsonl")
    except zipfile.BadZipFile as error:
        raise TaskDataError(f"{archive} cannot be read ({error}); get it again") from error


# ---- files


def _only(place: Path, pattern: str) -> Path:
    found = files_like(place, pattern)
    if len(found) != 1:
        named = ", ".join(path.name for path in found) or "none"
        raise TaskDataError(f"{place} must have one file {pattern}, not {named}; {LAYOUT}")
    return found[0]


def _rows(
    file: Path | IO[bytes], fields: dict[str, pa.DataType], source: str | None = None
) -> Dataset:
    """Returns the fields of each line, in order; the file's other ones are left out.

    Raises:
        TaskDataError: if there are no rows, or one lacks a field.
    """
    named = str(file) if source is None else source
    table = _table(file, named, fields)
    for name in fields:
        if table[name].null_count:
            row = table[name].is_null().index(True).as_py() + 1
            raise TaskDataError(f"{named}: row {row} has no {name}; {LAYOUT}")
    return Dataset(table)


def _table(file: Path | IO[bytes], source: str | Path, fields: dict[str, pa.DataType]) -> pa.Table:
    """Returns the fields of each line, null where it has none; of others not even the type counts.

    Raises:
        TaskDataError: if the file cannot be read, or a field has another type.
    """
    try:
        opened = open_bytes(file) if isinstance(file, Path) else contextlib.nullcontext(file)
        with opened as content:
            table = arrow_json.read_json(
                content,
                arrow_json.ReadOptions(block_size=_BLOCK),
                arrow_json.ParseOptions(
                    explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"
                ),
            )
        table.validate(full=True)  # its texts are UTF-8
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TaskDataError(f"{source} does not hold rows as JSON ({reason}); {LAYOUT}") from error
    return table
