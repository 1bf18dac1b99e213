"""Output files of long jobs: a lock for the only writer, durable appends, and full disks."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from datamodules.store import StoreError
from lightning_models.atomic_files import NO_ROOM


@contextlib.contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Locks an output file.

    Raises:
        ValueError: If another process has locked it.
    """
    lock = FileLock(output.with_name(f".{output.name}.lock"), timeout=0)
    try:
        acquired = lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"output ({output}) is being written by another process; wait for it, or name another "
            "file"
        ) from error
    with acquired:
        yield


def append_durably(path: Path, data: bytes) -> None:
    """Appends bytes to a file and syncs it to disk."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Converts a full-disk error into one that names the folder and the cure.

    Args:
        folder: Folder in which a store is being written.

    Raises:
        StoreError: If the disk, the user's quota or a limit on file sizes is exhausted.
    """
    try:
        yield
    except OSError as error:
        elsewhere = error.filename is not None and folder.parent not in Path(error.filename).parents
        if error.errno not in NO_ROOM or elsewhere:
            raise
        raise StoreError(
            f"{folder} cannot be written ({error.strerror}). Free some space, or name a cache_dir "
            "on another disk; finished parts are kept, and the same command continues from them."
        ) from error
