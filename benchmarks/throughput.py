"""Training throughput of configs: speed, utilisation, memory and waits for data, next to rivals.

    python -m benchmarks.throughput --config configs/ponderlm/tiny.yaml
    python -m benchmarks.throughput --only compile --config configs/*/tiny.yaml
    python -m benchmarks.throughput --config configs/thoughtbubbles/150m.yaml --device cuda \
        --vocab 50304 --compile -- -c configs/trainer/gpu.yaml --data.tokenizer bytes

What follows ``--`` goes to the parser of ``train.py``, for every config. Weights are random;
batches are those of the config's data, read while training; rivals have theirs at hand. These are a
plain decoder (GPT-2) of the same width, so deep that a token costs as many FLOPs (at most
``--most_layers``), on as many tokens in windows; ``transformers``' GPT-2 with its weights; and the
computation of the method's paper taken literally, where the project has that.

MFU is the counted FLOP/s over those of the fastest of a few square matrix products on the same
device, in the config's precision. Memory: each side alone in a fresh process, the peak above what
it held before its first step. Steps run in turn; ratios are medians over the rounds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

from benchmarks import harness, latents, sentences
from benchmarks.harness import Options, Step, gpt2_pair, in_turn, megabytes
from callbacks.throughput import context_length, real_tokens
from lightning_models import (
    LanguageModel,
    LatentThoughtLM,
    ThoughtGestaltLM,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.thinking_states.backbone import KNOWN

SIDES = ("ours", "plain", "transformers", "literal")
WARM_UP = 4
"""Steps before compiled and plain networks are timed: shapes of batches differ."""
LONGEST = 1024
"""Tokens of a rival's window, at most."""
TINY: dict[str, Any] = {"num_layers": 1, "dim": 16, "num_heads": 2, "ffn_dim": 32}
TINY |= {"fork_layers": (0,), "sentence_layer": 1, "input_layer": 0, "output_layer": 1}
"""Fields of configs under ``--tiny``, where a config has them."""


# ---- what is measured


class Job(NamedTuple):
    """A config's model, with its network on the device, and its data."""

    model: LanguageModel
    data: Any
    bf16: bool


def program(options: Options) -> Any:
    """Returns ``train.py`` with the first of ``options.config``: its model, data and trainer."""
    from training import LatentCLI
    from training.runtime import silence

    silence()
    accelerator = "gpu" if options.device == "cuda" else "cpu"
    words = [f"--config={options.config[0]}", *options.arguments]
    words += [f"--trainer.accelerator={accelerator}", "--trainer.devices=1"]
    words += ["--trainer.strategy=auto", "--trainer.logger=false"]
    return LatentCLI(words, run=False)


def load(options: Options, *, compiled: bool = False) -> Job:
    """Returns what the first of ``options.config`` builds, its weights drawn from one seed."""
    built_by = program(options)
    model, data = built_by.model, built_by.datamodule
    data.prepare_data()
    data.setup("fit")
    model.config = replace(model.config, **_changes(model.config, options))
    if hasattr(data, "wording"):
        model.take_wording(asdict(data.wording()))
    harness.built(model, Options(device=options.device, compile=compiled))
    return Job(model, data, str(built_by.trainer.precision).startswith("bf16"))


def _changes(config: Any, options: Options) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if getattr(config, "backbone", None) in KNOWN:  # its shape, without its files
        changes |= {"architecture": dict(KNOWN[config.backbone]), "backbone": None}
    if options.vocab is not None:
        changes["vocab_size"] = max(options.vocab, config.vocab_size)
    if options.tiny:
        known = {field.name for field in fields(config)}
        changes |= {key: value for key, value in TINY.items() if key in known}
        changes |= {key: None for key in ("architecture", "backbone") if key in known}
    return changes


