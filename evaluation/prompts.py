"""Texts to continue, from the command line or from a file."""

import json
from collections.abc import Sequence
from pathlib import Path


def collect_prompts(texts: Sequence[str], file: str | None) -> list[str]:
    """Returns the prompts that were typed, then those of the file.

    Args:
        texts: typed prompts; an empty one starts a document.
        file: txt (one prompt a line; blank lines are skipped) or jsonl (field ``prompt``).

    Raises:
        ValueError: if there are none, or the file cannot be read.
    """
    prompts = [*texts, *([] if file is None else read_prompts(Path(file)))]
    if not prompts:
        raise ValueError('there is nothing to continue; give --prompt "..." or --prompts_file F')
    return prompts


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts in a txt or jsonl file.

    Raises:
        ValueError: if the file is missing, is not UTF-8, or a jsonl line has no text in ``prompt``.
    """
    if not path.is_file():
        raise ValueError(f"prompts_file: there is no file {path}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts_file ({path}) is not UTF-8 text ({error})") from error
    numbered = [(n, line.rstrip("\r")) for n, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_field(path, n, line) for n, line in numbered]


def _field(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"prompts_file ({path}), line {number}: not JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'prompts_file ({path}), line {number}: expected {{"prompt": "text"}}')
    return str(row["prompt"])
