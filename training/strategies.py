"""FSDP2 over all processes of a run, and the number of processes of a strategy."""

from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from callbacks.checkpoint_io import ShardWriter, load_sharded
from lightning_models.base import OTHER_SHARDING
from lightning_models.checkpoint import shards
from training.errors import UserError


class FullySharded(ModelParallelStrategy):
    """FSDP2 over all processes of the run, or HSDP, with checkpoints as on one device.

    Lightning's strategy takes the number of processes as an argument, which a machine-independent
    config cannot know. The model shards itself in ``configure_model``.

    Args:
        shard_size: Number of processes that share one copy of the parameters, such as the 8 devices
            of a node. Groups of that size are replicas of each other (HSDP). Null means all.
        process_group_backend: ``nccl`` or ``gloo``. Null chooses by the device.
        sharded_checkpoints: If false, rank 0 writes the whole checkpoint in one file. If true,
            every rank writes its part into a folder next to the file. With ``in_background``,
            threads write the parts while training continues with the next step.
        gathers_in_bf16: Whether, under the precision ``bf16-mixed``, parameters of methods that
            gather block by block are gathered and computed with in bfloat16, by FSDP2's
            ``MixedPrecisionPolicy``: half the bytes, and residual streams in bfloat16. If false,
            they are gathered in float32, and autocast casts them as on one device. Each rank's
            part of weights and moments, and gradients' sums over ranks, are float32 either way.

    Raises:
        ValueError: If ``shard_size`` is below 1.
    """

    def __init__(
        self,
        shard_size: int | None = None,
        process_group_backend: str | None = None,
        sharded_checkpoints: bool | Literal["in_background"] = False,
        gathers_in_bf16: bool = True,
    ) -> None:
        if shard_size is not None and shard_size < 1:
            raise ValueError(f"shard_size ({shard_size}) must be at least 1, or null for all")
        self.shard_size = shard_size
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=bool(sharded_checkpoints),
            process_group_backend=process_group_backend,
        )
        self.sharded_checkpoints = sharded_checkpoints
        self.gathers_in_bf16 = gathers_in_bf16
        self._writer: ShardWriter | None = None

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """Dtype of gathered parameters, or None to keep their dtype."""
        mixed = self.precision_plugin.precision == "bf16-mixed"
        return torch.bfloat16 if mixed and self.gathers_in_bf16 else None

    def setup_environment(self) -> None:
        """Builds the mesh over all processes, with one axis or with axes for replicas and shards.

        Raises:
            ValueError: If ``shard_size`` does not divide the number of processes.
        """
        world = self._data_parallel_size = self.num_processes * self.num_nodes
        size = self.shard_size or world
        if world % size:
            raise ValueError(f"shard_size ({size}) must divide the number of processes ({world})")
        super().setup_environment()
        if size < world:
            axes = {"replicas": world // size, "shards": size}
            mesh = init_device_mesh(
                self.root_device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
            )
            assert self.lightning_module is not None
            self.lightning_module._device_mesh = mesh

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimiser's state, numbered as on one device; moments are DTensors."""
        return Strategy.optimizer_state(self, optimizer)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Writes one file, or parts and a file that names them; all ranks must call this."""
        path = Path(self.broadcast(filepath))
        if self.sharded_checkpoints:
            if self._writer is None:
                background = self.sharded_checkpoints == "in_background"
                self._writer = ShardWriter(self.checkpoint_io, in_background=background)
            self._writer.save(checkpoint, path)
            return
        rest, left = shards.take_out(checkpoint, lambda value: isinstance(value, DTensor))
        for key, tensor in left.items():
            whole = tensor.full_tensor()
            if self.is_global_zero:  # the writing rank
                shards.put_back(rest, {key: whole.cpu()}, path)
        super().save_checkpoint(rest, path, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint after any pending write has finished."""
        if self._writer is not None:
            self._writer.wait()
        super().remove_checkpoint(filepath)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads weights and optimisers, see `load_sharded`; returns the content."""
        path = Path(self.broadcast(checkpoint_path))
        if self._writer is not None:
            self._writer.wait()
        assert self.lightning_module is not None
        return load_sharded(path, self.lightning_module, self.optimizers)

    def teardown(self) -> None:
        """Waits for a pending write of a checkpoint."""
        try:
            if self._writer is not None:
                self._writer.wait()
        finally:
            self._writer = None
            super().teardown()


def count_devices(devices: Any) -> int:
    """Returns the number of devices per node in ``trainer.devices``."""
    if isinstance(devices, list):
        return len(devices)
    text = str(devices)
    if text in ("auto", "-1"):
        return max(1, torch.cuda.device_count())
    return len([part for part in text.split(",") if part.strip()]) if "," in text else int(text)


def count_sharing(strategy: Any, devices: int) -> int:
    """Returns the number of processes that share one copy of the parameters.

    Raises:
        UserError: If ``fit`` rejects the strategy, or the processes cannot be divided evenly.
    """
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if name in OTHER_SHARDING or name.startswith(("fsdp", "deepspeed")):
        raise UserError(
            f"trainer.strategy ({name}): parameters are sharded by training.FullySharded only "
            "(configs/trainer/fsdp.yaml)"
        )
    size = 1
    if isinstance(strategy, FullySharded):
        size = strategy.shard_size or devices
    if devices % size:
        raise UserError(f"shard_size ({size}) must divide the number of processes ({devices})")
    return size
