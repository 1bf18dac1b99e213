"""Which checkpoint ``--ckpt_path`` means, and how checkpoints are written."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_models.checkpoint import (
    Checkpoint,
    best_checkpoint,
    newest_checkpoint,
    place_of,
    read_checkpoint,
)
from training.errors import UserError


def find_checkpoint(asked: str, folders: Sequence[Path]) -> Checkpoint:
    """Returns the checkpoint that ``--ckpt_path`` names.

    Args:
        asked: a path; ``last``: the furthest whole checkpoint of the newest run below ``folders``;
            ``best``: the best one of that run.
        folders: searched with all their subfolders.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if asked not in ("last", "best"):
        return read_checkpoint(place_of(asked, "ckpt_path"))
    last = newest_checkpoint(folders)
    return last if asked == "last" else best_checkpoint(last, "ckpt_path=best")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint next to its place and renames it there.

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
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
            leftover.unlink(missing_ok=True)  # of a process that was killed while writing
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except (OSError, RuntimeError) as error:
            reason = _system_error(error)
            if reason is None:
                raise
            raise UserError(_not_written(target, reason)) from error
        finally:
            partial.unlink(missing_ok=True)


def _system_error(error: BaseException | None) -> OSError | None:
    """Returns the OSError that caused an error; torch makes RuntimeErrors of them."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _not_written(target: Path, reason: OSError) -> str:
    before = "the previous one is whole" if target.exists() else "there is no previous one"
    return (
        f"cannot write the checkpoint {target} ({reason.strerror or reason}); {before}. Make room, "
        "or choose another place with trainer.default_root_dir, and resume with --ckpt_path last"
    )
