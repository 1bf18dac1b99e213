"""``evaluate.py table``: result files side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from evaluation.console import format_columns
from evaluation.output import read_json

LEFT_OUT = (
    "checkpoint",
    "data",
    "settings",
    "bytes",
    "tokens",
    "likelihood",
    "model",
    "train_tokens",
    "label",
    "baseline",
)
"""Keys of a result that are no number to compare; perplexities carry their likelihood's name."""


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "files", type=str, nargs="+", help="JSON files that other commands wrote with --output."
    )


def run(settings: Namespace) -> None:
    """Prints one row a result, and a column for every number that any of them has."""
    paths = [Path(file) for file in settings.files]
    results = [
        (f"{name} {label}".strip(), result)
        for name, path in zip(_names(paths), paths, strict=True)
        for label, result in _results_in(_read(path))
    ]
    columns = list(dict.fromkeys(key for _, result in results for key in _compared(result)))
    header = ["", *(column.replace("_", " ") for column in columns)]
    rows = [
        [name, *(_readable(result.get(column)) for column in columns)] for name, result in results
    ]
    print(format_columns([header, *rows]))


def _results_in(content: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the results of a file with their labels: those of several models, or a plain one."""
    several = content.get("results")
    if not isinstance(several, list):
        return [("", content)]
    return [(str(result.get("label", "")), result) for result in several]


def _read(path: Path) -> dict[str, Any]:
    """Returns a result.

    Raises:
        ValueError: if the file is missing or holds no result.
    """
    result = read_json(path, "files")
    several = result.get("results", []) if isinstance(result, dict) else [result]
    if isinstance(several, list) and not all(isinstance(one, dict) for one in several):
        raise ValueError(f"files ({path}) holds no result; write one with evaluate.py --output")
    return result


def _compared(result: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a result that make columns."""
    return [
        key
        for key, value in result.items()
        if key not in LEFT_OUT and isinstance(value, str | int | float | bool | None)
    ]


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns what tells the files apart: their names, or those of their folders."""
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path.parent.name) for path in paths]


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
