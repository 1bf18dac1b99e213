"""Kernels, random generators with keys, gradients in evaluation, checkpointing, sharded parameters.

A generator's stream depends on what it is for, not on what was drawn before.
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
    "(bf16-mixed) stay as they are."
)
CUDNN_ATTENTION_HELP = (
    "Whether attention may take cuDNN's kernels, which PyTorch prefers on recent GPUs. They plan "
    "anew for each shape and, before cuDNN 9.26, have nan gradients with masks; of use to methods "
    "of one shape without masks."
)


def choose_kernels(
    matmul_precision: MatmulPrecision | None = None, *, cudnn_attention: bool = False
) -> None:
    """Sets which kernels this process takes; train.py, evaluate.py and benchmarks begin with it.

    Args:
        matmul_precision: Precision of products of float32 matrices. None leaves it unchanged.
        cudnn_attention: Whether scaled_dot_product_attention may take the kernels of cuDNN.
    """
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
    if matmul_precision is not None:
        torch.set_float32_matmul_precision(matmul_precision)


@functools.cache
def note_busy_cores() -> None:
    """Says on stderr, once, what to set where more programs run than there are cores.

    Threads of PyTorch wait for each other at every operation; where other programs hold the cores,
    each of these waits lasts a time slice.
    """
    threads = torch.get_num_threads()
    if threads < 2 or not hasattr(os, "getloadavg"):
        return
    with contextlib.suppress(OSError):  # not known
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
    """Returns numbers of the host, or a tensor, on the device, and does not wait for its queue.

    A plain copy waits until the device has done all that was asked of it before.
    """
    if isinstance(values, int | float):
        return torch.full((), values, dtype=dtype, device=device)
    tensor = values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=dtype)
    leaves = tensor.device.type == "cpu"  # in the other direction values would not be there yet
    return tensor.to(device, dtype, non_blocking=leaves)


@contextlib.contextmanager
def uncompiled(wanted: bool = True) -> Iterator[None]:
    """Runs compiled networks as plain code, for work whose shapes change from call to call."""
    with torch.compiler.set_stance("force_eager") if wanted else contextlib.nullcontext():
        yield


def seeded_generator(*key: int) -> torch.Generator:
    """Returns a CPU generator whose stream is a pure function of ``key`` (64-bit integers).

    Different keys give independent streams: (seed, step) for draws that all ranks must share,
    (seed, sequence id) for draws that must not depend on batching.
    """
    entropy = [len(key)]  # two 32-bit words for each value, so that different keys differ
    for value in key:
        entropy += [value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF]
    state = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
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


def checkpoint_blocks(
    network: nn.Module, mode: bool | Literal["selective"], attention_dropout: float = 0.0
) -> None:
    """Has all ``blocks`` of the network and its parts compute their activations again in backward.

    Calls with a cache (an argument by keyword), with frozen weights, without gradients, or while
    statistics are recorded, are left as they are.

    Args:
        network: Network, changed in place.
        mode: See ``SequenceConfig.gradient_checkpointing``.
        attention_dropout: Of the blocks. With it ``selective`` computes attention again: what is
            kept draws nothing then, and later dropouts would draw other masks than before.
    """
    if not mode:
        return
    options = {}
    if mode == "selective":
        kept = KEPT if attention_dropout else (*KEPT, "_scaled_dot_product_")
        policy = partial(_policy, kept)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for block in (b for part in network.modules() for b in getattr(part, "blocks", ())):
        # bound, so that a copy of the network calls its own blocks
        block.forward = MethodType(partial(_recomputed, options), block)


KEPT = ("mm", "addmm", "bmm", "baddbmm")
"""Operators, by the beginning of their names, whose results ``selective`` keeps."""


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
    """What FSDP2 takes for a forward pass: anything that is computed with the network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Returns ``compute()``: arguments of its own would be moved to the device."""
        return compute()


class ShardedParameters:
    """A network's parameters, spread over processes with FSDP2.

    To FSDP2 a training step is one forward pass, however often the network runs in it: parameters
    are gathered before the step, and each gradient is reduced once, after its backward pass. Ranks
    may run the network differently often then. Blocks that are units of their own are gathered and
    freed one at a time, which needs less memory; all ranks must run them equally often.

    Args:
        network: With ``blocks``, where those are to be units.
        mesh: A ``DeviceMesh`` of processes that share the parameters; of two axes: of
            replicas, and of the processes that share each.
        by_block: Whether each block is a unit.
        gathered_dtype: In which parameters are gathered and computed with, where blocks are
            units; None: their own. Without such units it is always their own, because a step
            there uses each weight several times and would add up its gradients in that
            precision. Parts, their gradients, and sums of gradients over ranks keep the
            parameters' own.
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
        """Whether ranks may hold more than their parts."""
        fill: Any = getattr(root, "set_reduce_scatter_unused_params", None)  # torch 2.13
        if fill is not None:
            fill(True)
        if mesh.ndim == 2:
            self._equal_replicas(mesh)

    @torch.no_grad()
    def _equal_replicas(self, mesh: Any) -> None:
        """Gives all replicas the weights of the first, as ranks may have drawn different ones."""
        import torch.distributed as dist

        group = mesh.get_group(0)
        for parameter in self._root.parameters():
            own: Any = parameter
            dist.broadcast(own.to_local(), dist.get_global_rank(group, 0), group=group)

    def step(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``compute(*arguments)``, a tensor whose backward pass reduces gradients.

        Every parameter must get a gradient on every rank before torch 2.13, zeros included.
        """
        if self.whole:  # an evaluation that an error has ended
            self.spread()
        return self._root(partial(compute, *arguments))

    def gather(self) -> None:
        """Makes all parameters whole on every rank until they are spread; all ranks must call it.

        Ranks may then compute what they like, with ``no_grad`` or gradients by inputs.
        """
        self.whole = True
        with torch.inference_mode(False):  # training uses the same memory
            self._keep_blocks(True)
            self._root(self._gather_blocks)  # the root stays gathered after a forward pass

    def spread(self) -> None:
        """Frees the parts of other ranks."""
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
