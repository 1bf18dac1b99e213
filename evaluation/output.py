"""Results: tables for people, and files that are whole or not there."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datamodules.readers import parse_json


def format_table(rows: Mapping[str, str]) -> str:
    """Returns names and values as two columns, one pair a line."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def check_target(target: str | Path, key: str = "output") -> Path:
    """Returns the path of a file to be written, having tried that its folder takes files.

    Called before the work starts, so that hours of it are not lost.

    Args:
        target: the file.
        key: the option that names it, for messages.

    Raises:
        ValueError: if the folder is missing or refuses files, or the target is a folder.
    """
    path = Path(target)
    if path.is_dir():
        raise ValueError(f"{key} ({path}) is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{key} ({path}): the folder {path.parent} does not exist; create it")
    trial = _beside(path)
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ValueError(
            f"{key} ({path}): cannot write to the folder {path.parent} ({error.strerror}); "
            "choose another one"
        ) from error
    return path


def check_targets(**targets: str | None) -> list[Path | None]:
    """Returns the paths of files to be written by one command, see ``check_target``.

    Args:
        **targets: the files by the options that name them; None where one is not asked for.

    Raises:
        ValueError: as ``check_target``; also if two of them are one file.
    """
    paths = [None if file is None else check_target(file, key) for key, file in targets.items()]
    seen: dict[Path, str] = {}
    for key, path in zip(targets, paths, strict=True):
        first = key if path is None else seen.setdefault(path.resolve(), key)
        if first != key:
            raise ValueError(f"{first} and {key} ({path}) are one file; name two different ones")
    return paths


def read_json(path: Path, key: str) -> Any:
    """Returns the content of a JSON file.

    Args:
        path: the file.
        key: the option that names it, for messages.

    Raises:
        ValueError: if it cannot be read or is not JSON.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{key} ({path}): cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{key} ({path}) is not JSON: {error}") from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under another name and renames it: readers see the old one or the new one.

    Args:
        path: the file; replaced where it exists, left as it is where ``write`` fails.
        write: writes the content to the path it is given.
    """
    unfinished = _beside(path)
    try:
        write(unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 with the line ends as they are, atomically."""
    write_atomically(path, lambda target: target.write_bytes(text.encode("utf-8")))


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically; nan and infinities become null."""
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def report_result(table: str, result: Any, target: Path | None) -> None:
    """Prints a result for people, and writes its JSON file if one is asked for."""
    print(table)
    if target is not None:
        write_json(target, result)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes one JSON object a line, atomically."""
    write_text(path, "".join(json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows))


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
