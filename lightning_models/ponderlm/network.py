"""Networks of PonderLM-2 and PonderLM-3 in pure torch: slots, Jacobi iterations, FLOPs.

A token owns K + 1 interleaved slots. Sequential inference computes slot (t, k) from the slots
before it. In parallel, pass n + 1 computes every slot from the states of pass n (Sec. 3.4.1); as a
slot depends on earlier ones only, the fixed point is unique, is what sequential inference computes,
and is reached after at most K T passes. The schedule is that of PonderLM-2's public code: K passes
that each add a slot to every token, J refinements, and a last pass that predicts.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_models.flops import attention_flops, head_flops, linear_flops
from lightning_models.layers import Block, FeedForward, KVCache, SelfAttention, record
from lightning_models.ponderlm.config import PonderConfig, PonderLM2Config
from lightning_models.ponderlm.router import Router, Steps, integrate, slot_bias
from lightning_models.runtime import seeded_generator
from lightning_models.transformer.network import Backbone

BLOCK_VARIANTS = 32
"""Graphs of a compiled block: numbers of slots, with and without bias, gradients, cache."""


class Pondered(NamedTuple):
    """States of a text after all steps."""

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
            cache: Empty; gets keys and values of the last pass, all slots of a token next to
                each other. The caller keeps the ones that count.
        """
        x = self.embed(tokens, tokens)  # (B, T, D)
        found = iterate(self, x, iterations)
        states = self.one_pass(x, found.latents, found.steps, cache)
        record_states(states, found.number)
        return self.weigh(states)

    def one_pass(
        self, x: Tensor, latents: Tensor, steps: Steps | None, cache: KVCache | None = None
    ) -> Tensor:
        """Returns the post-norm outputs (B, T, S, D) of S slots a token.

        Args:
            x: Embedded tokens (B, T, D).
            latents: Inputs of slots 1.. (B, T, S - 1, D).
            steps: The router's, by the pass before; None before there is one.
            cache: See ``forward``.
        """
        slots = torch.cat((x[:, :, None], latents), dim=2)  # (B, T, S, D)
        num_tokens, num_slots = slots.shape[1:3]
        token = torch.arange(num_tokens, device=x.device)[:, None]
        slot = torch.arange(num_slots, device=x.device)
        positions = self.slot_positions(token, slot)  # (T, S)
        bias = None if steps is None else self.slot_bias(steps)  # (B, T, K+1)
        h = self.run(
            slots.flatten(1, 2),
            positions.flatten(),
            cache=cache,
            key_bias=None if bias is None else bias[..., :num_slots].flatten(1),
        )
        return h.unflatten(1, (num_tokens, num_slots))  # (B, T S, D) -> (B, T, S, D)

    def slot_positions(self, token: Tensor, slot: Tensor) -> Tensor:
        """Returns rotary positions of slots, by the index of their token and their index in it."""
        if self.config.latent_positions == "shared":
            return token.expand(torch.broadcast_shapes(token.shape, slot.shape))
        return token * (self.config.thinking_steps + 1) + slot

    def route(self, first: Tensor) -> Steps | None:
        """Returns the tokens' step distribution by the output of slot 0 (..., D); None: all K."""
        return None

    def slot_bias(self, steps: Steps) -> Tensor:
        """Returns the attention bias (..., K+1) that slots have as keys: here none is damped."""
        return torch.zeros_like(steps.log_tail)

    def weigh(self, states: Tensor) -> Pondered:
        """Returns read-outs and executed steps for the states (B, T, K+1, D) of the last pass."""
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
        super().__init__(config)
        self.router = Router(config)
        self.router.reset()
        if config.augmentation == "literal":
            for block in self.blocks:
                assert isinstance(block, Block)
                block.attention.query_scale = (config.head_dim / (config.head_dim + 1)) ** 0.5

    def route(self, first: Tensor) -> Steps:
        return self.router.distribution(first)

    def slot_bias(self, steps: Steps) -> Tensor:
        return slot_bias(steps, self.config, truncate=not self.training)

    def weigh(self, states: Tensor) -> Pondered:
        """Integrates the states of the last pass by its own step distribution."""
        steps = self.route(states[:, :, 0])  # of (B, T) tokens
        return Pondered(states, steps, integrate(states, steps.log_steps), steps.executed)


