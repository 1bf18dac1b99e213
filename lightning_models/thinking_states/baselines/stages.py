"""Curricula that take a chain of thought away: which part of it a batch still shows.

A stage is a whole number that grows with the epochs behind a batch. Draws are a function of the
seed and the row's number, which never comes twice in a run: the loss and the data's counter agree,
and so do a resumed run and one that was never stopped.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_models.runtime import seeded_generator
from lightning_models.thinking_states.baselines.layout import Batch, Segment, shortened
from lightning_models.thinking_states.rows import chain_of

_UNIFORM, _OFFSET = range(2)  # what a row's draws are for: second number of their key

MOST_EXTRA = 100
"""Most tokens that removal smoothing takes away in advance."""


class Stages(Protocol):
    """A curriculum."""

    @property
    def final(self) -> int:
        """The last stage, from which on there is no chain."""
        ...

    def at(self, epochs: float) -> int:
        """Returns the stage with ``epochs`` behind, at most ``final``."""
        ...

    def kept(self, batch: Batch, stage: int, separator: tuple[int, ...]) -> tuple[Segment, Tensor]:
        """Returns what is left of the chains, and which rows learn where theirs ends (B,) bool.

        Args:
            batch: of questions; where it says how many ``epochs`` are behind, that decides.
            stage: for batches that do not say.
            separator: stands in front of each step.
        """
        ...


@dataclass(frozen=True)
class StepStages:
    """Stage s shows no longer the first s steps; behind ``last`` it shows none (Coconut)."""

    epochs_per_stage: float
    """Epochs of a stage."""
    last: int
    """Stage behind which all steps are gone."""
    first: int = 0
    """Stage of the first epoch."""
    uniform_prob: float = 0.0
    """Probability that a row is shown at a stage drawn from 0 to its number of steps."""
    seed: int = 0
    """Of the draws."""

    @property
    def final(self) -> int:
        """The stage at which all steps are gone."""
        return self.last + 1

    def at(self, epochs: float) -> int:
        """Returns the stage with ``epochs`` behind."""
        return min(self.first + math.floor(epochs / self.epochs_per_stage + 1e-9), self.final)

    def of_rows(self, batch: Batch, stage: int) -> Tensor:
        """Returns the stage at which each row is shown (B,) int64; see ``Stages.kept``."""
        numbers = batch["sequence_id"]
        if "epochs" not in batch:
            return torch.full_like(numbers, stage)
        stages = torch.full_like(numbers, self.at(batch["epochs"]))
        if not self.uniform_prob:
            return stages
        draws = row_draws(numbers, 2, self.seed, _UNIFORM)
        drawn = (draws[:, 1] * (num_steps(batch) + 1)).long()
        return torch.where(draws[:, 0] < self.uniform_prob, drawn, stages)

    def removed(self, batch: Batch, stages: Tensor) -> Tensor:
        """Returns n, the number of steps that are gone (B,), of rows at ``stages`` (B,)."""
        steps = num_steps(batch)
        return torch.where(stages > self.last, steps, torch.minimum(stages, steps))

    def kept(self, batch: Batch, stage: int, separator: tuple[int, ...]) -> tuple[Segment, Tensor]:
        """Returns the chains of the steps that are left; see ``Stages.kept``."""
        stages = self.of_rows(batch, stage)
        lengths = batch["step_lengths"]
        order = torch.arange(lengths.shape[1], device=lengths.device)
        gone = order < self.removed(batch, stages)[:, None]
        left = {**batch, "step_lengths": lengths.masked_fill(gone, 0)}
        return chain_of(left, separator), stages <= self.last


@dataclass(frozen=True)
class TokenStages:
    """Stage r no longer shows the first r tokens of a chain (iCoT)."""

    per_epoch: int
    """Delta, tokens that go in an epoch."""
    beyond: int
    """From here on all tokens are gone."""
    smoothing: float | None
    """lambda of the extra tokens that go in advance, P(o) ~ exp(-lambda o); None: none go."""
    side: str = "left"
    """Where tokens go first."""
    pretrain_epochs: int = 0
    """Epochs with whole chains."""
    seed: int = 0
    """Of the draws."""

    @property
    def final(self) -> int:
        """The stage at which all tokens are gone."""
        return self.beyond

    def at(self, epochs: float) -> int:
        """Returns r with ``epochs`` behind."""
        # NOTE(paper): the public code adds one every round(batches of an epoch / Delta) batches,
        # which drifts where that is not whole; here r is Delta times the epochs, rounded down.
        since = max(0.0, epochs - self.pretrain_epochs)
        return min(math.floor(self.per_epoch * since + 1e-9), self.beyond)

    def removed(self, batch: Batch, stage: int, lengths: Tensor) -> Tensor:
        """Returns how many tokens of chains of ``lengths`` (B,) are gone (B,) int64."""
        epochs = batch.get("epochs")
        if epochs is not None:
            stage = self.at(epochs)
        if stage >= self.beyond:
            return lengths
        removed = torch.full_like(lengths, stage)
        if epochs is not None and epochs >= self.pretrain_epochs and self.smoothing is not None:
            removed = removed + offsets(batch["sequence_id"], self.smoothing, self.seed)
        return torch.minimum(removed, lengths)

    def kept(self, batch: Batch, stage: int, separator: tuple[int, ...]) -> tuple[Segment, Tensor]:
        """Returns what is left of the chains; see ``Stages.kept``."""
        chain = chain_of(batch, separator)
        left = shortened(chain, self.removed(batch, stage, chain[1]), self.side)
        if "epochs" in batch:
            stage = self.at(batch["epochs"])
        return left, torch.full_like(chain[1], stage < self.beyond, dtype=torch.bool)


def num_steps(batch: Batch) -> Tensor:
    """Returns the number of reasoning steps of each row (B,) int64."""
    count: Tensor = (batch["step_lengths"] > 0).sum(dim=1)
    return count


def offsets(numbers: Tensor, smoothing: float, seed: int) -> Tensor:
    """Returns o of rows by their number (B,): P(o >= k) = exp(-lambda k), at most MOST_EXTRA.

    Args:
        numbers: of rows (B,) int64.
        smoothing: lambda.
        seed: of the draws.
    """
    level = row_draws(numbers, 1, seed, _OFFSET)[:, 0]
    return (-torch.log1p(-level) / smoothing).long().clamp(max=MOST_EXTRA)


def row_draws(numbers: Tensor, count: int, *key: int) -> Tensor:
    """Returns uniform draws in [0, 1) of rows by their number (B, count) float64."""
    rows = [
        torch.rand(count, generator=seeded_generator(*key, number), dtype=torch.float64)
        for number in numbers.tolist()
    ]
    return torch.stack(rows).to(numbers.device)
