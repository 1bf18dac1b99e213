"""Atomic writing of files: they are complete or absent, whenever a process is killed."""

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
"""System errors for a full disk, a quota or a limit of file sizes."""


@contextlib.contextmanager
def whole_file(path: Path, *, sole: bool = False) -> Iterator[BinaryIO]:
    """Opens a file for atomic writing: after a crash it has its old or its new content.

    The content is written to a temporary file in the same folder, which replaces the file at the
    end unless an error is raised.

    Args:
        path: The file, in an existing folder.
        sole: Whether no other process writes this file, so that the temporary files of killed
            processes can be removed.

    Raises:
        OSError: If the file cannot be written; ``filename`` is its path.
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
    with contextlib.suppress(OSError):  # some network file systems cannot sync folders
        sync(path.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file atomically, see `whole_file`; text as UTF-8 with unchanged line endings."""
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def unfinished_path(path: Path) -> Path:
    """Returns the temporary path at which this process writes a file or folder for ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Removes the temporary files of killed processes in a folder, for one file or all."""
    for leftover in folder.glob(f".{'*' if name is None else glob.escape(name)}.*.partial"):
        leftover.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def full_disk(error: BaseException | None) -> int | None:
    """Returns the errno if a full disk is the cause of an error, of any library, else None."""
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
    """Turns errors caused by a full disk into an OSError that names the path written to."""
    try:
        yield
    except Exception as error:
        code = full_disk(error)
        if code is None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error


def check_folder(key: str, folder: Path, value: Path | None = None) -> None:
    """Checks that files can be written to a folder, which need not exist; leaves nothing there.

    Args:
        key: Name of the argument, for the message.
        folder: The folder.
        value: Value of the argument, if it is not the folder but a path in it.

    Raises:
        ValueError: If the path or a parent is a file, or the folder is not writable.
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
