"""What a run will need before it is paid for: memory, strategy, time, communication.

    python -m benchmarks.plan --config configs/thoughtbubbles/772m.yaml --gpus 8 --gpu h100
    python -m benchmarks.plan --config configs/latent_thought/ltm_large.yaml --gpus 32 --largest
    python -m benchmarks.plan --table          # every paper-size run
    python -m benchmarks.plan --check          # predicted against measured memory on this CPU

No GPU is needed, and no memory of the model's size: a step is traced (``benchmarks.estimate``).
``--set data.batch_size=4`` changes the config as ``--data.batch_size=4`` of ``train.py`` does. A
GPU's micro-batch is its ``batch_size``, or less where GPUs share the rows of an optimiser step.

Memory: the peak of a step with moments, gradients of earlier micro-batches where there are any,
under FSDP also what a validation holds whole; a tenth of the GPU is left for CUDA, NCCL and
fragmentation. Compute time: FLOPs of ``flops_per_token`` at ``--share`` of the peak, or the
roofline's, where that is longer. Communication at the peak rates of links; it runs alongside
compute, but where a method gathers all parameters before its step.

Rows of sentences have the method's usual length and fill ``batch_tokens``. Rows of questions have
``--row_tokens`` tokens (``block_size``, the most, if not given). Where a config counts epochs,
``--tokens`` says how many tokens the run has.

``--check`` measures the process: resident set at its peak (VmHWM, by Linux) less what it was before
two training steps in float32, in a process of its own, after a small model of the same class has
warmed it up.
"""

import contextlib
import dataclasses
import functools
import io
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import harness, sentences, thinking
from benchmarks.estimate import GPUS, GPUS_PER_NODE, Estimate, Gpu, Transfer, estimate
from benchmarks.harness import Options
from lightning_models import LanguageModel
from lightning_models.thinking_states.backbone import KNOWN
from training.listing import SENTENCE_SLOTS

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
USABLE = 0.9
"""Share of a GPU's memory that a step may take."""
ANSWER = 16
STEPS = 8
"""Tokens of an answer and steps of a question's reasoning."""
GIB = 2.0**30

# ---- the run that is planned


@dataclass(frozen=True)
class PlannedRun:
    """A run by its config.

    Attributes:
        model: Without a network.
        rows: Of a micro-batch.
        accumulate: Micro-batches of an optimiser step, on one GPU.
        row_tokens: Of a row.
        sentences: Of a row of sentences, else 0.
        tokens: Of the whole run; None: not known.
    """

    model: LanguageModel
    rows: int
    accumulate: int
    row_tokens: int
    sentences: int
    tokens: float | None

    def __str__(self) -> str:
        """Returns what the heading shows."""
        return f"{type(self.model).__name__} {self.rows} rows x {self.accumulate}"

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimiser step."""
        return self.rows * self.accumulate

    def build(self) -> LanguageModel:
        """Returns another model with its network, in training mode."""
        model = type(self.model)(self.model.config, self.model.optimizer_config)
        model.configure_model()
        return model.train()

    def batch(self, rows: int) -> dict[str, Any]:
        """Returns a batch of random tokens."""
        vocab = self.model.config.vocab_size
        options = Options(batch=rows, streams=rows, vocab=vocab, device="cpu", seed=0)
        if self.model.reads == "sentences":
            options.lengths = [SENTENCE_SLOTS]
            return sentences.build_batch(options, self.sentences)
        if self.model.reads == "windows":
            batch = harness.random_windows(options, vocab, self.row_tokens)
            return {**batch, "lexical": batch["mask"]}
        reasoning = (self.row_tokens - ANSWER) // 2 // STEPS * STEPS
        options.length, options.thoughts, options.thought = reasoning, reasoning, 1
        options.answer = ANSWER
        return thinking.training_batch(STEPS, options)

    def flops(self) -> float:
        """Returns the training FLOPs of a row, as the method counts them."""
        with torch.device("meta"):
            model = self.build()
        return model.flops_per_token(self.row_tokens, training=True) * self.row_tokens


def read_run(words: list[str], row_tokens: int | None, tokens: float | None) -> PlannedRun:
    """Returns the run of some arguments of ``train.py``.

    Raises:
        ValueError: if they are not understood.
    """
    from training import LatentCLI
    from training.errors import UserError

    here = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"]
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:  # devices and seeds of no run
        logger.setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            program = LatentCLI([*words, *here], run=False)
        except UserError as error:
            raise ValueError(str(error)) from error
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
    model, data, trainer = program.model, program.datamodule, program.trainer
    if getattr(model.config, "backbone", None) in KNOWN:  # no weights from the hub
        shape = KNOWN[model.config.backbone]
        model.config = dataclasses.replace(model.config, architecture=dict(shape))
    if model.reads == "reasoning":  # what the prepared questions would say
        wording = {"answer_prefix": thinking.PREFIX, "step_separator": thinking.SEPARATOR}
        known = {field.name for field in dataclasses.fields(model.config)}
        own = {key: value for key, value in wording.items() if key in known}
        model.config = dataclasses.replace(model.config, **own)
    count, rows = 0, data.batch_size
    length = row_tokens or data.block_size
    if model.reads == "sentences":
        count = data.max_sentences
        length = count * SENTENCE_SLOTS
        rows = min(rows, max(1, data.batch_tokens // (count * (SENTENCE_SLOTS - 2))))
    steps = trainer.max_steps
    accumulate = trainer.accumulate_grad_batches
    if tokens is None and steps > 0:
        tokens = float(steps * rows * accumulate * length)
    return PlannedRun(model, rows, accumulate, length, count, tokens)


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
        sent: Bytes that a GPU sends for it.
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
    sent: float
    memory: float
    whole: float

    def fits(self, gpu: Gpu) -> bool:
        """Whether a GPU's memory is enough."""
        return self.memory <= USABLE * gpu.memory


