"""Latent-Thought training step against ``backward`` through the whole decoder at every inner step.

    python -m benchmarks.latents                         # two vocabularies, and growth with T_fast
    python -m benchmarks.latents --device cuda --dim 512 --context 1024 --batch 16 --vocab 50304 \
        --bf16 --compile                                 # ltm_small: tokens/s, MFU

Random tokens; both sides have the same weights, noise and fused AdamW, so their losses agree. Time:
rivals in turn, median ratio; ``bound`` is the ratio of their FLOPs. The count as published is the
paper's, see ``LatentThoughtLM.published_flops_per_token``. Memory: each side alone in a fresh
process, the peak above what it held before its first step. Growth: our step by T_fast, at the first
vocabulary.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.literal_latents import LiteralLatents
from benchmarks.measure import compare, seconds
from benchmarks.memory import extra_peak, in_a_process
from benchmarks.steps import training_step
from benchmarks.training_step import PEAKS
from lightning_models import LatentThoughtConfig, LatentThoughtLM
from lightning_models.flops import TRAINING_FACTOR
from lightning_models.latent_thought.module import TRAINED
from lightning_models.latent_thought.posterior import Noise, Purpose

Step = Callable[[], float]
GROWTH = (0, 4, 8, 16, 32)
"""T_fast of the rows of the growth table."""


def build_model(options: argparse.Namespace, vocab: int, steps: int) -> LatentThoughtLM:
    """Returns the model without dropout, with ``steps`` inner steps."""
    config = LatentThoughtConfig(
        vocab_size=vocab,
        block_size=options.context,
        num_layers=options.layers,
        dim=options.dim,
        num_heads=options.heads,
        window=options.window,
        latents_per_layer=options.latents_per_layer,
        inner_steps=steps,
        slow_gradient=options.slow_gradient,
    )
    torch.manual_seed(0)
    model = LatentThoughtLM(config)
    model.configure_model()
    return model.to(options.device).train()


def build_batch(options: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Returns rows of random tokens as window data modules make them."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(0, vocab, (options.batch, options.context + 1), generator=generator)
    tokens = stream[:, :-1].contiguous()
    batch = {"tokens": tokens, "targets": stream[:, 1:].contiguous()}
    batch["mask"] = torch.ones_like(tokens, dtype=torch.bool)
    batch["sequence_id"] = torch.arange(options.batch)
    return {key: value.to(options.device) for key, value in batch.items()}


def build_loss(
    side: str, model: LatentThoughtLM, batch: dict[str, Any], *, compiled: bool = False
) -> Callable[[], Tensor]:
    """Returns what computes the loss of ``ours`` or ``literal``, in nats per target.

    ``backward`` from it leaves one and the same gradient in the model's weights.
    """
    assert model.network is not None
    if side == "literal":
        rival = LiteralLatents(model.network, batch["tokens"].shape[1])
        noise = _noise(model, batch)
        if compiled:
            rival.compile()
        return lambda: rival.loss(batch, *noise)
    if compiled:
        model.network.compile()

    def loss() -> Tensor:
        """The training objective of the batch."""
        terms = model.loss(batch).terms.values()
        return torch.stack([term.sum / term.normaliser for term in terms]).sum()

    return loss


def _noise(model: LatentThoughtLM, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns what the model draws outside of a run: for the first log-variances, and samples."""
    config, weight = model.config, model.network.output_matrix
    rows = batch["sequence_id"].tolist()
    keys = [(config.inference_seed, TRAINED, 0, number) for number in rows]
    noise = Noise(keys, (config.num_latents, config.dim), weight.device, weight.dtype)
    return noise.draw(Purpose.START), noise.draw(Purpose.INNER)


def build_step(
    side: str, options: argparse.Namespace, vocab: int, steps: int | None = None
) -> Step:
    """Returns a function that does one whole training step and returns nats per target."""
    model = build_model(options, vocab, options.steps if steps is None else steps)
    batch = build_batch(options, vocab)
    loss = build_loss(side, model, batch, compiled=options.compile)
    return training_step(model, loss, options.device, bf16=options.bf16)


