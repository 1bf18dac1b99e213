"""Memory, time and communication of a training step that is traced, not run.

The step of any method (loss, backward pass, optimiser) runs on tensors without values
(``FakeTensorMode``), while torch's own ``MemTracker`` or ``FSDPMemTracker`` adds up what each
operator allocates. What a step computes from the batch alone (lengths, masks, indices, drawn
numbers of passes) keeps its values, since those decide shapes in some methods: integers and
booleans that depend on no weight are computed for real. A shape that depends on weights, such as
how many streams a threshold keeps, has no answer without them: then the most that a step may keep
is counted, and the estimate says so (``at_most``).

Everything is traced on fake CPU tensors, as torch without CUDA refuses autograd on fake GPU ones.
Operators, shapes and dtypes are those of a GPU but for attention kernels (torch's flash kernel of
the CPU keeps the same tensors) and for what the allocator of a GPU adds by rounding.
"""

import contextlib
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.harness import PEAKS, objective
from lightning_models import LanguageModel
from lightning_models.optim import build_optimizer
from lightning_models.output_layer import CHUNK_ROWS
from lightning_models.runtime import ShardedParameters

GPUS_PER_NODE = 8


class Gpu(NamedTuple):
    """What a GPU can do.

    Attributes:
        flops: Dense bf16 FLOP/s.
        memory: Bytes.
        bandwidth: Of its memory, bytes/s.
        link: To GPUs of the same node, bytes/s in each direction.
        network: To other nodes, a GPU's share, bytes/s in each direction.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float


GPUS = {
    "a100": Gpu(PEAKS["A100"], 80e9, 2.04e12, 300e9, 25e9),
    "h100": Gpu(PEAKS["H100"], 80e9, 3.35e12, 450e9, 50e9),
    "h200": Gpu(PEAKS["H200"], 141e9, 4.8e12, 450e9, 50e9),
}
"""By data sheets: SXM modules, NVLink, and one InfiniBand port (200 or 400 Gbit/s) a GPU."""


class Transfer(NamedTuple):
    """A kind of collective operation.

    Attributes:
        operator: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        ranks: How many take part.
        within_node: Whether they are GPUs of one node.
    """

    operator: str
    ranks: int
    within_node: bool

    def sent(self, payload: float) -> float:
        """Returns the bytes that a rank sends, by the ring algorithm.

        Args:
            payload: bytes of the whole tensor.
        """
        rounds = 2 if self.operator == "all_reduce" else 1
        return rounds * payload * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Estimate:
    """What a training step of one micro-batch needs on each GPU.

    Attributes:
        parameters: Of the whole network, those included that are not trained.
        trained: Parameters that have gradients.
        parts: Bytes at the moment of the highest sum, by what they are for.
        held: Bytes before the step: weights, moments, batch, and gradients that are kept.
        floor: Seconds in which a GPU does every operator at its peak, one after the other.
        transfers: Payload bytes by kind of collective.
        at_most: Whether shapes depend on weights; the most that a step may keep is counted then.
    """

    parameters: int
    trained: int
    parts: dict[str, float]
    held: float
    floor: float
    transfers: Mapping[Transfer, float]
    at_most: bool

    @property
    def peak(self) -> float:
        """Most bytes at a time."""
        return sum(self.parts.values())

    def continued(self, more: "Estimate", times: float) -> "Estimate":
        """Returns the estimate that lies ``times`` as far beyond ``more`` as that beyond this one.

        Every figure is taken to grow along a straight line, as where equal computations, each of
        which frees its graph, follow one another.
        """

        def line(here: float, there: float) -> float:
            return there + times * (there - here)

        return Estimate(
            parameters=more.parameters,
            trained=more.trained,
            parts={part: line(self.parts.get(part, 0), size) for part, size in more.parts.items()},
            held=line(self.held, more.held),
            floor=line(self.floor, more.floor),
            transfers={
                kind: line(self.transfers.get(kind, 0), size)
                for kind, size in more.transfers.items()
            },
            at_most=more.at_most,
        )

    def communication(self, gpu: Gpu) -> float:
        """Returns the seconds that collectives take at the peak rates of links."""
        return sum(
            kind.sent(payload) / (gpu.link if kind.within_node else gpu.network)
            for kind, payload in self.transfers.items()
        )


# ---- tensors without values


FILLS = {
    "zeros_like": 0,
    "new_zeros": 0,
    "ones_like": 1,
    "new_ones": 1,
    "empty_like": 0,
    "new_empty": 0,
    "full_like": None,
    "new_full": None,
}
"""Operators that take but a shape of their tensor, and what they fill; None: their argument."""


class _BatchValues(TorchDispatchMode):
    """Computes integers and booleans that depend on no weight for real, the rest without values."""

    def __init__(self, choices: bool) -> None:
        """Begins.

        Args:
            choices: whether choices that depend on weights are made up, see ``_made_up``; else
                they have no values, and it is an error where a shape depends on them.
        """
        super().__init__()
        self._choices = choices
        self._unknown = WeakIdKeyDictionary()  # storages that something unknown was written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        known = [t for t in tensors if not isinstance(t, FakeTensor)]
        if len(known) == len(tensors) and not any(map(self._is_unknown, known)):
            if tensors or not _result_dtype(func, args, kwargs).is_floating_point:
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        if not self._choices:
            self._note_writes(func, args, kwargs)
            if any(map(self._is_unknown, known)) and torch.Tag.data_dependent_output in func.tags:
                raise DataDependentOutputException(func)
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in FILLS and not result.dtype.is_floating_point:
            value = FILLS[name]
            with unset_fake_temporarily():  # of the shape of something unknown, but known itself
                filled = args[-1] if value is None else value
                return torch.full(result.shape, filled, dtype=result.dtype)
        if not self._choices or func._schema.is_mutable or func.is_view:
            return result
        return tree_map_only(FakeTensor, functools.partial(_made_up, func, args, kwargs), result)

    def _is_unknown(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._unknown

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Remembers known tensors that this operator overwrites with unknown values."""
        if not func._schema.is_mutable:
            return
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = given.get(argument.name)
            if written and isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                self._unknown[value.untyped_storage()] = True


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in nested sequences and dicts; faster than torch's general tree."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _made_up(func: Any, args: Any, kwargs: Any, result: FakeTensor) -> Tensor:
    """Returns a result with values, where it is a choice: the most that a step may keep.

    Every comparison holds, and of candidates that are ranked the first ones are the best.
    """
    if result.dtype.is_floating_point or result.dtype.is_complex:
        return result
    with unset_fake_temporarily():
        if result.dtype == torch.bool:
            return torch.ones(result.shape, dtype=torch.bool)
        if func.overloadpacket.__name__ not in ("sort", "topk", "argsort"):
            return torch.zeros(result.shape, dtype=result.dtype)
        places = {a.name: n for n, a in enumerate(func._schema.arguments)}
        place = places["dim"]
        dim = kwargs.get("dim", args[place] if len(args) > place else -1) % result.dim()
        ranks = torch.arange(result.shape[dim], dtype=result.dtype)
        shape = [-1 if n == dim else 1 for n in range(result.dim())]
        return ranks.view(shape).expand(result.shape).contiguous()


