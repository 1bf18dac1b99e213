"""Random generators with keys, gradients within evaluation, checkpointing, sharded parameters.

A generator's stream depends on what it is for, not on what was drawn before.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_models.layers.recording import recorded


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


# ---- gradient checkpointing


def checkpoint_blocks(network: nn.Module, how: bool | Literal["selective"]) -> None:
    """Has each of the network's ``blocks`` compute its activations again in the backward pass.

    Calls with a cache, with frozen weights, without gradients, or while statistics are recorded are
    left as they are.

    Args:
        network: changed in place.
        how: see ``SequenceConfig.gradient_checkpointing``.
    """
    if not how:
        return
    options = {}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in getattr(network, "blocks", ()):
        # bound, so that a copy of the network calls its own blocks
        block.forward = MethodType(partial(_recomputed, options), block)


def _recomputed(options: dict[str, Any], block: Any, *args: Any, **kwargs: Any) -> Any:
    forward = MethodType(type(block).forward, block)
    cached = any(kwargs.get(key) is not None for key in ("cache", "past_key_values"))
    learns = torch.is_grad_enabled() and any(p.requires_grad for p in block.parameters())
    if cached or recorded() or not learns:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


KEPT = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_")


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op.__name__.startswith(KEPT)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# ---- sharded parameters


class _WholeStep(nn.Module):
    """What FSDP2 takes for a forward pass: anything that is computed with the network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``compute(*arguments)``."""
        return compute(*arguments)


class ShardedParameters:
    """A network's parameters, spread over processes with FSDP2.

    To FSDP2 a training step is one forward pass, however often the network runs in it: parameters
    are gathered before the step, and each gradient is reduced once, after its backward pass. Ranks
    may run the network differently often then. Blocks that are units of their own are gathered and
    freed one at a time, which needs less memory; all ranks must run them equally often.
    """

    def __init__(self, network: nn.Module, mesh: Any, *, by_block: bool) -> None:
        """Shards the network, in place.

        Args:
            network: with ``blocks``, where those are to be units.
            mesh: a ``DeviceMesh`` of processes that share the parameters; of two axes: of
                replicas, and of the processes that share each.
            by_block: whether each block is a unit.
        """
        from torch.distributed.fsdp import fully_shard

        blocks = tuple(getattr(network, "blocks", ())) if by_block else ()
        for block in blocks:
            fully_shard(block, mesh=mesh)
        root = _WholeStep(network)
        fully_shard(root, mesh=mesh)
        self._root: Any = root
        self._blocks: tuple[Any, ...] = blocks

    def step(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``compute(*arguments)``, a tensor whose backward pass reduces gradients."""
        return self._root(compute, *arguments)

    def gather(self) -> None:
        """Makes all parameters whole on every rank until they are spread; all ranks must call it.

        Ranks may then compute what they like, with ``no_grad`` or gradients by inputs.
        """
        with torch.inference_mode(False):  # training uses the same memory
            self._keep_blocks(True)
            self._root(self._gather_blocks)  # the root stays gathered after a forward pass

    def spread(self) -> None:
        """Frees the parts of other ranks."""
        with torch.inference_mode(False):
            self._keep_blocks(False)
            for unit in (*self._blocks, self._root):
                unit.reshard()

    def _gather_blocks(self) -> None:
        for block in self._blocks:
            block.unshard()

    def _keep_blocks(self, keep: bool) -> None:
        for block in self._blocks:
            block.set_reshard_after_forward(not keep)
            block.set_reshard_after_backward(not keep)
