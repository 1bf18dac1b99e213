"""Cost of a score: FLOPs as papers and as we count them, steps, wall time (docs/compute.md)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor, nn

from datamodules.text import IGNORE
from lightning_models import LanguageModel
from lightning_models.layers import recording

Cost = dict[str, Any]
"""Cost entries of every score in the JSON files, see ``price``."""
NAMES = {
    "flops_per_token": "FLOPs/scored token",
    "executed_steps": "executed steps",
    "generation_flops_per_token": "FLOPs/generated token",
    "flops_per_token_6nd": "6 N (1 + steps)",
    "expected_steps": "expected steps",
    "nominal_flops_per_token": "nominal FLOPs/token",
    "nominal_steps": "nominal steps",
    "seconds": "seconds",
}
"""Displayed names of the keys of a cost."""


def cost_cells(result: Mapping[str, Any]) -> dict[str, str]:
    """Formats the costs of a result, by their displayed names."""
    return {name: f"{result[key]:.4g}" for key, name in NAMES.items() if key in result}


def price(
    model: LanguageModel,
    context: int,
    steps: float | None,
    seconds: float,
    flops: float | None = None,
    planned: float | None = None,
    rows_per_target: float = 1.0,
    expected: float | None = None,
) -> Cost:
    """Returns the cost of scores of sequences of ``context`` tokens.

    Args:
        model: The model that was scored.
        context: Average number of tokens in a sequence.
        steps: Mean of the executed additional steps. Defaults to the steps that the model's
            configuration plans (``LanguageModel.passes_per_token``).
        seconds: Wall time from the first batch to the last.
        flops: Counted FLOPs per token. Defaults to the planned ones.
        planned: FLOPs per token that the configuration plans. Defaults to the model's FLOPs at
            ``context``.
        rows_per_target: Number of positions computed per target, above 1 if rows overlap.
        expected: Mean of the additional steps that a router expects, if there is one.

    Returns:
        ``flops_per_token`` of scoring, counted operation by operation; for adaptive models
        (``LanguageModel.adaptive``) the executed FLOPs, absent if nothing was scored.
        ``executed_steps``, additional passes per target. ``generation_flops_per_token``.
        ``flops_per_token_6nd``: 6 N (1 + steps) with N all parameters, which PonderLM-3 (arXiv
        2603.02023, section 4.2) calls inference FLOPs per token. ``expected_steps``, sum_{k >= 1}
        w_k of a router. For adaptive models the planned ``nominal_flops_per_token`` and
        ``nominal_steps``. ``seconds``. See docs/compute.md.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    planned_steps = model.passes_per_token(context) - 1
    planned = model.flops_per_token(context) if planned is None else planned
    planned *= rows_per_target
    flops = None if flops is None else flops * rows_per_target
    executed = planned_steps if steps is None else steps
    nominal = {"nominal_flops_per_token": planned, "nominal_steps": planned_steps}
    if flops is None and not model.adaptive:
        flops = planned
    return {
        **({} if flops is None else {"flops_per_token": flops}),
        "executed_steps": executed,
        "generation_flops_per_token": model.generation_flops(context, steps),
        "flops_per_token_6nd": 6 * parameters * (1 + executed),
        **({} if expected is None else {"expected_steps": expected}),
        **(nominal if model.adaptive else {}),
        "seconds": seconds,
    }