def _result_dtype(func: Any, args: Any, kwargs: Any) -> torch.dtype:
    """Returns the dtype of what an operator without tensors among its arguments makes."""
    asked: torch.dtype | None = kwargs.get("dtype")
    if asked is not None:
        return asked
    name = func.overloadpacket.__name__
    if name.startswith(("randint", "randperm")):
        return torch.int64
    if name in ("arange", "full", "scalar_tensor"):
        numbers = args[1:] if name == "full" else args
        return torch.result_type(torch.zeros(1, dtype=torch.bool), sum(numbers))
    return torch.get_default_dtype()


@contextlib.contextmanager
def _without_values(choices: bool) -> Iterator[None]:
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        # copying a module asks each tensor for its address, which a fake one has not
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with _BatchValues(choices):
            yield


def _renewed(network: nn.Module) -> None:
    """Gives the network parameters of their own, as views of fake copies hide their storage."""
    new: dict[Tensor, nn.Parameter] = {}
    for module in network.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if old not in new:
                    new[old] = nn.Parameter(torch.empty_like(old), old.requires_grad)
                module._parameters[name] = new[old]


# ---- what is counted

LOGITS = "logits"
PARTS = {
    "Parameter": "weights",
    "Buffer": "weights",
    "Sharded Param": "weights",
    "Unsharded Param": "gathered",
    "All Gather": "gathered",
    "Reduce Scatter": "gathered",
    "Gradient": "gradients",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "Activation": "activations",
    "Temp": "activations",
    LOGITS: LOGITS,
    "Optstate": "optimiser",
    "OptState": "optimiser",
    "Other": "batch",
    "Inputs": "batch",
}
"""Names of the two trackers' categories."""


