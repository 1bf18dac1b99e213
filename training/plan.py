"""``train.py plan``: FLOPs, memory and time of a run, without training or its devices.

    python train.py plan -c configs/thoughtbubbles/772m.yaml -c configs/trainer/ddp.yaml \
        --trainer.devices 8
    python train.py plan -c configs/ponderlm/410m.yaml --trainer.devices 8 --mfu 0.3 --gpu A100

It takes all options of ``fit``. Memory is the peak of a micro-batch and an optimiser step, traced
on tensors without values (``FakeTensorMode``) by torch's ``MemTracker``. Integers that depend only
on the batch keep their values, because they determine shapes in some methods. If weights determine
a shape, the maximum that a step may keep is counted. The trace uses CPU kernels, so it excludes the
rounding of a GPU's allocator and the memory of CUDA itself.
"""

import copy
import dataclasses
import functools
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from callbacks.overview import batch_line, quantity
from callbacks.throughput import PEAK_BF16
from callbacks.validation import Validation
from datamodules.base import limited_batches
from datamodules.sources import StepBatch
from lightning_models import LanguageModel
from lightning_models.memory import check_batch, weights_size
from lightning_models.optim import build_optimizer
from lightning_models.output_layer import CHUNK_ROWS
from training.cli import LatentCLI
from training.errors import UserError
from training.listing import is_prepared, planned_tokens, row_tokens, validation_tokens
from training.strategies import count_devices, count_sharing
from training.synthetic import MARKERS, SENTENCE_SLOTS, make_batch, without_files

try:  # private; tried with torch 2.13
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
except ImportError as error:
    raise UserError(
        f"plan predicts memory with torch's MemTracker, which torch {torch.__version__} lacks; "
        "install torch 2.13"
    ) from error


class Planner(LatentCLI):
    """``fit``'s command line, which prints a plan instead of training."""

    shown: ClassVar[dict[str, str]] = {"fit": "plan"}

    def __init__(self, args: list[str]) -> None:
        super().__init__(["fit", *args])

    def add_arguments_to_parser(self, parser: Any) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--mfu", type=float, default=0.4, help="plan: fraction of the devices' peak FLOP/s."
        )
        parser.add_argument(
            "--gpu",
            type=Literal[tuple(PEAK_BF16)],
            default="H100",
            help="plan: device with the dense bf16 peak, unless throughput.peak_tflops is set.",
        )

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        self.asked = asked = dict(self._get(self.config_init, "trainer"))
        for key, registry in (("accelerator", AcceleratorRegistry), ("strategy", StrategyRegistry)):
            names = {"auto", *registry} | ({"gpu"} if key == "accelerator" else set())
            if isinstance(asked[key], str) and asked[key] not in names:
                names_text = ", ".join(sorted(names))
                raise UserError(f"trainer.{key} ({asked[key]}) must be one of {names_text}")
        # one process on this CPU checks the other options
        overrides = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
        unused = dict.fromkeys(("precision", "plugins", "profiler", "callbacks"))
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        return L.Trainer(**{**asked, **overrides, **unused, **dict.fromkeys(off, False)})

    def check_sizes(self) -> None:
        check_batch(self.datamodule)
        weights_size(self.model, 2.0**63)  # traced, so the memory of this machine does not matter

    @property
    def devices(self) -> int:
        """Number of processes that would train."""
        return count_devices(self.asked["devices"]) * int(self.asked["num_nodes"])

    def announce(self) -> None:
        """Prints nothing, because no default is trained."""

    def _run_subcommand(self, subcommand: str) -> None:
        mfu, gpu = self._get(self.config, "mfu"), self._get(self.config, "gpu")
        tflops = self._get(self.config, "throughput").get("peak_tflops")
        if not 0 < mfu <= 1:
            raise UserError(f"mfu ({mfu}) must be above 0 and at most 1")
        peak = PEAK_BF16[gpu] if tflops is None else tflops * 1e12
        for line in describe(self.planned_run(), mfu * peak):
            print(line, flush=True)

    def planned_run(self) -> "PlannedRun":
        """Returns the run that the options describe."""
        validation = self._get(self.config_init, "validation")
        return PlannedRun.of(self.model, self.datamodule, self.asked, validation)


# ---- the run


