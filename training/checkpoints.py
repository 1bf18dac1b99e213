"""Which checkpoint ``--ckpt_path`` means, and how checkpoints are written."""

import copy
import errno
import glob
import os
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint import HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

from callbacks.hooks import gather
from lightning_models import shards
from lightning_models.checkpoint import (
    Checkpoint,
    best_checkpoint,
    checkpoint_files,
    is_model_folder,
    newest_checkpoint,
    place_of,
    read_checkpoint,
    read_whole,
)
from training.errors import UserError

AUTO = "auto"
"""Value of ``--ckpt_path`` for the last checkpoint, and a new run where there is none yet."""


def find_checkpoint(
    ckpt_path: str, folders: Sequence[Path], verb: str = "fit", *, verifies: bool = True
) -> Checkpoint | None:
    """Returns the checkpoint that ``--ckpt_path`` names, or None if ``auto`` begins a new run.

    Args:
        ckpt_path: A path, or ``last`` for the furthest whole checkpoint of the newest run below
            ``folders``, ``best`` for the best one of that run, or ``auto`` for ``last`` if there is
            a checkpoint file.
        folders: Folders to search, with all their subfolders.
        verb: Verb of the command line; only ``fit`` can begin a run.
        verifies: See :func:`read_checkpoint`.

    Raises:
        ValueError: If there is none, or it cannot be read.
    """
    if ckpt_path == AUTO and verb == "fit":
        if not any(path for folder in folders for path in checkpoint_files(folder)):
            return None
        ckpt_path = "last"
    if ckpt_path not in ("last", "best", AUTO):
        return read_checkpoint(place_of(ckpt_path, "ckpt_path"), verifies=verifies)
    last = newest_checkpoint(folders, verifies=verifies)
    if ckpt_path != "best":
        return last
    return best_checkpoint(last, "ckpt_path=best", verifies=verifies)


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
            _remove_shards(target, but=checkpoint.get(shards.KEY, {}).get("folder"))
        except (OSError, RuntimeError) as error:
            reason = _system_error(error)
            if reason is None:
                raise
            raise UserError(_not_written(target, reason)) from error
        finally:
            partial.unlink(missing_ok=True)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Returns everything a checkpoint holds, also in parts that processes have written.

        All processes of a run call this together, and read the checkpoint that the first one has
        found: later ones do not verify parts before, and may have found a damaged one.
        """
        path = gather(path)[0]
        if "://" not in str(path) and is_model_folder(Path(path)):
            return read_whole(path)
        content: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return content if "://" in str(path) else shards.whole(Path(path), content, together=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint and the parts that processes have written of it."""
        super().remove_checkpoint(path)
        if "://" not in str(path):
            _remove_shards(Path(path), but=None)


def _remove_shards(target: Path, but: str | None) -> None:
    """Removes the folders of parts of a checkpoint file, but one; also those that a kill left."""
    for folder in target.parent.glob(f"{glob.escape(target.name)}.shards-*"):
        if folder.name != but:
            shutil.rmtree(folder, ignore_errors=True)


class ShardWriter:
    """Writes checkpoints in parts (:mod:`lightning_models.shards`), one after the other.

    Each rank writes its shards, and rank 0 then the file that names them. All ranks make one, and
    call its methods together.

    Args:
        file_writer: Writer of the file.
        in_background: Whether a thread writes copies of the shards, in memory of the CPU,
            while training goes on.
    """

    def __init__(self, file_writer: CheckpointIO, *, in_background: bool) -> None:
        self._file_writer, self._in_background = file_writer, in_background
        self._group = torch.distributed.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, content: dict[str, Any], path: Path) -> None:
        """Writes a checkpoint, or begins to, after the one before is written.

        Args:
            content: Nested dicts. DTensors in them become parts, the same ones on all ranks; the
                rest is taken from rank 0.
            path: The file, the same on all ranks.

        Raises:
            UserError: If this checkpoint, or the one before, cannot be written.
        """
        self.wait()
        rest, tensors = shards.take_out(content, lambda value: isinstance(value, DTensor))
        folder = [f"{path.name}.shards-{uuid.uuid4().hex[:8]}"]
        torch.distributed.broadcast_object_list(folder, group=self._group)
        rest[shards.KEY] = {"folder": folder[0], "tensors": shards.describe(tensors)}
        if self._in_background:  # the next step changes the originals in place
            rest = copy.deepcopy(rest)
            tensors = {p: t.detach().to("cpu", copy=True) for p, t in tensors.items()}
        self._running = self._thread.submit(self._write, rest, tensors, path)
        if not self._in_background:
            self.wait()

    def wait(self) -> None:
        """Waits until a checkpoint that was begun is written.

        Raises:
            UserError: If it cannot be written.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _write(
        self, rest: dict[str, Any], tensors: dict[shards.Place, DTensor], path: Path
    ) -> None:
        import torch.distributed.checkpoint as dcp

        folder = path.parent / rest[shards.KEY]["folder"]
        writer = _NamedParts(str(folder), save_distributed=True)
        state = {shards.name_of(key): tensor for key, tensor in tensors.items()}
        try:
            dcp.save(state, storage_writer=writer, process_group=self._group)
        except dcp.api.CheckpointException as error:
            shutil.rmtree(folder, ignore_errors=True)
            reasons = (_system_error(failure[0]) for failure in error.failures.values())
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is None:
                raise
            raise UserError(_not_written(path, reason), agreed=True) from error
        rest[shards.KEY]["sums"] = self._sums(folder, writer.names, path)
        failure: list[str | None] = [None]
        if torch.distributed.get_rank() == 0:
            try:
                self._file_writer.save_checkpoint(rest, path)
            except UserError as error:
                failure = [str(error)]
        torch.distributed.broadcast_object_list(failure, group=self._group)
        if failure[0] is not None:
            raise UserError(failure[0], agreed=True)

    def _sums(self, folder: Path, names: set[str], path: Path) -> dict[str, str]:
        """Returns the digests of all parts; each rank reads the parts that it has written.

        No rank lists the folder: on a network file system it may not see yet what others wrote.

        Raises:
            UserError: If one cannot be read; on all ranks.
        """
        written = {name: shards.sum_of(folder / name) for name in names}
        of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_ranks, written, group=self._group)
        sums = {name: value for each in of_ranks for name, value in each.items()}
        if not all(sums.values()):
            reason = OSError(errno.EIO, f"{folder} cannot be read back")
            raise UserError(_not_written(path, reason), agreed=True)
        return sums


class _NamedParts(HuggingFaceStorageWriter):
    """Writes this rank's tensors, and keeps the names of the files that it has written."""

    names: set[str]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written = super().write_data(plan, planner)
        self.names = {result.storage_data.relative_path for result in written.wait()}
        return written


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
