"""Thoughtbubbles' training step against the plain transformer on as many positions.

    python -m benchmarks.forking                              # the small size, on a CPU
    python -m benchmarks.forking --device cuda --layers 16 --dim 768 --heads 12 --context 512 \
        --batch 64 --vocab 50304 --fork_layers 3 7 11 --compile     # the paper's 150M

overhead = (our step time / our FLOPs) / (plain step time / plain FLOPs), the plain transformer of
the same widths run at a sequence length of kappa. ``fork`` is the share of the step that the fork
layers take (score, selection, gather, positions; forward and backward), timed in turn with whole
steps on the streams that they meet there; under --compile they run uncompiled.
Memory is each side's peak above what it held before its first step, in a process of its own. copy-n
runs on the same tokens.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Options, Step, built, compare, megabytes, random_windows
from lightning_models import (
    CopyConfig,
    CopyLM,
    LanguageModel,
    ThoughtbubblesConfig,
    ThoughtbubblesLM,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.layers import recording, rope_tables

LLAMA = {"norm": "rms", "activation": "swiglu", "bias": False}


def build(options: Options) -> tuple[LanguageModel, int]:
    """Returns ``options.side``, ``ours``, ``copy-n`` or ``plain``, and the length of its sequences.

    The plain transformer reads kappa L tokens.
    """
    shape: dict[str, Any] = {
        "vocab_size": options.vocab,
        "block_size": options.context,
        "num_layers": options.layers,
        "dim": options.dim,
        "num_heads": options.heads,
        "positions": "rope",
        **(LLAMA if options.llama else {}),
    }
    model: LanguageModel
    length = options.context
    if options.side == "ours":
        forks: dict[str, Any] = {
            "fork_layers": tuple(options.fork_layers),
            "kappa": f"{options.kappa}L",
        }
        model = ThoughtbubblesLM(ThoughtbubblesConfig(**shape, **forks))
    elif options.side.startswith("copy"):
        model = CopyLM(CopyConfig(**shape, copies=int(options.side[-1])))
    else:
        length = options.kappa * options.context
        model = TransformerLM(TransformerConfig(**shape))
    return built(model, options), length


def build_step(options: Options) -> Step:
    """Returns a function that does one whole training step."""
    return _step_of(*build(options), options)


def _step_of(model: LanguageModel, length: int, options: Options) -> Step:
    batch = random_windows(options, options.vocab, length)
    loss = functools.partial(harness.objective, model, batch)
    return harness.training_step(model, loss, options.device, bf16=options.bf16)


def build_fork_steps(model: LanguageModel, options: Options) -> Callable[[], Any]:
    """Returns a function that runs all fork layers forward and backward on a step's streams."""
    network: Any = model.network
    seen: list[dict[str, Any]] = []
    tokens = torch.randint(0, options.vocab, (options.batch, options.context))
    lengths = torch.full((options.batch,), options.context).to(options.device)
    autocast = functools.partial(
        torch.autocast, torch.device(options.device).type, torch.bfloat16, enabled=options.bf16
    )
    with recording(fork=lambda **values: seen.append(values)), torch.no_grad(), autocast():
        network(tokens.to(options.device))
    gradients: list[Tensor] = [torch.randn_like(values["after"].x) for values in seen]

    def run() -> None:
        """Forks forward and backward, each on the streams that it was seen to get."""
        for fork, values, gradient in zip(network.forks, seen, gradients, strict=True):
            before = values["before"]
            before = before.with_x(before.x.detach().requires_grad_())
            with autocast():
                after = fork(before, lengths, model.config.allocation).streams
                rope_tables(after.positions(), model.config.head_dim)
            torch.autograd.backward(
                (after.x, after.log_p), (gradient, torch.ones_like(after.log_p))
            )

    return run


def _each(options: Options) -> Iterator[Options]:
    """Yields the options with each budget and precision."""
    for kappa in options.kappa:
        for bf16 in options.bf16:
            yield Options(**{**vars(options), "kappa": kappa, "bf16": bf16})


def overhead(options: Options) -> Iterator[dict[str, Any]]:
    """Yields time, FLOPs and memory against the plain transformer, by budget and precision."""
    for asked in _each(options):
        sides = [Options(**vars(asked), side=side) for side in ("ours", "plain")]
        ours, plain = map(build, sides)
        step = _step_of(*ours, asked)
        time = compare(step, _step_of(*plain, asked), asked.rounds)
        flops = ours[0].flops_per_token(asked.context) * asked.context
        flops /= plain[0].flops_per_token(plain[1]) * plain[1]
        share = compare(build_fork_steps(ours[0], asked), step, asked.rounds).ratio
        memory = [megabytes("benchmarks.forking", side) for side in sides]
        yield {
            "kappa": f"{asked.kappa}L",
            "precision": "bf16" if asked.bf16 else "float32",
            "ours s": time.ours,
            "plain s": time.theirs,
            "FLOP ratio": flops,
            "overhead": time.ratio / flops,
            "fork %": 100 * share,
            "ours MB": memory[0],
            "plain MB": memory[1],
            "memory ratio": memory[0] / memory[1],
        }


def controls(options: Options) -> Iterator[dict[str, Any]]:
    """Yields tokens per second of every budget, and relative to a copy-n model's."""
    for control in options.controls:
        for asked in _each(options):
            rivals = [build_step(Options(**vars(asked), side=side)) for side in ("ours", control)]
            time = compare(rivals[0], rivals[1], asked.rounds)
            yield {
                "kappa": f"{asked.kappa}L",
                "precision": "bf16" if asked.bf16 else "float32",
                "tokens/s": asked.batch * asked.context / time.ours,
                "control": control,
                "times the control's": 1 / time.ratio,
            }


def main() -> None:
    """Parses the command line and prints the tables."""
    sizes = {"layers": 6, "dim": 192, "heads": 6, "context": 256, "batch": 8, "vocab": 2048}
    parser = harness.options_parser(__doc__, **sizes)
    parser.add_argument("--fork_layers", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--kappa", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bf16", type=lambda s: s == "yes", nargs="+", default=[False, True])
    parser.add_argument("--controls", nargs="*", default=["copy-3", "copy-5"])
    parser.add_argument("--llama", action="store_true", help="rms norm, swiglu, no biases")
    parser.add_argument("--compile", action="store_true")
    harness.run(parser, {"overhead": overhead, "controls": controls}, build_step)


if __name__ == "__main__":
    main()
