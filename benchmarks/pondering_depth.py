"""Whether skipped steps save time: generation with a router that is told what to say.

With every token at k steps, time per token should be (a + (k + 1) b) / (a + (K + 1) b) of that at
full depth, where a is the output layer with sampling and b one slot of all rows; both are timed in
turn with the generation. ``mixed``: the depth of each token of each row is drawn evenly from 0..K,
so that rows are at different tokens; its k is what was executed.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import seconds
from lightning_models import PonderLM
from lightning_models.generation import Sampler, SamplingConfig, generate
from lightning_models.layers import recording
from lightning_models.output_layer import logits
from lightning_models.ponderlm import sequential
from lightning_models.ponderlm.router import Steps, executed_steps

FIRM = 50.0
"""Logit of the number of steps that a token is told to take; the others have 0."""
GREEDY = SamplingConfig(temperature=0)
BATCHES = (1, 8)


def report_generation(model: PonderLM, options: argparse.Namespace) -> None:
    """Prints time per token by depth, for single rows and for a batch."""
    most = model.config.thinking_steps
    print("batch  depth  steps  ms/token  a ms  b ms  ratio to full  predicted  measured/predicted")
    for rows in BATCHES:
        generator = torch.Generator().manual_seed(0)
        shape = rows, options.prompt
        prompts = torch.randint(1, options.vocab, shape, generator=generator).tolist()
        for depth in [*range(most), "mixed"]:
            row = _rows(model, prompts, depth, options)
            print(f"{rows:5d} {depth!s:>6s} {row}", flush=True)


def _rows(model: PonderLM, prompts: list[list[int]], depth: Any, options: Any) -> str:
    most = model.config.thinking_steps
    runs: list[Callable[[], float]] = [
        lambda: _generate(model, prompts, depth, options),
        lambda: _generate(model, prompts, most, options),
        lambda: _one_head(model, len(prompts)),
        lambda: _one_slot(model, prompts, options),
    ]
    times = [[run() for run in runs] for _ in range(options.rounds + 1)][1:]
    steps = _mean_steps(model, prompts, depth, options)
    ratio = statistics.median(t[0] / t[1] for t in times)
    a, b = (statistics.median(t[i] for t in times) for i in (2, 3))
    predicted = (a + (steps + 1) * b) / (a + (most + 1) * b)
    own = statistics.median(t[0] for t in times)
    return (
        f"{steps:6.2f} {1e3 * own:9.2f} {1e3 * a:5.2f} {1e3 * b:5.2f} {ratio:14.3f} "
        f"{predicted:10.3f} {ratio / predicted:19.2f}"
    )


@torch.no_grad()
def _generate(
    model: PonderLM, prompts: list[list[int]], depth: Any, options: argparse.Namespace
) -> float:
    """Returns seconds per new token of a row, after the prompt."""
    with _Told(model, depth):
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=options.device)
        tokens = torch.tensor(prompts, device=options.device)
        start = seconds(lambda: model.init_cache(tokens, lengths, options.new))
        whole = seconds(lambda: _continue(model, prompts, options))
    return (whole - start) / options.new


def _mean_steps(
    model: PonderLM, prompts: list[list[int]], depth: Any, options: argparse.Namespace
) -> float:
    """Returns the additional steps that a generated token takes."""
    taken: list[int] = []
    counting = recording(generated_steps=lambda steps: taken.extend(steps.tolist()))
    with _Told(model, depth), counting:
        _continue(model, prompts, options)
    return statistics.mean(taken)


def _continue(model: PonderLM, prompts: list[list[int]], options: argparse.Namespace) -> None:
    generate(model, prompts, max_new_tokens=options.new, sampling=GREEDY, device=options.device)


class _Told:
    """A router that says what it is told."""

    def __init__(self, model: PonderLM, depth: Any) -> None:
        self.model, self.depth = model, depth

    def __enter__(self) -> None:
        self.model.network.route = self._route  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self.model.network.route

    def _route(self, first: Tensor) -> Steps:
        most = self.model.config.thinking_steps
        if self.depth == "mixed":  # as good as random, and the same at each run
            depth = (first[..., 0].abs() * 1e4).long() % (most + 1)
        else:
            depth = torch.full(first.shape[:-1], self.depth, device=first.device)
        scores = FIRM * torch.nn.functional.one_hot(depth, most + 1).float()
        tails = scores.flip(-1).logcumsumexp(dim=-1).flip(-1)
        log_tail = tails - tails[..., :1]
        executed = executed_steps(log_tail, self.model.config.tau)
        return Steps(scores.log_softmax(dim=-1), log_tail, executed)


def _one_head(model: PonderLM, rows: int) -> float:
    """Returns the seconds of an output layer and the choice of a token, for all rows."""
    matrix = model.network.output_matrix.detach()
    h, ready = matrix[:rows], torch.ones(rows, dtype=torch.bool, device=matrix.device)
    sampler = Sampler(GREEDY, range(rows))

    def run() -> None:
        """Chooses a token a row, ``REPEATS`` times."""
        for _ in range(REPEATS):
            scores = logits(h, matrix).float()
            sampler.choose(scores, ready, range(rows)).tolist()

    return seconds(run) / REPEATS


REPEATS = 20


@torch.no_grad()
def _one_slot(model: PonderLM, prompts: list[list[int]], options: argparse.Namespace) -> float:
    """Returns the seconds of a slot of all rows, after the prompts."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=options.device)
    tokens = torch.tensor(prompts, device=options.device)
    cache = model.init_cache(tokens, lengths, REPEATS)
    last = tokens[:, -1]

    def run() -> None:
        """Advances every row by a slot, ``REPEATS`` times."""
        for _ in range(REPEATS):
            bool(sequential.advance(model.network, cache, last).any())

    return seconds(run) / REPEATS
