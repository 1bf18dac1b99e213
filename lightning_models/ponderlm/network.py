"""The interleaved slots of PonderLM-2 and PonderLM-3 in pure torch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_models.layers import Block, KVCache
from lightning_models.ponderlm import jacobi
from lightning_models.ponderlm.config import PonderConfig, PonderLM2Config
from lightning_models.ponderlm.router import Router, Steps, integrate, slot_bias
from lightning_models.transformer.network import Backbone

BLOCK_VARIANTS = 32
"""Graphs of a compiled block: numbers of slots, with and without bias, gradients, cache."""


class Pondered(NamedTuple):
    """A text behind all of its steps."""

    states: Tensor
    """h_k, post-norm outputs of all slots (B, T, K+1, D)."""
    steps: Steps | None
    """The router's distribution of each token; None where there is no router."""
    read_out: Tensor
    """What the output matrix is applied to (B, T, D)."""
    executed: Tensor
    """Additional steps of each token (B, T) int64: K, or the ones not skipped."""


class SlotNetwork(Backbone):
    """PonderLM-2: a token owns K + 1 slots next to each other, in one causal sequence.

    Slot 0 reads the token's embedding, slot k the post-norm output of slot k - 1, which in
    parallel is that of the pass before. The last slot predicts.
    """

    config: PonderLM2Config

    def forward(
        self, tokens: Tensor, iterations: int | None, cache: KVCache | None = None
    ) -> Pondered:
        """Returns the states of ``tokens`` (B, T), rows padded on the right.

        Args:
            tokens: int64.
            iterations: J, refinement passes; None: until nothing changes any more.
            cache: empty; gets keys and values of the last pass, all slots of a token next to
                each other. The caller keeps the ones that count.
        """
        x = self.embed(tokens, tokens)
        found = jacobi.iterate(self, x, iterations)
        states = self.one_pass(x, found.latents, found.steps, cache)
        jacobi.record_states(states, found.number)
        return self.weigh(states)

    def one_pass(
        self, x: Tensor, latents: Tensor, steps: Steps | None, cache: KVCache | None = None
    ) -> Tensor:
        """Returns the post-norm outputs (B, T, S, D) of S slots a token.

        Args:
            x: embedded tokens (B, T, D).
            latents: inputs of slots 1.. (B, T, S - 1, D).
            steps: the router's, by the pass before; None before there is one.
            cache: see ``forward``.
        """
        slots = torch.cat((x[:, :, None], latents), dim=2)
        num_tokens, num_slots = slots.shape[1:3]
        token = torch.arange(num_tokens, device=x.device)[:, None]
        positions = self.slot_positions(token, torch.arange(num_slots, device=x.device))
        bias = None if steps is None else self.slot_bias(steps)
        h = self.run(
            slots.flatten(1, 2),
            positions.flatten(),
            cache=cache,
            key_bias=None if bias is None else bias[..., :num_slots].flatten(1),
        )
        return h.unflatten(1, (num_tokens, num_slots))

    def slot_positions(self, token: Tensor, slot: Tensor) -> Tensor:
        """Returns rotary positions of slots, by the index of their token and their own."""
        if self.config.latent_positions == "shared":
            return token.expand(torch.broadcast_shapes(token.shape, slot.shape))
        return token * (self.config.thinking_steps + 1) + slot

    def route(self, first: Tensor) -> Steps | None:
        """Returns how many steps tokens take, by the output of slot 0 (..., D); None: all."""
        return None

    def slot_bias(self, steps: Steps) -> Tensor:
        """Returns the attention bias (..., K+1) that slots have as keys: here none is damped."""
        return torch.zeros_like(steps.log_tail)

    def weigh(self, states: Tensor) -> Pondered:
        """Returns what is made of the states (B, T, K+1, D) of the last pass."""
        steps = self.config.thinking_steps
        executed = torch.full(states.shape[:2], steps, device=states.device)
        return Pondered(states, None, states[:, :, -1], executed)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each block, which all passes share; takes what ``torch.compile`` takes."""
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, BLOCK_VARIANTS)
        for block in self.blocks:
            block.compile(*args, **kwargs)


class PonderNetwork(SlotNetwork):
    """PonderLM-3: a router damps and, outside training, skips the slots of later steps."""

    config: PonderConfig

    def __init__(self, config: PonderConfig) -> None:
        """Builds and initialises the network."""
        super().__init__(config)
        self.router = Router(config)
        self.router.reset()
        if config.augmentation == "literal":
            for block in self.blocks:
                assert isinstance(block, Block)
                block.attention.query_scale = (config.head_dim / (config.head_dim + 1)) ** 0.5

    def route(self, first: Tensor) -> Steps:
        """Returns the step distribution by the output of slot 0 (..., D)."""
        return self.router.distribution(first)

    def slot_bias(self, steps: Steps) -> Tensor:
        """Returns the attention bias (..., K+1) that slots have as keys."""
        return slot_bias(steps, self.config, truncate=not self.training)

    def weigh(self, states: Tensor) -> Pondered:
        """Integrates the states of the last pass by its own step distribution."""
        steps = self.route(states[:, :, 0])
        return Pondered(states, steps, integrate(states, steps.log_steps), steps.executed)
