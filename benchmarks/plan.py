"""What a run will need before it is paid for: memory, strategy, time, communication.

    python -m benchmarks.plan --config configs/thoughtbubbles/772m.yaml --gpus 8 --gpu h100
    python -m benchmarks.plan --config configs/latent_thought/ltm_large.yaml --gpus 32 --largest
    python -m benchmarks.plan --table          # every paper-size run; some: --config A B
    python -m benchmarks.plan --check          # predicted against measured memory on this CPU

No GPU is needed, and no memory of the model's size: a step is traced (``benchmarks.estimate``).
``--set data.batch_size=4`` changes the config as ``--data.batch_size=4`` of ``train.py`` does. A
GPU's micro-batch is its ``batch_size``, or less where GPUs share the rows of an optimiser step.
There is a row for each strategy that the GPUs allow: ddp, hsdp (more than one whole node of eight),
fsdp. One micro-batch is traced, as the others of a step take the same memory and time, and of a
Latent-Thought LM that has more inner steps two and four of those (``traced``).

Memory: the peak of a step with moments, gradients of earlier micro-batches where there are any,
under FSDP (``gathers_in_bf16``) also what a validation holds whole; a tenth of the GPU is left
for CUDA, NCCL and fragmentation. Compute time: FLOPs of ``flops_per_token`` at ``--share`` of the
peak, or the roofline's, where that is longer. Communication at the peak rates of links; it runs
alongside compute, but where a method gathers all parameters before its step.

Rows of sentences have the method's usual length and fill ``batch_tokens``. Rows of questions have
``--row_tokens`` tokens (``block_size``, the most, if not given). Where a config counts epochs,
``--tokens`` says how many tokens the run has.

``--check`` measures the process: resident set at its peak (VmHWM, by Linux) less what it was before
two training steps in float32, in a process of its own, after a small model of the same class has
warmed it up.
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from benchmarks.estimate import GPUS, GPUS_PER_NODE, Estimate, Gpu, Transfer, estimate
from benchmarks.harness import Options
from benchmarks.planned_run import PlannedRun, read_run
from training.listing import SENTENCE_SLOTS

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
USABLE = 0.9
"""Share of a GPU's memory that a step may take."""
GIB = 2.0**30

# ---- strategies


class Strategy(NamedTuple):
    """How GPUs share a run: ``mesh`` as ``estimate`` takes it."""

    name: str
    mesh: tuple[int, ...]


def strategies(gpus: int) -> list[Strategy]:
    """Returns those that there are for that many GPUs, the one that communicates least first."""
    if gpus == 1:
        return [Strategy("one GPU", ())]
    nodes, rest = divmod(gpus, GPUS_PER_NODE)
    hybrid = [Strategy("hsdp", (nodes, GPUS_PER_NODE))] if nodes > 1 and not rest else []
    return [Strategy("ddp", ()), *hybrid, Strategy("fsdp", (gpus,))]


@dataclass(frozen=True)
class Plan:
    """A strategy's figures.

    Attributes:
        strategy: Which.
        step: Of a micro-batch on each GPU.
        micro_batch: Rows.
        accumulate: Micro-batches of an optimiser step.
        compute: Seconds of an optimiser step.
        communication: Seconds of it.
        seconds: Of both, as they overlap.
        sent_by: Bytes that a GPU sends for it, by operator (``Transfer.operator``).
        memory: Bytes at the peak, that of a validation included.
        whole: Bytes that a validation holds.
    """

    strategy: Strategy
    step: Estimate
    micro_batch: int
    accumulate: int
    compute: float
    communication: float
    seconds: float
    sent_by: dict[str, float]
    memory: float
    whole: float

    @property
    def sent(self) -> float:
        """Bytes that a GPU sends for an optimiser step."""
        return sum(self.sent_by.values())

    def fits(self, gpu: Gpu) -> bool:
        """Whether a GPU's memory is enough."""
        return self.memory <= USABLE * gpu.memory


