"""Sharding of a network's parameters over devices."""

from typing import Any

from torch import nn


def shard(network: nn.Module, mesh: Any) -> None:
    """Shards each block, then the rest, with FSDP2 over the mesh's data-parallel axis.

    A network that has a field ``sharded`` is told: all ranks must then run as many blocks.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = mesh["data_parallel"]
    for block in getattr(network, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    if hasattr(network, "sharded"):
        network.sharded = True  # type: ignore[assignment]
