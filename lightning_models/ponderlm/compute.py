"""FLOPs of pondering over slots: by pass, by training step, by generated token."""

import torch
from torch import Tensor

from lightning_models.flops import attention_flops, head_flops, linear_flops
from lightning_models.layers import FeedForward, SelfAttention
from lightning_models.ponderlm.config import PonderLM2Config
from lightning_models.ponderlm.jacobi import mean_iterations
from lightning_models.ponderlm.network import SlotNetwork


def slots_flops(network: SlotNetwork, context: int, slots: float) -> float:
    """Returns the forward FLOPs of so many slots a token, in a sequence of ``context`` tokens.

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
        network: its sizes.
        executed: additional steps of each token, int64 (B, T).
        real: bool (B, T), which tokens are no padding.
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
    behind each depth cost output layers more.
    """
    config = network.config
    passes = pass_flops(network, context, mean_iterations(config))
    left = config.grad_last_passes
    left_passes = sum(n for n, _ in passes) if left is None else float(left)
    factor = 4.0 if config.checkpoint_passes else 3.0
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
    """Returns how many output layers training applies beside the one that predicts."""
    depths = config.thinking_steps + 1
    return depths / config.depth_losses_every if config.measures_depths else 0.0


def generation_flops(network: SlotNetwork, context: int, steps: float | None) -> float:
    """Returns the FLOPs per token of generating in a context of ``context`` tokens.

    Args:
        network: its sizes.
        context: tokens.
        steps: additional steps of a token on average; None: K.
    """
    config = network.config
    steps = config.thinking_steps if steps is None else steps
    return slots_flops(network, context, 1 + steps) + router_flops(network) + head_flops(config)


def parts(network: SlotNetwork, context: int) -> dict[str, float]:
    """Returns the forward FLOPs per token of one pass over all slots, by what they are spent on."""
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
