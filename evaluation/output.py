"""Files that are whole or not there, and text of results for people."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from lightning_models.atomic_files import (
    check_folder,
    full_disk_of,
    sync,
    unfinished_path,
    write_whole,
)

_Result = TypeVar("_Result")


def format_table(rows: Mapping[str, str]) -> str:
    """Returns names and values as two columns, one pair a line."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def check_target(target: str | Path, key: str = "output") -> Path:
    """Returns the path of a file to be written, having tried that its folder takes files.

    Called before the work starts, so that hours of it are not lost; ``key`` is the option that
    names it.

    Raises:
        ValueError: if the folder is missing or refuses files, or the target is a folder.
    """
    path = Path(target)
    if path.is_dir():
        raise ValueError(f"{key} ({path}) is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{key} ({path}): the folder {path.parent} does not exist; create it")
    check_folder(key, path.parent, path)
    return path


def check_targets(**targets: str | None) -> list[Path | None]:
    """Returns the paths of files to be written by one command, see ``check_target``.

    Targets are files by the options that name them, None where one is not asked for.

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


def write_folder(
    path: Path, write: Callable[[Path], _Result], replaced: Sequence[str] = ()
) -> _Result:
    """Writes a folder under another name first, and returns what ``write`` returns.

    A new or empty folder appears whole. In one that has files each of ``replaced`` is replaced
    whole, or goes where it is not written any more; other files stay. Without ``replaced`` a
    folder that got files meanwhile is an OSError.

    Args:
        path: The folder, which does not change if ``write`` fails.
        write: Writes the content to the folder that it is given.
        replaced: Names of the files that a folder with files may get.

    Raises:
        OSError: If the disk is full, with the path of the folder.
    """
    path = path.resolve()
    unfinished = unfinished_path(path)
    try:
        with full_disk_of(path):
            unfinished.mkdir(parents=True)
            result = write(unfinished)
        for file in unfinished.iterdir():  # safetensors lets nobody else read what it writes
            file.chmod(file.stat().st_mode | unfinished.stat().st_mode & 0o666)
            sync(file)
        sync(unfinished)
        if not replaced or not path.exists() or not any(path.iterdir()):
            os.replace(unfinished, path)
            sync(path.parent)
            return result
        for name in replaced:
            if (unfinished / name).exists():
                os.replace(unfinished / name, path / name)
            else:
                (path / name).unlink(missing_ok=True)
        sync(path)
        return result
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically; nan and infinities become null."""
    write_whole(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def render(template: str, **values: Any) -> str:
    """Returns an HTML page from a template of this package, with values as escaped text."""
    import jinja2

    folder = resources.files("evaluation")
    loader = jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values)


def report_result(table: str, result: Any, target: Path | None) -> None:
    """Prints a result for people, and writes its JSON file if one is asked for."""
    print(table)
    if target is not None:
        write_json(target, result)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes one JSON object a line, atomically."""
    write_whole(path, "".join(json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows))


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
