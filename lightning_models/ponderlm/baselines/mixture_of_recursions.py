"""Mixture-of-Recursions: one shared stack of blocks, applied again to the tokens a router picks.

Tokens are chosen for the next recursion by rank, or by a threshold.
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
from lightning_models.ponderlm.baselines.shared import DepthLM, RepeatedNetwork, places
from lightning_models.ponderlm.config import PonderingConfig
from lightning_models.runtime import uncompiled

Routing = Literal["threshold", "topk"]

WIDTH_STEP = 64
"""Threshold routing computes a multiple of this number of tokens a row: shapes seldom change."""

ROUNDING = 1e-9
"""Taken off before rounding up: 0.55 * 100 in float64 is 55.00000000000001, and means 55."""


class RecursionChoice(NamedTuple):
    """Tokens that take one recursion, and the accuracy of the threshold rule on that choice."""

    chosen: Tensor
    """Bool (B, T)."""
    router_loss: Tensor
    """Summed cross-entropy, in nats, of sigmoid(logit) against having been chosen."""
    decisions: Tensor
    """Number of its summands: tokens of the recursion before, unless all of them take this one."""


def quota(capacity: float, tokens: int) -> int:
    """Returns ceil(capacity * tokens)."""
    return math.ceil(capacity * tokens - ROUNDING)


def choose(
    logit: Tensor, candidates: Tensor, quotas: Tensor | None, *, everyone: bool = False
) -> RecursionChoice:
    """Returns which candidates take a recursion.

    Args:
        logit: The router's, float32 or better (B, T).
        candidates: Who took the recursion before, bool (B, T).
        quotas: How many of a row are chosen, int64 (B,), those of the highest logits, of equals
            the earlier; None: all with sigmoid(logit) > 0.5.
        everyone: Whether all candidates take it, whatever their logits.
    """
    if everyone or quotas is None:
        nothing = logit.new_zeros(())
        chosen = candidates if everyone else candidates & (logit > 0)
        return RecursionChoice(chosen, nothing, nothing)
    order = logit.detach().masked_fill(~candidates, -math.inf)
    order = order.argsort(dim=1, descending=True, stable=True)  # (B, T), best first
    chosen = candidates & (order.argsort(dim=1) < quotas[:, None])
    nats = F.binary_cross_entropy_with_logits(logit, chosen.to(logit.dtype), reduction="none")
    loss = nats.masked_fill(~candidates, 0.0).sum()
    return RecursionChoice(chosen, loss, candidates.sum().to(logit.dtype))


def quotas_of(capacity: float, tokens: Tensor) -> Tensor:
    """Returns ``quota`` of each number of tokens, int64 (B,)."""
    return (capacity * tokens.double() - ROUNDING).ceil().long()


def places_of(chosen: Tensor, width: int) -> Tensor:
    """Returns indices (B, width) of the chosen tokens of each row in order, then of others.

    The others come after the chosen ones, so that causality hides them.
    """
    order = torch.sort((~chosen).to(torch.int8), dim=1, stable=True).indices
    return order[:, :width]


def width_of(chosen: Tensor) -> int:
    """Returns a width that all chosen tokens of the fullest row fit in; 0 if there are none."""
    most = int(chosen.sum(dim=1).max()) if chosen.numel() else 0
    return min(chosen.shape[1], math.ceil(most / WIDTH_STEP) * WIDTH_STEP)


@dataclass(frozen=True, kw_only=True)
class MoRConfig(PonderingConfig):
    """A shared stack applied once to all tokens, then up to ``thinking_steps`` K times to some.

    Raises:
        ValueError: If a value is out of its range.
    """

    capacities: tuple[float, ...] = (0.9, 0.8, 0.73)
    """Share of a text's tokens that takes each of the K extra recursions, in training. The first
    application has capacity 1. These execute 2.43 steps a token, as in PonderLM-3's Table 2."""
    router_weight: float = 1e-3
    """Weight of the routers' cross-entropy in the objective."""
    eval_routing: Routing = "threshold"
    """How texts are scored: by each token's own router, causally, or by rank as in training, which
    depends on later tokens. Generation routes by threshold in either case."""

    def __post_init__(self) -> None:
        """Checks the capacities, and what the family checks."""
        super().__post_init__()
        capacities = self.capacities
        if len(capacities) != self.thinking_steps:
            raise ValueError(
                f"capacities ({capacities}) must be as many as thinking_steps "
                f"({self.thinking_steps}); give one for each extra recursion"
            )
        if any(not 0 < c <= 1 for c in capacities) or sorted(capacities)[::-1] != [*capacities]:
            raise ValueError(
                f"capacities ({capacities}) must be in (0, 1] and none above the one before: a "
                "recursion takes its tokens from those of the recursion before"
            )
        if self.router_weight < 0:
            raise ValueError(f"router_weight ({self.router_weight}) must not be negative")

    def everyone(self, number: int) -> bool:
        """Returns whether extra recursion ``number``, from 0, keeps all tokens of the one before.

        Then there is nothing to choose, in training or outside of it.
        """
        return self.capacities[number] == (1.0, *self.capacities)[number]

    @property
    def chooses(self) -> bool:
        """Whether there is anything to choose."""
        return not all(self.everyone(number) for number in range(self.thinking_steps))


