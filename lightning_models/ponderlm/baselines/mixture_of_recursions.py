"""Mixture-of-Recursions: a shared stack of blocks, applied again to tokens chosen by a router.

Tokens are chosen for the next recursion by rank or by a threshold.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.flops import attention_flops
from lightning_models.layers import KVCache, initialise, record, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import linear_cross_entropy
from lightning_models.outputs import Likelihood, LossOutput, Mean, Term
from lightning_models.ponderlm.baselines.shared import DepthLM, RepeatedNetwork, positions_and_mask
from lightning_models.ponderlm.config import PonderingConfig
from lightning_models.runtime import uncompiled

Routing = Literal["threshold", "topk"]

WIDTH_STEP = 64
"""Threshold routing pads the chosen tokens to a multiple of this, so shapes seldom change."""

ROUNDING = 1e-9
"""Tolerance subtracted before rounding up, as 0.55 * 100 is 55.00000000000001 in float64."""


class RecursionChoice(NamedTuple):
    """Tokens that take a recursion, and the router's loss for predicting this choice."""

    chosen: Tensor
    """Bool (B, T), true for chosen tokens."""
    router_loss: Tensor
    """Summed cross-entropy, in nats, of sigmoid(logit) against ``chosen``."""
    decisions: Tensor
    """Number of its terms: candidates, or 0 if there is no choice by rank."""


def quota(capacity: float, tokens: int) -> int:
    """Returns ceil(capacity * tokens)."""
    return math.ceil(capacity * tokens - ROUNDING)


def choose(
    logit: Tensor, candidates: Tensor, quotas: Tensor | None, *, everyone: bool = False
) -> RecursionChoice:
    """Chooses the candidates that take a recursion.

    Args:
        logit: Router logits (B, T), float32 or better.
        candidates: Bool (B, T), true for tokens that took the previous recursion.
        quotas: int64 (B,), number of tokens to choose in each row by the highest logits, earlier
            ones first among equals. If None, tokens with sigmoid(logit) > 0.5 are chosen.
        everyone: Whether all candidates take it regardless of their logits.
    """
    if everyone or quotas is None:
        zero = logit.new_zeros(())
        chosen = candidates if everyone else candidates & (logit > 0)
        return RecursionChoice(chosen, zero, zero)
    order = logit.detach().masked_fill(~candidates, -math.inf)
    order = order.argsort(dim=1, descending=True, stable=True)  # (B, T), best first
    # the argsort of a permutation is its inverse: the rank of each token
    chosen = candidates & (order.argsort(dim=1) < quotas[:, None])
    nats = F.binary_cross_entropy_with_logits(logit, chosen.to(logit.dtype), reduction="none")
    loss = nats.masked_fill(~candidates, 0.0).sum()
    return RecursionChoice(chosen, loss, candidates.sum().to(logit.dtype))


def quotas_of(capacity: float, tokens: Tensor) -> Tensor:
    """Returns ``quota`` for each of several token counts, int64 (B,)."""
    return (capacity * tokens.double() - ROUNDING).ceil().long()


def chosen_first(chosen: Tensor, width: int) -> Tensor:
    """Returns indices (B, width) of the chosen tokens of each row in order, then of others.

    The others follow the chosen ones, so that causality hides them.
    """
    # a stable sort of False before True keeps the order within both groups
    order = torch.sort((~chosen).to(torch.int8), dim=1, stable=True).indices
    return order[:, :width]


def width_of(chosen: Tensor) -> int:
    """Returns the padded width for the chosen tokens of the fullest row, 0 if there are none."""
    width = int(chosen.sum(dim=1).max()) if chosen.numel() else 0
    return min(chosen.shape[1], math.ceil(width / WIDTH_STEP) * WIDTH_STEP)


