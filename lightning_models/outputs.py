"""Losses, scores and metrics: what a method returns, and how it is averaged.

Terms of the objective from ``loss``, log-likelihoods from ``score``; the objective of an optimiser
step (all ranks and accumulated micro-batches); metrics over a corpus.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module
from torchmetrics import Metric

from lightning_models.runtime import on_device

Likelihood = Literal["exact", "lower_bound", "estimate", "noncausal"]


class Term(NamedTuple):
    """One summand of the objective: ``sum / normaliser``, both scalars.

    ``over`` names the entry of ``batch["step_normalisers"]`` that holds this normaliser summed
    over the whole optimiser step (all ranks, all accumulated micro-batches); the base divides by
    that one. A mapping names several entries with a weight each: the normaliser is their weighted
    sum. None declares a mean over the micro-batch, for terms that depend on the model.
    """

    sum: Tensor
    normaliser: Tensor | float
    over: str | Mapping[str, float] | None = None


class Mean(NamedTuple):
    """A statistic that is a quotient, whose parts are added up over the step first."""

    sum: Tensor
    number: Tensor | float


@dataclasses.dataclass
class LossOutput:
    """What ``LanguageModel.loss`` returns.

    ``terms`` add up to the objective; the one named ``nll`` (nats) is reported as ``train/loss``.
    ``stats`` are detached scalars, averaged over micro-batches and ranks, or means of their own.
    ``sequence_nats``, a detached scalar, is what the bound loses in addition to that term
    (KL divergences): it is no part of the objective, but of ``train/loss`` and ``train/bpb``.
    """

    terms: dict[str, Term]
    stats: dict[str, Tensor | Mean] = dataclasses.field(default_factory=dict)
    sequence_nats: Tensor | float = 0.0


class Scores(NamedTuple):
    """Log-likelihood of a batch in nats.

    ``log_prob`` in the shape of the targets, (B, T) or (B, S, U), 0 where none is, is float32, or
    float64 from a model in float64;
    ``sequence_term`` (B,) belongs to a whole sequence (minus a KL divergence) and is not spread
    over tokens; ``num_targets`` (B,) says how many tokens of each row are counted, 0 for rows that
    only fill up a batch; ``kind`` says what the sum is.
    """

    log_prob: Tensor
    sequence_term: Tensor
    num_targets: Tensor
    kind: Likelihood

    def total(self) -> Tensor:
        """Returns the batch's log-likelihood, a float64 scalar; filling rows have no sequence."""
        return self.log_prob.detach().double().sum() + self.sequence_total()

    def sequence_total(self) -> Tensor:
        """Returns the sum of the sequences' own terms, a float64 scalar."""
        terms = self.sequence_term.detach().double()
        return terms.where(self.num_targets > 0, 0.0).sum()

    def reported(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the part that loss and perplexity count: log-likelihood (float64) and targets.

        That is all of it, but where the batch says which targets are ``lexical``: then boundary
        tokens do not count.
        """
        if "lexical" not in batch:
            return self.total(), self.num_targets.sum()
        lexical = batch["lexical"]
        words = self.log_prob.detach().masked_fill(~lexical, 0.0).double().sum()
        return words + self.sequence_total(), lexical.sum()


# ---- averages over a corpus: right for ragged batches, accumulation and many ranks


PERPLEXITY_NAMES = {
    "exact": "ppl",
    "lower_bound": "ppl_bound",
    "estimate": "ppl_estimate",
    "noncausal": "ppl_noncausal",
}
"""What exp(nats per token) may be called, by the kind of likelihood it comes from."""


class Ratio(Metric):
    """Sum of numerators over sum of denominators, both float64, summed over ranks.

    Used for nats per token (then perplexity is one exponential at the end, never a mean of
    exponentials) and for nats per byte.
    """

    full_state_update = False
    numerator: Tensor
    denominator: Tensor

    def __init__(self) -> None:
        super().__init__()
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("numerator", default=zero, dist_reduce_fx="sum")
        self.add_state("denominator", default=zero.clone(), dist_reduce_fx="sum")

    def update(self, numerator: Tensor, denominator: Tensor | float) -> None:
        """Adds one batch: two sums (scalars, or tensors whose elements are summed)."""
        self.numerator += torch.as_tensor(numerator, dtype=torch.float64).detach().sum()
        device = self.denominator.device
        self.denominator += on_device(denominator, device, torch.float64).detach().sum()

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Module:
        # Follows the module to its device, but not to its dtype: bf16 sums stop at 256.
        device = fn(torch.empty(0, device=self.numerator.device)).device
        return super()._apply(lambda tensor: tensor.to(device), exclude_state)

    def compute(self) -> Tensor:
        """Returns the ratio as a float32 scalar (nan before the first update)."""
        return (self.numerator / self.denominator).float()


def bits(nats: float) -> float:
    """Returns an amount of information in bits."""
    return nats / math.log(2)


class StageMetrics(nn.Module):
    """Nats per token and nats per byte of one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.per_token = Ratio()
        self.per_byte = Ratio()
        self.of_sequences = Ratio()

    def add(
        self,
        nats: Tensor,
        tokens: Tensor | float,
        num_bytes: Tensor | None,
        all_nats: Tensor | None = None,
        sequence_nats: Tensor | float = 0.0,
    ) -> None:
        """Adds one batch.

        Args:
            nats: Sum over the reported tokens.
            tokens: Their number.
            num_bytes: UTF-8 bytes of all targets; None: not known.
            all_nats: Sum over all targets, where some are not reported; None: ``nats``.
            sequence_nats: The part of ``nats`` that belongs to whole sequences (a KL divergence).
        """
        self.per_token.update(nats, tokens)
        self.of_sequences.update(torch.as_tensor(sequence_nats), tokens)
        if num_bytes is not None:
            self.per_byte.update(nats if all_nats is None else all_nats, num_bytes)

    def values(self, kind: str) -> dict[str, Tensor]:
        """Returns loss (nats per token), perplexity under its honest name, and bpb if known.

        Of a lower bound, or an estimate of one, also its parts: ``elbo/token`` (of a bound only),
        ``nll/token`` and ``kl/token``.
        """
        loss = self.per_token.compute()
        values = {"loss": loss, PERPLEXITY_NAMES[kind]: loss.exp()}
        if kind in ("lower_bound", "estimate"):
            divergence = self.of_sequences.compute()
            values |= {"nll/token": loss - divergence, "kl/token": divergence}
        if kind == "lower_bound":
            values["elbo/token"] = -loss
        if self.per_byte.update_count:
            values["bpb"] = self.per_byte.compute() / math.log(2)
        return values

    def reset(self) -> None:
        """Starts again."""
        self.per_token.reset()
        self.per_byte.reset()
        self.of_sequences.reset()


class StepMeans:
    """Means of named quantities over one optimiser step: all its micro-batches, all ranks.

    Sums stay on the device, and one collective serves all of them.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, numerator: Tensor, denominator: Tensor | float = 1.0) -> None:
        """Adds one micro-batch's sum and what it is to be divided by (a tensor's sum)."""
        top = numerator.detach().double().sum()
        bottom = on_device(denominator, top.device, torch.float64).detach().sum()
        pair = torch.stack((top, bottom))
        if name in self._sums:
            pair = self._sums[name].to(pair.device) + pair  # restored sums lie on the CPU
        self._sums[name] = pair

    def take(self, *, wait: bool = True) -> dict[str, Tensor | None]:
        """Returns the means, float32, None for a mean of nothing, and starts again.

        Every rank must have added the same names.

        Args:
            wait: Whether to wait for a GPU, which knows what was counted. Without waiting, its
                means of nothing are nan.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        sums = torch.stack([self._sums[name] for name in names])
        self._sums = {}
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        means = (sums[:, 0] / sums[:, 1]).float()
        knows = wait or sums.device.type == "cpu"
        counts = sums[:, 1].tolist() if knows else [math.nan] * len(names)
        return {
            name: mean if count else None
            for name, mean, count in zip(names, means, counts, strict=True)
        }

    def sums(self) -> dict[str, list[float]]:
        """Returns this process' sums so far, for a checkpoint between two micro-batches."""
        return {name: pair.tolist() for name, pair in self._sums.items()}

    def add_sums(self, sums: dict[str, list[float]]) -> None:
        """Adds what ``sums`` returned before a break; the values are exact."""
        for name, (numerator, denominator) in sums.items():
            self.add(name, torch.tensor(numerator, dtype=torch.float64), denominator)


