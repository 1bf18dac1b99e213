"""Additional computation steps of a model, and what they cost a generated token."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from datamodules.windows import IGNORE
from lightning_models import LanguageModel


@dataclass(frozen=True)
class Thinking:
    """How much more than one step tokens take, and FLOPs of generating one of them."""

    executed_steps: float
    """Additional steps, the mean over the targets."""
    generation_flops: float
    """FLOPs per generated token, counted operation by operation."""
    flops_6nd: float
    """6 N (1 + steps) with N all parameters: what PonderLM-3 (arXiv 2603.02023, section 4.2) calls
    inference FLOPs per token. It is rather the count of a training step; ratios are the same."""

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers under the keys of the JSON file."""
        return {
            "executed_steps": self.executed_steps,
            "generation_flops_per_token": self.generation_flops,
            "flops_per_token_6nd": self.flops_6nd,
        }


def price_steps(model: LanguageModel, context: int, steps: float) -> Thinking:
    """Returns what it costs to generate a token with so many additional steps on average.

    Args:
        model: which; one that takes no additional steps costs what it costs.
        context: tokens in front.
        steps: mean of additional steps, at least 0.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Thinking(
        executed_steps=steps,
        generation_flops=model.generation_flops(context, steps),
        flops_6nd=6 * parameters * (1 + steps),
    )


class GeneratedSteps:
    """Counts the additional steps of generated tokens, where a model records them."""

    def __init__(self) -> None:
        """Starts at none."""
        self._steps = self._tokens = 0

    def count(self, steps: Tensor) -> None:
        """Takes the steps, int64 (n,), that tokens have taken."""
        self._steps += int(steps.sum())
        self._tokens += len(steps)

    @property
    def mean(self) -> float | None:
        """Steps per generated token; None if nothing was recorded."""
        return self._steps / self._tokens if self._tokens else None


class StepCounter:
    """Sums the additional steps of all targets, where a model records ``thinking_steps``."""

    def __init__(self) -> None:
        """Starts at none."""
        self._steps = self._targets = 0
        self._batch: dict[str, Any] = {}

    def watch(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the batches; what is recorded belongs to the latest."""
        for batch in batches:
            self._batch = batch
            yield batch

    def count(self, executed: Tensor, most: int) -> None:
        """Takes what the model records.

        Args:
            executed: additional steps of each token of the batch, int64 (B, T).
            most: K, what they are at most.
        """
        targets = (self._batch["targets"] != IGNORE).to(executed.device)
        self._steps += int(executed[targets].sum())
        self._targets += int(targets.sum())

    @property
    def mean(self) -> float | None:
        """The mean over the targets; None if nothing was recorded."""
        return self._steps / self._targets if self._targets else None

    def priced(self, model: LanguageModel, context: int) -> Thinking | None:
        """Returns the mean with its price, see `price_steps`; None if nothing was recorded."""
        return None if self.mean is None else price_steps(model, context, self.mean)