@dataclass(frozen=True, kw_only=True)
class MoRConfig(PonderingConfig):
    """A shared stack, applied once to all tokens and up to K = ``thinking_steps`` times to some.

    Raises:
        ValueError: If a value is out of range.
    """

    capacities: tuple[float, ...] = (0.9, 0.8, 0.73)
    """Fraction of a text's tokens that takes each of the K extra recursions in training. The
    defaults execute 2.43 steps per token, as in PonderLM-3's Table 2."""
    # NOTE(paper): unpublished for PonderLM-3's baseline. With 1e-3, gates of hardly any token stay
    # above the threshold (docs/results/ponderlm.md). The public code of arXiv 2507.10524 scales the
    # gates by 0.1, which weakens the pull of the language model's loss on them.
    router_weight: float = 0.1
    """Weight of the routers' cross-entropy in the objective. If it is too small, gates fall below
    the threshold of 1/2, and few tokens recur outside training."""
    eval_routing: Routing = "threshold"
    """Routing in scoring: by threshold, which is causal, or by rank as in training, which depends
    on later tokens. Generation always routes by threshold."""

    def __post_init__(self) -> None:
        super().__post_init__()
        capacities = self.capacities
        if len(capacities) != self.thinking_steps:
            raise ValueError(
                f"capacities ({capacities}) must have thinking_steps ({self.thinking_steps}) "
                "values; give one for each extra recursion"
            )
        if any(not 0 < c <= 1 for c in capacities) or sorted(capacities)[::-1] != [*capacities]:
            raise ValueError(
                f"capacities ({capacities}) must be in (0, 1] and non-increasing: a recursion "
                "chooses among the tokens of the previous one"
            )
        if self.router_weight < 0:
            raise ValueError(f"router_weight ({self.router_weight}) must not be negative")

    def everyone(self, recursion: int) -> bool:
        """Returns whether extra recursion ``recursion`` (0-based) keeps all previous tokens.

        In that case there is no choice, in training or outside it.
        """
        return self.capacities[recursion] == (1.0, *self.capacities)[recursion]

    @property
    def chooses(self) -> bool:
        """Whether any recursion chooses among its candidates."""
        return not all(self.everyone(recursion) for recursion in range(self.thinking_steps))


class RecursionCache:
    """Keys and values of each recursion, for the tokens that took it."""

    def __init__(self, config: MoRConfig, batch: int, capacity: int, device: torch.device) -> None:
        self.recursions = [
            KVCache(config.num_layers, batch, capacity, device)
            for _ in range(config.thinking_steps + 1)
        ]

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        for recursion in self.recursions:
            recursion.select(rows)


class Recursed(NamedTuple):
    """States of a text after its recursions."""

    states: Tensor
    """Normed states (B, T, D), or after each number of recursions (B, T, K+1, D)."""
    executed: Tensor
    """Extra recursions of each token, int64 (B, T)."""
    router_loss: Tensor
    """Summed cross-entropy of the routers, in nats; 0 unless tokens were chosen by rank."""
    decisions: Tensor
    """Number of terms of the router loss."""


class MoRNetwork(RepeatedNetwork):
    """Hierarchical expert choice: a recursion chooses among the tokens of the previous one.

    The chosen tokens attend to each other at their original positions and are updated as
    ``H + g (blocks(H) - H)`` with ``g = sigmoid(router(H))``; the others keep H.
    """

    # NOTE(paper): H + g f(H) of arXiv 2507.10524, where f is read as the update that the blocks add
    # to H. With f(H) = blocks(H), which contains H, every recursion would add the whole stream
    # again. Here g = 0 leaves a token unchanged, and g = 1 for all is the looped decoder.
    config: MoRConfig

    def __init__(self, config: MoRConfig) -> None:
        super().__init__(config)
        self.routers = nn.ModuleList(nn.Linear(config.dim, 1) for _ in range(config.thinking_steps))
        initialise(self.routers, config)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        cache: RecursionCache | None = None,
        every_depth: bool = False,
        *,
        valid: Tensor | None = None,
        routing: Routing = "topk",
    ) -> Recursed:
        """Returns the states of ``tokens`` (B, T) and the decisions of the routers.

        Args:
            tokens: int64 (B, T), padded on the right.
            cache: Earlier tokens of each recursion, to which the valid new ones are appended.
            every_depth: Whether to return the states after each number of recursions.
            valid: Bool (B, T), false in padding, which is never chosen. Defaults to all.
            routing: Choice by rank among these tokens (``topk``) or by threshold, see ``choose``.
        """
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        kv = None if cache is None else cache.recursions[0]
        positions, mask = positions_and_mask(tokens.shape[1], kv, tokens.device)
        x = self.embed(tokens, positions)
        x = self.apply_blocks(x, self.rope(positions), cache=kv, mask=mask)
        if kv is not None:
            kv.advance(valid.sum(dim=1))
        chosen, executed = valid, torch.zeros_like(tokens)
        loss = decisions = torch.zeros((), device=x.device)
        streams = [x]
        for recursion in range(self.config.thinking_steps):
            logit = self.route(x, recursion)
            quotas = None
            if routing == "topk":
                quotas = quotas_of(self.config.capacities[recursion], valid.sum(dim=1))
            choice = choose(logit, chosen, quotas, everyone=self.config.everyone(recursion))
            chosen, executed = choice.chosen, executed + choice.chosen
            loss, decisions = loss + choice.router_loss, decisions + choice.decisions
            x = self.recurse(x, logit, chosen, positions, recursion, routing, cache)
            streams.append(x)
        states = [
            self.norm(x) for x in (streams if every_depth else streams[-1:])
        ]  # (B, T, D) each
        out = torch.stack(states, dim=2) if every_depth else states[0]
        return Recursed(out, executed, loss, decisions)

    def route(self, x: Tensor, recursion: int) -> Tensor:
        """Returns router logits (B, T) for the stream (B, T, D), in float32 or better."""
        router = self.routers[recursion]
        assert isinstance(router, nn.Linear)
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logit = F.linear(
                x.to(acc_dtype), router.weight.to(acc_dtype), router.bias.to(acc_dtype)
            )
        return logit[..., 0]

    def recurse(
        self,
        x: Tensor,
        logit: Tensor,
        chosen: Tensor,
        positions: Tensor,
        recursion: int,
        routing: Routing,
        cache: RecursionCache | None,
    ) -> Tensor:
        """Returns the stream (B, T, D) after the chosen tokens took an extra recursion.

        The shapes are fixed under ``topk``. Under ``threshold`` they depend on the fullest row, and
        nothing is computed if no token was chosen.
        """
        num_tokens = x.shape[1]
        by_rank = routing == "topk"
        capacity = self.config.capacities[recursion]
        width = quota(capacity, num_tokens) if by_rank else width_of(chosen)
        if width == 0:
            return x
        token = chosen_first(chosen, width)  # (B, width)
        index = token[..., None].expand(-1, -1, x.shape[2])  # (B, width, D)
        selected = x.gather(1, index)  # (B, width, D)
        rope = self.rope(positions.expand(len(x), num_tokens).gather(1, token))
        kv = None if cache is None else cache.recursions[recursion + 1]
        mask = None if kv is None else kv.mask(width)
        out = self.apply_blocks(selected, rope, cache=kv, mask=mask)
        if kv is not None:
            kv.advance(chosen.sum(dim=1))
        # (B, width, 1), 0 for tokens that only fill up the width, which keep their state
        gate = (logit.sigmoid() * chosen).gather(1, token)[..., None].to(x.dtype)
        return x.scatter(1, index, selected + gate * (out - selected))

    def new_cache(self, batch: int, capacity: int) -> RecursionCache:  # type: ignore[override]
        return RecursionCache(self.config, batch, capacity, self.embedding.weight.device)