def plan(
    run: PlannedRun, strategy: Strategy, gpus: int, gpu: Gpu, share: float, rows: int = 0
) -> Plan:
    """Returns what a run needs under a strategy.

    Args:
        run: which.
        strategy: how GPUs share it.
        gpus: how many.
        gpu: their kind.
        share: of the peak FLOP/s that training reaches.
        rows: of a micro-batch; 0: the config's, or a GPU's part of the step, if that is less.
    """
    own = math.ceil(run.rows_per_step / gpus)
    rows = rows or min(run.rows, own)
    accumulate = max(1, math.ceil(own / rows))
    replicas = strategy.name == "ddp"
    step = estimate(
        run.build,
        run.batch(rows),
        gpu=gpu,
        mesh=strategy.mesh,
        keeps_gradients=replicas or accumulate > 1,
    )
    if replicas:  # once a step, whatever is accumulated
        step.transfers[Transfer("all_reduce", gpus, gpus <= GPUS_PER_NODE)] = 4 * step.parameters
    times = 1 if replicas else accumulate
    flops = run.flops() * rows * accumulate
    compute = max(flops / (share * gpu.flops), step.floor * accumulate)
    communication = times * step.communication(gpu)
    overlaps = replicas or run.model.shards_blocks
    seconds = max(compute, communication) if overlaps else compute + communication
    shards = strategy.mesh[-1] if strategy.mesh else 0
    whole = 4.0 * step.parameters * (1 + 3 / shards) if shards else 0.0
    return Plan(
        strategy=strategy,
        step=step,
        micro_batch=rows,
        accumulate=accumulate,
        compute=compute,
        communication=communication,
        seconds=seconds,
        sent=times * step.sent,
        memory=max(step.peak, whole),
        whole=whole,
    )


def chosen(run: PlannedRun, gpus: int, gpu: Gpu, share: float) -> tuple[list[Plan], Plan | None]:
    """Returns plans of strategies, up to the first that fits, and that one; None if none does."""
    tried: list[Plan] = []
    for strategy in strategies(gpus):
        tried.append(plan(run, strategy, gpus, gpu, share))
        if tried[-1].fits(gpu):
            return tried, tried[-1]
    return tried, None


def largest(run: PlannedRun, strategy: Strategy, gpus: int, gpu: Gpu) -> int:
    """Returns the most rows of a micro-batch that fit, 0 if none does.

    Memory by rows is close to a straight line: each trace corrects the line of the two before.
    """
    known: dict[int, float] = {}

    def peak(rows: int) -> float:
        if rows not in known:
            keeps = strategy.name == "ddp" or run.accumulate > 1
            step = estimate(
                run.build, run.batch(rows), gpu=gpu, mesh=strategy.mesh, keeps_gradients=keeps
            )
            known[rows] = step.peak
        return known[rows]

    limit, low, high = USABLE * gpu.memory, 1, 2
    if peak(low) > limit:
        return 0
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


