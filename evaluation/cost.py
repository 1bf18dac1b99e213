"""What a score costs: FLOPs as papers and as we count them, steps, wall time (docs/compute.md)."""

import contextlib
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from datamodules.text import IGNORE
from lightning_models import LanguageModel
from lightning_models.layers import recording


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What stands next to every score; fields are keys of the JSON files, absent where None."""

    flops_per_token: float | None
    """FLOPs per token of scoring, all passes, counted operation by operation. Where texts decide
    (``LanguageModel.adaptive``) those that ran; None if nothing was scored."""
    executed_steps: float
    """Additional passes through the network, the mean over the targets; 0: a plain decoder."""
    generation_flops_per_token: float
    """FLOPs per generated token, counted operation by operation."""
    flops_per_token_6nd: float
    """6 N (1 + steps) with N all parameters: what PonderLM-3 (arXiv 2603.02023, section 4.2) calls
    inference FLOPs per token. It is rather the count of a training step; ratios are the same."""
    nominal_flops_per_token: float | None = None
    """FLOPs per token of scoring as the configuration plans, where texts decide what runs."""
    nominal_steps: float | None = None
    """Additional passes of a token as the configuration plans, where texts decide what runs."""
    seconds: float
    """Wall time of what was measured, from the first batch to the last."""

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers under the keys of the JSON file."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def as_cells(self) -> dict[str, str]:
        """Returns the numbers for people, by name."""
        return {NAMES[key]: f"{value:.4g}" for key, value in self.as_dict().items()}


NAMES = {
    "flops_per_token": "FLOPs/token",
    "executed_steps": "executed steps",
    "generation_flops_per_token": "FLOPs/generated token",
    "flops_per_token_6nd": "6 N (1 + steps)",
    "nominal_flops_per_token": "nominal FLOPs/token",
    "nominal_steps": "nominal steps",
    "seconds": "seconds",
}
"""Fields of a cost as people read them."""


def price(
    model: LanguageModel,
    context: int,
    steps: float | None,
    seconds: float,
    flops: float | None = None,
    planned: float | None = None,
) -> Cost:
    """Returns the cost of scores of sequences of ``context`` tokens.

    Args:
        model: which; one that takes no additional steps costs what it costs.
        context: tokens of a sequence, on average.
        steps: mean of additional steps that were executed, at least 0; None: those of the model's
            configuration (``LanguageModel.passes_per_token``), where nothing reports them.
        seconds: that it took.
        flops: FLOPs per token that were counted; None: the planned ones, except where texts decide.
        planned: FLOPs per token of the model's configuration; None: at ``context`` tokens.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    planned_steps = model.passes_per_token(context) - 1
    planned = model.flops_per_token(context) if planned is None else planned
    executed = planned_steps if steps is None else steps
    return Cost(
        flops_per_token=flops if flops is not None or model.adaptive else planned,
        executed_steps=executed,
        generation_flops_per_token=model.generation_flops(context, steps),
        flops_per_token_6nd=6 * parameters * (1 + executed),
        nominal_flops_per_token=planned if model.adaptive else None,
        nominal_steps=planned_steps if model.adaptive else None,
        seconds=seconds,
    )


def mean_cost(costs: Sequence[Cost], tokens: Sequence[int]) -> Cost:
    """Returns the cost of several texts together.

    Args:
        costs: of each, at least one.
        tokens: of each: FLOPs and steps are means that they weigh; seconds are added up.
    """
    weights = tokens if sum(tokens) else [1] * len(costs)

    def mean(key: str) -> Any:
        """Returns the weighted mean of a field; None where a cost lacks it."""
        values = [getattr(cost, key) for cost in costs]
        if None in values:
            return None
        return sum(map(operator.mul, values, weights)) / sum(weights)

    means = {field.name: mean(field.name) for field in fields(Cost)}
    return Cost(**{**means, "seconds": sum(cost.seconds for cost in costs)})


class Stopwatch:
    """Wall time since it was made, in seconds; what runs on a GPU must have been waited for."""

    def __init__(self) -> None:
        """Starts."""
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time so far."""
        return time.perf_counter() - self._start


class GeneratedSteps:
    """Counts the additional steps of generated tokens, where a model records them."""

    def __init__(self) -> None:
        """Starts at none."""
        self._steps, self._tokens = 0.0, 0

    def count(self, steps: Tensor) -> None:
        """Takes the steps, int64 or float64 (n,), that tokens have taken."""
        self._steps += steps.sum().item()
        self._tokens += len(steps)

    @property
    def mean(self) -> float | None:
        """Steps per generated token; None if nothing was recorded."""
        return self._steps / self._tokens if self._tokens else None


class ComputeCounter:
    """Sums what scoring computes, as far as a model records it.

    The additional steps of all targets (``thinking_steps``) and the FLOPs of all tokens that are no
    padding (``flops``), in float64: sums over batches, not means of their means.
    """

    def __init__(self) -> None:
        """Starts at none."""
        self._steps = self._flops = 0.0
        self._targets = self._tokens = 0
        self._batch: dict[str, Any] = {}

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which all that models record is counted."""
        return recording(thinking_steps=self.count, flops=self.count_flops)

    def watch(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the batches; what is recorded belongs to the latest."""
        for batch in batches:
            self._batch = batch
            yield batch

    def count(self, executed: Tensor, most: float) -> None:
        """Takes what the model records.

        Args:
            executed: additional steps of each token of the batch, int64 or float64 (B, T).
            most: K, what they are at most.
        """
        targets = (self._batch["targets"] != IGNORE).to(executed.device)
        self._steps += executed[targets].sum().item()
        self._targets += int(targets.sum())

    def count_flops(self, flops: Tensor, tokens: Tensor) -> None:
        """Takes what the model records: FLOPs (B,) float64 and tokens (B,) int64 of each row."""
        self._flops += flops.sum().item()
        self._tokens += int(tokens.sum())

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs of all rows per token of theirs; None if nothing was recorded."""
        return self._flops / self._tokens if self._tokens else None

    @property
    def mean(self) -> float | None:
        """The mean over the targets; None if nothing was recorded."""
        return self._steps / self._targets if self._targets else None
