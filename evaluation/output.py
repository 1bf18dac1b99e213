"""Atomic output files, checks of their folders, and readable text of results."""

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
    """Formats names and values as two columns, one pair per line."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def check_target(target: str | Path, key: str = "output") -> Path:
    """Returns the path of an output file after checking that its folder can be written to.

    Commands call it before the work starts, so that hours are not lost. ``key`` is the option that
    names the file.

    Raises:
        ValueError: If the folder is missing or not writable, or the target is a folder.
    """
    path = Path(target)
    if path.is_dir():
        raise ValueError(f"{key} ({path}) is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{key} ({path}): the folder {path.parent} does not exist; create it")
    check_folder(key, path.parent, path)
    return path


def check_targets(**targets: str | None) -> list[Path | None]:
    """Returns the paths of the output files of a command, see ``check_target``.

    Args:
        **targets: Files by the options that name them, or None for options without a value.

    Raises:
        ValueError: See ``check_target``; also if two options name the same file.
    """
    paths = [None if file is None else check_target(file, key) for key, file in targets.items()]
    seen: dict[Path, str] = {}
    for key, path in zip(targets, paths, strict=True):
        first = key if path is None else seen.setdefault(path.resolve(), key)
        if first != key:
            raise ValueError(f"{first} and {key} ({path}) are one file; name two different files")
    return paths


def write_folder(
    path: Path, write: Callable[[Path], _Result], replaced: Sequence[str] = ()
) -> _Result:
    """Writes a folder atomically, under a temporary name first; returns the result of ``write``.

    A new or empty folder appears in one step. In a folder with files, each of ``replaced`` is
    replaced atomically, or deleted if it is not written any more; other files stay.

    Args:
        path: The folder, which does not change if ``write`` fails.
        write: Function that writes the content to a given folder.
        replaced: Names of the files to replace in a folder with files.

    Raises:
        OSError: If the disk is full, or the folder has files and ``replaced`` is empty.
    """
    path = path.resolve()
    unfinished = unfinished_path(path)
    try:
        with full_disk_of(path):
            unfinished.mkdir(parents=True)
            result = write(unfinished)
        for file in unfinished.iterdir():  # safetensors makes files readable by the owner only
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
    """Writes a value as indented JSON, atomically; nan and infinities become null."""
    write_whole(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def render(template: str, **values: Any) -> str:
    """Renders a template of this package as an HTML page; values are escaped."""
    import jinja2

    folder = resources.files("evaluation")
    loader = jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values)


def report_result(table: str, result: Any, target: Path | None) -> None:
    """Prints the table of a result, and writes its JSON file if requested."""
    print(table)
    if target is not None:
        write_json(target, result)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes one JSON object per line, atomically."""
    write_whole(path, "".join(json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows))


def _finite(value: Any) -> Any:
    """Replaces nan and infinities, which JSON lacks, with None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