def report(options: argparse.Namespace) -> None:
    """Prints the tables that were asked for."""
    place = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{options.layers} layers x {options.dim}, {options.heads} heads, {options.context} tokens,"
        f" window {options.window}, batch {options.batch}, {options.latents_per_layer} latents a "
        f"layer, T_fast {options.steps}, slow gradient {options.slow_gradient}, "
        f"{'bf16' if options.bf16 else 'float32'}, {place}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}{', compiled' if options.compile else ''}"
    )
    tables = {"speed": _speed, "memory": _memory, "growth": _growth}
    for name in options.only:
        tables[name](options)


def _speed(options: argparse.Namespace) -> None:
    print("vocabulary  ours s literal s  x faster  bound | MFLOP/token as published | loss, apart")
    for vocab in options.vocab:
        losses: dict[str, list[float]] = {"ours": [], "literal": []}
        ours, literal = (_noting(build_step(side, options, vocab), losses[side]) for side in losses)
        time = compare(ours, literal, options.rounds)
        apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
        model = build_model(options, vocab, options.steps)
        flops = model.flops_per_token(options.context, training=True)
        published = model.published_flops_per_token(options.context)
        once = sum(model.flops_by_part(options.context).values())
        bound = (options.steps + 1) * TRAINING_FACTOR * once / flops
        print(
            f"{vocab:10d} {time.ours:7.3f} {time.theirs:9.3f} {1 / time.ratio:9.2f} "
            f"{bound:6.2f} | {flops / 1e6:11.1f} {published / 1e6:12.1f} | "
            f"{losses['ours'][0]:.6f}, {apart:.1e} in {len(losses['ours'])} steps"
        )
        print(_throughput(options, flops, time.ours), flush=True)


def _noting(step: Step, losses: list[float]) -> Callable[[], None]:
    """Returns the step; what it returns is noted."""
    return lambda: losses.append(step())


def _throughput(options: argparse.Namespace, flops: float, step_seconds: float) -> str:
    """Returns our tokens per second, and on a known GPU the share of its peak that they use."""
    speed = options.batch * options.context / step_seconds
    text = f"           {speed:.0f} tokens/s"
    name = torch.cuda.get_device_name() if options.device == "cuda" else ""
    peak = options.peak or next((value for chip, value in PEAKS.items() if chip in name), None)
    return text if peak is None else f"{text}, MFU {flops * speed / peak:.2f}"


def _memory(options: argparse.Namespace) -> None:
    print("vocabulary  ours MB  literal MB  ratio")
    for vocab in options.vocab:
        settings = {**vars(options), "vocab": vocab}
        ours, literal = (
            in_a_process("benchmarks.latents", {**settings, "side": side}) / 1e6
            for side in ("ours", "literal")
        )
        print(f"{vocab:10d} {ours:8.0f} {literal:11.0f} {ours / literal:6.2f}", flush=True)


def _growth(options: argparse.Namespace) -> None:
    vocab = options.vocab[0]
    print(f"T_fast  s/step  ms each further inner step (vocabulary {vocab})")
    taken = _medians([build_step("ours", options, vocab, count) for count in GROWTH], options)
    for row, (count, time) in enumerate(zip(GROWTH, taken, strict=True)):
        more = (time - taken[row - 1]) / (count - GROWTH[row - 1]) if row else None
        print(f"{count:6d} {time:7.3f} {'-' if more is None else f'{1e3 * more:.1f}':>8s}")


def _medians(steps: Sequence[Step], options: argparse.Namespace) -> list[float]:
    """Returns the median seconds of each, taken in turn after one uncounted run."""
    rounds = [[seconds(step) for step in steps] for _ in range(options.rounds + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def main() -> None:
    """Parses the command line and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--latents_per_layer", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="T_fast")
    parser.add_argument("--slow_gradient", choices=("final", "trajectory"), default="final")
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 50304])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", type=float, help="FLOP/s, for the MFU of an unlisted chip")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("speed", "memory", "growth"),
        default=["speed", "memory", "growth"],
    )
    parser.add_argument("--memory", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(
            f"--steps ({options.steps}) must be at least 1, or there is no loop to compare"
        )
    if options.memory is None:
        report(options)
        return
    asked = argparse.Namespace(**json.loads(options.memory))
    print(extra_peak(build_step(asked.side, asked, asked.vocab), asked.device))


if __name__ == "__main__":
    main()
