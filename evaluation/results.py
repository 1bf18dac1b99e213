"""Results in the folder of a run, one file each: ``results/KEY.json``.

The key is a digest of all that decides the numbers: the checkpoint's content, the text, the
settings, the code that computes them. The same key is the same result, which is then read rather
than computed again. Each file holds the result as its command writes it, with these facts under
``identity``.
"""

import hashlib
import importlib.util
import inspect
import json
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from evaluation.output import write_json
from lightning_models.checkpoint import Checkpoint

RESULT_FORMAT = 1
"""Raised where the meaning of a number in the files changes."""
FOLDER = "results"
OWN_PACKAGES = ("lightning_models", "datamodules", "evaluation")
CHUNK = 2**24
Result = dict[str, Any]


def results_folder(checkpoint: Checkpoint) -> Path:
    """Returns the folder for results of a checkpoint: in that of its run, else next to its file."""
    folder = checkpoint.path.resolve().parent
    return (folder.parent if folder.name == "checkpoints" else folder) / FOLDER


def checkpoint_digest(path: Path) -> str:
    """Returns a digest of a checkpoint's content, from the CRCs in its zip directory.

    The parts of a sharded checkpoint are in it by the digests that the file holds. A model folder,
    or a file that is no zip archive, is read.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        parts: list[Any] = [(str(file.relative_to(path)), _crc(file)) for file in files]
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        # names begin with that of the file as it was saved, which may have moved
        parts = [(e.filename.partition("/")[2], e.CRC, e.file_size) for e in entries]
    else:
        parts = [_crc(path)]
    return _digest(parts)


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            value = zlib.crc32(block, value)
    return value


def kept(
    checkpoint: Checkpoint,
    facts: Mapping[str, Any],
    kinds: Iterable[type],
    compute: Callable[[], Result],
) -> tuple[Result, Path | None]:
    """Returns the result of a checkpoint that these facts decide, computed once.

    Args:
        checkpoint: The checkpoint that the result is about.
        facts: All that decides the numbers besides the checkpoint and the code.
        kinds: The classes, of the model and the data, whose code is part of the key.
        compute: Computes the result under the keys of its JSON file.

    Returns:
        The result, and the file that it was read from, or None where it was computed.
    """
    code = code_digest(*kinds)
    if code is None:
        return compute(), None
    facts = {"code": code, **facts}
    identity = _identity(checkpoint, facts)
    path = results_folder(checkpoint) / f"{_digest(identity)}.json"
    content = _read(path)
    if content is not None and content.pop("identity") == identity:
        return content, path
    result = compute()
    if all(math.isfinite(value) for value in result.values() if isinstance(value, float)):
        keep(checkpoint, result, facts)
    return result, None


def keep(checkpoint: Checkpoint, result: Result, facts: Mapping[str, Any]) -> None:
    """Writes a result to the folder of the checkpoint's run; where that refuses, warns.

    Args:
        checkpoint: The checkpoint that the result is about.
        result: The result under the keys of its JSON file.
        facts: All that decides the numbers besides the checkpoint.
    """
    folder = results_folder(checkpoint)
    identity = _identity(checkpoint, facts)
    try:
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{_digest(identity)}.json", {**result, "identity": identity})
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{folder}: the result cannot be kept ({error}); it is computed again next time",
            stacklevel=3,
        )


def _identity(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> Result:
    digest = checkpoint_digest(checkpoint.path)
    identity = {"format": RESULT_FORMAT, "checkpoint": digest, **facts}
    return dict(json.loads(_as_text(identity)))  # as it is read from a file


def results_of(checkpoint: Checkpoint) -> list[Result]:
    """Returns the results that are about the checkpoint's content, the oldest first."""
    files = sorted(
        results_folder(checkpoint).glob("*.json"), key=lambda file: (file.stat().st_mtime, file)
    )
    contents = [content for content in map(_read, files) if content is not None]
    if not contents:
        return []
    digest = checkpoint_digest(checkpoint.path)
    return [each for each in contents if each["identity"].get("checkpoint") == digest]


def _read(path: Path) -> Result | None:
    """Returns the content of a file; None where it is no result."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(content, dict) and isinstance(content.get("identity"), dict)
    return content if known else None


def code_digest(*kinds: type) -> str | None:
    """Returns a digest of the sources that compute a result, or None where there are none to read.

    These are the packages of this project that do, and those of the classes, which may be the
    user's.
    """
    packages = dict.fromkeys(
        (*OWN_PACKAGES, *(kind.__module__.partition(".")[0] for kind in kinds))
    )
    digests = [_package_digest(name) for name in packages]
    return None if None in digests else _digest([*digests, torch.__version__])


@cache
def _package_digest(name: str) -> str | None:
    spec = None
    with suppress(ImportError, ValueError):  # a notebook, or a module that was made by hand
        spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        files = [
            file
            for folder in spec.submodule_search_locations
            for file in Path(folder).rglob("*.py")
        ]
    else:
        files = [Path(inspect.getsourcefile(importlib.import_module(name)) or "")]
    return _digest([file.read_text(encoding="utf-8") for file in sorted(files) if file.is_file()])


def _digest(value: Any) -> str:
    return hashlib.sha256(_as_text(value).encode()).hexdigest()[:16]


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