class RecursionCache:
    """Keys and values of each recursion, of the tokens that took it."""

    def __init__(self, config: MoRConfig, batch: int, capacity: int, device: torch.device) -> None:
        """Allows for ``capacity`` tokens a row."""
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
    """Normed (B, T, D), or after each number of recursions (B, T, K+1, D)."""
    executed: Tensor
    """Extra recursions of each token, int64 (B, T)."""
    router_loss: Tensor
    """Summed cross-entropy of the routers, in nats; 0 unless tokens were chosen by rank."""
    decisions: Tensor
    """Number of its summands."""


class MoRNetwork(RepeatedNetwork):
    """Hierarchical expert choice: a recursion picks its tokens from those of the one before.

    They attend among themselves, at their own positions, and are updated as
    ``H + g (blocks(H) - H)`` with ``g = sigmoid(router(H))``; the others keep H.
    """

    # NOTE(paper): H + g f(H) of arXiv 2507.10524, with f read as what the blocks add to H. With
    # f(H) = blocks(H), which contains H, every recursion would add the whole stream once more; so
    # g = 0 leaves a token as it was, and g = 1 for all is the looped decoder
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
        """Returns the states of ``tokens`` (B, T) and what the routers did.

        Args:
            tokens: int64, padded on the right.
            cache: Earlier tokens of each recursion; the valid new ones are added.
            every_depth: Whether states are those after each number of recursions.
            valid: Bool (B, T), which tokens are no padding; None: all. Only they are chosen.
            routing: See ``choose``; ``topk`` counts the tokens at hand.
        """
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        own = None if cache is None else cache.recursions[0]
        positions, mask = places(tokens.shape[1], own, tokens.device)
        x = self.embed(tokens, positions)
        x = self.apply_blocks(x, self.rope(positions), cache=own, mask=mask)
        if own is not None:
            own.advance(valid.sum(dim=1))
        chosen, executed = valid, torch.zeros_like(tokens)
        loss = decisions = torch.zeros((), device=x.device)
        streams = [x]
        for number in range(self.config.thinking_steps):
            logit = self.route(x, number)
            quotas = None
            if routing == "topk":
                quotas = quotas_of(self.config.capacities[number], valid.sum(dim=1))
            choice = choose(logit, chosen, quotas, everyone=self.config.everyone(number))
            chosen, executed = choice.chosen, executed + choice.chosen
            loss, decisions = loss + choice.router_loss, decisions + choice.decisions
            x = self.recurse(x, logit, chosen, positions, number, routing, cache)
            streams.append(x)
        states = [
            self.norm(x) for x in (streams if every_depth else streams[-1:])
        ]  # (B, T, D) each
        out = torch.stack(states, dim=2) if every_depth else states[0]
        return Recursed(out, executed, loss, decisions)

    def route(self, x: Tensor, number: int) -> Tensor:
        """Returns the router's logits (B, T) on a stream (B, T, D), in float32 or better."""
        router = self.routers[number]
        assert isinstance(router, nn.Linear)
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logit = F.linear(x.to(wide), router.weight.to(wide), router.bias.to(wide))
        return logit[..., 0]

    def recurse(
        self,
        x: Tensor,
        logit: Tensor,
        chosen: Tensor,
        positions: Tensor,
        number: int,
        routing: Routing,
        cache: RecursionCache | None,
    ) -> Tensor:
        """Returns the stream (B, T, D) after extra recursion ``number`` of the chosen tokens.

        The shapes of ``topk`` are fixed; ``threshold`` computes as much as the fullest row needs,
        and nothing if no row takes the recursion.
        """
        num_tokens = x.shape[1]
        by_rank = routing == "topk"
        width = quota(self.config.capacities[number], num_tokens) if by_rank else width_of(chosen)
        if width == 0:
            return x
        where = places_of(chosen, width)  # (B, width)
        index = where[..., None].expand(-1, -1, x.shape[2])  # (B, width, D)
        mine = x.gather(1, index)
        rope = self.rope(positions.expand(len(x), num_tokens).gather(1, where))
        own = None if cache is None else cache.recursions[number + 1]
        mask = None if own is None else own.mask(width)
        out = self.apply_blocks(mine, rope, cache=own, mask=mask)
        if own is not None:
            own.advance(chosen.sum(dim=1))
        gate = (logit.sigmoid() * chosen).gather(1, where)[..., None].to(x.dtype)  # (B, width, 1)
        return x.scatter(1, index, mine + gate * (out - mine))

    def new_cache(self, batch: int, capacity: int) -> RecursionCache:  # type: ignore[override]
        return RecursionCache(self.config, batch, capacity, self.embedding.weight.device)


