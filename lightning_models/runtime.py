"""Random generators with keys, gradients within evaluation, sharded parameters.

A generator's stream depends on what it is for, not on what was drawn before.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


def seeded_generator(*key: int) -> torch.Generator:
    """Returns a CPU generator whose stream is a pure function of ``key`` (64-bit integers).

    Different keys give independent streams: (seed, step) for draws that all ranks must share,
    (seed, sequence id) for draws that must not depend on batching.
    """
    words = [len(key)]  # each number as two words of 32 bits: no two keys share their words
    for number in key:
        words += [number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF]
    state = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state & 0x7FFFFFFFFFFFFFFF)


# ---- gradients within scoring and decoding, for methods that infer by gradient


@contextlib.contextmanager
def gradients_on() -> Iterator[None]:
    """Turns gradients on, whatever is around: ``no_grad``, or the trainer's inference mode.

    What was made in inference mode outside must pass through :func:`ordinary` before it is used.
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Puts a module and all below it in eval mode, each to return to the mode it was in."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def ordinary(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch with copies in place of tensors that inference mode has made.

    Such tensors can't be saved for a backward pass.
    """
    return {
        key: value.clone() if torch.is_tensor(value) and value.is_inference() else value
        for key, value in batch.items()
    }


# ---- sharded parameters


def shard(network: nn.Module, mesh: Any) -> None:
    """Shards each block, then the rest, with FSDP2 over the mesh's data-parallel axis.

    Sets a network's field ``sharded``, if it has one: all ranks must then run as many blocks.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = mesh["data_parallel"]
    for block in getattr(network, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    if hasattr(network, "sharded"):
        network.sharded = True  # type: ignore[assignment]