class EndlessBatches:
    """The training batches of a job without end, those of one epoch after those of another.

    Attributes:
        tokens: real tokens of each batch so far.
        waited: seconds that training waited for each.
    """

    def __init__(self, job: Job, device: str) -> None:
        """Begins with the first batch."""
        self._job, self._device = job, torch.device(device)
        self._batches = self._endless()
        self.tokens: list[int] = []
        self.waited: list[float] = []

    def _endless(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self._job.data.train_dataloader()

    def next(self) -> dict[str, Any]:
        """Returns the next batch, on the device."""
        start = time.perf_counter()
        batch = next(self._batches)
        self.waited.append(time.perf_counter() - start)
        self.tokens.append(int(real_tokens(batch)))
        moved: dict[str, Any] = self._job.model.transfer_batch_to_device(batch, self._device, 0)
        return moved


class Side(NamedTuple):
    """One of the rivals.

    Attributes:
        step: a whole training step.
        flops: of training, per token.
        tokens: of one step, where all are alike.
        batches: what the steps read, where they differ.
    """

    step: Step
    flops: float
    tokens: int
    batches: EndlessBatches | None = None


def reading(job: Job, options: Options) -> Side:
    """Returns the config's own side."""
    batches, model = EndlessBatches(job, options.device), job.model
    first = next(iter(job.data.train_dataloader()))
    flops = model.flops_per_token(context_length(first), training=True)

    def loss() -> Tensor:
        """The objective of the next batch."""
        return harness.objective(model, batches.next())

    step = harness.training_step(model, loss, options.device, bf16=job.bf16)
    return Side(step, flops, int(real_tokens(first)), batches)


def side(name: str, options: Options) -> Side | None:
    """Returns a side of the first config; None where it has no such rival."""
    job = load(options, compiled=options.compile and name == "ours")
    own = reading(job, options)
    if name == "ours":
        return own
    if name == "literal":
        loss = literal_loss(job, options)
        if loss is None:
            return None
        step = harness.training_step(job.model, loss, options.device, bf16=job.bf16)
        return Side(step, own.flops, own.tokens)
    return decoder(name, job, own, options)


def decoder(name: str, job: Job, own: Side, options: Options) -> Side:
    """Returns GPT-2 with as many FLOPs per token, ``plain`` or that of ``transformers``."""
    first = next(iter(job.data.train_dataloader()))
    rows = next(value for value in first.values() if isinstance(value, Tensor)).shape[0]
    context = max(2, min(LONGEST, own.tokens // rows))
    batch_size = max(1, own.tokens // context)
    config = job.model.config
    shape: Any = config
    if getattr(config, "architecture", None):
        shape = argparse.Namespace(
            dim=config.architecture["hidden_size"],
            num_heads=config.architecture["num_attention_heads"],
        )
    sizes = (config.vocab_size, context, shape.dim, shape.num_heads)
    layers = equal_layers(own.flops, *sizes, most=options.most_layers)
    theirs, plain = gpt2_pair(config.vocab_size, context, layers, shape.dim, shape.num_heads)
    batch = harness.random_windows(
        Options(batch=batch_size, device=options.device), config.vocab_size, context
    )
    module: torch.nn.Module = theirs if name == "transformers" else plain
    module.to(options.device).train()
    if options.compile:
        (theirs if name == "transformers" else plain.network).compile()

    def loss() -> Tensor:
        """Nats per target of the windows."""
        if name == "plain":
            return harness.objective(plain, batch)
        logits = theirs(batch["tokens"], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    step = harness.training_step(module, loss, options.device, bf16=job.bf16)
    return Side(step, plain.flops_per_token(context, training=True), batch_size * context)


def equal_layers(flops: float, vocab: int, context: int, dim: int, heads: int, *, most: int) -> int:
    """Returns how deep a plain decoder is whose training costs ``flops`` per token, about."""
    costs = []
    for layers in (1, 2):
        sizes: dict[str, Any] = {"vocab_size": vocab, "block_size": context, "dim": dim}
        model = TransformerLM(TransformerConfig(**sizes, num_layers=layers, num_heads=heads))
        with torch.device("meta"):
            model.configure_model()
        costs.append(model.flops_per_token(context, training=True))
    layers = 1 + round((flops - costs[0]) / (costs[1] - costs[0]))
    return min(max(layers, 1), most)


def literal_loss(job: Job, options: Options) -> Callable[[], Tensor] | None:
    """Returns the loss of the paper's computation on the first batch; None: there is none.

    Those of ``benchmarks.latents`` and ``benchmarks.sentences``, without dropout.
    """
    model: Any = job.model
    batch = EndlessBatches(job, options.device).next()
    if type(model) is LatentThoughtLM:
        usual = model.config.latents == "layered" and model.config.inference == "variational"
        return latents.build_loss("literal", model, batch) if usual else None
    if type(model) is ThoughtGestaltLM:
        if model.config.layer_type != "alternate" or model.config.memory != "differentiable":
            return None
        rival = sentences.LiteralGestalt(model.network)
        padded, count = sentences.tensorize(batch, model.config.block_size), real_tokens(batch)
        return lambda: rival.loss(padded) / count
    return None


# ---- tables


def speed(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what each side of each config does in a second."""
    for asked in _each(options):
        found = {name: side(name, asked) for name in options.sides}
        there = {name: each for name, each in found.items() if each is not None}
        times = in_turn([each.step for each in there.values()], options.rounds)
        rates = [
            [tokens / taken for tokens, taken in zip(_tokens(each, options), own, strict=True)]
            for each, own in zip(there.values(), times, strict=True)
        ]
        peak = _peak(asked)
        for (name, each), own, rate in zip(there.items(), times, rates, strict=True):
            tokens_per_second = statistics.median(rate)
            flops = each.flops * tokens_per_second
            yield {
                "config": asked.config[0],
                "side": name,
                "tokens/s": tokens_per_second,
                "to ours": statistics.median(a / b for a, b in zip(rate, rates[0], strict=True)),
                "MFLOP/token": each.flops / 1e6,
                "GFLOP/s": flops / 1e9,
                "MFU": flops / peak,
                "waits for data": _share_waited(each, own),
                "peak MB": megabytes(MODULE, asked, side=name) if asked.measure_memory else None,
            }


def _tokens(each: Side, options: Options) -> list[int]:
    """Returns the tokens of every counted round."""
    return (
        [each.tokens] * options.rounds
        if each.batches is None
        else each.batches.tokens[-options.rounds :]
    )


def _share_waited(each: Side, times: list[float]) -> float | None:
    return None if each.batches is None else sum(each.batches.waited[-len(times) :]) / sum(times)


MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
REPEATS = 5


def measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of the fastest of a few square matrix products on the device."""
    size = MATRIX_SIZE[device.type]
    a = torch.ones(size, size, dtype=dtype, device=device)
    b = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _peak(options: Options) -> float:
    """Returns the measured FLOP/s of the device in the config's precision."""
    dtype = torch.bfloat16 if load(options).bf16 else torch.float32
    return measured_rate(torch.device(options.device), dtype)


def compilation(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what ``compile: true`` gains for each config, and the seconds that it takes."""
    for asked in _each(options):
        with fresh_cache():  # an earlier run compiled nothing for this one
            yield _gain(asked)


def _gain(options: Options) -> dict[str, Any]:
    torch.compiler.reset()
    before = _graphs()
    plain, compiled = (
        reading(load(options, compiled=each), options).step for each in (False, True)
    )
    first = [sum(map(harness.seconds, [step] * WARM_UP)) for step in (plain, compiled)]
    graphs = _graphs() - before
    time = harness.compare(plain, compiled, options.rounds)
    return {
        "config": options.config[0],
        "plain s": time.ours,
        "compiled s": time.theirs,
        "gain": time.ratio,
        "compile s": first[1] - first[0],
        "graphs": graphs,
        "later": _graphs() - before - graphs,
    }


def _graphs() -> int:
    """Returns how many graphs have been compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _each(options: Options) -> Iterator[Options]:
    """Yields the options with one config each."""
    for path in options.config:
        yield Options(**{**vars(options), "config": [path]})


def build_step(options: Options) -> Step:
    """Returns a whole training step of ``options.side``, for its memory."""
    found = side(options.side, options)
    assert found is not None
    return found.step


# ---- command line


MODULE = "benchmarks.throughput"


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = harness.options_parser(__doc__, most_layers=64)
    parser.add_argument("--config", nargs="+", required="--memory" not in sys.argv)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--vocab", type=int, help="of the model, if its tokenizer has fewer")
    parser.add_argument("--compile", action="store_true", help="networks, in the speed table")
    parser.add_argument("--tiny", action="store_true", help="one small layer, as a trial")
    parser.add_argument("--no_memory", dest="measure_memory", action="store_false")
    parser.add_argument("arguments", nargs="*", help="after --: arguments of train.py")
    return parser


def main() -> None:
    """Parses the command line and prints the tables."""
    tables = {"speed": speed, "compile": compilation}
    harness.run(build_parser(), tables, build_step, default=["speed"])


if __name__ == "__main__":
    main()
