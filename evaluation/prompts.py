"""Texts to continue, from the command line or from a file."""

from collections.abc import Sequence
from pathlib import Path

from datamodules import read_prompts
from datamodules.readers import check_utf8


def collect_prompts(texts: Sequence[str], file: str | None) -> list[str]:
    """Returns the prompts that were typed, then those of the file.

    Args:
        texts: typed prompts; an empty one starts a document.
        file: txt (one prompt a line; blank lines are skipped) or jsonl (field ``prompt``).

    Raises:
        ValueError: if there are none, a typed one is not UTF-8, or the file cannot be read.
    """
    for text in texts:
        check_utf8(text, f"prompt {text!a}")
    prompts = [*texts, *([] if file is None else read_prompts(Path(file)))]
    if not prompts:
        raise ValueError('there is nothing to continue; give --prompt "..." or --prompts_file F')
    return prompts
