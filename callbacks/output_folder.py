"""A look at folders that will be written to, before the work."""

import tempfile
from pathlib import Path


def check_folder(key: str, folder: Path) -> None:
    """Tries that a folder, which need not exist yet, can be written to; leaves no file there.

    Args:
        key: the argument that names it, for the message.
        folder: the folder.

    Raises:
        ValueError: if it is a file, lies below one, or refuses files.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{key} ({folder}): {existing} is a file; choose another folder")
    try:
        with tempfile.TemporaryDirectory(prefix=".trial-", dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"{key} ({folder}): {existing} cannot be written to ({error.strerror}); choose another "
            "folder"
        ) from error
