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

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import harness
from benchmarks.harness import (
    Options,
    built,
    compare,
    in_turn,
    megabytes,
    objective,
    random_windows,
)
from lightning_models import LatentThoughtConfig, LatentThoughtLM
from lightning_models.flops import TRAINING_FACTOR
from lightning_models.latent_thought.module import TRAINED
from lightning_models.latent_thought.network import LatentAttention, LatentThoughtNetwork
from lightning_models.latent_thought.posterior import INIT_NOISE, Noise, Purpose
from lightning_models.layers import SelfAttention, apply_rope, rope_tables
from lightning_models.layers.blocks import join_heads, split_heads

GROWTH = (0, 4, 8, 16, 32)
"""T_fast of the rows of the growth table."""


def build_model(options: Options, vocab: int, steps: int) -> LatentThoughtLM:
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
        noise="fixed",  # one draw serves the rival's samples
        slow_gradient=options.slow_gradient,
    )
    model = LatentThoughtLM(config)
    built(model, Options(device=options.device))  # compiled with the loss
    return model


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
    return functools.partial(objective, model, batch)


def _noise(model: LatentThoughtLM, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns what the model draws outside of a run: for the first log-variances, and samples."""
    config, weight = model.config, model.network.output_matrix
    rows = batch["sequence_id"].tolist()
    keys = [(config.inference_seed, TRAINED, 0, number) for number in rows]
    noise = Noise(keys, (config.num_latents, config.dim), weight.device, weight.dtype)
    return noise.draw(Purpose.START), noise.draw(Purpose.INNER)


def build_step(options: Options) -> Callable[[], float]:
    """Returns a function that does a training step of ``options.side``: nats per target."""
    model = build_model(options, options.vocab, options.steps)
    batch = random_windows(options, options.vocab, options.context)
    loss = build_loss(options.side, model, batch, compiled=options.compile)
    return harness.training_step(model, loss, options.device, bf16=options.bf16)


def _sides(options: Options, vocab: int) -> list[Options]:
    return [Options(**{**vars(options), "vocab": vocab, "side": s}) for s in ("ours", "literal")]


def speed(options: Options) -> Iterator[dict[str, Any]]:
    """Yields times, FLOPs and losses of both sides, by vocabulary."""
    for vocab in options.vocab:
        losses: list[list[float]] = [[], []]
        steps = [build_step(side) for side in _sides(options, vocab)]
        ours, literal = (
            lambda step=step, own=own: own.append(step())
            for step, own in zip(steps, losses, strict=True)
        )
        time = compare(ours, literal, options.rounds)
        model = build_model(options, vocab, options.steps)
        flops = model.flops_per_token(options.context, training=True)
        once = sum(model.flops_by_part(options.context).values())
        tokens = options.batch * options.context / time.ours
        yield {
            "vocabulary": vocab,
            "ours s": time.ours,
            "literal s": time.theirs,
            "times faster": 1 / time.ratio,
            "bound": (options.steps + 1) * TRAINING_FACTOR * once / flops,
            "MFLOP/token": flops / 1e6,
            "as published": model.published_flops_per_token(options.context) / 1e6,
            "loss": losses[0][0],
            "losses apart": max(abs(a - b) for a, b in zip(*losses, strict=True)),
            "tokens/s": tokens,
            "MFU": harness.utilisation(flops * tokens, options),
        }


def memory(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the peak memory of both sides, by vocabulary."""
    for vocab in options.vocab:
        ours, literal = (megabytes("benchmarks.latents", side) for side in _sides(options, vocab))
        yield {
            "vocabulary": vocab,
            "ours MB": ours,
            "literal MB": literal,
            "ratio": ours / literal,
        }


def growth(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the time of our step by T_fast, and what each further inner step adds."""
    first = _sides(options, options.vocab[0])[0]
    steps = [build_step(Options(**{**vars(first), "steps": count})) for count in GROWTH]
    taken = list(map(statistics.median, in_turn(steps, options.rounds)))
    for row, (count, time) in enumerate(zip(GROWTH, taken, strict=True)):
        more = 1e3 * (time - taken[row - 1]) / (count - GROWTH[row - 1]) if row else None
        yield {"T_fast": count, "s/step": time, "ms each further": more}


# ---- the rival
#
# What the public code does at every inner step: a forward pass from the embedding on, all logits at
# once, and a backward pass that leaves gradients in every weight of the decoder.


class LiteralLatents(nn.Module):
    """A network's weights in the literal computation (``layered`` latents at ``index``).

    Rotations and mask are computed once, noise is given: neither counts against it.
    """

    def __init__(self, network: LatentThoughtNetwork, context: int) -> None:
        """Shares the weights of ``network``, for sequences of ``context`` tokens."""
        super().__init__()
        self.network = network
        config, device = network.config, network.embedding.weight.device
        places = torch.arange(context, device=device)
        latents = torch.arange(config.latents_per_layer, device=device)
        self.rope = rope_tables(places, config.head_dim, config.rope_base)
        self.latent_rope = rope_tables(latents, config.head_dim, config.rope_base)
        self.visible = None
        if config.window is not None and config.window < context:
            distance = places[:, None] - places
            self.visible = (distance >= 0) & (distance < config.window)

    def forward(self, tokens: Tensor, targets: Tensor, z: Tensor) -> Tensor:
        """Returns the summed cross-entropy in nats of targets (B, T) under latents (B, Z, D)."""
        x = self.network.embedding(tokens)
        own = z.unflatten(1, (len(self.network.layers), -1)).unbind(1)
        for block, latents in zip(self.network.layers, own, strict=True):
            x = x + self._attend(block.attention, block.attention_norm(x))
            x = x + self._read(block.latent_attention, block.latent_norm(x), latents)
            x = x + block.feed_forward(block.feed_forward_norm(x))
        logits = F.linear(self.network.norm(x), self.network.output_matrix)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def loss(self, batch: dict[str, Any], start: Tensor, draw: Tensor) -> Tensor:
        """Returns the mean cross-entropy at the inferred z.

        Gradients that inference left in the decoder are cleared with ``slow_gradient: final``, and
        stay, as in the public code, with ``trajectory``: there as sums over the batch, here as
        means over its targets, like the rest.

        Args:
            batch: ``tokens`` and ``targets`` (B, T).
            start: normal noise (B, Z, D) of the first log-variances.
            draw: normal noise (B, Z, D) of all samples.
        """
        tokens, targets = batch["tokens"], batch["targets"]
        z = self._infer(tokens, targets, start, draw)
        count = (targets >= 0).sum()
        if self.network.config.slow_gradient == "final":
            self.zero_grad()
        for p in self.parameters():
            if p.grad is not None:
                p.grad /= count
        return self(tokens, targets, z) / count

    def _infer(self, tokens: Tensor, targets: Tensor, start: Tensor, draw: Tensor) -> Tensor:
        config = self.network.config
        mean = torch.zeros_like(start).requires_grad_()
        log_variance = (config.init_log_variance + INIT_NOISE * start).requires_grad_()
        optimizer = torch.optim.AdamW(
            [mean, log_variance],
            lr=config.inner_lr[1],
            betas=config.inner_betas,
            weight_decay=config.inner_weight_decay,
            fused=True,
        )
        for _ in range(config.inner_steps):
            optimizer.zero_grad()
            z = mean + (0.5 * log_variance).exp() * draw
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
            (self(tokens, targets, z) + kl).backward()
            optimizer.step()
        return (mean + (0.5 * log_variance).exp() * draw).detach()

    def _attend(self, attention: SelfAttention, x: Tensor) -> Tensor:
        parts = attention.qkv(x).chunk(3, dim=-1)
        q, k, v = (split_heads(part, attention.num_heads) for part in parts)
        q, k = apply_rope(q, self.rope), apply_rope(k, self.rope)
        causal = self.visible is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible, is_causal=causal)
        return attention.out(join_heads(out))

    def _read(self, attention: LatentAttention, x: Tensor, latents: Tensor) -> Tensor:
        parts = attention.query(x), *attention.key_value(latents).chunk(2, dim=-1)
        q, k, v = (split_heads(part, attention.num_heads) for part in parts)
        q, k = apply_rope(q, self.rope), apply_rope(k, self.latent_rope)
        return attention.out(join_heads(F.scaled_dot_product_attention(q, k, v)))


def check(options: Options) -> None:
    """Checks that there is a loop to compare.

    Raises:
        ValueError: if there is none.
    """
    if options.steps < 1:
        raise ValueError(
            f"--steps ({options.steps}) must be at least 1, or there is no loop to compare"
        )


def main() -> None:
    """Parses the command line and prints the tables."""
    sizes = {"layers": 3, "dim": 256, "heads": 8, "context": 256, "window": 256, "batch": 4}
    parser = harness.options_parser(__doc__, rounds=3, **sizes, latents_per_layer=8)
    parser.add_argument("--steps", type=int, default=16, help="T_fast")
    parser.add_argument("--slow_gradient", choices=("final", "trajectory"), default="final")
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 50304])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--peak", type=float, help="FLOP/s, for the MFU of an unlisted chip")
    tables = {"speed": speed, "memory": memory, "growth": growth}
    harness.run(parser, tables, build_step, prepare=check)


if __name__ == "__main__":
    main()