def plan(
    run: PlannedRun,
    strategy: Strategy,
    gpus: int,
    gpu: Gpu,
    share: float,
    rows: int = 0,
    *,
    on_gpu: bool = True,
) -> Plan:
    """Returns what a run needs under a strategy.

    Args:
        run: which.
        strategy: how GPUs share it.
        gpus: how many.
        gpu: their kind.
        share: of the peak FLOP/s that training reaches.
        rows: of a micro-batch; 0: the config's, or a GPU's part of the step, if that is less.
        on_gpu: as ``estimate`` takes it.
    """
    own = math.ceil(run.rows_per_step / gpus)
    rows = rows or min(run.rows, own)
    accumulate = max(1, math.ceil(own / rows))
    replicas = strategy.name == "ddp"
    keeps = replicas or accumulate > 1
    step = traced(run, rows, strategy, gpu, keeps_gradients=keeps, on_gpu=on_gpu)
    if replicas:  # once a step, whatever is accumulated
        reduction = Transfer("all_reduce", gpus, gpus <= GPUS_PER_NODE)
        step = dataclasses.replace(step, transfers={reduction: 4 * step.trained})
    times = 1 if replicas else accumulate
    flops = run.flops() * rows * accumulate
    compute = max(flops / (share * gpu.flops), step.floor * accumulate)
    communication = times * step.communication(gpu)
    sent_by = dict.fromkeys(OPERATORS, 0.0)
    for kind, payload in step.transfers.items():
        sent_by[kind.operator] += times * kind.sent(payload)
    overlaps = replicas or run.model.shards_blocks
    seconds = max(compute, communication) if overlaps else compute + communication
    shards = strategy.mesh[-1] if strategy.mesh else 0
    gathered = 2 if run.model.shards_blocks else 4  # bytes of a parameter; bf16, float32
    whole = step.parameters * (gathered + 3 * 4 / shards) if shards else 0.0
    return Plan(
        strategy=strategy,
        step=step,
        micro_batch=rows,
        accumulate=accumulate,
        compute=compute,
        communication=communication,
        seconds=seconds,
        sent_by=sent_by,
        memory=max(step.peak, whole),
        whole=whole,
    )


TRACED_STEPS = 2, 4
"""Inner steps of Latent-Thought LMs that are traced, where a config has more."""


def traced(
    run: PlannedRun,
    rows: int,
    strategy: Strategy,
    gpu: Gpu,
    keeps_gradients: bool,
    *,
    on_gpu: bool = True,
) -> Estimate:
    """Returns what a micro-batch needs.

    Inner steps are alike, and each frees its graph before the next, or keeps as much as the others:
    of more than four two and four are traced, and lead to the rest along a straight line.

    Args:
        run: which.
        rows: of the micro-batch.
        strategy: how GPUs share it.
        gpu: for seconds.
        keeps_gradients: whether gradients exist before it.
        on_gpu: as ``estimate`` takes it.
    """
    trace = functools.partial(
        estimate,
        batch=run.batch(rows),
        gpu=gpu,
        mesh=strategy.mesh,
        keeps_gradients=keeps_gradients,
        on_gpu=on_gpu,
    )
    low, high = TRACED_STEPS
    if run.inner_steps <= high:
        return trace(run.build)
    few, more = (trace(functools.partial(run.build, number)) for number in TRACED_STEPS)
    return few.continued(more, (run.inner_steps - high) / (high - low))


def chosen(run: PlannedRun, gpus: int, gpu: Gpu, share: float) -> tuple[list[Plan], Plan | None]:
    """Returns plans of strategies, up to the first that fits, and that one; None if none does."""
    tried: list[Plan] = []
    for strategy in strategies(gpus):
        tried.append(plan(run, strategy, gpus, gpu, share))
        if tried[-1].fits(gpu):
            return tried, tried[-1]
    return tried, None