def memory(options: Options) -> Iterator[dict[str, Any]]:
    """Yields a strategy's memory in GiB by part, its communication and its time."""
    run, gpu = options.run, GPUS[options.gpu]
    plans, best = chosen(run, options.gpus, gpu, options.share)
    for each in plans:
        parts = {name: size / GIB for name, size in each.step.parts.items()}
        yield {
            "strategy": each.strategy.name,
            "rows x accumulated": f"{each.micro_batch} x {each.accumulate}",
            **{
                f"{name} GiB": parts.get(name, 0.0)
                for name in ("weights", "gathered", "gradients", "optimiser")
            },
            "activations GiB": parts["activations"],
            "logits GiB": parts.get("logits", 0.0),
            "peak GiB": each.step.peak / GIB,
            "validation GiB": each.whole / GIB if each.whole else None,
            "fits": "yes" if each.fits(gpu) else "no",
            "sent GB/step": each.sent / 1e9,
            "communication s": each.communication,
            "compute s": each.compute,
            "step s": each.seconds,
        }
    print("\n" + in_words(run, plans, best, options))


def in_words(run: PlannedRun, plans: list[Plan], best: Plan | None, options: Options) -> str:
    """Returns what the run is, which strategy it gets and why, and what that costs."""
    gpu, first = GPUS[options.gpu], plans[0]
    lines = [f"{first.step.parameters:,} parameters; {cost(run, best, options)}"]
    if first.step.at_most:
        lines.append(
            "Which states survive depends on weights: memory is that of the most that can."
        )
    room = f"{USABLE * gpu.memory / GIB:.1f} GiB of a {options.gpu}"
    if best is None:
        lines.append(f"No strategy fits {room} with these rows: --set a lower data.batch_size.")
        return "\n".join(lines)
    why = {
        "one GPU": "it fits one GPU",
        "ddp": "replicas fit, and reduce gradients once a step",
        "hsdp": "replicas do not fit; parameters are gathered within a node",
        "fsdp": "replicas do not fit; parameters are spread over all GPUs",
    }
    lines.append(f"Strategy: {best.strategy.name}, as {why[best.strategy.name]} ({room}).")
    if best.strategy.mesh and not run.model.shards_blocks:
        lines.append("All parameters are gathered before each micro-batch, and held whole in it.")
    if options.largest:
        most = largest(run, best.strategy, options.gpus, gpu)
        lines.append(f"Largest micro-batch: {most} rows of {run.row_tokens} tokens.")
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


GSM8K_ROWS, GSM8K_TOKENS = 4 * 385_620, 256
"""Four epochs of GSM8K-Aug; tokens of a row are ours, the paper does not say."""
PAPERS: dict[str, tuple[float | None, int | None]] = {
    "thoughtbubbles/150m": (None, None),
    "thoughtbubbles/319m": (None, None),
    "thoughtbubbles/530m": (None, None),
    "thoughtbubbles/772m": (None, None),
    "thought_gestalt/85m": (25 * 50e6 * SENTENCE_SLOTS / (SENTENCE_SLOTS - 2), None),
    "latent_thought/ltm_small": (None, None),
    "latent_thought/ltm_medium": (None, None),
    "latent_thought/ltm_large": (None, None),
    "ponderlm/70m": (None, None),
    "ponderlm/410m": (None, None),
    "thinking_states/qwen2.5-1.5b_gsm8k": (GSM8K_ROWS * GSM8K_TOKENS, GSM8K_TOKENS),
}
"""Tokens where the config counts epochs (Thought Gestalt: 25, the most, of 50 M words), and tokens
of a row where the config does not say."""


def papers(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what the papers' runs cost."""
    gpu = GPUS[options.gpu]
    for name, (tokens, row_tokens) in PAPERS.items():
        start = time.perf_counter()
        run = read_run([f"--config={CONFIGS / name}.yaml"], row_tokens, tokens)
        plans, best = chosen(run, options.gpus, gpu, options.share)
        each = best or plans[-1]
        speed = tokens_per_second(run, each, options.gpus)
        days = (run.tokens or 0) / speed / 86400
        yield {
            "config": name,
            "parameters M": each.step.parameters / 1e6,
            "B tokens": (run.tokens or 0) / 1e9,
            "strategy": each.strategy.name if best else "none fits",
            "GPUs": options.gpus,
            "rows x accumulated": f"{each.micro_batch} x {each.accumulate}",
            "GiB": each.memory / GIB,
            "step s": each.seconds,
            "days": days,
            "GPU-hours": 24 * days * options.gpus,
            "traced in s": round(time.perf_counter() - start),
        }


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
    for file in options.config or CHECKED:
        name = file.removeprefix("configs/").removesuffix(".yaml")
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
    parser.add_argument("--largest", action="store_true", help="finds the largest micro-batch")
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
