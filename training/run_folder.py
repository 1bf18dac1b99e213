"""The folder of a run, which one process at a time writes to."""

import contextlib
import dataclasses
import errno
from pathlib import Path

import lightning as L
from filelock import FileLock, Timeout
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from training.errors import UserError
from training.loggers import MLFlowRun, RunPlace, WandbRun

LOCK = ".lock"
PATIENCE = 60.0
"""Seconds for the process that trains a run to end, such as the one that SLURM has requeued."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class WaitedError(Exception):
    """The folder of a run was in use, and is free now; its checkpoint may be newer than before."""


def hold(place: RunPlace, at_end: contextlib.ExitStack) -> RunPlace:
    """Holds the folder of a run, see :func:`hold_folder`; returns the place with its name.

    Args:
        place: Where the run is logged. Without a version the run gets a new folder.
        at_end: Frees the folder, and removes it if nothing was written to it.
    """
    _make(place.group, at_end)
    if place.version is None:
        place = dataclasses.replace(place, version=_new_version(place.group))
    folder = place.group / str(place.version)
    at_end.callback(_remove_if_empty, folder)
    hold_folder(folder, at_end, key=f"name ({folder.name})", waits=place.purge_step is not None)
    return place


def hold_checkpoints(trainer: L.Trainer, at_end: contextlib.ExitStack, *, waits: bool) -> None:
    """Holds the folders that checkpoints of a training go to, see :func:`hold_folder`.

    Services such as W&B give each run a folder with a new name; these are unknown yet.
    """
    local = (TensorBoardLogger, CSVLogger, WandbRun, MLFlowRun)
    named = not trainer.loggers or isinstance(trainer.loggers[0], local)
    held = set()
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or not (named or callback.dirpath):
            continue
        given = callback.dirpath is not None
        path = str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        if "://" in path or (folder := Path(path).resolve()) in held:
            continue
        held.add(folder)
        key = "checkpoint.dirpath" if given else "trainer.default_root_dir"
        hold_folder(folder, at_end, key=key, waits=waits)


def hold_folder(folder: Path, at_end: contextlib.ExitStack, *, key: str, waits: bool) -> None:
    """Holds a folder against other processes; the system frees it when this one dies.

    Args:
        folder: Made if there is none.
        at_end: Frees the folder, and removes it if it was made here and stayed empty.
        key: The option that names it, for messages.
        waits: Whether a run goes on, which another process may be about to end.

    Raises:
        WaitedError: A run that goes on was in use until now.
        UserError: It still is after `PATIENCE`, or the folder of a new run is in use.
    """
    _make(folder, at_end)
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    try:
        _acquire(lock, folder, key, waits=waits)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        rank_zero_warn(
            f"{folder} lies on a file system without locks ({error.strerror}): see to it that no "
            "other process trains the same run"
        )
    at_end.callback(_free, lock, folder)


def _make(folder: Path, at_end: contextlib.ExitStack) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        at_end.callback(_remove_if_empty, path)


def _acquire(lock: FileLock, folder: Path, key: str, *, waits: bool) -> None:
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=0)
        return
    if not waits:
        raise UserError(
            f"{key}: another process trains a run in {folder}; choose another folder for this one"
        )
    rank_zero_info(f"another process trains the run in {folder}: waiting up to {PATIENCE:g} s")
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout as error:
        raise UserError(
            f"ckpt_path: another process trains the run in {folder}; wait for its end, or begin a "
            "run of its own from the path of the checkpoint"
        ) from error
    lock.release()
    raise WaitedError


def _new_version(group: Path) -> str:
    """Makes the next folder ``version_N``, which no other process then has."""
    taken = [int(path.name[8:]) for path in group.glob("version_*") if path.name[8:].isdecimal()]
    idx = max(taken, default=-1) + 1
    while True:
        try:
            (group / f"version_{idx}").mkdir()
            return f"version_{idx}"
        except FileExistsError:
            idx += 1


def _free(lock: FileLock, folder: Path) -> None:
    """Frees a folder; removes the lock file if nothing else was written to the folder."""
    with contextlib.suppress(OSError):
        # while the lock is held: whoever opened the file before notices that it is gone
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
    lock.release()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
