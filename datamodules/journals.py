"""Files that survive being killed: whole writes, durable appends, one writer at a time."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from datamodules.store import StoreError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Holds the lock of an output.

    Raises:
        ValueError: Another process has it.
    """
    lock = FileLock(output.with_name(f".{output.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"output ({output}) is being written by another process; wait for it, or name another "
            "file"
        ) from error
    try:
        yield
    finally:
        lock.release()


def append_durably(path: Path, data: bytes) -> None:
    """Adds bytes to a file; they are on the disk when this returns."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, text: str) -> None:
    """Writes a text file; after a crash at any point it is the old one or the new one."""
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to write; after a crash at any point it is the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with replacing(path, unfinished) as temporary, temporary.open("wb") as file:
        yield file


@contextlib.contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[Path]:
    """Yields a path to write to, which then replaces the file; without an error only.

    Args:
        path: The file; after a crash at any point it is the old one or the new one.
        temporary: A path in the same folder, which is gone afterwards.
    """
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextlib.contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Turns the error of a full disk into one that names the folder and the cure.

    Args:
        folder: Where a store is written.

    Raises:
        StoreError: The disk, the user's share of it or a limit of file sizes is used up.
    """
    try:
        yield
    except OSError as error:
        elsewhere = error.filename is not None and folder.parent not in Path(error.filename).parents
        if error.errno not in _NO_ROOM or elsewhere:
            raise
        raise StoreError(
            f"{folder} cannot be written ({error.strerror}). Make room there, or name a cache_dir "
            "on another disk; what is finished is kept, the same command continues from it."
        ) from error


def no_room(error: BaseException | None) -> str | None:
    """Returns the system's words if a full disk caused an error, also one of another library."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return os.strerror(error.errno)
        of_rust = re.search(r"\(os error (\d+)\)", str(error))  # safetensors
        if of_rust is not None and int(of_rust[1]) in _NO_ROOM:
            return os.strerror(int(of_rust[1]))
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turns the error of a full disk into one that names the file or folder that is written.

    Raises:
        ValueError: The disk, the user's share of it or a limit of file sizes is used up.
    """
    try:
        yield
    except Exception as error:
        reason = no_room(error)
        if reason is None:
            raise
        raise ValueError(
            f"{path} cannot be written ({reason}); what was there before is whole. Make room, or "
            "choose another place"
        ) from error


def sync(path: Path) -> None:
    """Makes sure that a file, or the names in a folder, are on disk, not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
