"""How this project writes files: they are whole or not there, whenever a process is killed."""

import contextlib
import errno
import glob
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of the system for a full disk, a quota or a limit of file sizes."""


@contextlib.contextmanager
def whole_file(path: Path, *, sole: bool = False) -> Iterator[BinaryIO]:
    """Opens a file to write; after a crash at any point it is the old one or the new one.

    The content goes to the disk under another name in the same folder, which replaces the file at
    the end, unless an error is raised.

    Args:
        path: The file; its folder exists.
        sole: Whether no other process writes this file at the time, so that what killed ones have
            left unfinished can be removed.

    Raises:
        OSError: If it cannot be written; ``filename`` is the path.
    """
    if sole:
        remove_unfinished(path.parent, path.name)
    temporary = unfinished_path(path)
    try:
        with full_disk_of(path), temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some network file systems sync no folders
        sync(path.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8 with its line ends unchanged, see `whole_file`."""
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def unfinished_path(path: Path) -> Path:
    """Returns where this process writes a file or folder before it is moved to ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes have left unfinished of one file in a folder, or of all."""
    for leftover in folder.glob(f".{'*' if name is None else glob.escape(name)}.*.partial"):
        leftover.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes sure that a file, or the names in a folder, are on disk, not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def full_disk(error: BaseException | None) -> int | None:
    """Returns the number of the system's error if a full disk is the cause, in any library."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return error.errno
        of_rust = re.search(r"\(os error (\d+)\)", str(error))  # safetensors
        if of_rust is not None and int(of_rust[1]) in NO_ROOM:
            return int(of_rust[1])
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def full_disk_of(path: Path) -> Iterator[None]:
    """Has a full disk raise an OSError with the path of the file or folder that is written."""
    try:
        yield
    except Exception as error:
        number = full_disk(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def check_folder(key: str, folder: Path, value: Path | None = None) -> None:
    """Tries that a folder, which need not exist yet, can be written to; leaves no file there.

    Args:
        key: The argument that names it, for the message.
        folder: The folder.
        value: The argument's value where that is not the folder but a path in it.

    Raises:
        ValueError: If it is a file, lies below one, or refuses files.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    name = f"{key} ({value or folder})"
    if not existing.is_dir():
        raise ValueError(f"{name}: {existing} is a file; choose another folder")
    try:
        with tempfile.TemporaryDirectory(prefix=".trial-", dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"{name}: cannot write to {existing} ({error.strerror}); choose another folder"
        ) from error