def mean_cost(results: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> Cost:
    """Returns the cost of one or more texts together; keys that a text lacks are left out.

    FLOPs and steps are means weighted by ``tokens``; seconds are summed.
    """
    weights = tokens if sum(tokens) else [1] * len(results)
    means = {
        key: sum(result[key] * weight for result, weight in zip(results, weights, strict=True))
        / sum(weights)
        for key in NAMES
        if all(key in result for result in results)
    }
    return {**means, "seconds": sum(result["seconds"] for result in results)}


# ---- FLOPs by part of the model


PARTS = ("output", "self_attention", "cross_attention", "feed_forward")
"""Parts that most models have, before the parts of a method."""


def non_embedding_parameters(model: LanguageModel) -> int:
    """Returns N, the parameters outside token and position embeddings and the output matrix.

    Kaplan et al. (arXiv 2001.08361) count so, and the papers quote sizes so; biases, norms and
    frozen weights are included. The output matrix is ``model.network.output_matrix``.
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    tables.add(id(getattr(model.network, "output_matrix", None)))
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in tables)


def count_compute(model: LanguageModel, context: int) -> dict[str, Any]:
    """Returns sizes and FLOPs per token of a model, under the keys of the CSV file.

    ``flops_one_pass`` is one pass through the network, and ``parts`` its FLOPs by part;
    ``flops_forward`` scores a sequence, with as many passes as the method needs;
    ``flops_as_published`` is a training step as the method's paper counts it, None if the paper
    counts no differently.

    The model needs no weights; ``context`` is the length of a sequence in tokens.
    """
    parts = model.flops_by_part(context)
    return {
        "context": context,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_one_pass": sum(parts.values()),
        "flops_forward": model.flops_per_token(context),
        "flops_training": model.flops_per_token(context, training=True),
        "flops_as_published": model.published_flops_per_token(context),
        "parts": parts,
    }


def compute_frame(counts: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> pd.DataFrame:
    """Returns sizes, FLOPs per token and the shares of one pass, one row per model.

    Args:
        counts: Results of ``count_compute``, at least one.
        labels: The label of each model.

    Returns:
        ``label``, the counts, and ``flops_PART`` and ``share_PART`` (0 to 1) of the parts that any
        of the models has, the common ones first.
    """
    parts_of_any = dict.fromkeys(part for count in counts for part in count["parts"])
    names = [part for part in PARTS if part in parts_of_any]
    names += [part for part in parts_of_any if part not in PARTS]
    frame = pd.DataFrame(list(counts), dtype=object)
    spent = {part: [float(c["parts"].get(part, 0)) for c in counts] for part in names}
    parts = pd.DataFrame(spent)
    shares = parts.div(frame["flops_one_pass"].astype(float), axis=0)
    frame = pd.concat(
        [frame.drop(columns="parts"), parts.add_prefix("flops_"), shares.add_prefix("share_")],
        axis=1,
    )
    frame.insert(0, "label", list(labels))
    unknown = frame["flops_as_published"].isna().all()
    return frame.drop(columns="flops_as_published") if unknown else frame


# ---- counts while models run


class GeneratedSteps:
    """Counts the additional steps of generated tokens, if a model records them."""

    def __init__(self) -> None:
        self._steps, self._tokens = 0.0, 0

    def count(self, steps: Tensor) -> None:
        """Adds the steps of tokens, int64 or float64 (n,)."""
        self._steps += steps.sum().item()
        self._tokens += len(steps)

    @property
    def mean(self) -> float | None:
        """Steps per generated token, or None if nothing was recorded."""
        return self._steps / self._tokens if self._tokens else None


class ComputeCounter:
    """Accumulates the compute of scoring, as far as a model records it.

    It sums, in float64, the additional steps of all targets (``thinking_steps``), the steps that a
    router expects (``router``), and the FLOPs of all tokens except padding (``flops``). Means are
    quotients of these sums, not means over batches.
    """

    def __init__(self) -> None:
        self._steps = self._expected = self._flops = 0.0
        self._targets = self._routed = self._tokens = 0
        self._batch: dict[str, Any] = {}

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which steps and FLOPs are counted."""
        return recording(flops=self.count_flops, **self.steps)

    def watch(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the batches; recorded values belong to the latest one."""
        for batch in batches:
            self._batch = batch
            yield batch

    @property
    def steps(self) -> dict[str, Callable[..., None]]:
        """Recording functions of additional steps, by the name of the statistic."""
        return {"thinking_steps": self.count, "router": self.count_expected}

    def count(self, executed: Tensor, most: float) -> None:
        """Adds the additional steps of tokens, int64 or float64 (B, T), each at most K."""
        taken = self._of_targets(executed)
        self._steps += taken.sum().item()
        self._targets += len(taken)

    def count_expected(self, log_tail: Tensor, **_: Any) -> None:
        """Adds log w (B, T, K+1), w_k the probability that a token takes k steps or more."""
        tail = self._of_targets(log_tail)[:, 1:].double().exp()  # (targets, K)
        self._expected += tail.sum().item()
        self._routed += len(tail)

    def _of_targets(self, values: Tensor) -> Tensor:
        """Returns the values (B, T, ...) of the batch's targets."""
        return values[(self._batch["targets"] != IGNORE).to(values.device)]

    def count_flops(self, flops: Tensor, tokens: Tensor) -> None:
        """Adds the recorded FLOPs, float64 (B,), and tokens, int64 (B,), of each row."""
        self._flops += flops.sum().item()
        self._tokens += int(tokens.sum())

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs per token of all rows, or None if nothing was recorded."""
        return self._flops / self._tokens if self._tokens else None

    @property
    def mean(self) -> float | None:
        """Mean of the executed steps of the targets, or None if nothing was recorded."""
        return self._steps / self._targets if self._targets else None

    @property
    def expected(self) -> float | None:
        """Mean of the expected steps of the targets, or None if nothing was recorded."""
        return self._expected / self._routed if self._routed else None
