"""What a score costs: FLOPs as papers and as we count them, steps, wall time (docs/compute.md)."""

import contextlib
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from datamodules.text import IGNORE
from lightning_models import LanguageModel
from lightning_models.layers import recording


@dataclass(frozen=True)
class Thinking:
    """How much more than one pass tokens take, and FLOPs of generating one of them."""

    executed_steps: float
    """Additional passes through the network, the mean over the targets; 0: a plain decoder."""
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


@dataclass(frozen=True)
class Cost:
    """What stands next to every score."""

    flops_per_token: float | None
    """FLOPs per token of scoring, all passes, counted operation by operation. Where texts decide
    (``LanguageModel.adaptive``) those that ran; None if nothing was scored."""
    thinking: Thinking
    seconds: float
    """Wall time of what was measured, from the first batch to the last."""
    nominal: "Nominal | None" = None
    """What the configuration plans, where texts decide what runs."""

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers under the keys of the JSON file."""
        counted = {} if self.flops_per_token is None else {"flops_per_token": self.flops_per_token}
        planned = {} if self.nominal is None else self.nominal.as_dict()
        return {**counted, **self.thinking.as_dict(), **planned, "seconds": self.seconds}

    def as_cells(self) -> dict[str, str]:
        """Returns the numbers for people, by name."""
        names = {
            "flops_per_token": "FLOPs/token",
            "executed_steps": "executed steps",
            "generation_flops_per_token": "FLOPs/generated token",
            "flops_per_token_6nd": "6 N (1 + steps)",
            "nominal_flops_per_token": "nominal FLOPs/token",
            "nominal_steps": "nominal steps",
            "seconds": "seconds",
        }
        return {names[key]: f"{value:.4g}" for key, value in self.as_dict().items()}


@dataclass(frozen=True)
class Nominal:
    """What a model computes for a text that takes exactly what its configuration plans."""

    flops_per_token: float
    """FLOPs per token of scoring (``LanguageModel.flops_per_token``)."""
    steps: float
    """Additional passes of a token (``LanguageModel.passes_per_token``)."""

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers under the keys of the JSON file."""
        return {"nominal_flops_per_token": self.flops_per_token, "nominal_steps": self.steps}


def price(
    model: LanguageModel,
    context: int,
    steps: float | None,
    seconds: float,
    flops: float | None = None,
) -> Cost:
    """Returns the cost of scores of sequences of ``context`` tokens.

    Args:
        model: which.
        context: tokens of a sequence, on average.
        steps: mean of additional steps that were executed; None: see ``price_steps``.
        seconds: that it took.
        flops: FLOPs per token that were counted; None: those of the model's configuration, which
            are nominal where texts decide.
    """
    planned = model.flops_per_token(context)
    nominal = Nominal(planned, model.passes_per_token(context) - 1) if model.adaptive else None
    scored = flops if flops is not None or nominal else planned
    return Cost(scored, price_steps(model, context, steps), seconds, nominal)


def price_steps(model: LanguageModel, context: int, steps: float | None) -> Thinking:
    """Returns what it costs to generate a token with so many additional steps on average.

    Args:
        model: which; one that takes no additional steps costs what it costs.
        context: tokens in front.
        steps: mean of additional steps, at least 0; None: those of the model's configuration
            (``LanguageModel.passes_per_token``), where nothing reports how many were executed.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    executed = model.passes_per_token(context) - 1 if steps is None else steps
    return Thinking(
        executed_steps=executed,
        generation_flops=model.generation_flops(context, steps),
        flops_6nd=6 * parameters * (1 + executed),
    )


def mean_cost(costs: Sequence[Cost], tokens: Sequence[int]) -> Cost:
    """Returns the cost of several texts together.

    Args:
        costs: of each, at least one.
        tokens: of each: FLOPs and steps are means that they weigh; seconds are added up.
    """
    weights = tokens if sum(tokens) else [1] * len(costs)

    def mean(values: Iterable[float]) -> float:
        return sum(map(operator.mul, values, weights)) / sum(weights)

    thoughts = [cost.thinking for cost in costs]
    counted = [cost.flops_per_token for cost in costs if cost.flops_per_token is not None]
    planned = [cost.nominal for cost in costs if cost.nominal is not None]
    nominal = None
    if len(planned) == len(costs):
        nominal = Nominal(
            mean(one.flops_per_token for one in planned), mean(one.steps for one in planned)
        )
    return Cost(
        mean(counted) if len(counted) == len(costs) else None,
        Thinking(
            mean(thinking.executed_steps for thinking in thoughts),
            mean(thinking.generation_flops for thinking in thoughts),
            mean(thinking.flops_6nd for thinking in thoughts),
        ),
        sum(cost.seconds for cost in costs),
        nominal,
    )


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