def largest(run: PlannedRun, planned: Plan, gpu: Gpu) -> int:
    """Returns the most rows of a micro-batch that fit under a plan's strategy, 0 if none does.

    Memory by rows is close to a straight line: each trace corrects the line of the two before.
    """
    strategy, limit = planned.strategy, USABLE * gpu.memory
    keeps = strategy.name == "ddp" or planned.accumulate > 1
    known = {planned.micro_batch: planned.step.peak}
    if planned.whole > limit:
        return 0

    def peak(rows: int) -> float:
        if rows not in known:
            known[rows] = traced(run, rows, strategy, gpu, keeps).peak
        return known[rows]

    low, high = sorted((planned.micro_batch, planned.micro_batch // 2 or 2))
    for _ in range(6):
        if peak(high) == peak(low):
            high *= 2
            continue
        slope = (peak(high) - peak(low)) / (high - low)
        guess = max(1, int(high + (limit - peak(high)) / slope))
        if guess in known:
            break
        low, high = sorted((high, guess))
        peak(guess)
    return max((rows for rows, size in known.items() if size <= limit), default=0)


# ---- tables


OPERATORS = ("all_gather", "reduce_scatter", "all_reduce")
SHOWN_PARTS = ("weights", "gathered", "gradients", "optimiser", "activations", "logits")


def memory(options: Options) -> Iterator[dict[str, Any]]:
    """Yields each strategy's memory in GiB by part, its communication and its time."""
    run, gpu = options.run, GPUS[options.gpu]
    plans: list[Plan] = []
    for strategy in strategies(options.gpus):
        each = plan(run, strategy, options.gpus, gpu, options.share)
        plans.append(each)
        row: dict[str, Any] = {
            "strategy": strategy.name,
            "rows x accumulated": f"{each.micro_batch} x {each.accumulate}",
            **{f"{name} GiB": each.step.parts.get(name, 0) / GIB for name in SHOWN_PARTS},
            "peak GiB": each.step.peak / GIB,
            "validation GiB": each.whole / GIB if each.whole else None,
            "fits": "yes" if each.fits(gpu) else "no",
            **{f"{name} GB/step": size / 1e9 for name, size in each.sent_by.items()},
            "communication s": each.communication,
            "compute s": each.compute,
            "step s": each.seconds,
        }
        if options.largest:
            row["largest micro-batch"] = largest(run, each, gpu)
        yield row
    print("\n" + in_words(run, plans, options))


WHY = {
    "one GPU": "it fits one GPU",
    "ddp": "replicas fit, and reduce gradients once a step",
    "hsdp": "replicas do not fit; parameters are gathered within a node",
    "fsdp": "replicas do not fit; parameters are spread over all GPUs",
}


def in_words(run: PlannedRun, plans: list[Plan], options: Options) -> str:
    """Returns what the run is, which strategy it gets and why, and what that costs."""
    gpu = GPUS[options.gpu]
    best = next((each for each in plans if each.fits(gpu)), None)
    first = plans[0]
    lines = [
        f"{first.step.parameters:,} parameters; {cost(run, best, options)}",
        run.batch_line(first.micro_batch, first.accumulate, options.gpus),
    ]
    if first.step.at_most:
        lines.append(
            "Which states survive depends on weights: memory is that of the most that can."
        )
    room = f"{USABLE * gpu.memory / GIB:.1f} GiB of a {options.gpu}"
    if best is None:
        lines.append(f"No strategy fits {room} with these rows: --set a lower data.batch_size.")
        return "\n".join(lines)
    lines.append(f"Strategy: {best.strategy.name}, as {WHY[best.strategy.name]} ({room}).")
    if best.strategy.mesh and not run.model.shards_blocks:
        lines.append("All parameters are gathered before each micro-batch, and held whole in it.")
    return "\n".join(lines)


def cost(run: PlannedRun, best: Plan | None, options: Options) -> str:
    """Returns tokens/s, days and GPU-hours."""
    if best is None:
        return "no strategy fits"
    speed = tokens_per_second(run, best, options.gpus)
    if run.tokens is None:
        return f"{speed:,.0f} tokens/s; how long, --tokens says"
    days = run.tokens / speed / 86400
    hours = days * 24 * options.gpus
    return (
        f"{speed:,.0f} tokens/s: {run.tokens / 1e9:.3g} B tokens in {days:.3g} days, "
        f"{hours:,.4g} GPU-hours"
    )


def tokens_per_second(run: PlannedRun, each: Plan, gpus: int) -> float:
    """Returns the tokens of all GPUs in a second."""
    rows = each.micro_batch * each.accumulate * gpus
    return rows * run.row_tokens / each.seconds


GESTALT_TOKENS = 25 * 50e6
"""25 epochs, the most, of 50 M tokens, boundaries not counted."""
GSM8K_ROWS, GSM8K_TOKENS = 4 * 385_620, 256
"""Four epochs of GSM8K-Aug; tokens of a row are ours, the paper does not say."""
STATES_ROWS, STATES_TOKENS = 5 * 20_000, 128
"""Five epochs of 20,000 texts; 128 tokens is about the longest row of ten operations."""
PAPERS: dict[str, tuple[float | None, int | None]] = {
    "thoughtbubbles/150m": (None, None),
    "thoughtbubbles/319m": (None, None),
    "thoughtbubbles/530m": (None, None),
    "thoughtbubbles/772m": (None, None),
    "thought_gestalt/85m": (GESTALT_TOKENS * SENTENCE_SLOTS / (SENTENCE_SLOTS - 2), None),
    "latent_thought/ltm_small": (None, None),
    "latent_thought/ltm_medium": (None, None),
    "latent_thought/ltm_large": (None, None),
    "ponderlm/70m": (None, None),
    "ponderlm/410m": (None, None),
    "ponderlm/ponderlm2_70m": (None, None),
    "ponderlm/ponderlm2_410m": (None, None),
    "thinking_states/qwen2.5-0.5b_parity": (STATES_ROWS * STATES_TOKENS, STATES_TOKENS),
    "thinking_states/qwen2.5-0.5b_vars": (STATES_ROWS * STATES_TOKENS, STATES_TOKENS),
    "thinking_states/qwen2.5-1.5b_gsm8k": (GSM8K_ROWS * GSM8K_TOKENS, GSM8K_TOKENS),
    "thinking_states/qwen2.5-1.5b_two_hop": (None, 128),
}
"""Tokens where the config counts epochs (None where the data's size is not known, either), and
tokens of a row where the config does not say."""


def papers(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what the papers' runs cost, or those of the configs that are named."""
    gpu = GPUS[options.gpu]
    for name in map(config_name, options.config or PAPERS):
        start = time.process_time()
        tokens, row_tokens = PAPERS.get(name, (None, None))
        run = read_run([f"--config={CONFIGS / name}.yaml"], row_tokens, tokens)
        plans, best = chosen(run, options.gpus, gpu, options.share)
        each = best or plans[-1]
        speed = tokens_per_second(run, each, options.gpus)
        days = None if run.tokens is None else run.tokens / speed / 86400
        yield {
            "config": name,
            "parameters M": each.step.parameters / 1e6,
            "B tokens": None if run.tokens is None else run.tokens / 1e9,
            "strategy": each.strategy.name if best else "none fits",
            "GPUs": options.gpus,
            "rows x accumulated": f"{each.micro_batch} x {each.accumulate}",
            "GiB": each.memory / GIB,
            "step s": each.seconds,
            "days": days,
            "GPU-hours": None if days is None else 24 * days * options.gpus,
            "traced, CPU s": round(time.process_time() - start),
        }


def config_name(file: str) -> str:
    """Returns a config's name as the tables have it: without folder and ending."""
    return file.removeprefix("configs/").removesuffix(".yaml")


# ---- predicted against measured

SIZES: dict[str, dict[str, int]] = {
    "small": {"num_layers": 4, "dim": 256, "num_heads": 4},
    "large": {"num_layers": 6, "dim": 512, "num_heads": 8},
}
WARM = {"num_layers": 4, "dim": 32, "num_heads": 4}
CHECKED = (
    "transformer/tiny",
    "thoughtbubbles/tiny",
    "thoughtbubbles/copy3_tiny",
    "thought_gestalt/tiny",
    "thought_gestalt/gist_85m",
    "latent_thought/tiny",
    "ponderlm/tiny",
    "ponderlm/ponderlm2_tiny",
    "ponderlm/ponderlm1_tiny",
    "ponderlm/looped_tiny",
    "ponderlm/pause_tiny",
    "ponderlm/mor_tiny",
    "thinking_states/tiny_parity",
    "thinking_states/cot_tiny_parity",
    "thinking_states/no_cot_tiny_parity",
    "thinking_states/icot_tiny_parity",
    "thinking_states/coconut_tiny_parity",
)
"""A config of every method."""


def checked_run(name: str, sizes: dict[str, int]) -> PlannedRun:
    """Returns a method's run at another size, of which a step takes seconds on a CPU."""
    run = read_run([f"--config={CONFIGS / name}.yaml"], 160 if "thinking" in name else None, None)
    known = {field.name for field in dataclasses.fields(run.model.config)}
    changes: dict[str, Any] = {**sizes, "ffn_dim": 4 * sizes["dim"], "sentence_layer": 3}
    config: Any = run.model.config
    run.model.config = dataclasses.replace(
        config, **{key: value for key, value in changes.items() if key in known}
    )
    return run


def build_step(options: Options) -> harness.Step:
    """Returns a training step on this CPU, after one of a small model has warmed the process up."""
    for sizes in (WARM, SIZES[options.size]):
        run = checked_run(options.config, sizes)
        torch.manual_seed(0)
        model, batch = run.build(), run.batch(options.batch)
        loss = functools.partial(harness.objective, model, batch)
        assert model.network is not None
        step = harness.training_step(model.network, loss, "cpu", bf16=False)
        if sizes is WARM:
            step()
    return step


def check(options: Options) -> Iterator[dict[str, Any]]:
    """Yields predicted and measured MB that two steps need beyond weights and batch."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system at once
    for name in map(config_name, options.config or CHECKED):
        for size, sizes in SIZES.items():
            run = checked_run(name, sizes)
            step = estimate(run.build, run.batch(options.batch), on_gpu=False)
            weights = step.parts["weights"] + step.parts["batch"]
            settings = {"config": name, "size": size, "batch": options.batch, "device": "cpu"}
            measured = harness.in_a_process("benchmarks.plan", settings)
            predicted = step.peak - weights
            yield {
                "config": name,
                "size": size,
                "parameters M": step.parameters / 1e6,
                "predicted MB": predicted / 1e6,
                "measured MB": measured / 1e6,
                "predicted / measured": predicted / measured,
            }


def main() -> None:
    """Parses the command line and prints the tables that it asks for."""
    parser = harness.options_parser(__doc__, gpus=8, batch=4)
    parser.add_argument("--config", nargs="+", default=None, help="files, as train.py takes them")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--share", type=float, default=0.4, help="of peak FLOP/s; MFU")
    parser.add_argument("--tokens", type=float, default=None, help="of the whole run")
    parser.add_argument("--row_tokens", type=int, default=None)
    parser.add_argument(
        "--largest", action="store_true", help="finds the largest micro-batch of each strategy"
    )
    parser.add_argument("--table", action="store_true", help="what the papers' runs cost")
    parser.add_argument("--check", action="store_true", help="predicted and measured memory")
    parser.add_argument("--set", nargs="+", default=[], help="data.batch_size=4 and the like")
    harness.run(parser, TABLES, build_step, default=["memory"], prepare=prepare)


def prepare(options: Options) -> None:
    """Chooses the table, and reads the run that is planned.

    Raises:
        ValueError: if there is no config, or it is not understood.
    """
    table, check = vars(options).pop("table"), vars(options).pop("check")
    if options.gpus < 1 or not 0 < options.share <= 1:
        raise ValueError(f"--gpus ({options.gpus}) must be at least 1, --share in (0, 1]")
    if table or check:
        for name in ("set", "tokens", "row_tokens"):
            if getattr(options, name):
                raise ValueError(f"--{name} is of one --config, not of --table and --check")
        options.only = ["papers"] if table else ["check"]
        return
    if options.config is None:
        raise ValueError("--config says which run is planned, e.g. configs/ponderlm/410m.yaml")
    words = [f"--config={file}" for file in options.config]
    words += [f"--{word}" for word in vars(options).pop("set")]
    options.run = read_run(words, options.row_tokens, options.tokens)


TABLES = {"memory": memory, "papers": papers, "check": check}


if __name__ == "__main__":
    main()
