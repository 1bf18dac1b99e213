"""Jacobi iterations: all slots of all tokens at once, from the states of the pass before.

Sequential inference computes slot (t, k) from the slots before it. In parallel, pass n + 1
computes every slot from the states of pass n (Sec. 3.4.1); as a slot depends on earlier ones
only, the fixed point is unique, is what sequential inference computes, and is reached after at
most K T passes. The schedule is that of PonderLM-2's public code: K passes that each add a slot to
every token, J refinements, and a last pass that predicts.
"""

import contextlib
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_models.layers import record
from lightning_models.ponderlm.config import PonderLM2Config
from lightning_models.ponderlm.router import Steps
from lightning_models.runtime import seeded_generator


class Slots(Protocol):
    """A network whose passes are iterated."""

    config: PonderLM2Config
    sharded: bool

    def one_pass(self, x: Tensor, latents: Tensor, steps: Steps | None) -> Tensor:
        """Returns the outputs (B, T, S, D) of S slots a token."""

    def route(self, first: Tensor) -> Steps | None:
        """Returns the step distribution by the outputs of slot 0."""


class Iterate(NamedTuple):
    """What a pass leaves to the next one."""

    latents: Tensor
    """Inputs of slots 1..S-1 (B, T, S-1, D)."""
    steps: Steps | None
    """How many steps tokens take, by the outputs of slot 0."""
    number: int
    """How many passes with all slots there were."""


def iterate(network: Slots, x: Tensor, iterations: int | None) -> Iterate:
    """Returns the latents that the last pass reads: those behind K growing passes and J others.

    Args:
        network: its ``one_pass`` and router.
        x: embedded tokens (B, T, D).
        iterations: J; None: until nothing changes any more.

    Raises:
        ValueError: if it is None and parameters are sharded.
    """
    config, most = network.config, network.config.thinking_steps
    found = Iterate(x.new_empty(*x.shape[:2], 0, x.shape[2]), None, 0)
    if most == 0:
        return found
    if iterations is None and network.sharded:
        raise ValueError(
            "eval_iterations (null) iterates as often as each rank's texts need, which sharded "
            "parameters do not allow; set a number"
        )
    limit = most * x.shape[1] if iterations is None else iterations
    total = most + limit + 1
    for number in range(most + limit):
        last = config.grad_last_passes
        graph = last is None or number >= total - last
        with contextlib.nullcontext() if graph else torch.no_grad():
            following = _pass(network, x, found)
        settled = iterations is None and number >= most and _equal(following, found)
        found = following
        if settled:
            break
    return found


def _pass(network: Slots, x: Tensor, before: Iterate) -> Iterate:
    """Returns what the next pass reads."""
    config = network.config
    if config.checkpoint_passes and torch.is_grad_enabled():
        states: Tensor = checkpoint(
            network.one_pass, x, before.latents, before.steps, use_reentrant=False
        )
    else:
        states = network.one_pass(x, before.latents, before.steps)
    steps = network.route(states[:, :, 0])
    whole = states.shape[2] > config.thinking_steps
    if whole:
        record_states(states, before.number)
    return Iterate(states[:, :, : config.thinking_steps], steps, before.number + whole)


def _equal(one: Iterate, other: Iterate) -> bool:
    """Whether the latents are the same to the last bit; then all that follows is, too."""
    return torch.equal(one.latents, other.latents)


def record_states(states: Tensor, iteration: int | None) -> None:
    """Records ``states`` (B, T, K+1, D) of a pass, numbered from 0 over those with all slots."""
    record("states", states=states, iteration=iteration)


def draw_iterations(config: PonderLM2Config, step: int) -> int:
    """Returns J of an optimiser step, the same on all ranks."""
    low, high = config.jacobi_iterations
    generator = seeded_generator(config.jacobi_seed, step)
    return low + int(torch.randint(high - low + 1, (), generator=generator))


def mean_iterations(config: PonderLM2Config) -> float:
    """Returns E[J] of training."""
    return sum(config.jacobi_iterations) / 2
