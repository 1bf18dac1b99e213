"""The folder of a report: whole or not there, and never one that somebody else has filled."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from evaluation.compare.page import GENERATOR
from evaluation.compare.report import FIGURE

PAGE = "report.html"
FILES = (FIGURE, "report.md", "report.csv", "runs.csv", "curves.csv", PAGE)
"""What is written; the page last, as it says whose folder it is."""


def check_folder(target: str) -> Path:
    """Returns the folder that a report is to be written to, having tried that it can be.

    Args:
        target: a folder that does not exist, is empty or has an earlier report; others above it
            are made.

    Raises:
        ValueError: if it is something else, or refuses files.
    """
    folder = Path(target).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output ({folder}) is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not _is_ours(folder):
        raise ValueError(
            f"output ({folder}) has other files, and no report of an earlier comparison; name "
            "another folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        trial = _beside(folder)
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise ValueError(
            f"output ({folder}): cannot write to {folder.parent} ({error.strerror}); choose "
            "another folder"
        ) from error
    return folder


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a report: first all of it beside its place, then there.

    A new folder appears whole. In one of an earlier report each file is replaced whole, those that
    are not written any more go, and files of others stay.

    Args:
        folder: as ``check_folder`` returned it.
        write: writes some of ``FILES``, the page among them, to the folder that it is given.
    """
    unfinished = _beside(folder)
    unfinished.mkdir()
    try:
        write(unfinished)
        if not folder.exists():
            os.rename(unfinished, folder)
            return
        for name in FILES:
            if (unfinished / name).exists():
                os.replace(unfinished / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Whether a folder has a page that this command wrote."""
    page = folder / PAGE
    try:
        with page.open(encoding="utf-8", errors="replace") as file:
            return f'content="{GENERATOR}"' in file.read(2000)
    except OSError:
        return False


def _beside(folder: Path) -> Path:
    resolved = folder.resolve()
    return resolved.with_name(f".{resolved.name}.{os.getpid()}.tmp")
