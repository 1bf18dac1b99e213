"""Recursions of one shared stack of blocks on ever fewer tokens: MoR's network."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.layers import KVCache, initialise
from lightning_models.ponderlm.baselines.recursion_routing import (
    Choice,
    Routing,
    choose,
    places_of,
    quota,
    quotas_of,
    width_of,
)
from lightning_models.ponderlm.baselines.repeated import RepeatedNetwork
from lightning_models.ponderlm.config import PonderingConfig


@dataclass(frozen=True, kw_only=True)
class MoRConfig(PonderingConfig):
    """A shared stack applied once to all tokens, then up to ``thinking_steps`` K times to some.

    Raises:
        ValueError: if a value is out of its range.
    """

    capacities: tuple[float, ...] = (0.9, 0.8, 0.73)
    """Share of a text's tokens that takes each of the K extra recursions, in training. The first
    application has capacity 1. These execute 2.43 steps a token, as in PonderLM-3's Table 2."""
    router_weight: float = 1e-3
    """Weight of the routers' cross-entropy in the objective."""
    eval_routing: Routing = "threshold"
    """How texts are scored: by each token's own router, causally, or by rank as in training, which
    looks at later tokens. Generation routes by threshold in either case."""

    def __post_init__(self) -> None:
        """Checks the capacities beside what the family checks."""
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
    """A text behind its recursions."""

    states: Tensor
    """Normed (B, T, D), or behind each number of recursions (B, T, K+1, D)."""
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
        """Builds and initialises the network; the decoder's weights are drawn first."""
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
            cache: earlier tokens of each recursion; the valid new ones are added.
            every_depth: whether states are those behind each number of recursions.
            valid: bool (B, T), which tokens are no padding; None: all. Only they are chosen.
            routing: see ``recursion_routing.choose``; ``topk`` counts the tokens at hand.
        """
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        own = None if cache is None else cache.recursions[0]
        positions, mask = self.places(tokens.shape[1], own)
        x = self.embed(tokens, positions)
        x = self.apply_blocks(x, self.rope(positions), cache=own, mask=mask)
        if own is not None:
            own.advance(valid.sum(dim=1))
        chosen, executed = valid, torch.zeros_like(tokens)
        loss = decisions = torch.zeros((), device=x.device)
        streams = [x]
        for number in range(self.config.thinking_steps):
            logit = self.route(x, number)
            choice = self.choose(logit, chosen, valid, number, routing)
            chosen, executed = choice.chosen, executed + choice.chosen
            loss, decisions = loss + choice.router_loss, decisions + choice.decisions
            x = self.recurse(x, logit, chosen, positions, number, routing, cache)
            streams.append(x)
        states = [self.norm(x) for x in (streams if every_depth else streams[-1:])]
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

    def choose(
        self, logit: Tensor, candidates: Tensor, valid: Tensor, number: int, routing: Routing
    ) -> Choice:
        """Returns who takes extra recursion ``number``; see ``recursion_routing.choose``."""
        quotas = None
        if routing == "topk":
            quotas = quotas_of(self.config.capacities[number], valid.sum(dim=1))
        return choose(logit, candidates, quotas, everyone=self.config.everyone(number))

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
        """Returns the stream (B, T, D) behind extra recursion ``number`` of the chosen tokens.

        The shapes of ``topk`` are fixed; ``threshold`` computes as much as the fullest row needs,
        and nothing if no row takes the recursion.
        """
        num_tokens = x.shape[1]
        by_rank = routing == "topk"
        width = quota(self.config.capacities[number], num_tokens) if by_rank else width_of(chosen)
        if width == 0 and not self.sharded:
            return x
        width = max(1, width)  # ranks that share parameters all run the blocks
        places = places_of(chosen, width)
        index = places[..., None].expand(-1, -1, x.shape[2])
        mine = x.gather(1, index)
        rope = self.rope(positions.expand(len(x), num_tokens).gather(1, places))
        own = None if cache is None else cache.recursions[number + 1]
        mask = None if own is None else own.mask(width)
        out = self.apply_blocks(mine, rope, cache=own, mask=mask)
        if own is not None:
            own.advance(chosen.sum(dim=1))
        gate = (logit.sigmoid() * chosen).gather(1, places)[..., None].to(x.dtype)
        return x.scatter(1, index, mine + gate * (out - mine))

    def new_cache(self, batch: int, capacity: int) -> RecursionCache:  # type: ignore[override]
        """Returns an empty cache with room for ``capacity`` tokens a row."""
        return RecursionCache(self.config, batch, capacity, self.embedding.weight.device)