# ---- a micro-batch's share of the optimiser step's objective: Lightning divides by the number of
# accumulated micro-batches and DDP averages over ranks; the shares undo both


def objective(
    output: LossOutput,
    totals: Mapping[str, float],
    *,
    accumulate: int,
    world_size: int,
    device: torch.device,
) -> Tensor:
    """Returns the scalar whose mean over ranks and micro-batches is the step's objective.

    Args:
        output: Terms of one micro-batch.
        totals: ``step_normalisers`` of its batch; empty: every term has its own normaliser.
        accumulate: Micro-batches of an optimiser step.
        world_size: Number of ranks.
        device: Where the terms are.

    Raises:
        ValueError: If a term names a normaliser that the batch does not have.
    """
    total = torch.zeros((), device=device)
    for name, term in output.terms.items():
        share = _share(name, term, totals, accumulate, world_size, device)
        total = total + term.sum * share
    return total


def _share(
    name: str,
    term: Term,
    totals: Mapping[str, float],
    accumulate: int,
    world_size: int,
    device: torch.device,
) -> Tensor | float:
    """Returns the factor on a term's sum; a sum over nothing has no share.

    Micro-batch means weigh equally among those of their step, of which an epoch's last step may
    have fewer.
    """
    if totals and term.over is not None:
        counted = _counted(name, term.over, totals)
        return world_size * accumulate / counted if counted else 0.0
    normaliser = on_device(term.normaliser, device)
    share = accumulate / totals.get("micro_batches", accumulate) / normaliser
    return torch.where(normaliser > 0, share, 0.0)


def _counted(name: str, over: str | Mapping[str, float], totals: Mapping[str, float]) -> float:
    """Returns the normaliser of the whole step."""
    weights = {over: 1.0} if isinstance(over, str) else over
    for key in weights:
        if key not in totals:
            raise ValueError(
                f"term {name}: the batch has no normaliser {key!r}, only {', '.join(totals)}; the "
                "data must count it over the optimiser step"
            )
    return sum(weight * totals[key] for key, weight in weights.items())
