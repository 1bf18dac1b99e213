"""Outputs of long work: one writer at a time, durable appends, and what a full disk means."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from datamodules.store import StoreError
from lightning_models.atomic_files import NO_ROOM


@contextlib.contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Holds the lock of an output.

    Raises:
        ValueError: Another process has it.
    """
    lock = FileLock(output.with_name(f".{output.name}.lock"), timeout=0)
    try:
        held = lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"output ({output}) is being written by another process; wait for it, or name another "
            "file"
        ) from error
    with held:
        yield


def append_durably(path: Path, data: bytes) -> None:
    """Adds bytes to a file; they are on the disk when this returns."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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
        if error.errno not in NO_ROOM or elsewhere:
            raise
        raise StoreError(
            f"{folder} cannot be written ({error.strerror}). Make room there, or name a cache_dir "
            "on another disk; what is finished is kept, the same command continues from it."
        ) from error
