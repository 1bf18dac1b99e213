"""Kernels, keyed random generators, gradients in evaluation, checkpointing, sharded parameters.

A generator's stream depends on its key, not on earlier draws.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_models.layers.recording import is_recording

MatmulPrecision = Literal["highest", "high", "medium"]
MATMUL_PRECISION_HELP = (
    "Products of float32 matrices: highest in float32; high in TF32, several times faster on GPUs "
    "since Ampere, with relative errors up to 1e-3; medium in bf16. Products under autocast "
    "(bf16-mixed) are not affected."
)
CUDNN_ATTENTION_HELP = (
    "Whether attention may use cuDNN's kernels, which PyTorch prefers on recent GPUs. They are "
    "planned again for each shape and, before cuDNN 9.26, have nan gradients with masks, so they "
    "suit methods with one shape and no masks."
)


def choose_kernels(
    matmul_precision: MatmulPrecision | None = None, *, cudnn_attention: bool = False
) -> None:
    """Selects the kernels of this process; train.py, evaluate.py and benchmarks call it first.

    Args:
        matmul_precision: Precision of float32 matrix products. By default it is unchanged.
        cudnn_attention: Whether scaled_dot_product_attention may use cuDNN's kernels.
    """
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
    if matmul_precision is not None:
        torch.set_float32_matmul_precision(matmul_precision)


@functools.cache
def note_busy_cores() -> None:
    """Suggests OMP_NUM_THREADS=1 on stderr, once, if more programs run than there are cores.

    PyTorch's threads wait for each other at every operation. If other programs hold the cores, each
    wait lasts a time slice.
    """
    threads = torch.get_num_threads()
    if threads < 2 or not hasattr(os, "getloadavg"):
        return
    with contextlib.suppress(OSError):  # the load is unknown
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores:
            print(
                f"note: other programs keep the {cores} cores busy (load average {load:.1f}), and "
                f"{threads} threads of PyTorch that wait for each other can take 20 times as long "
                "as one; set OMP_NUM_THREADS=1 in front of the command",
                file=sys.stderr,
            )


def on_device(
    values: Tensor | float | Sequence[float],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Copies numbers or a tensor to the device without a synchronisation.

    A plain copy waits until the device has finished all earlier work.
    """
    if isinstance(values, int | float):
        return torch.full((), values, dtype=dtype, device=device)
    tensor = values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=dtype)
    from_host = tensor.device.type == "cpu"  # copies to the host must wait for their values
    return tensor.to(device, dtype, non_blocking=from_host)


@contextlib.contextmanager
def uncompiled(wanted: bool = True) -> Iterator[None]:
    """Runs compiled networks in eager mode, for calls whose shapes change all the time."""
    with torch.compiler.set_stance("force_eager") if wanted else contextlib.nullcontext():
        yield


def seeded_generator(*key: int) -> torch.Generator:
    """Returns a CPU generator whose stream is a pure function of ``key`` (64-bit integers).

    Different keys give independent streams, e.g. (seed, step) for draws that all ranks share, and
    (seed, sequence id) for draws that must not depend on batching.
    """
    entropy = [len(key)]  # two 32-bit words for each value, so that different keys differ
    for value in key:
        entropy += [value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF]
    state = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state & 0x7FFFFFFFFFFFFFFF)


# ---- gradients in scoring and decoding, for methods with gradient-based inference


@contextlib.contextmanager
def gradients_on() -> Iterator[None]:
    """Enables gradients, even inside ``no_grad`` or the trainer's inference mode.

    Tensors made in inference mode must pass through :func:`ordinary` before they are used.
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Puts a module in eval mode, and restores the mode of every submodule afterwards."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def ordinary(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch with copies of tensors that were made in inference mode.

    Such tensors cannot be saved for a backward pass.
    """
    return {
        key: value.clone() if torch.is_tensor(value) and value.is_inference() else value
        for key, value in batch.items()
    }


# ---- gradient checkpointing


