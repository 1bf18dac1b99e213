"""Networks of PonderLM-2 and PonderLM-3 in plain PyTorch: slots, Jacobi iterations, FLOPs.

Each token has K + 1 interleaved slots. Sequential inference computes slot (t, k) from the slots
before it. In parallel, pass n + 1 computes every slot from the states of pass n (Sec. 3.4.1). Since
a slot depends on earlier ones only, the fixed point is unique, equals the result of sequential
inference, and is reached after at most K T passes. The schedule follows PonderLM-2's public code:
K passes that each add a slot to every token, J refinements, and a last pass that predicts.
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
"""Limit on the compiled variants of a block, by number of slots, bias, gradients and cache."""


class Pondered(NamedTuple):
    """States of a text after all steps."""

    states: Tensor
    """h_k, post-norm outputs of all slots (B, T, K+1, D)."""
    steps: Steps | None
    """Step distribution of each token, or None without a router."""
    read_out: Tensor
    """Input of the output layer (B, T, D)."""
    executed: Tensor
    """Additional steps of each token (B, T) int64: K, less the skipped ones."""


class SlotNetwork(Backbone):
    """PonderLM-2: one causal sequence with K + 1 consecutive slots per token.

    The input of slot 0 is the token's embedding, the input of slot k the post-norm output of slot
    k - 1, taken from the previous pass in parallel computation. The last slot predicts.
    """

    config: PonderLM2Config

    def forward(
        self, tokens: Tensor, iterations: int | None, cache: KVCache | None = None
    ) -> Pondered:
        """Returns the states of ``tokens`` (B, T), rows padded on the right.

        Args:
            tokens: int64 (B, T).
            iterations: J, the number of refinement passes. None means iterating to convergence.
            cache: Empty cache for the keys and values of the last pass, in the order of the slots.
                The caller removes the entries of skipped slots and padding.
        """
        x = self.embed(tokens, tokens)  # (B, T, D)
        inputs = iterate(self, x, iterations)
        states = self.one_pass(x, inputs.latents, inputs.steps, cache)
        record_states(states, inputs.num_passes)
        return self.weigh(states)

    def one_pass(
        self, x: Tensor, latents: Tensor, steps: Steps | None, cache: KVCache | None = None
    ) -> Tensor:
        """Returns the post-norm outputs (B, T, S, D) of S slots per token.

        Args:
            x: Embedded tokens (B, T, D).
            latents: Inputs of slots 1 to S - 1 (B, T, S - 1, D).
            steps: Step distribution from the previous pass, or None in the first pass.
            cache: See ``forward``.
        """
        slots = torch.cat((x[:, :, None], latents), dim=2)  # (B, T, S, D)
        num_tokens, num_slots = slots.shape[1:3]
        token = torch.arange(num_tokens, device=x.device)[:, None]
        slot = torch.arange(num_slots, device=x.device)
        positions = self.slot_positions(token, slot)  # (T, S)
        bias = None if steps is None else self.slot_bias(steps)  # (B, T, K+1)
        # One causal sequence of T S slots: causality alone lets slot (t, k) see all slots of
        # earlier tokens and slots 0 to k of its token.
        h = self.run(
            slots.flatten(1, 2),  # (B, T S, D)
            positions.flatten(),
            cache=cache,
            # the first passes have fewer than K + 1 slots
            key_bias=None if bias is None else bias[..., :num_slots].flatten(1),
        )
        return h.unflatten(1, (num_tokens, num_slots))  # (B, T S, D) -> (B, T, S, D)

    def slot_positions(self, token: Tensor, slot: Tensor) -> Tensor:
        """Returns rotary positions of slots, given their token's index and their index in it."""
        if self.config.latent_positions == "shared":
            return token.expand(torch.broadcast_shapes(token.shape, slot.shape))
        return token * (self.config.thinking_steps + 1) + slot

    def route(self, first: Tensor) -> Steps | None:
        """Returns the step distribution for outputs of slot 0 (..., D), or None if all take K."""
        return None

    def slot_bias(self, steps: Steps) -> Tensor:
        """Returns the attention bias (..., K+1) of slots as keys, here zero."""
        return torch.zeros_like(steps.log_tail)

    def weigh(self, states: Tensor) -> Pondered:
        """Returns the read-outs and executed steps of the last pass's states (B, T, K+1, D)."""
        steps = self.config.thinking_steps
        executed = torch.full(states.shape[:2], steps, device=states.device)
        return Pondered(states, None, states[:, :, -1], executed)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each block, which all passes share, with the arguments of ``torch.compile``."""
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, BLOCK_VARIANTS)
        for block in self.blocks:
            block.compile(*args, **kwargs)


class PonderNetwork(SlotNetwork):
    """PonderLM-3: a router attenuates later slots in training and skips them at inference."""

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
        """Integrates the states of the last pass over its step distribution."""
        steps = self.route(states[:, :, 0])  # (B, T, D) -> step distributions of (B, T) tokens
        return Pondered(states, steps, integrate(states, steps.log_steps), steps.executed)


# ---- Jacobi iterations


class Iterate(NamedTuple):
    """Inputs of the next pass."""

    latents: Tensor
    """Inputs of slots 1 to S - 1 (B, T, S-1, D)."""
    steps: Steps | None
    """Step distribution from the outputs of slot 0."""
    num_passes: int
    """Number of passes over all K + 1 slots so far."""


def iterate(network: SlotNetwork, x: Tensor, iterations: int | None) -> Iterate:
    """Returns the inputs of the last pass, after K growing passes and J refinements.

    Args:
        network: Network whose ``one_pass`` and router are applied.
        x: Embedded tokens (B, T, D).
        iterations: J. None means iterating to convergence.
    """
    config, max_steps = network.config, network.config.thinking_steps
    current = Iterate(x.new_empty(*x.shape[:2], 0, x.shape[2]), None, 0)  # no latents: (B, T, 0, D)
    if max_steps == 0:
        return current
    # the fixed point is reached after K T passes at the latest
    limit = max_steps * x.shape[1] if iterations is None else iterations
    total = max_steps + limit + 1
    for index in range(max_steps + limit):
        last = config.grad_last_passes
        graph = last is None or index >= total - last  # total includes the pass that predicts
        with contextlib.nullcontext() if graph else torch.no_grad():
            following = _pass(network, x, current)
        # bit-equal latents reproduce themselves in all further passes
        converged = (
            iterations is None
            and index >= max_steps
            and torch.equal(following.latents, current.latents)
        )
        current = following
        if converged:
            break
    return current


def _pass(network: SlotNetwork, x: Tensor, before: Iterate) -> Iterate:
    """Runs a pass and returns the inputs of the next one, with one more slot until all exist."""
    config = network.config
    if config.checkpoint_passes and torch.is_grad_enabled():
        states: Tensor = checkpoint(
            network.one_pass, x, before.latents, before.steps, use_reentrant=False
        )  # (B, T, S, D)
    else:
        states = network.one_pass(x, before.latents, before.steps)
    steps = network.route(states[:, :, 0])  # (B, T, D) -> step distributions of (B, T) tokens
    complete = states.shape[2] > config.thinking_steps  # all K + 1 slots
    if complete:
        record_states(states, before.num_passes)
    # The output of slot k is the next input of slot k + 1, so the output of slot K has no use.
    latents = states[:, :, : config.thinking_steps]
    return Iterate(latents, steps, before.num_passes + complete)


def record_states(states: Tensor, iteration: int | None) -> None:
    """Records the ``states`` (B, T, K+1, D) of a pass; iteration 0 is the first with all slots."""
    record("states", states=states, iteration=iteration)


def draw_iterations(config: PonderLM2Config, step: int) -> int:
    """Draws J for an optimiser step, the same on all ranks."""
    low, high = config.jacobi_iterations
    generator = seeded_generator(config.jacobi_seed, step)
    return low + int(torch.randint(high - low + 1, (), generator=generator))


# ---- FLOPs


def slots_flops(network: SlotNetwork, context: int, slots: float) -> float:
    """Returns the forward FLOPs of ``slots`` slots per token, in a sequence of ``context`` tokens.

    Each slot attends to all slots before it, so attention is quadratic in their number. ``slots``
    may be fractional, as a mean over tokens.
    """
    length = round(context * slots)
    linear = linear_flops(network.blocks)
    return slots * (linear + attention_flops(network.config, max(1, length)))


def router_flops(network: SlotNetwork) -> float:
    """Returns the router's FLOPs per token, or 0 without a router."""
    router = getattr(network, "router", None)
    return 0.0 if router is None else linear_flops(router)


