"""Locking of a run's folder, so that only one process writes to it."""

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
"""Seconds to wait for the previous process of a run, such as one that SLURM requeued."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class WaitedError(Exception):
    """Raised after waiting for a run's folder; its checkpoint may be newer than before."""


def hold(run: RunPlace, at_end: contextlib.ExitStack) -> RunPlace:
    """Locks the folder of a run, see :func:`hold_folder`; returns the place with its version.

    Args:
        run: Log location of the run. Without a version the run gets a new folder.
        at_end: Stack that unlocks the folder, and removes it if it is empty.
    """
    _make(run.group, at_end)
    if run.version is None:
        run = dataclasses.replace(run, version=_new_version(run.group))
    folder = run.group / str(run.version)
    at_end.callback(_remove_if_empty, folder)
    hold_folder(folder, at_end, key=f"name ({folder.name})", waits=run.purge_step is not None)
    return run


def hold_checkpoints(trainer: L.Trainer, at_end: contextlib.ExitStack, *, waits: bool) -> None:
    """Locks the checkpoint folders of a run, see :func:`hold_folder`.

    Services such as W&B give each run a folder with a new name, which is still unknown.
    """
    local = (TensorBoardLogger, CSVLogger, WandbRun, MLFlowRun)
    has_folder = not trainer.loggers or isinstance(trainer.loggers[0], local)
    held_folders = set()
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or not (has_folder or callback.dirpath):
            continue
        explicit = callback.dirpath is not None
        path = str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        if "://" in path or (folder := Path(path).resolve()) in held_folders:
            continue
        held_folders.add(folder)
        key = "checkpoint.dirpath" if explicit else "trainer.default_root_dir"
        hold_folder(folder, at_end, key=key, waits=waits)


def hold_folder(folder: Path, at_end: contextlib.ExitStack, *, key: str, waits: bool) -> None:
    """Locks a folder against other processes; the system releases the lock if this one dies.

    Args:
        folder: Folder to lock; it is created if missing.
        at_end: Stack that unlocks the folder, and removes it if it was created here and is empty.
        key: Option that names the folder, for messages.
        waits: Whether a run resumes, whose previous process may be about to end.

    Raises:
        WaitedError: If the folder of a resumed run was in use until now.
        UserError: If it still is after `PATIENCE`, or the folder of a new run is in use.
    """
    _make(folder, at_end)
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    try:
        _acquire(lock, folder, key, waits=waits)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        rank_zero_warn(
            f"{folder} lies on a file system without locks ({error.strerror}): make sure that no "
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
            f"ckpt_path: another process trains the run in {folder}; wait until it ends, or start "
            "a separate run from the path of the checkpoint"
        ) from error
    lock.release()
    raise WaitedError


def _new_version(group: Path) -> str:
    """Creates the next folder ``version_N`` atomically."""
    versions = [int(path.name[8:]) for path in group.glob("version_*") if path.name[8:].isdecimal()]
    idx = max(versions, default=-1) + 1
    while True:
        try:
            (group / f"version_{idx}").mkdir()
            return f"version_{idx}"
        except FileExistsError:
            idx += 1


def _free(lock: FileLock, folder: Path) -> None:
    """Unlocks a folder, and removes the lock file if there is no other file."""
    with contextlib.suppress(OSError):
        # while the lock is held, so that other openers notice the removal
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
    lock.release()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