class _Read(NamedTuple):
    """Recursions (B, P) int64 of the tokens of prefixes, and which of them are no padding."""

    executed: Tensor
    real: Tensor


class MoRLM(DepthLM):
    """Mixture-of-Recursions with expert choice (arXiv 2507.10524).

    In training a token is chosen by its rank in the whole text, later tokens included. The routers
    learn to decide by the token alone; scoring and generation use that decision, causally, unless
    ``eval_routing`` is ``topk``.

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
        """Whether scoring routes tokens without looking at later ones."""
        return self.config.eval_routing == "threshold" or not self.config.chooses

    @property
    def likelihood(self) -> Likelihood:
        """``exact`` where it is causal, else ``noncausal``."""
        return "exact" if self.causal else "noncausal"

    @property
    def adaptive(self) -> bool:
        """Whether more than a text's length decides how many of its tokens take a recursion."""
        return self.config.eval_routing == "threshold" and self.config.chooses

    def build_network(self) -> MoRNetwork:
        return MoRNetwork(self.config)

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        return self.network.routers.parameters()

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the cross-entropy under expert choice, and that of the routers.

        Also logs ``executed_steps``, extra recursions of a token with a target.
        """
        targets, valid = batch["targets"], batch.get("mask")
        found: Recursed = self.network(batch["tokens"], valid=valid, routing="topk")
        nll = linear_cross_entropy(found.states, self.network.output_matrix, targets)
        counted = targets >= 0
        output = LossOutput({"nll": Term(nll, counted.sum(), "targets")})
        if self.config.chooses:
            output.terms["router"] = Term(
                self.config.router_weight * found.router_loss, found.decisions
            )
        output.stats["executed_steps"] = Mean((found.executed * counted).sum(), counted.sum())
        return output

    def read(self, batch: dict[str, Any], every_depth: bool) -> tuple[Tensor, Tensor]:
        """Returns states and executed recursions by ``eval_routing``; see ``DepthLM``.

        Records ``flops``, see ``LanguageModel.adaptive``.
        """
        valid = batch.get("mask", torch.ones_like(batch["tokens"], dtype=torch.bool))
        # A threshold takes another number of tokens from each batch: each would compile anew.
        with uncompiled(self.config.eval_routing == "threshold"):
            cache, before = self._prefix(batch)
            found: Recursed = self.network(
                batch["tokens"],
                cache,
                every_depth,
                valid=valid,
                routing=self.config.eval_routing,
            )
        if wants("flops"):
            executed, real = found.executed, valid
            if before is not None:  # a row costs what it does alone
                executed = torch.cat((before.executed, executed), dim=1)
                real = torch.cat((before.real, real), dim=1)
            flops = self._executed_flops(executed, real)
            record("flops", flops=flops, tokens=real.sum(dim=1))
        return found.states, found.executed

    def _prefix(self, batch: dict[str, Any]) -> tuple[RecursionCache | None, _Read | None]:
        """Returns for each row a copy of the cache of its prefix, and what its tokens executed."""
        if "prefix" not in batch:
            return None, None
        tokens, rows = batch["prefix"][:, :-1], batch["prefix_row"]
        cache = self.network.new_cache(len(tokens), tokens.shape[1] + 1 + batch["tokens"].shape[1])
        place = torch.arange(tokens.shape[1], device=tokens.device)
        real = place < batch["prefix_lengths"][:, None] - 1
        found: Recursed = self.network(tokens, cache, valid=real, routing="threshold")
        cache.select(rows)
        return cache, _Read(found.executed[rows], real[rows])

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
            valid = torch.arange(num_tokens - 1, device=prompts.device) < lengths[:, None] - 1
            self.network(prompts[:, :-1], cache, valid=valid, routing="threshold")
        return cache

    def decode_step(  # type: ignore[override]
        self, cache: RecursionCache, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns next-token logits (B, V) after ``tokens`` (B,); every row is ready.

        Records ``generated_steps``: ``steps`` (B,) int64, the additional steps of each token.
        """
        found: Recursed = self.network(tokens[:, None], cache, routing="threshold")
        record("generated_steps", steps=found.executed[:, 0])
        h = found.states
        logits = h[:, 0] @ self.network.output_matrix.to(h.dtype).t()
        return logits.float(), torch.ones_like(tokens, dtype=torch.bool)

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the forward FLOPs per token under expert choice, by part; see ``LanguageModel``.

        Threshold routing costs as much where it takes as many tokens as the capacities set; what it
        takes is what ``score`` records.
        """
        shares = [quota(capacity, context) / context for capacity in self.config.capacities]
        return self.flops_of_shares(context, shares)

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part, where tokens take ``steps`` recursions.

        Recursions are taken to be shared out like the capacities, scaled to fewer steps or, for
        more, moved towards 1; only attention depends on that.

        Raises:
            ValueError: If there are fewer.
        """
        capacities, most = self.config.capacities, self.config.thinking_steps
        if not 0 <= steps <= most:
            raise ValueError(f"steps ({steps}) must be between 0 and thinking_steps ({most})")
        usual = sum(capacities)
        if steps <= usual:
            shares = [capacity * steps / usual for capacity in capacities]
        else:
            missing = (most - steps) / (most - usual)
            shares = [1 - (1 - capacity) * missing for capacity in capacities]
        return self.flops_of_shares(context, shares)

    def _executed_flops(self, executed: Tensor, valid: Tensor) -> Tensor:
        """Returns the FLOPs (B,) float64 of texts whose tokens (B, T) took ``executed`` steps."""
        depths = torch.arange(1, self.config.thinking_steps + 1, device=executed.device)
        taken = ((executed[..., None] >= depths) & valid[..., None]).sum(dim=1).tolist()  # (B, K)
        lengths = [max(1, length) for length in valid.sum(dim=1).tolist()]
        flops = [
            n * sum(self.flops_of_shares(n, [count / n for count in counts]).values())
            for n, counts in zip(lengths, taken, strict=True)
        ]
        return torch.tensor(flops, dtype=torch.float64) * valid.any(dim=1).cpu()

    def flops_of_shares(self, context: int, shares: Sequence[float]) -> dict[str, float]:
        """Returns the forward FLOPs per token by part, if such shares take the recursions."""
        config, parts = self.config, self.plain_flops(context)
        projections = parts["self_attention"] - attention_flops(config, context)
        applied = [1.0, *shares]
        keys = sum(share * (share * context + 1) / 2 for share in applied)  # that a token sees
        return {
            "output": parts["output"],
            "self_attention": sum(applied) * projections + keys * attention_flops(config, 1),
            "feed_forward": sum(applied) * parts["feed_forward"],
            "routers": 2.0 * config.dim * config.thinking_steps,
        }
