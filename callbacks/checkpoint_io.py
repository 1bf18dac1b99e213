"""Writing and loading of checkpoints, as single files or as parts written by several ranks."""

import copy
import errno
import glob
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint import HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from callbacks.hooks import gather
from lightning_models.checkpoint import (
    CheckpointError,
    is_model_folder,
    read_file,
    shards,
    write_file,
)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a file in the same folder and renames it.

    Lightning's class writes to the system's temporary folder; if that is another file system, a
    run that is killed while copying leaves a truncated file instead of the previous one.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint so that ``path`` is always either the old or the new file."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_file(target, checkpoint, sole=True)
            _remove_shards(target, keep=checkpoint.get(shards.KEY, {}).get("folder"))
        except (OSError, RuntimeError) as error:
            reason = _system_error(error)
            if reason is None:
                raise
            raise CheckpointError(_not_written(target, reason)) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Returns the content of a checkpoint, including parts that several processes wrote.

        It is collective: all processes of a run read the checkpoint that rank 0 has chosen,
        because the other ranks do not verify parts and may have chosen a damaged one.

        Args:
            path: A file, a model folder or a URL.
            map_location: Device of the tensors from a URL. Tensors of files stay on the CPU.
            weights_only: If False, the file may run code.
        """
        path = gather(path)[0]
        content: dict[str, Any]
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only)
        if weights_only is False and Path(path).is_file():
            content = super().load_checkpoint(path, weights_only=False)
        else:
            content = read_file(Path(path), mapped=False)
        return shards.whole(Path(path), content, together=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint and its parts."""
        super().remove_checkpoint(path)
        if "://" not in str(path):
            _remove_shards(Path(path), keep=None)


def _remove_shards(target: Path, keep: str | None) -> None:
    """Removes a checkpoint file's folders of parts except one, including folders of killed runs."""
    for folder in target.parent.glob(f"{glob.escape(target.name)}.shards-*"):
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)


class ShardWriter:
    """Writes checkpoints in parts (:mod:`lightning_models.checkpoint.shards`), one at a time.

    Each rank writes its shards, and then rank 0 writes the file that names them. Creating a writer
    and calling its methods is collective.

    Args:
        file_writer: Writer of the file.
        in_background: Whether a thread writes copies of the shards in CPU memory while training
            continues.
    """

    def __init__(self, file_writer: CheckpointIO, *, in_background: bool) -> None:
        self._file_writer, self._in_background = file_writer, in_background
        self._group = torch.distributed.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, content: dict[str, Any], path: Path) -> None:
        """Writes a checkpoint, or starts writing it, once the previous one is written.

        Args:
            content: Nested dicts. DTensors in them, the same ones on all ranks, become parts; other
                values come from rank 0.
            path: The file, the same on all ranks.

        Raises:
            CheckpointError: If this checkpoint, or the previous one, cannot be written.
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
        """Waits until the current checkpoint is written.

        Raises:
            CheckpointError: If it cannot be written.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _write(
        self, rest: dict[str, Any], tensors: dict[shards.KeyPath, DTensor], path: Path
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
            raise CheckpointError(_not_written(path, reason), agreed=True) from error
        rest[shards.KEY]["sums"] = self._sums(folder, writer.names, path)
        failure: list[str | None] = [None]
        if torch.distributed.get_rank() == 0:
            try:
                self._file_writer.save_checkpoint(rest, path)
            except CheckpointError as error:
                failure = [str(error)]
        torch.distributed.broadcast_object_list(failure, group=self._group)
        if failure[0] is not None:
            raise CheckpointError(failure[0], agreed=True)

    def _sums(self, folder: Path, names: set[str], path: Path) -> dict[str, str]:
        """Returns the digests of all parts; each rank reads the parts that it has written.

        No rank lists the folder: on a network file system other ranks' files may not be visible
        yet.
        """
        written = {name: shards.sum_of(folder / name) for name in names}
        of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_ranks, written, group=self._group)
        sums = {name: value for rank_sums in of_ranks for name, value in rank_sums.items()}
        if not all(sums.values()):
            reason = OSError(errno.EIO, f"{folder} cannot be read back")
            raise CheckpointError(_not_written(path, reason), agreed=True)
        return sums


class _NamedParts(HuggingFaceStorageWriter):
    """Writes this rank's tensors, and records the names of the written files."""

    names: set[str]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written = super().write_data(plan, planner)
        self.names = {result.storage_data.relative_path for result in written.wait()}
        return written


def load_sharded(
    path: Path, model: L.LightningModule, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """Loads a checkpoint into a sharded model and its optimisers, and returns its content.

    The checkpoint may come from any number of processes and any strategy. Loading is collective:
    each rank reads the parts that it needs.

    Args:
        path: The checkpoint's file, or a model folder, which has no state of optimisers.
        model: The module with parameters sharded by FSDP2.
        optimizers: The optimisers to restore, none in evaluation.

    Raises:
        CheckpointError: If it has no optimiser state, or its parameter groups differ.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    content: dict[str, Any] = read_file(path)
    if shards.KEY in content:
        parameter: Any = next(model.parameters())
        empty = partial(
            empty_dtensor, device_mesh=parameter.device_mesh, placements=parameter.placements
        )
        content = shards.whole(path, content, empty, together=True)
        model.load_state_dict(content["state_dict"], strict=model.strict_loading)
    else:
        options = StateDictOptions(full_state_dict=True, strict=model.strict_loading)
        set_model_state_dict(model, content["state_dict"], options=options)
    if is_model_folder(path):
        return content
    states = content.get("optimizer_states", ())
    if len(states) < len(optimizers):
        raise CheckpointError(
            f"{path} has only weights; resume from a checkpoint with the state of the optimiser"
        )
    for optimizer, state in zip(optimizers, states, strict=False):
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (state["param_groups"], optimizer.param_groups)
        ]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"{path}: its optimiser has groups of {sizes[0]} parameters, the config's has "
                f"{sizes[1]}; resume with the optimizer options it was trained with"
            )
        optimizer.load_state_dict(_in_shards(optimizer, state))
    return content


def _in_shards(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimiser's state with moments sharded like their parameters."""
    groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
    pairs = (zip(saved["params"], current["params"], strict=True) for saved, current in groups)
    parameters: dict[int, Any] = {idx: p for group in pairs for idx, p in group}

    def cut(idx: int, value: Any) -> Any:
        parameter = parameters[idx]
        is_moment = isinstance(value, torch.Tensor) and value.shape == parameter.shape
        if not is_moment or isinstance(value, DTensor):
            return value
        # every rank has read the file, so nothing is sent; the copy releases its memory
        return distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        ).clone()

    moments = {
        idx: {key: cut(idx, value) for key, value in moments.items()}
        for idx, moments in state["state"].items()
    }
    return {**state, "state": moments}


def _system_error(error: BaseException | None) -> OSError | None:
    """Returns the OSError that caused an error, which torch may wrap in a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _not_written(target: Path, reason: OSError) -> str:
    state = "the previous one is intact" if target.exists() else "there is no previous one"
    return (
        f"cannot write the checkpoint {target} ({reason.strerror or reason}); {state}. Make room, "
        "or choose another folder with trainer.default_root_dir, and resume with --ckpt_path last"
    )