def checkpoint_blocks(
    network: nn.Module, mode: bool | Literal["selective"], attention_dropout: float = 0.0
) -> None:
    """Enables activation checkpointing for all ``blocks`` of the network and its submodules.

    Calls with a cache (a keyword argument), with frozen weights, without gradients, or while
    statistics are recorded are not checkpointed.

    Args:
        network: Network, changed in place.
        mode: See ``SequenceConfig.gradient_checkpointing``.
        attention_dropout: Dropout probability on attention weights. If it is not 0, ``selective``
            also recomputes attention: a kept result would draw no mask in backward, and shift the
            masks of later dropouts.
    """
    if not mode:
        return
    options = {}
    if mode == "selective":
        kept = KEPT if attention_dropout else (*KEPT, "_scaled_dot_product_")
        policy = partial(_policy, kept)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for block in (b for part in network.modules() for b in getattr(part, "blocks", ())):
        # bound to the block, so that a deep copy of the network calls the copied blocks
        block.forward = MethodType(partial(_recomputed, options), block)


KEPT = ("mm", "addmm", "bmm", "baddbmm")
"""Prefixes of the names of operators whose results ``selective`` keeps."""


def _recomputed(options: dict[str, Any], block: Any, *args: Any, **kwargs: Any) -> Any:
    forward = MethodType(type(block).forward, block)
    cached = any(kwargs.get(key) is not None for key in ("cache", "past_key_values"))
    learns = torch.is_grad_enabled() and any(p.requires_grad for p in block.parameters())
    if cached or is_recording() or not learns:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _policy(
    kept: tuple[str, ...], context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    saves = op.__name__.startswith(kept)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


# ---- sharded parameters


class _WholeStep(nn.Module):
    """Module whose forward pass, to FSDP2, is any function that uses the network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()  # it binds its arguments, which FSDP2 would move to the device


class ShardedParameters:
    """A network's parameters, sharded over processes with FSDP2.

    To FSDP2 a training step is one forward pass, however often the network runs in it: parameters
    are gathered before the step, and each gradient is reduced once, after its backward pass. Ranks
    may therefore run the network differently often. Blocks that are separate units are gathered and
    freed one at a time, which needs less memory, but all ranks must run them equally often.

    Args:
        network: Network, with ``blocks`` if these are units.
        mesh: ``DeviceMesh`` of the processes that share the parameters. With two axes, the first is
            of replicas and the second of the processes that share each replica.
        by_block: Whether each block is a unit.
        gathered_dtype: Dtype of gathered parameters and computation if blocks are units.
            Defaults to the parameters' dtype. If blocks are not units, it is ignored, because a
            step uses each weight several times and would sum its gradients in this precision.
            Shards, their gradients, and sums of gradients over ranks keep the parameters' dtype.
    """

    def __init__(
        self,
        network: nn.Module,
        mesh: Any,
        *,
        by_block: bool,
        gathered_dtype: torch.dtype | None = None,
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(
            param_dtype=gathered_dtype if by_block else None,
            reduce_dtype=next(network.parameters()).dtype,
            cast_forward_inputs=False,  # rotary tables and biases of keys stay float32
        )
        blocks = tuple(getattr(network, "blocks", ())) if by_block else ()
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        root = _WholeStep(network)
        fully_shard(root, mesh=mesh, mp_policy=policy)
        self._root: Any = root
        self._blocks: tuple[Any, ...] = blocks
        self.whole = False
        """Whether ranks may hold more than their shards."""
        fill: Any = getattr(root, "set_reduce_scatter_unused_params", None)  # torch 2.13
        if fill is not None:
            fill(True)
        if mesh.ndim == 2:
            self._equal_replicas(mesh)

    @torch.no_grad()
    def _equal_replicas(self, mesh: Any) -> None:
        """Copies the first replica's weights to all, as ranks may have drawn different ones."""
        import torch.distributed as dist

        group = mesh.get_group(0)
        parameters: Any = self._root.parameters()
        for parameter in parameters:
            dist.broadcast(parameter.to_local(), dist.get_global_rank(group, 0), group=group)

    def step(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``compute(*arguments)``, a tensor whose backward pass reduces gradients.

        Before torch 2.13, every parameter must get a gradient on every rank, if only zeros.
        """
        if self.whole:  # after an evaluation that ended with an error
            self.spread()
        return self._root(partial(compute, *arguments))

    def gather(self) -> None:
        """Gathers all parameters on every rank until ``spread``; all ranks must call it.

        Ranks may then compute independently, with ``no_grad`` or gradients by inputs.
        """
        self.whole = True
        with torch.inference_mode(False):  # training uses the same tensors
            self._keep_blocks(True)
            self._root(self._gather_blocks)  # the root stays gathered after a forward pass

    def spread(self) -> None:
        """Frees the shards of other ranks."""
        self.whole = False
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
