"""Finding, checking, reading and writing checkpoint files."""

import os
import pickle
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from training.errors import UserError

SUFFIX = ".ckpt"


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint file says about the run that wrote it.

    Attributes:
        path: the file.
        step: optimiser steps done.
        model: class path and init arguments; without ``class_path`` if the file names none.
        data: the same for the data module, None if the file names none.
        best: the best checkpoint so far by that run's own account, None if it kept none.
    """

    path: Path
    step: int
    model: dict[str, Any]
    data: dict[str, Any] | None
    best: Path | None


def read_checkpoint(path: Path) -> SavedRun:
    """Returns the description in a checkpoint, without reading its tensors.

    Raises:
        UserError: there is no such file, it is damaged, or it is not a checkpoint.
    """
    if not path.is_file():
        raise UserError(f"ckpt_path: there is no checkpoint {path}")
    content = _load(path)
    recipe = content.get("recipe") or {}
    arguments = {
        key: value
        for key, value in content.get("hyper_parameters", {}).items()
        if not key.startswith("_")
    }
    return SavedRun(
        path=path,
        step=int(content.get("global_step", 0)),
        model=recipe.get("model") or {"init_args": arguments},
        data=recipe.get("data"),
        best=_best_path(content, path),
    )


def find_checkpoint(asked: str, folders: Sequence[Path]) -> SavedRun:
    """Returns the checkpoint that ``--ckpt_path`` names.

    Args:
        asked: a path; ``last``: the newest whole checkpoint below ``folders``; ``best``: the best
            one of the run that wrote that.
        folders: searched with all their subfolders.

    Raises:
        UserError: there is none.
    """
    if asked not in ("last", "best"):
        return read_checkpoint(Path(asked).expanduser())
    last = newest_checkpoint(folders)
    if asked == "last":
        return last
    if last.best is None or not last.best.is_file():
        raise UserError(
            f"ckpt_path=best: the run of {last.path} has kept no best checkpoint; it needs a "
            "validation and checkpoint.save_top_k of at least 1. Give a path, or `last`"
        )
    return read_checkpoint(last.best)


def newest_checkpoint(folders: Sequence[Path]) -> SavedRun:
    """Returns the newest whole checkpoint below ``folders``.

    The folder that was written to last comes first, and within it the highest step: copying a run
    may change the order of its files' times, but not their steps. Damaged files are named in a
    warning and skipped.

    Raises:
        UserError: there is none.
    """
    by_folder: dict[Path, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.expanduser().rglob(f"*{SUFFIX}")):
            if path.is_file():
                by_folder.setdefault(path.parent.resolve(), []).append(path)
    by_time = sorted(by_folder.values(), key=lambda files: max(map(_time, files)))
    for files in reversed(by_time):
        whole = list(_whole(files))
        if whole:
            return max(whole, key=lambda run: (run.step, _time(run.path)))
    places = ", ".join(str(folder) for folder in folders)
    raise UserError(
        f"ckpt_path: there is no whole checkpoint below {places}; give the folder of the run with "
        "--trainer.default_root_dir or a path with --ckpt_path, or leave it out to start anew"
    )


def _whole(files: Iterable[Path]) -> Iterable[SavedRun]:
    for path in files:
        try:
            yield read_checkpoint(path)
        except UserError as error:
            rank_zero_warn(f"skipping a damaged checkpoint: {error}")


def _time(path: Path) -> int:
    return path.stat().st_mtime_ns


def _load(path: Path) -> dict[str, Any]:
    """Returns the checkpoint with its tensors left on disk.

    Raises:
        UserError: the file is cut off (a zip archive has its directory at the end), or something
            else than a checkpoint of plain values and tensors.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is cut off or not a checkpoint ({path.stat().st_size} bytes)")
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read as a checkpoint: {first_line}") from error
    if not isinstance(content, dict) or "state_dict" not in content:
        raise UserError(f"{path} is not a checkpoint of a training run: it has no state_dict")
    return content


def _best_path(content: dict[str, Any], path: Path) -> Path | None:
    """Returns the best checkpoint by the account of the one at ``path``; a moved run keeps it."""
    for state in content.get("callbacks", {}).values():
        best = state.get("best_model_path") if isinstance(state, dict) else None
        if best:
            moved = path.parent / Path(best).name
            return moved if moved.is_file() else Path(best)
    return None


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it there.

    Lightning's own goes through the system's temporary folder; if that is another file system, a
    run that is killed while copying leaves a cut-off file in the place of the previous one.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes ``checkpoint`` so that ``path`` is at any time the old file or the new one."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