class PlannedRun(NamedTuple):
    """A run described by its options.

    Attributes:
        model: The model, without a network or weights from files.
        outline: The model with its network on the meta device.
        data: The data module, prepared or not.
        trainer: Options of the trainer, as in training.
        batch: The batch of an optimiser step.
        rows: Number of rows of a micro-batch on one device.
        slots: Number of positions per row; for sentences, including their boundaries.
        share: Number of processes that share one copy of the parameters.
    """

    model: LanguageModel
    outline: Any
    data: Any
    trainer: Mapping[str, Any]
    batch: StepBatch
    rows: int
    slots: int
    share: int

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        data: Any,
        trainer: Mapping[str, Any],
        validation: Validation | None = None,
    ) -> "PlannedRun":
        """Returns the planned run for a model, data, and options of trainer and validation."""
        devices = count_devices(trainer["devices"]) * trainer["num_nodes"]
        batch = data.step_batch(devices, trainer["accumulate_grad_batches"])
        options = (validation or Validation()).trainer_options(
            trainer,
            accumulate=batch.accumulate,
            rows_at_once=data.eval_batch_size * devices,
        )
        trainer = {**trainer, **options, "accumulate_grad_batches": batch.accumulate}
        if trainer.get("overfit_batches"):  # as the trainer does
            trainer["limit_train_batches"] = trainer["overfit_batches"]
        limit = trainer["limit_train_batches"]
        batch = batch.within(limit) if isinstance(limit, int) and limit else batch
        rows, slots = batch.micro, data.block_size
        if data.rows == "sentences":
            slots = data.max_sentences * SENTENCE_SLOTS
            lexical = data.max_sentences * (SENTENCE_SLOTS - MARKERS)
            rows = min(data.batch_size, max(1, batch.micro // lexical))
        share = count_sharing(trainer["strategy"], devices)
        outline = without_files(model, longest=False)  # FLOPs are means over draws
        with torch.device("meta"):
            outline.configure_model()
        return cls(without_files(model), outline, data, trainer, batch, rows, slots, share)

    @property
    def devices(self) -> int:
        """Number of processes that train."""
        return self.batch.devices

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.outline.network.parameters())

    @property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return sum(p.numel() for p in self.outline.network.parameters() if p.requires_grad)


# ---- its description


def describe(run: PlannedRun, rate: float) -> Iterator[str]:
    """Yields the lines of a plan for devices with ``rate`` FLOP/s."""
    frozen = "" if run.trained == run.parameters else f", {run.trained:,} of them trained"
    yield f"{type(run.model).__name__}: {run.parameters:,} parameters{frozen}"
    prepared = run.data.rows != "reasoning" or row_tokens(run.data) != run.slots
    tokens = run.batch.size * (run.data.unit_tokens() if prepared else run.slots)
    steps, total = count_steps(run, tokens)
    yield batch_line(run.batch, tokens, run.data.rows, steps=steps, total=total)
    yield from describe_cost(run, total, rate)
    parts = predict_memory(run)
    text = ", ".join(f"{name} {quantity(size)}B" for name, size in parts.items() if size)
    yield f"memory of a device: {quantity(sum(parts.values()))}B ({text})"
    if run.share > 1:
        whole = f"{quantity(4 * run.parameters)}B"
        yield f"parameters are shared by {run.share} devices; a validation gathers all ({whole})"


def count_steps(run: PlannedRun, tokens: int) -> tuple[float | None, float | None]:
    """Returns a run's optimiser steps and tokens, None before its text is prepared.

    Args:
        run: The planned run.
        tokens: Number of tokens per step.
    """
    accumulate, steps = run.batch.accumulate, run.trainer["max_steps"]
    limit, epochs = run.trainer["limit_train_batches"], run.trainer["max_epochs"] or 0
    bounds: list[tuple[float, float]] = []
    if steps > 0:
        bounds.append((steps, steps * tokens))
    if epochs > 0 and (whole := steps_of_epoch(run.data)) is not None:
        each = limited_batches(whole * accumulate, 1.0 if limit is None else limit) / accumulate
        bounds.append((epochs * math.ceil(each), epochs * each * tokens))
    elif epochs > 0 and isinstance(limit, int):
        micro_batches = epochs * limit
        bounds.append((epochs * math.ceil(limit / accumulate), micro_batches * tokens / accumulate))
    elif epochs > 0:
        row = row_tokens(run.data)
        planned: float | None = planned_tokens(run.data, {"max_epochs": epochs}, row)
        if planned is not None:
            planned *= 1.0 if limit is None else limit
            bounds.append((math.ceil(planned / tokens), planned))
    return min(bounds, default=(None, None))


def steps_of_epoch(data: Any) -> int | None:
    """Returns the steps per epoch if the batch size is set and the text prepared, else None.

    Rows that do not fill a step are left out.
    """
    if data.order_of_steps is None or not is_prepared(data):
        return None
    data.prepare_data()
    data.setup("fit")
    return len(data.training_source()) // int(data.step_batch(1).accumulate)


def describe_cost(run: PlannedRun, total: float | None, rate: float) -> Iterator[str]:
    """Yields the FLOPs of training and validation, and the hours they take."""
    if total is None:
        yield (
            f"FLOPs: {quantity(count_flops(run, 1.0)[0])} per token; the number of tokens is known "
            "once the text is prepared, or with trainer.max_steps"
        )
        return
    scored = validation_tokens(run.data, run.trainer, total, row=run.slots, batch=run.batch)
    training, validation = count_flops(run, total, scored or 0.0)
    text = f"FLOPs: {quantity(training)} of training ({quantity(training / total)} per token)"
    if scored is None:
        text += ", validation's FLOPs are known once its text is prepared"
    else:
        text += f", {validation / (training + validation):.1%} of all FLOPs are validation's"
    yield text
    seconds = (training + validation) / (rate * run.devices)
    yield (
        f"time: {seconds / 3600:.3g} hours on {run.devices} x "
        f"{quantity(rate)}FLOP/s, {seconds / 3600 * run.devices:.3g} device-hours"
    )


def count_flops(run: PlannedRun, trained: float, scored: float = 0.0) -> tuple[float, float]:
    """Returns the FLOPs of training on ``trained`` tokens and of scoring ``scored`` tokens."""
    # the network also reads the markers of sentences
    marked = SENTENCE_SLOTS / (SENTENCE_SLOTS - MARKERS) if run.data.rows == "sentences" else 1.0
    training = marked * run.outline.flops_per_token(run.slots, training=True) * trained
    return training, scored * run.outline.flops_per_token(run.slots)


# ---- memory


def predict_memory(run: PlannedRun) -> dict[str, float]:
    """Returns the peak bytes of a device by category."""
    precision = str(run.trainer["precision"] or "32-true")
    strategy, by_block = run.trainer["strategy"], run.model.shards_blocks
    gathers = run.share > 1 and by_block and precision == "bf16-mixed" and strategy.gathers_in_bf16
    types = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    dtype = torch.bfloat16 if gathers else types.get(precision, torch.float32)
    in_buckets = getattr(strategy, "_ddp_kwargs", {}).get("gradient_as_bucket_view", False)
    accumulates = run.batch.accumulate > 1
    parts = trace_step(
        run.model,
        make_batch(run.model, run.rows, run.slots),
        on_gpu=run.trainer["accelerator"] != "cpu",
        autocast=precision.endswith("mixed"),
        dtype=dtype,
        keeps_gradients=run.share == 1 and (accumulates or in_buckets),
    )
    if run.share > 1:
        return share_parameters(run, parts, dtype)
    if run.devices > 1 and not in_buckets:
        parts["DDP's buckets"] = float(dtype.itemsize * run.trained)
    return parts


def share_parameters(
    run: PlannedRun, parts: Mapping[str, float], gathered: torch.dtype
) -> dict[str, float]:
    """Returns the memory of a device with its share of parameters, gradients and moments.

    If FSDP2 gathers block by block, the parameters outside blocks and two blocks are whole at a
    time, with their gradients; otherwise all parameters are, and at the end of the backward pass
    also their gradients and a buffer of the same size for the reduction.
    """
    count, trained = run.parameters, 4.0 * run.trained
    shares = {
        "weights": 4.0 * count / run.share,
        "gradients": trained / run.share,
        "optimizer states": 2 * trained / run.share,
        "batch": parts["batch"],
    }
    if run.model.shards_blocks:
        network = run.outline.network
        blocks = sorted(sum(p.numel() for p in block.parameters()) for block in network.blocks)
        at_once = count - sum(blocks[:-2])
        more = {"gathered": 2.0 * at_once * gathered.itemsize, "activations": parts["activations"]}
        return shares | more
    passes = {"gathered": 4.0 * count + parts["gradients"], "activations": parts["activations"]}
    end = {"gathered": 4.0 * count + 2 * trained, "activations": 0.0}
    return shares | max(passes, end, key=lambda part: sum(part.values()))


FEW_INNER_STEPS = 3
PARTS = {
    "Parameter": "weights",
    "Buffer": "weights",
    "Gradient": "gradients",
    "Optstate": "optimizer states",
    "Activation": "activations",
    "Temp": "activations",
    "Other": "batch",
}
"""Category of the tracker -> category of a plan."""


def trace_step(
    model: LanguageModel,
    batch: dict[str, Any],
    *,
    on_gpu: bool = False,
    autocast: bool = False,
    dtype: torch.dtype = torch.float32,
    keeps_gradients: bool = False,
) -> dict[str, float]:
    """Returns the peak bytes of a micro-batch and an optimiser step by category.

    Args:
        model: A model without a network, see ``without_files``.
        batch: Tensors on the CPU.
        on_gpu: Whether the output layer uses the chunk size of GPUs.
        autocast: Whether the loss runs under 16-bit autocast.
        dtype: Type of the parameters.
        keeps_gradients: Whether gradients of earlier micro-batches exist before the step.
    """
    chunks = {"cpu": CHUNK_ROWS["cuda"]} if on_gpu else {}
    # Truncated normals are redrawn until their values fit, but fake tensors have no values.
    normals = mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
    # Copying a module reads the address of each tensor, which a fake tensor lacks.
    quiet, fake = (
        warnings.catch_warnings(action="ignore"),
        FakeTensorMode(allow_non_fake_inputs=True),
    )
    with quiet, mock.patch.dict(CHUNK_ROWS, chunks), fake, _BatchValues():
        model = _few_inner_steps(model).train()
        with normals:
            model.configure_model()
        network: Any = model.network
        _own_storage(network, dtype)
        exempt = model.no_decay_parameters()
        optimizer = build_optimizer(network, model.optimizer_config, no_decay=exempt)
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # creates the moments
        if not keeps_gradients:
            optimizer.zero_grad()
        tracker = _tracker(network, optimizer, batch)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = training_loss(model, batch)
            loss.backward()
            optimizer.step()
    sizes: Counter[str] = Counter(dict.fromkeys(PARTS.values(), 0))
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    for key, size in snapshot.items():
        if key != "Total":
            sizes[PARTS[key.value]] += size
    return {part: float(size) for part, size in sizes.items()}


def _few_inner_steps(model: LanguageModel) -> LanguageModel:
    """Returns a copy with few inner steps if each step frees its graph, so memory is equal."""
    model, config = copy.deepcopy(model), model.config
    if getattr(config, "slow_gradient", "") == "final":
        few: Any = {"inner_steps": min(config.inner_steps, FEW_INNER_STEPS)}
        model.config = dataclasses.replace(config, **few)
    return model


def training_loss(model: LanguageModel, batch: dict[str, Any]) -> Tensor:
    """Returns the training objective of a batch, a scalar."""
    terms = model.loss(batch).terms.values()
    return torch.stack([term.sum / term.normaliser for term in terms]).sum()


def _tracker(network: Any, optimizer: Any, batch: Mapping[str, Any]) -> Any:
    """Returns a tracker without module hooks.

    Module hooks take most of the time, and fail if weights are frozen and gradients flow to latent
    vectors. The tracker's gradient hooks would keep gradients alive that autograd could hand over.
    """
    tracker: Any = MemTracker()
    names = ("__enter__", "__exit__", "register_user_hooks", "clear_user_hooks")
    nothing = dict.fromkeys(names, lambda *_: None)
    tracker._mod_tracker = SimpleNamespace(parents=frozenset(), is_bw=False, **nothing)

    def count_gradient(parameter: Tensor) -> None:
        """Registers a gradient once it is accumulated."""
        tracker._update_and_maybe_create_winfos(parameter.grad, _MemRefType.GRAD)

    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    tracker.track_external(network, optimizer, *tensors)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(count_gradient)
    return tracker


def _own_storage(network: nn.Module, dtype: torch.dtype) -> None:
    """Replaces parameters by tensors with separate storage, which views of fake copies hide."""
    new: dict[Tensor, nn.Parameter] = {}
    for module in network.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if old not in new:
                    new[old] = nn.Parameter(torch.empty_like(old, dtype=dtype), old.requires_grad)
                module._parameters[name] = new[old]


# ---- tensors without values

FILLS = {"zeros": 0, "empty": 0, "ones": 1}
"""Fill values of operators such as ``zeros_like`` and ``new_ones``."""


class _BatchValues(TorchDispatchMode):
    """Computes real integers and booleans, and everything else without values.

    Integers and booleans that depend on weights are chosen so that a step keeps the most memory.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if tensors and not any(isinstance(t, FakeTensor) for t in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not tensors and isinstance(result, Tensor) and not result.dtype.is_floating_point:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        made = name.removeprefix("new_").removesuffix("_like")
        if made != name and made in {*FILLS, "full"} and not result.dtype.is_floating_point:
            with unset_fake_temporarily():
                return torch.full(result.shape, FILLS.get(made, args[-1]), dtype=result.dtype)
        if func._schema.is_mutable or func.is_view:
            return result
        return tree_map_only(FakeTensor, functools.partial(_choose, func, args, kwargs), result)


def _choose(func: Any, args: Any, kwargs: Any, result: FakeTensor) -> Tensor:
    """Chooses the values of an integer or boolean result that depends on weights.

    Every comparison is true, and rankings keep the order of the candidates.
    """
    if result.dtype.is_floating_point or result.dtype.is_complex:
        return result
    with unset_fake_temporarily():
        if func.overloadpacket.__name__ not in ("sort", "topk", "argsort"):
            return torch.full(result.shape, result.dtype == torch.bool, dtype=result.dtype)
        position = [argument.name for argument in func._schema.arguments].index("dim")
        dim = kwargs.get("dim", args[position] if len(args) > position else -1) % result.dim()
        shape = [-1 if n == dim else 1 for n in range(result.dim())]
        ranks = torch.arange(result.shape[dim], dtype=result.dtype).view(shape)
        return ranks.expand(result.shape).contiguous()
