"""Files that grow line by line and survive being killed: one writer, lines that are on the disk."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


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