def count_transfer(
    transfers: Counter[Transfer], func: Any, result: Any, args: Any, kwargs: Any
) -> None:
    """Adds the payload of a collective operation that is dispatched; waiting for one has none."""
    if func in sync_ops:
        return
    ranks = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
    nodes = {rank // GPUS_PER_NODE for rank in ranks}
    name = func.overloadpacket.__name__
    operator = next(n for n in ("gather", "scatter", "reduce") if n in name)
    operator = {"gather": "all_gather", "scatter": "reduce_scatter"}.get(operator, "all_reduce")
    payload = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
    transfers[Transfer(operator, len(ranks), len(nodes) == 1)] += payload


class _NoModules:
    """Stands in for the trackers' ``ModTracker``.

    Statistics by module are not asked for, take most of the time, and its hooks fail where weights
    are frozen and gradients go to latent vectors.
    """

    parents: frozenset[str] = frozenset()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def register_user_hooks(self, *_: object) -> None:
        """No module is watched."""

    def clear_user_hooks(self) -> None:
        """No module is watched."""

    def get_known_fqn(self, module: nn.Module) -> str:
        """Returns a name, which the trackers ask for and only print."""
        return type(module).__name__

    @property
    def is_bw(self) -> bool:
        """Whether a backward pass runs."""
        return torch._C._current_graph_task_id() != -1


class _Counts(MemTracker):
    """Adds to a tracker: logits as a part, the roofline's seconds, collectives.

    Mixed into both trackers.
    """

    def prepare(self, rows: set[int], gpu: Gpu) -> None:
        """Begins to count.

        Args:
            rows: of output matrices: a tensor whose last dimension is one of them holds logits.
            gpu: whose seconds are counted.
        """
        self._mod_tracker = _NoModules()  # type: ignore[assignment]
        self._ref_class = [*self._ref_class, LOGITS]  # type: ignore[assignment]
        self.rows, self.gpu = rows, gpu
        self.floor, self.transfers = 0.0, Counter[Transfer]()

    def watch_gradients(self, network: nn.Module) -> None:
        """Has gradients of weights counted as such once they are whole.

        The tracker's own hooks would keep a gradient alive that autograd could else hand over.
        """

        def count(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._update_and_maybe_create_winfos(parameter.grad, _MemRefType.GRAD)

        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(count)

    def _track(self, reftype: Any, t: Tensor) -> None:
        if t.dim() and t.shape[-1] in self.rows and reftype.value in ("Activation", "Temp"):
            reftype = LOGITS
        super()._track(reftype, t)

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, snapshot in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < snapshot["Total"]:
                self._peak_mem[device] = snapshot["Total"]
                self._peak_mem_snap[device] = dict(snapshot)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented and not func.is_view:
            if func in collective_ops:
                count_transfer(self.transfers, func, result, args, kwargs or {})
            else:
                self.floor += _seconds(func, result, args, kwargs or {}, self.gpu)
        return result

    def parts(self, which: str) -> dict[str, float]:
        """Returns bytes by part, ``current`` ones or those of the ``peak``."""
        found: Counter[str] = Counter()
        for snapshot in self.get_tracker_snapshot(which).values():
            for key, size in snapshot.items():
                name = getattr(key, "value", key)
                if name != "Total":
                    found[PARTS[name]] += size
        return dict(found)


class _WholeTracker(_Counts):
    """Of parameters that each process holds whole."""


class _ShardedTracker(_Counts, FSDPMemTracker):
    """Of parameters that FSDP2 has spread."""


def _seconds(func: Any, result: Any, args: Any, kwargs: Any, gpu: Gpu) -> float:
    """Returns the longer of an operator's time for its FLOPs and for its bytes (roofline)."""
    outputs = _tensors(result)
    tensors = _tensors((args, kwargs)) + outputs
    traffic = sum(t.numel() * t.element_size() for t in tensors if 0 not in t.stride())
    flops = _flops(func, result, args, kwargs)
    slower = 2 if outputs and outputs[0].dtype == torch.float32 else 1  # TF32
    return max(slower * flops / gpu.flops, traffic / gpu.bandwidth)


def _flops(func: Any, result: Any, args: Any, kwargs: Any) -> float:
    name = func.overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":  # not registered
        return float(sdpa_flop_count(*(t.shape for t in args[:3])))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return float(sdpa_backward_flop_count(*(t.shape for t in args[:4])))
    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


# ---- the step


class Root(nn.Module):
    """A network whose forward pass is any function that uses it."""

    def __init__(self, network: nn.Module) -> None:
        """Holds the network."""
        super().__init__()
        self.network = network

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """Returns what ``compute`` does."""
        return compute()


def estimate(
    build: Callable[[], LanguageModel],
    batch: dict[str, Any],
    *,
    gpu: Gpu = GPUS["h100"],
    on_gpu: bool = True,
    mesh: tuple[int, ...] = (),
    keeps_gradients: bool = False,
) -> Estimate:
    """Returns what a step of one micro-batch needs once moments exist.

    Args:
        build: returns a model with its network, in training mode. It is called among tensors
            without values, so that a network of any size takes no memory.
        batch: real tensors on the CPU.
        gpu: for seconds.
        on_gpu: whether the loss runs under bf16 autocast with shared parameters gathered in
            bfloat16, and the output layer takes chunks of a GPU's size; else float32, as on a CPU.
        mesh: processes that share parameters (FSDP2); two numbers: replicas, and processes that
            share each (HSDP). Empty: each process holds all of them.
        keeps_gradients: whether gradients exist before the step: of micro-batches before this one,
            or in DDP's buckets.
    """
    options: dict[str, Any] = {"gpu": gpu, "on_gpu": on_gpu, "keeps_gradients": keeps_gradients}
    chunks = {"cpu": CHUNK_ROWS["cuda"]} if on_gpu else {}
    with mock.patch.dict(CHUNK_ROWS, chunks), _pretended(mesh) as pretended:
        try:
            return _trace(build, batch, pretended, choices=False, **options)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return _trace(build, batch, pretended, choices=True, **options)


def _trace(
    build: Callable[[], LanguageModel],
    batch: dict[str, Any],
    mesh: Any,
    *,
    choices: bool,
    gpu: Gpu,
    on_gpu: bool,
    keeps_gradients: bool,
) -> Estimate:
    with _without_values(choices):
        with mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor):
            model = build()  # that initialisation draws again until values fit
        network = model.network
        assert network is not None
        _renewed(network)
        parameters = sum(p.numel() for p in network.parameters())
        trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
        rows = {m.weight.shape[0] for m in network.modules() if isinstance(m, nn.Embedding)}
        dtype = torch.bfloat16 if on_gpu else None
        run = sharded_run(model, mesh, dtype) if mesh is not None else Root(network)
        exempt = model.no_decay_parameters()
        optimizer = build_optimizer(network, model.optimizer_config, no_decay=exempt)
        _make_moments(optimizer)
        if not keeps_gradients:
            optimizer.zero_grad()
        tracker = _tracker(run, network, optimizer, batch, rows, gpu)
        with tracker:
            if mesh is None:
                tracker.watch_gradients(network)
            held = sum(tracker.parts("current").values())
            with torch.autocast("cpu", torch.bfloat16, enabled=on_gpu):
                value = run(functools.partial(objective, model, batch))
            value.backward()
            optimizer.step()
    return Estimate(
        parameters=parameters,
        trained=trained,
        parts=tracker.parts("peak"),
        held=held,
        floor=tracker.floor,
        transfers=tracker.transfers,
        at_most=choices,
    )


def sharded_run(model: LanguageModel, mesh: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """Returns a ``Root`` of the model's network, whose parameters FSDP2 spreads over the mesh.

    ``dtype`` is the one in which they are gathered; None: their own.
    """
    assert model.network is not None
    sharded = ShardedParameters(
        model.network, mesh, by_block=model.shards_blocks, gathered_dtype=dtype
    )
    model._sharded = sharded
    root: nn.Module = sharded._root
    return root


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimiser make its state, as of a run that has taken steps; gradients stay."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _tracker(
    run: nn.Module,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Any],
    rows: set[int],
    gpu: Gpu,
) -> _Counts:
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    if isinstance(run, Root):
        tracker: _Counts = _WholeTracker()
        tracker.prepare(rows, gpu)
        tracker.track_external(network, optimizer, *tensors)
        return tracker
    sharded = _ShardedTracker(run, optimizer)
    sharded.prepare(rows, gpu)
    sharded.track_inputs(tuple(tensors))
    return sharded


@contextlib.contextmanager
def _pretended(shape: tuple[int, ...]) -> Iterator[Any]:
    """A device mesh whose other ranks do not exist; None for no shape."""
    if math.prod(shape) == 1:
        yield None
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
    try:
        names = ("replicas", "shards")[-len(shape) :]
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
