"""One training step against ``transformers``' GPT2LMHeadModel: time and peak memory.

    python -m benchmarks.training_step                  # the CPU table
    python -m benchmarks.training_step --device cuda --layers 12 --dim 768 --heads 12 \
        --context 1024 --batch 16 --vocab 50257 --compile

Both sides have the same weights, batch and fused AdamW. Time: rivals in turn, median ratio. Memory:
each side alone in a fresh process, the peak above what it held before its first step (on a GPU what
the allocator handed out, on a CPU the resident set, read from Linux' /proc).
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.measure import compare
from benchmarks.memory import extra_peak, in_a_process
from benchmarks.peers import gpt2_pair
from benchmarks.steps import training_step
from lightning_models.flops import TRAINING_FACTOR

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s."""


def build_step(side: str, options: argparse.Namespace, vocab: int, bf16: bool) -> Callable[[], Any]:
    """Returns a function that does one whole training step of ``ours`` or ``theirs``."""
    sizes = options.context, options.layers, options.dim, options.heads
    theirs, ours = gpt2_pair(vocab, *sizes)
    stream = torch.randint(0, vocab, (options.batch, options.context + 1), device=options.device)
    batch = {"tokens": stream[:, :-1], "targets": stream[:, 1:].contiguous()}
    module: torch.nn.Module = theirs if side == "theirs" else ours
    module.to(options.device).train()
    if options.compile:
        (theirs if side == "theirs" else ours.network).compile()

    def loss() -> torch.Tensor:
        """Nats per target of the batch."""
        if side == "theirs":
            logits = theirs(batch["tokens"], use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        term = ours.loss(batch).terms["nll"]
        return term.sum / term.normaliser

    return training_step(module, loss, options.device, bf16=bf16)


def report(options: argparse.Namespace) -> None:
    """Prints one row per vocabulary and precision."""
    place = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{options.layers} layers x {options.dim}, {options.context} tokens, batch {options.batch},"
        f" {place}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        f"{', compiled' if options.compile else ''}"
    )
    print("vocabulary precision ours s theirs s ratio ours MB theirs MB ratio MFU")
    for vocab in options.vocab:
        for bf16 in (False, True):
            sides = [build_step(side, options, vocab, bf16) for side in ("ours", "theirs")]
            time = compare(sides[0], sides[1], options.rounds)
            del sides
            settings = {**vars(options), "vocab": vocab, "bf16": bf16}
            ours, theirs = (
                in_a_process("benchmarks.training_step", {**settings, "side": side}) / 1e6
                for side in ("ours", "theirs")
            )
            print(
                f"{vocab:10d} {'bf16' if bf16 else 'float32':9s}"
                f" {time.ours:6.3f} {time.theirs:8.3f} {time.ratio:5.2f}"
                f" {ours:7.0f} {theirs:9.0f} {ours / theirs:5.2f}"
                f" {_mfu(options, vocab, time.ours) if bf16 else '-'}"
            )


def _mfu(options: argparse.Namespace, vocab: int, step_seconds: float) -> str:
    """Counted FLOPs of a step (3 x forward, causal attention) over time and the chip's peak."""
    if options.device != "cuda":
        return "-"
    peak = next((v for name, v in PEAKS.items() if name in torch.cuda.get_device_name()), None)
    if peak is None:
        return "-"
    _, ours = gpt2_pair(vocab, options.context, options.layers, options.dim, options.heads)
    flops = ours.flops_per_token(options.context) * TRAINING_FACTOR
    return f"{flops * options.batch * options.context / step_seconds / peak:.2f}"


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 50304])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--memory", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is None:
        report(options)
        return
    asked = argparse.Namespace(**json.loads(options.memory))
    print(extra_peak(build_step(asked.side, asked, asked.vocab, asked.bf16), asked.device))


if __name__ == "__main__":
    main()