# ---- Jacobi iterations


class Iterate(NamedTuple):
    """Inputs of the next pass."""

    latents: Tensor
    """Inputs of slots 1..S-1 (B, T, S-1, D)."""
    steps: Steps | None
    """How many steps tokens take, by the outputs of slot 0."""
    number: int
    """Number of passes with all slots so far."""


def iterate(network: SlotNetwork, x: Tensor, iterations: int | None) -> Iterate:
    """Returns the inputs of the last pass, after K growing passes and J refinements.

    Args:
        network: Its ``one_pass`` and router.
        x: Embedded tokens (B, T, D).
        iterations: J; None: until nothing changes any more.
    """
    config, most = network.config, network.config.thinking_steps
    found = Iterate(x.new_empty(*x.shape[:2], 0, x.shape[2]), None, 0)  # no latents: (B, T, 0, D)
    if most == 0:
        return found
    limit = most * x.shape[1] if iterations is None else iterations
    total = most + limit + 1
    for number in range(most + limit):
        last = config.grad_last_passes
        graph = last is None or number >= total - last  # the last pass of all counts, too
        with contextlib.nullcontext() if graph else torch.no_grad():
            following = _pass(network, x, found)
        # equal to the last bit: then all that follows is, too
        settled = (
            iterations is None and number >= most and torch.equal(following.latents, found.latents)
        )
        found = following
        if settled:
            break
    return found


def _pass(network: SlotNetwork, x: Tensor, before: Iterate) -> Iterate:
    """Returns the inputs of the pass after this one."""
    config = network.config
    if config.checkpoint_passes and torch.is_grad_enabled():
        states: Tensor = checkpoint(
            network.one_pass, x, before.latents, before.steps, use_reentrant=False
        )  # (B, T, S, D)
    else:
        states = network.one_pass(x, before.latents, before.steps)
    steps = network.route(states[:, :, 0])  # of all tokens, by their slots 0
    whole = states.shape[2] > config.thinking_steps
    if whole:
        record_states(states, before.number)
    return Iterate(states[:, :, : config.thinking_steps], steps, before.number + whole)


def record_states(states: Tensor, iteration: int | None) -> None:
    """Records ``states`` (B, T, K+1, D) of a pass, numbered from 0 over those with all slots."""
    record("states", states=states, iteration=iteration)


def draw_iterations(config: PonderLM2Config, step: int) -> int:
    """Returns J of an optimiser step, the same on all ranks."""
    low, high = config.jacobi_iterations
    generator = seeded_generator(config.jacobi_seed, step)
    return low + int(torch.randint(high - low + 1, (), generator=generator))


# ---- FLOPs


def slots_flops(network: SlotNetwork, context: int, slots: float) -> float:
    """Returns the forward FLOPs of ``slots`` slots a token, in a sequence of ``context`` tokens.

    Each slot sees the slots before it, so attention grows with the square of their number. A
    fraction of slots is a mean over tokens.
    """
    places = round(context * slots)
    linear = linear_flops(network.blocks)
    return slots * (linear + attention_flops(network.config, max(1, places)))


def router_flops(network: SlotNetwork) -> float:
    """Returns the FLOPs of a token's router, 0 where there is none."""
    router = getattr(network, "router", None)
    return 0.0 if router is None else linear_flops(router)