class _Prefix(NamedTuple):
    """Extra recursions (B, P) int64 of the tokens of prefixes, and the mask of real tokens."""

    executed: Tensor
    real: Tensor


class MoRLM(DepthLM):
    """Mixture-of-Recursions with expert choice (arXiv 2507.10524).

    In training tokens are chosen by rank in the whole text, including later tokens. The routers
    learn to predict this choice from the token alone. Scoring and generation use their prediction,
    which is causal, unless ``eval_routing`` is ``topk``.

    Args:
        config: Shape of the network, recursions and routers.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    config: MoRConfig
    network: MoRNetwork

    def __init__(
        self,
        config: MoRConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def causal(self) -> bool:
        """Whether the routing of a token in scoring is independent of later tokens."""
        return self.config.eval_routing == "threshold" or not self.config.chooses

    @property
    def likelihood(self) -> Likelihood:
        """``exact`` if scoring is causal, else ``noncausal``."""
        return "exact" if self.causal else "noncausal"

    @property
    def adaptive(self) -> bool:
        """Whether the number of recursions of a text depends on more than its length."""
        return self.config.eval_routing == "threshold" and self.config.chooses

    def build_network(self) -> MoRNetwork:
        return MoRNetwork(self.config)

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        return self.network.routers.parameters()

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the cross-entropy under expert choice and the cross-entropy of the routers.

        Also logs ``executed_steps``, the extra recursions of tokens with a target.
        """
        targets, valid = batch["targets"], batch.get("mask")
        recursed: Recursed = self.network(batch["tokens"], valid=valid, routing="topk")
        nll = linear_cross_entropy(recursed.states, self.network.output_matrix, targets)
        counted = targets >= 0
        output = LossOutput({"nll": Term(nll, counted.sum(), "targets")})
        if self.config.chooses:
            router_loss = self.config.router_weight * recursed.router_loss
            output.terms["router"] = Term(router_loss, recursed.decisions)
        output.stats["executed_steps"] = Mean((recursed.executed * counted).sum(), counted.sum())
        return output

    def read(self, batch: dict[str, Any], every_depth: bool) -> tuple[Tensor, Tensor]:
        """Returns states and executed recursions under ``eval_routing``, see ``DepthLM``.

        Records ``flops``, see ``LanguageModel.adaptive``.
        """
        valid = batch.get("mask", torch.ones_like(batch["tokens"], dtype=torch.bool))
        # Under a threshold the number of tokens differs by batch, and each would recompile.
        with uncompiled(self.config.eval_routing == "threshold"):
            cache, before = self._prefix(batch)
            recursed: Recursed = self.network(
                batch["tokens"],
                cache,
                every_depth,
                valid=valid,
                routing=self.config.eval_routing,
            )
        if wants("flops"):
            executed, real = recursed.executed, valid
            if before is not None:  # each row is charged for its whole prefix
                executed = torch.cat((before.executed, executed), dim=1)
                real = torch.cat((before.real, real), dim=1)
            flops = self._executed_flops(executed, real)
            record("flops", flops=flops, tokens=real.sum(dim=1))
        return recursed.states, recursed.executed

    def _prefix(self, batch: dict[str, Any]) -> tuple[RecursionCache | None, _Prefix | None]:
        """Returns for each row a copy of its prefix's cache and the recursions of its tokens."""
        if "prefix" not in batch:
            return None, None
        tokens, rows = batch["prefix"][:, :-1], batch["prefix_row"]
        cache = self.network.new_cache(len(tokens), tokens.shape[1] + 1 + batch["tokens"].shape[1])
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        # (C, P - 1): the last token of a prefix is the first of its continuations
        real = positions < batch["prefix_lengths"][:, None] - 1
        recursed: Recursed = self.network(tokens, cache, valid=real, routing="threshold")
        cache.select(rows)  # (C prefixes) -> (B continuations), one copy for each
        return cache, _Prefix(recursed.executed[rows], real[rows])

    def init_cache(  # type: ignore[override]
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> RecursionCache:
        num_tokens = prompts.shape[1]
        cache = self.network.new_cache(len(prompts), num_tokens + max_new_tokens)
        if num_tokens > 1:
            # (B, P - 1): decode_step reads the last token of each prompt
            valid = torch.arange(num_tokens - 1, device=prompts.device) < lengths[:, None] - 1
            self.network(prompts[:, :-1], cache, valid=valid, routing="threshold")
        return cache

    def decode_step(  # type: ignore[override]
        self, cache: RecursionCache, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns next-token logits (B, V) after ``tokens`` (B,), for which every row is ready.

        Records ``generated_steps``: ``steps`` (B,) int64, the additional steps of each token.
        """
        recursed: Recursed = self.network(tokens[:, None], cache, routing="threshold")
        record("generated_steps", steps=recursed.executed[:, 0])
        h = recursed.states
        logits = h[:, 0] @ self.network.output_matrix.to(h.dtype).t()
        return logits.float(), torch.ones_like(tokens, dtype=torch.bool)

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the forward FLOPs per token under expert choice, by part, see ``LanguageModel``.

        Threshold routing costs the same if it chooses as many tokens as the capacities; ``score``
        records the FLOPs that were executed.
        """
        shares = [quota(capacity, context) / context for capacity in self.config.capacities]
        return self.flops_of_shares(context, shares)

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part if tokens take ``steps`` extra recursions.

        Assumes that recursions are distributed in proportion to the capacities, which are scaled
        down for fewer steps and moved towards 1 for more. Only attention depends on this.

        Raises:
            ValueError: If ``steps`` is not between 0 and ``thinking_steps``.
        """
        capacities, max_steps = self.config.capacities, self.config.thinking_steps
        if not 0 <= steps <= max_steps:
            raise ValueError(f"steps ({steps}) must be between 0 and thinking_steps ({max_steps})")
        usual = sum(capacities)
        if steps <= usual:
            shares = [capacity * steps / usual for capacity in capacities]
        else:
            missing = (max_steps - steps) / (max_steps - usual)
            shares = [1 - (1 - capacity) * missing for capacity in capacities]
        return self.flops_of_shares(context, shares)

    def _executed_flops(self, executed: Tensor, valid: Tensor) -> Tensor:
        """Returns the FLOPs (B,) float64 of texts whose tokens (B, T) took ``executed`` steps."""
        depths = torch.arange(1, self.config.thinking_steps + 1, device=executed.device)
        # (B, T, K) -> (B, K), number of tokens in each recursion
        taken = ((executed[..., None] >= depths) & valid[..., None]).sum(dim=1).tolist()
        lengths = [max(1, length) for length in valid.sum(dim=1).tolist()]
        flops = [
            n * sum(self.flops_of_shares(n, [count / n for count in counts]).values())
            for n, counts in zip(lengths, taken, strict=True)
        ]
        return torch.tensor(flops, dtype=torch.float64) * valid.any(dim=1).cpu()

    def flops_of_shares(self, context: int, shares: Sequence[float]) -> dict[str, float]:
        """Returns the forward FLOPs per token by part for given shares of tokens by recursion."""
        config, parts = self.config, self.plain_flops(context)
        projections = parts["self_attention"] - attention_flops(config, context)
        applied = [1.0, *shares]
        # mean number of keys that a token attends to, summed over recursions
        keys = sum(share * (share * context + 1) / 2 for share in applied)
        return {
            "output": parts["output"],
            "self_attention": sum(applied) * projections + keys * attention_flops(config, 1),
            "feed_forward": sum(applied) * parts["feed_forward"],
            "routers": 2.0 * config.dim * config.thinking_steps,
        }
