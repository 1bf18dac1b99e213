"""Cache of results in the folder of a run, one file each: ``results/KEY.json``.

The key is a digest of the facts that determine the numbers: the checkpoint's content, the text, the
settings and the code. A result with the same key is read instead of computed again. Each file holds
the result as its command writes it, with these facts under ``identity`` and the time under
``written``.
"""

import hashlib
import importlib.util
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from evaluation.output import write_json
from lightning_models.checkpoint import RESULTS, Checkpoint, file_status, record_checksums, shards

RESULT_FORMAT = 1
"""Version of the files, incremented when the meaning of a number changes."""
OWN_PACKAGES = ("lightning_models", "datamodules", "evaluation")
CHUNK = 2**24
Result = dict[str, Any]


def results_folder(checkpoint: Checkpoint) -> Path:
    """Returns the folder for results: in the run's folder, in a model folder, or next to a file."""
    path = checkpoint.path.resolve()
    if path.is_dir():
        return path / RESULTS
    return (path.parents[1] if path.parent.name == "checkpoints" else path.parent) / RESULTS


def checkpoint_digest(checkpoint: Checkpoint) -> str | None:
    """Returns a digest of a checkpoint's content, from the CRCs in its zip directory.

    The file of a sharded checkpoint holds digests of the parts, so they are covered. A model
    folder, and a file that is not a zip archive, are read in full.

    Returns:
        The digest, or None if the file was replaced since it was read, or if it was written by an
        older version, without digests of its parts.
    """
    path, parts = checkpoint.path, checkpoint.content.get(shards.KEY)
    if isinstance(parts, Mapping) and parts.get("sums") is None:
        return None
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        known = [file for file in files if file.parent.name != RESULTS]
        entries: list[Any] = [(str(file.relative_to(path)), _crc(file)) for file in known]
    else:
        entries = record_checksums(path) or [_crc(path)]
    return None if file_status(path) != checkpoint.status else _digest(entries)


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            value = zlib.crc32(block, value)
    return value


def cached_result(
    checkpoint: Checkpoint,
    facts: Mapping[str, Any],
    packages: Iterable[str],
    compute: Callable[[], Result],
) -> tuple[Result, Path | None]:
    """Returns a result of a checkpoint from the cache, or computes and saves it.

    Args:
        checkpoint: The checkpoint that the result is about.
        facts: All facts that determine the numbers, apart from the checkpoint and the code.
        packages: Packages of the model and its data, whose code is part of the key.
        compute: Function that computes the result under the keys of its JSON file.

    Returns:
        The result, and the file that it was read from, or None if it was computed.
    """
    code = code_digest(packages)
    identity = None if code is None else _identity(checkpoint, {"code": code, **facts})
    if identity is None:
        return compute(), None
    path = results_folder(checkpoint) / f"{_digest(identity)}.json"
    content = _read(path)
    if content is not None and content.pop("identity") == identity:
        del content["written"]
        return content, path
    result = compute()
    # a running job may have replaced the file in the meantime
    if _is_finite(result) and file_status(checkpoint.path) == checkpoint.status:
        _write(path, result, identity)
    return result, None


def save_result(checkpoint: Checkpoint, result: Result, facts: Mapping[str, Any]) -> None:
    """Saves a result that ``cached_result`` never reads, such as scores of tasks.

    ``facts`` determine the numbers, together with the checkpoint.
    """
    identity = _identity(checkpoint, facts)
    if identity is not None:
        path = results_folder(checkpoint) / f"{_digest(identity)}.json"
        _write(path, result, identity)


def _write(path: Path, result: Result, identity: Result) -> None:
    timestamp = datetime.now(UTC).isoformat()
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, {**result, "identity": identity, "written": timestamp})
    except (OSError, ValueError) as error:
        print(f"{path.parent}: cannot save the result ({error})", file=sys.stderr)


def _identity(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> Result | None:
    """Returns the facts as they are in a file, or None if the checkpoint has no digest."""
    digest = checkpoint_digest(checkpoint)
    if digest is None:
        return None
    return dict(json.loads(_as_text({"format": RESULT_FORMAT, "checkpoint": digest, **facts})))


def _is_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


def results_of(checkpoint: Checkpoint) -> list[Result]:
    """Returns the results of the checkpoint's content, oldest first."""
    files = sorted(results_folder(checkpoint).glob("*.json"))
    contents = [content for content in map(_read, files) if content is not None]
    if not contents:
        return []
    same = {"format": RESULT_FORMAT, "checkpoint": checkpoint_digest(checkpoint)}
    matching = [content for content in contents if same.items() <= content["identity"].items()]
    return sorted(matching, key=lambda content: str(content["written"]))


def _read(path: Path) -> Result | None:
    """Returns the content of a file, or None if it is not a result."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_valid = isinstance(content, dict) and isinstance(content.get("identity"), dict)
    return content if is_valid and "written" in content else None


def code_digest(packages: Iterable[str]) -> str | None:
    """Returns a digest of the code that computes a result, or None if it cannot be read.

    It covers this project's packages, the given ones, which may be the user's, and the version of
    torch.
    """
    digests = [_package_digest(name) for name in dict.fromkeys((*OWN_PACKAGES, *packages))]
    return None if None in digests else _digest([*digests, torch.__version__])


@cache
def _package_digest(name: str) -> str | None:
    spec = None
    with suppress(ImportError, ValueError):  # a notebook, or a module without a file
        spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        files = [Path(spec.origin or "")]
    else:
        folders = map(Path, spec.submodule_search_locations)
        files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    sources = [file.read_bytes() for file in files if file.is_file()]
    return _digest([hashlib.sha256(source).hexdigest() for source in sources]) if sources else None


def _digest(value: Any) -> str:
    return hashlib.sha256(_as_text(value).encode()).hexdigest()[:16]


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