def pass_flops(network: SlotNetwork, context: int, iterations: float) -> list[tuple[float, float]]:
    """Returns the passes over a text as (how many, forward FLOPs per token of one).

    K growing passes of 1, ..., K slots a token, then J + 1 of K + 1 slots: with K = 3 and J = 2.5
    as much as 20 plain passes, attention apart.
    """
    most = network.config.thinking_steps
    router = router_flops(network)
    growing = [(1.0, slots_flops(network, context, i) + router) for i in range(1, most + 1)]
    others = iterations + 1 if most else 1.0
    return [*growing, (others, slots_flops(network, context, most + 1) + router)]


def scoring_flops(network: SlotNetwork, context: int) -> float:
    """Returns the FLOPs per token of scoring a text of ``context`` tokens.

    Iterations to convergence are counted as their limit, K passes a token.
    """
    config = network.config
    head = head_flops(config)
    if config.inference == "sequential":
        return generation_flops(network, context, None)
    limit = config.thinking_steps * context
    iterations = limit if config.eval_iterations is None else config.eval_iterations
    return head + sum(n * flops for n, flops in pass_flops(network, context, iterations))


def executed_flops(network: SlotNetwork, executed: Tensor, real: Tensor) -> Tensor:
    """Returns the FLOPs (B,) float64 of scoring texts slot by slot.

    Args:
        network: Its sizes.
        executed: Additional steps of each token, int64 (B, T).
        real: Bool (B, T), which tokens are no padding.
    """
    slots = ((executed + 1) * real).sum(dim=1).tolist()
    once = router_flops(network) + head_flops(network.config)
    linear = linear_flops(network.blocks)
    flops = [
        taken * (linear + attention_flops(network.config, max(1, taken))) + tokens * once
        for taken, tokens in zip(slots, real.sum(dim=1).tolist(), strict=True)
    ]
    return torch.tensor(flops, dtype=torch.float64)


def training_flops(network: SlotNetwork, context: int) -> float:
    """Returns the FLOPs per token of a training step, at the mean number of iterations.

    Passes without gradient cost their forward pass only, checkpointed ones a second one; losses
    after each depth cost additional output layers.
    """
    config = network.config
    passes = pass_flops(network, context, sum(config.jacobi_iterations) / 2)  # at E[J]
    left = config.grad_last_passes
    left_passes = sum(n for n, _ in passes) if left is None else float(left)
    factor = 3.0 + config.checkpoint_passes + (config.gradient_checkpointing is True)
    total = 0.0
    for number, (count, flops) in enumerate(reversed(passes)):
        graph = min(count, left_passes)
        left_passes -= graph
        total += flops * (graph * factor + (count - graph))
        if number == 0 and graph and config.checkpoint_passes:
            total -= flops  # the last pass, which predicts, is held
    heads = 3.0 + _depth_losses(config)
    return total + heads * head_flops(config)


def _depth_losses(config: PonderLM2Config) -> float:
    """Returns the number of output layers training applies in addition to the one that predicts."""
    depths = config.thinking_steps + 1
    return depths / config.depth_losses_every if config.measures_depths else 0.0


def generation_flops(network: SlotNetwork, context: int, steps: float | None) -> float:
    """Returns the FLOPs per token of generating in a context of ``context`` tokens.

    Args:
        network: Its sizes.
        context: Tokens.
        steps: Additional steps of a token on average; None: K.
    """
    config = network.config
    steps = config.thinking_steps if steps is None else steps
    return slots_flops(network, context, 1 + steps) + router_flops(network) + head_flops(config)


def flops_by_part(network: SlotNetwork, context: int) -> dict[str, float]:
    """Returns the forward FLOPs per token of one pass over all slots, by part of the network."""
    slots = network.config.thinking_steps + 1
    modules = list(network.blocks.modules())
    projections = sum(linear_flops(part) for part in modules if isinstance(part, SelfAttention))
    attention = attention_flops(network.config, context * slots)
    feed_forward = sum(linear_flops(part) for part in modules if isinstance(part, FeedForward))
    found = {
        "output": head_flops(network.config),
        "self_attention": slots * (projections + attention),
        "feed_forward": slots * feed_forward,
    }
    router = router_flops(network)
    return {**found, "router": router} if router else found
