"""One training step against ``transformers``' GPT2LMHeadModel: time and peak memory.

    python -m benchmarks.training_step                  # the CPU table
    python -m benchmarks.training_step --device cuda --layers 12 --dim 768 --heads 12 \
        --context 1024 --batch 16 --vocab 50257 --compile

Both sides have the same weights, batch and fused AdamW. Time: rivals in turn, median ratio. Memory:
each side alone in a fresh process, the peak above what it held before its first step (on a GPU what
the allocator handed out, on a CPU the resident set, read from Linux' /proc).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import harness
from benchmarks.harness import Options, Step, compare, gpt2_pair, megabytes, random_windows


def build_step(options: Options) -> Step:
    """Returns a function that does one whole training step of ``options.side``."""
    theirs, ours = gpt2_pair(
        options.vocab, options.context, options.layers, options.dim, options.heads
    )
    batch = random_windows(options, options.vocab, options.context)
    module: torch.nn.Module = theirs if options.side == "theirs" else ours
    module.to(options.device).train()
    if options.compile:
        (theirs if options.side == "theirs" else ours.network).compile()

    def loss() -> torch.Tensor:
        """Nats per target of the batch."""
        if options.side == "theirs":
            logits = theirs(batch["tokens"], use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        return harness.objective(ours, batch)

    return harness.training_step(module, loss, options.device, bf16=options.bf16)


def steps(options: Options) -> Iterator[dict[str, Any]]:
    """Yields one row per vocabulary and precision."""
    for vocab in options.vocab:
        for bf16 in (False, True):
            settings = {**vars(options), "vocab": vocab, "bf16": bf16}
            sides = [Options(**settings, side=side) for side in ("ours", "theirs")]
            time = compare(build_step(sides[0]), build_step(sides[1]), options.rounds)
            ours, theirs = (megabytes("benchmarks.training_step", side) for side in sides)
            yield {
                "vocabulary": vocab,
                "precision": "bf16" if bf16 else "float32",
                "ours s": time.ours,
                "theirs s": time.theirs,
                "time ratio": time.ratio,
                "ours MB": ours,
                "theirs MB": theirs,
                "memory ratio": ours / theirs,
                "MFU": _mfu(sides[0], time.ours) if bf16 else None,
            }


def _mfu(options: Options, step_seconds: float) -> float | None:
    """Counted FLOPs of a step (3 x forward, causal attention) over time and the chip's peak."""
    if options.device != "cuda":
        return None
    _, ours = gpt2_pair(options.vocab, options.context, options.layers, options.dim, options.heads)
    flops = ours.flops_per_token(options.context, training=True)
    return harness.utilisation(flops * options.batch * options.context / step_seconds, options)


def main() -> None:
    """Parses the command line and prints the table."""
    parser = harness.options_parser(__doc__, layers=6, dim=256, heads=4, context=256, batch=16)
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 50304])
    parser.add_argument("--compile", action="store_true")
    harness.run(parser, {"steps": steps}, build_step)


if __name__ == "__main__":
    main()
