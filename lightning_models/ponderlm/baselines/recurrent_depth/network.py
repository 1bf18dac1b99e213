"""Network of recurrent depth in plain PyTorch: prelude, repeated core and coda.

In Huginn's notation: e = P(x), s_i = R(A [s_(i-1); e]) for i = 1 to r, logits = head(C(s_r)).
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_models.layers import (
    Block,
    KVCache,
    LayerCache,
    Rope,
    initialise,
    make_norm,
    record,
    wants,
)
from lightning_models.ponderlm.baselines.recurrent_depth.config import LoopedConfig
from lightning_models.ponderlm.baselines.recurrent_depth.exits import log_exits
from lightning_models.ponderlm.baselines.shared import RepeatedNetwork, positions_and_mask
from lightning_models.runtime import seeded_generator

NOISE_ROWS = 256
"""Number of positions whose noise comes from one generator."""
SIGMA = 0.5
"""Standard deviation of tau in ``draw_recurrences``."""


class SandwichBlock(Block):
    """A pre-norm block with a second norm for each sub-layer.

    Huginn normalises the residual sum, x <- n2(x + f(n1 x)), and Ouro the output of the sub-layer,
    x <- x + n2(f(n1 x)).
    """

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.attention_post_norm = make_norm(config)
        self.feed_forward_post_norm = make_norm(config)
        self.norms_sum = config.recurrence.norms == "huginn"
        for norm in (self.attention_post_norm, self.feed_forward_post_norm):
            nn.init.constant_(norm.get_parameter("weight"), config.recurrence.post_norm_gain)

    def add(self, x: Tensor, out: Tensor, layer: str) -> Tensor:
        norm: nn.Module = getattr(self, f"{layer}_post_norm")
        result: Tensor = norm(x + out) if self.norms_sum else x + norm(out)
        return result


class Stack(nn.Module):
    """Blocks that are applied once: the prelude or the coda."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


class Entered(NamedTuple):
    """Input of the core."""

    e: Tensor
    """Output of the prelude (B, T, D)."""
    rope: Rope
    positions: Tensor
    """int64 (T,) or (B, T)."""
    cache: KVCache | None
    mask: Tensor | None
    """See ``SelfAttention``."""

    def rows(self, index: Tensor) -> "Entered":
        """Selects rows by int64 indices; the caller restricts the cache."""
        rope = self.rope
        if len(rope.cos) > 1:  # (B, 1, T, R), or (1, 1, T, R) if all rows share positions
            rope = Rope(rope.cos[index], rope.sin[index])
        mask = None if self.mask is None else self.mask[index]
        return Entered(self.e[index], rope, self.positions[index], self.cache, mask)