def pass_flops(network: SlotNetwork, context: int, iterations: float) -> list[tuple[float, float]]:
    """Returns the passes over a text as pairs (number of passes, forward FLOPs per token of one).

    K growing passes have 1, ..., K slots per token, then J + 1 have K + 1. Except for attention,
    K = 3 and J = 2.5 cost as much as 20 plain passes.
    """
    max_steps = network.config.thinking_steps
    router = router_flops(network)
    growing = [(1.0, slots_flops(network, context, i) + router) for i in range(1, max_steps + 1)]
    others = iterations + 1 if max_steps else 1.0
    return [*growing, (others, slots_flops(network, context, max_steps + 1) + router)]


def scoring_flops(network: SlotNetwork, context: int) -> float:
    """Returns the FLOPs per token of scoring a text of ``context`` tokens.

    Iterations to convergence are counted at their upper bound, K passes per token.
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
        network: The network.
        executed: Additional steps of each token, int64 (B, T).
        real: Bool (B, T), false in padding.
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

    Passes without gradients cost a forward pass only, checkpointed passes a second one. Losses
    after each depth cost additional output layers.
    """
    config = network.config
    passes = pass_flops(network, context, sum(config.jacobi_iterations) / 2)  # at E[J]
    left = config.grad_last_passes
    left_passes = sum(n for n, _ in passes) if left is None else float(left)
    factor = 3.0 + config.checkpoint_passes + (config.gradient_checkpointing is True)
    total = 0.0
    for index, (count, flops) in enumerate(reversed(passes)):
        graph = min(count, left_passes)
        left_passes -= graph
        total += flops * (graph * factor + (count - graph))
        if index == 0 and graph and config.checkpoint_passes:
            total -= flops  # the last pass, which predicts, is not checkpointed
    heads = 3.0 + _depth_losses(config)
    return total + heads * head_flops(config)


def _depth_losses(config: PonderLM2Config) -> float:
    """Returns the number of forward output layers per token that the losses by depth cost."""
    depths = config.thinking_steps + 1
    return depths / config.depth_losses_every if config.measures_depths else 0.0


def generation_flops(network: SlotNetwork, context: int, steps: float | None) -> float:
    """Returns the FLOPs per token of generating in a context of ``context`` tokens.

    Args:
        network: The network.
        context: Number of tokens of the context.
        steps: Mean number of additional steps of a token. Defaults to K.
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
    parts = {
        "output": head_flops(network.config),
        "self_attention": slots * (projections + attention),
        "feed_forward": slots * feed_forward,
    }
    router = router_flops(network)
    return {**parts, "router": router} if router else parts
