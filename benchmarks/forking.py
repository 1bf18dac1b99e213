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

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import compare
from benchmarks.memory import extra_peak, in_a_process
from benchmarks.steps import training_step
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


def build(side: str, options: argparse.Namespace, kappa: int) -> tuple[LanguageModel, int]:
    """Returns ``ours``, ``copy-n`` or ``plain`` (at kappa L), and the length of its sequences."""
    torch.manual_seed(0)
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
    if side == "ours":
        forks = tuple(options.fork_layers)
        model = ThoughtbubblesLM(
            ThoughtbubblesConfig(**shape, fork_layers=forks, kappa=f"{kappa}L")
        )
    elif side.startswith("copy"):
        model = CopyLM(CopyConfig(**shape, copies=int(side[-1])))
    else:
        length = kappa * options.context
        model = TransformerLM(TransformerConfig(**shape))
    model.configure_model()
    return model.to(options.device).train(), length


def build_step(
    model: LanguageModel, length: int, options: argparse.Namespace, bf16: bool
) -> Callable[[], Any]:
    """Returns a function that does one whole training step."""
    stream = torch.randint(0, options.vocab, (options.batch, length + 1), device=options.device)
    batch = {"tokens": stream[:, :-1], "targets": stream[:, 1:].contiguous()}
    if options.compile:
        assert model.network is not None
        model.network.compile()

    def loss() -> Tensor:
        """Nats per target of the batch."""
        term = model.loss(batch).terms["nll"]
        return term.sum / term.normaliser

    return training_step(model, loss, options.device, bf16=bf16)


def build_fork_steps(
    model: LanguageModel, options: argparse.Namespace, bf16: bool
) -> Callable[[], Any]:
    """Returns a function that runs all fork layers forward and backward on a step's streams."""
    network: Any = model.network
    seen: list[dict[str, Any]] = []
    tokens = torch.randint(0, options.vocab, (options.batch, options.context))
    lengths = torch.full((options.batch,), options.context).to(options.device)
    autocast = functools.partial(
        torch.autocast, torch.device(options.device).type, torch.bfloat16, enabled=bf16
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


def report(options: argparse.Namespace) -> None:
    """Prints one row per budget and precision."""
    place = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{options.layers} layers x {options.dim}, forks at {options.fork_layers}, "
        f"{options.context} tokens, batch {options.batch}, V {options.vocab}, {place}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
        f"{', compiled' if options.compile else ''}"
    )
    print("kappa precision  ours s plain s  FLOP ratio overhead fork % | ours MB plain MB ratio")
    for kappa in options.kappa:
        for bf16 in options.bf16:
            ours, plain = (build(side, options, kappa) for side in ("ours", "plain"))
            time = compare(
                build_step(*ours, options, bf16), build_step(*plain, options, bf16), options.rounds
            )
            flops = ours[0].flops_per_token(options.context) * options.context
            flops /= plain[0].flops_per_token(plain[1]) * plain[1]
            step = build_step(*ours, options, bf16)
            share = compare(build_fork_steps(ours[0], options, bf16), step, options.rounds).ratio
            row = f"{kappa:4d}L {'bf16' if bf16 else 'float32':9s}"
            row += f" {time.ours:7.3f} {time.theirs:7.3f} {flops:11.3f}"
            row += f" {time.ratio / flops:8.2f} {100 * share:6.1f}"
            print(row + _memory(options, kappa, bf16), flush=True)
    for side in options.controls:
        _report_control(side, options)


def _memory(options: argparse.Namespace, kappa: int, bf16: bool) -> str:
    settings = {**vars(options), "kappa": kappa, "bf16": bf16}
    ours, plain = (
        in_a_process("benchmarks.forking", {**settings, "side": side}) / 1e6
        for side in ("ours", "plain")
    )
    return f" | {ours:7.0f} {plain:8.0f} {ours / plain:5.2f}"


def _report_control(side: str, options: argparse.Namespace) -> None:
    """Prints tokens per second of every budget, relative to a copy-n model's."""
    for kappa in options.kappa:
        for bf16 in options.bf16:
            rivals = [build_step(*build(s, options, kappa), options, bf16) for s in ("ours", side)]
            time = compare(rivals[0], rivals[1], options.rounds)
            tokens = options.batch * options.context
            print(
                f"{kappa}L {'bf16' if bf16 else 'float32'}: {tokens / time.ours:.0f} tokens/s, "
                f"{1 / time.ratio:.2f} times {side}'s",
                flush=True,
            )


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--fork_layers", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--kappa", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bf16", type=lambda s: s == "yes", nargs="+", default=[False, True])
    parser.add_argument("--controls", nargs="*", default=["copy-3", "copy-5"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama", action="store_true", help="rms norm, swiglu, no biases")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--memory", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is None:
        report(options)
        return
    asked = argparse.Namespace(**json.loads(options.memory))
    step = build_step(*build(asked.side, asked, asked.kappa), asked, asked.bf16)
    print(extra_peak(step, asked.device))


if __name__ == "__main__":
    main()
