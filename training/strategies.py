"""Sharding over all devices, as the configs name it."""

from lightning.pytorch.strategies import ModelParallelStrategy


class FullySharded(ModelParallelStrategy):
    """FSDP2 over every process of the run; a checkpoint is one file, as on one device.

    Lightning's own must be told how many processes there are, which a config file that fits any
    machine cannot know. The model shards itself in ``configure_model``.
    """

    def __init__(self, process_group_backend: str | None = None) -> None:
        """Chooses how processes talk.

        Args:
            process_group_backend: ``nccl`` or ``gloo``; null: by the device.
        """
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
        )

    def setup_environment(self) -> None:
        """Takes all processes of all nodes into the data-parallel axis of the mesh."""
        self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()