class RecurrentNetwork(RepeatedNetwork):
    """Prelude, core ``blocks`` applied r times, and coda; by default the looped decoder.

    ``norm`` is the final norm. Huginn applies it before and after the coda, Ouro after every
    recurrence, with its output fed back.
    """

    # NOTE(paper): Huginn scales embeddings by sqrt(D), to variance 2/5, and has biases for queries
    # and keys only; here embeddings have the same scale in all methods, and qkv_bias includes
    # values. Its code also initialises the up half of the GLU smaller, unlike the paper.
    config: LoopedConfig

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        shape = config.recurrence
        self.prelude, self.coda = (
            Stack([self.block_class(config) for _ in range(count)])
            for count in (shape.prelude_layers, shape.coda_layers)
        )
        concat = shape.injection == "concat"
        self.adapter = nn.Linear(2 * config.dim, config.dim, bias=False) if concat else None
        self.gate = nn.Linear(config.dim, 1) if shape.gate != "none" else None
        for part in (self.prelude, self.coda, self.adapter, self.gate):
            if part is not None:
                initialise(part, config)
        self._noise: Tensor | None = None

    @property
    def block_class(self) -> type[Block]:  # type: ignore[override]
        """Class of all blocks."""
        return Block if self.config.recurrence.norms == "pre" else SandwichBlock

    @property
    def slots(self) -> int:
        """Number of cached recurrences of a token."""
        shape, recurrences = self.config.recurrence, self.config.thinking_steps + 1
        if shape.cache_lookup == "last":
            return 1  # overwritten by every recurrence
        return min(shape.cache_slots or recurrences, recurrences)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, every_depth: bool = False
    ) -> Tensor:
        """Returns the normed states (B, T, D) of ``tokens`` (B, T), padded on the right.

        With a gate, records ``router``: ``log_steps`` (B, T, K+1), log-probabilities of exiting
        after each recurrence, and ``log_tail``, log-probabilities of not exiting before it.

        Args:
            tokens: int64 (B, T).
            cache: Earlier keys and values of every recurrence. The caller then advances it.
            every_depth: Whether to return the states (B, T, K+1, D) read out after each recurrence.
        """
        entered = self.enter(tokens, cache)
        gated = self.gate is not None and wants("router")
        states = self.recur(entered, self.first_state(entered), every=every_depth or gated)
        if gated:
            logits = torch.stack([self.exit_logits(s) for s in states], dim=-1)
            log_steps, log_tail = log_exits(logits)
            record("router", log_steps=log_steps, log_tail=log_tail)
        if every_depth:
            return torch.stack([self.read_out(s, entered) for s in states], dim=2)
        return self.read_out(states[-1], entered)

    # ---- components

    def enter(self, tokens: Tensor, cache: KVCache | None = None) -> Entered:
        """Runs the prelude e = P(x) on ``tokens`` (B, T)."""
        positions, mask = positions_and_mask(tokens.shape[1], cache, tokens.device)
        x = self.embed(tokens, positions)
        entered = Entered(x, self.rope(positions), positions, cache, mask)
        e = self._through(x, entered, self.prelude.blocks, self.slots * len(self.blocks))
        return entered._replace(e=e)

    def _through(
        self, x: Tensor, entered: Entered, blocks: Iterable[nn.Module], first: int
    ) -> Tensor:
        rope, cache, mask = entered.rope, entered.cache, entered.mask
        return self.apply_blocks(x, rope, cache=cache, mask=mask, blocks=blocks, first=first)

    def first_state(self, entered: Entered, noise: Tensor | None = None) -> Tensor:
        """Returns s_0 (B, T, D).

        Args:
            entered: Input of the core.
            noise: Standard normals (B, T, D) for a noisy state. By default they depend on seed and
                position alone, so that they are the same in scoring and decoding.
        """
        shape = self.config.recurrence
        if shape.state == "embedding":
            return entered.e
        if shape.state == "zero":
            return torch.zeros_like(entered.e)
        # NOTE(paper): a normal distribution, as printed; the public code truncates it at 3 sigma.
        noise = self._fixed_noise(entered) if noise is None else noise
        return (shape.state_std * noise.to(entered.e.dtype)).expand_as(entered.e)

    def _fixed_noise(self, entered: Entered) -> Tensor:
        # drawn for all possible positions, since the host does not know the positions in use
        count = getattr(entered.cache, "longest", 0) + entered.e.shape[1]
        table, device = self._noise, entered.e.device
        if table is None or len(table) < count or table.device != device:
            drawn = draw_noise((self.config.recurrence.seed,), count, self.config.dim)
            table = self._noise = drawn.to(device)
        return table[entered.positions]

    def step(self, s: Tensor, entered: Entered, recurrence: int) -> Tensor:
        """Returns s_i (B, T, D) from s_(i-1), where ``recurrence`` is i - 1."""
        if self.adapter is not None:
            # autocast computes it in bf16, but the residual stream stays in float32
            s = self.adapter(torch.cat((s, entered.e), dim=-1)).to(entered.e.dtype)
        elif self.config.recurrence.injection == "add":
            s = s + entered.e
        first = recurrence % self.slots * len(self.blocks)  # slots are reused cyclically
        s = self._through(s, entered, self.blocks, first)
        return self.norm(s) if self.config.recurrence.norms == "ouro" else s

    def recur(
        self,
        entered: Entered,
        s: Tensor,
        *,
        every: bool = False,
        recurrences: int | None = None,
        trained: int | None = None,
    ) -> list[Tensor]:
        """Returns s_1 to s_r, or only the first and the last two.

        Args:
            entered: Input of the core.
            s: Initial state s_0 (B, T, D).
            every: Whether to return all states.
            recurrences: r. Defaults to K + 1.
            trained: Number of last recurrences that keep their graph. Defaults to all.
        """
        recurrences = self.config.thinking_steps + 1 if recurrences is None else recurrences
        untrained = 0 if trained is None else max(0, recurrences - trained)
        states: list[Tensor] = []
        for recurrence in range(recurrences):
            with torch.no_grad() if recurrence < untrained else contextlib.nullcontext():
                s = self.step(s, entered, recurrence)
            states.append(s)
            if not every and len(states) > 3:
                del states[1]
        return states

    def read_out(self, s: Tensor, entered: Entered) -> Tensor:
        """Returns the normed input (B, T, D) of the output layer for states s (B, T, D)."""
        shape = self.config.recurrence
        h = self.norm(s) if shape.norms == "huginn" else s
        if shape.coda_layers:
            first = self.slots * len(self.blocks) + shape.prelude_layers
            h = self._through(h, entered, self.coda.blocks, first)
        elif shape.norms == "ouro":
            return h
        return self.norm(h)

    def exit_logits(self, s: Tensor) -> Tensor:
        """Returns the gate logits (...) of lambda for states s (..., D), in float32 or better."""
        assert self.gate is not None
        h = s if self.config.recurrence.norms == "ouro" else self.norm(s)
        acc_dtype = torch.promote_types(h.dtype, torch.float32)
        with torch.autocast(h.device.type, enabled=False):
            weight, bias = self.gate.weight.to(acc_dtype), self.gate.bias.to(acc_dtype)
            return nn.functional.linear(h.to(acc_dtype), weight, bias)[..., 0]

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        shape = self.config.recurrence
        layers = self.slots * len(self.blocks) + shape.prelude_layers + shape.coda_layers
        return KVCache(layers, batch, capacity, self.embedding.weight.device)

    def core_layers(self, cache: KVCache, slot: int) -> list[LayerCache]:
        """Returns the cache layers of the core's blocks in a slot."""
        depth = len(self.blocks)
        return cache.layers[slot * depth : (slot + 1) * depth]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each block, which all recurrences share; arguments as in ``torch.compile``."""
        for blocks in (self.prelude.blocks, self.blocks, self.coda.blocks):
            for block in blocks:
                block.compile(*args, **kwargs)


# ---- random draws


def draw_noise(key: Sequence[int], positions: int, dim: int) -> Tensor:
    """Returns standard normals (N, D), N >= ``positions``, as a function of key and position."""
    generators = (seeded_generator(*key, part) for part in range(-(-positions // NOISE_ROWS)))
    return torch.cat(
        [torch.randn(NOISE_ROWS, dim, generator=g, dtype=torch.float32) for g in generators]
    )


def draw_recurrences(config: LoopedConfig, step: int) -> int:
    """Draws r for an optimiser step, the same for all ranks and micro-batches.

    tau ~ N(log rbar - sigma^2 / 2, sigma^2), r ~ Poisson(e^tau) + 1, with rbar = K + 1.
    """
    # NOTE(paper): the mean is rbar + 1, since the 1 that keeps r positive is added as printed.
    generator = seeded_generator(config.recurrence.seed, step)
    normal = float(torch.randn((), generator=generator, dtype=torch.float64))
    return 1 + int(torch.poisson(_rates(config, torch.tensor(normal)), generator=generator))


def _rates(config: LoopedConfig, normal: Tensor) -> Tensor:
    """Returns e^tau for standard normals, float64."""
    mean = math.log(config.thinking_steps + 1) - SIGMA**2 / 2
    return (mean + SIGMA * normal.double()).exp()


def mean_recurrences(config: LoopedConfig) -> tuple[float, float]:
    """Returns the means over training steps of r and min(r, k), the recurrences with gradients."""
    shape, fixed = config.recurrence, config.thinking_steps + 1
    if shape.training_recurrences == "fixed":
        return fixed, min(fixed, shape.backprop_recurrences or fixed)
    if shape.backprop_recurrences is None:
        return fixed + 1, fixed + 1
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)  # quadrature over tau
    rates = _rates(config, torch.from_numpy(nodes))
    below = torch.zeros_like(rates)  # P(Poisson < j)
    trained = 0.0
    for j in range(shape.backprop_recurrences):  # E min(r, k) = sum_{j < k} P(r > j)
        trained += float((torch.from_numpy(weights) * (1 - below)).sum() / weights.sum())
        below = below + (j * rates.log() - rates - math.lgamma(j + 1)).exp()
    return fixed + 1, trained
