"""Results of methods and their averages.

Contains the terms of ``loss``, the log-likelihoods of ``score``, the objective of an optimiser step
over ranks and accumulated micro-batches, and metrics over a corpus.
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
    """A term of the objective, ``sum / normaliser``, both scalars.

    ``over`` names the entry of ``batch["step_normalisers"]`` with this normaliser summed over the
    whole optimiser step (all ranks and accumulated micro-batches), by which the base class divides.
    A mapping gives weights to several entries, whose weighted sum is the normaliser. None declares
    a mean over the micro-batch, for terms that depend on the model.
    """

    sum: Tensor
    normaliser: Tensor | float
    over: str | Mapping[str, float] | None = None


class Mean(NamedTuple):
    """A statistic that is the quotient of two sums over the optimiser step."""

    sum: Tensor
    normaliser: Tensor | float


@dataclasses.dataclass
class LossOutput:
    """Result of ``LanguageModel.loss``.

    ``terms`` add up to the objective; the one named ``nll`` (nats) is reported as ``train/loss``.
    ``stats`` are detached scalars, averaged over micro-batches and ranks, or ``Mean``s.
    ``sequence_nats``, a detached scalar, is the rest of the bound (KL
    divergences), which is included in ``train/loss`` and ``train/bpb`` but not in the objective.
    """

    terms: dict[str, Term]
    stats: dict[str, Tensor | Mean] = dataclasses.field(default_factory=dict)
    sequence_nats: Tensor | float = 0.0


class Scores(NamedTuple):
    """Log-likelihood of a batch in nats.

    ``log_prob`` has the shape of the targets, (B, T) or (B, S, U), is 0 at positions without one,
    and is float32, or float64 for a model in float64. ``sequence_term`` (B,) belongs to the whole
    sequence (minus a KL divergence) and is not distributed over tokens. ``num_targets`` (B,) is the
    number of targets of each row, 0 for rows that pad a batch. ``kind`` is the kind of likelihood.
    """

    log_prob: Tensor
    sequence_term: Tensor
    num_targets: Tensor
    kind: Likelihood

    def total(self) -> Tensor:
        """Returns the log-likelihood of the batch as a float64 scalar."""
        return self.log_prob.detach().double().sum() + self.sequence_total()

    def sequence_total(self) -> Tensor:
        """Returns the sum of the sequence terms, without padding rows, as a float64 scalar."""
        terms = self.sequence_term.detach().double()  # (B,)
        return terms.where(self.num_targets > 0, 0.0).sum()

    def reported(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the log-likelihood (float64) and number of targets for loss and perplexity.

        Boundary tokens do not count if the batch has a mask of ``lexical`` targets.
        """
        if "lexical" not in batch:
            return self.total(), self.num_targets.sum()
        lexical = batch["lexical"]
        log_prob = self.log_prob.detach().masked_fill(~lexical, 0.0).double().sum()
        return log_prob + self.sequence_total(), lexical.sum()


# ---- averages over a corpus, exact for ragged batches, accumulation and many ranks


PERPLEXITY_NAMES = {
    "exact": "ppl",
    "lower_bound": "ppl_bound",
    "estimate": "ppl_estimate",
    "noncausal": "ppl_noncausal",
}
"""Name of exp(nats per token) by the kind of likelihood."""


class Ratio(Metric):
    """Sum of numerators over sum of denominators, both float64, summed over ranks.

    Used for nats per byte and nats per token, of which perplexity is the exponential at the end,
    never a mean of exponentials.
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
        """Adds the two sums of a batch (scalars, or tensors whose elements are summed)."""
        self.numerator += torch.as_tensor(numerator, dtype=torch.float64).detach().sum()
        device = self.denominator.device
        self.denominator += on_device(denominator, device, torch.float64).detach().sum()

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Module:
        # Follows the module's device but not its dtype, since sums in bf16 stop growing at 256.
        device = fn(torch.empty(0, device=self.numerator.device)).device
        return super()._apply(lambda tensor: tensor.to(device), exclude_state)

    def compute(self) -> Tensor:
        """Returns the ratio as a float32 scalar, nan before the first update."""
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
            tokens: Number of the reported tokens.
            num_bytes: Number of UTF-8 bytes of all targets, or None if unknown.
            all_nats: Sum over all targets, if some are not reported. Defaults to ``nats``.
            sequence_nats: Part of ``nats`` that belongs to whole sequences (a KL divergence).
        """
        self.per_token.update(nats, tokens)
        self.of_sequences.update(torch.as_tensor(sequence_nats), tokens)
        if num_bytes is not None:
            self.per_byte.update(nats if all_nats is None else all_nats, num_bytes)

    def values(self, likelihood: str) -> dict[str, Tensor]:
        """Returns loss (nats per token), perplexity named by kind of likelihood, and bpb if known.

        For a lower bound or an estimate, includes the parts ``nll/token`` and ``kl/token``, and for
        a bound ``elbo/token``.
        """
        loss = self.per_token.compute()
        values = {"loss": loss, PERPLEXITY_NAMES[likelihood]: loss.exp()}
        if likelihood in ("lower_bound", "estimate"):
            divergence = self.of_sequences.compute()
            values |= {"nll/token": loss - divergence, "kl/token": divergence}
        if likelihood == "lower_bound":
            values["elbo/token"] = -loss
        if self.per_byte.update_count:
            values["bpb"] = self.per_byte.compute() / math.log(2)
        return values

    def reset(self) -> None:
        """Resets all sums."""
        self.per_token.reset()
        self.per_byte.reset()
        self.of_sequences.reset()


class StepMeans:
    """Means of named quantities over the micro-batches and ranks of an optimiser step.

    Sums stay on the device and are reduced in one collective.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, numerator: Tensor, denominator: Tensor | float = 1.0) -> None:
        """Adds the numerator and denominator of a micro-batch, summed over their elements."""
        top = numerator.detach().double().sum()
        bottom = on_device(denominator, top.device, torch.float64).detach().sum()
        pair = torch.stack((top, bottom))
        if name in self._sums:
            pair = self._sums[name].to(pair.device) + pair  # restored sums are on the CPU
        self._sums[name] = pair

    def take(self, *, wait: bool = True) -> dict[str, Tensor | None]:
        """Returns the means in float32, None for empty ones, and resets the sums.

        Every rank must have added the same names.

        Args:
            wait: Whether to synchronise with a GPU to read the denominators. If not, empty means on
                a GPU are nan.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        # (names, 2), in an order that ranks share
        sums = torch.stack([self._sums[name] for name in names])
        self._sums = {}
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        means = (sums[:, 0] / sums[:, 1]).float()  # (names,), nan where the denominator is 0
        knows = wait or sums.device.type == "cpu"
        # reading the denominators waits for the device
        counts = sums[:, 1].tolist() if knows else [math.nan] * len(names)
        return {
            name: mean if count else None
            for name, mean, count in zip(names, means, counts, strict=True)
        }

    def sums(self) -> dict[str, list[float]]:
        """Returns the sums of this process, for a checkpoint between two micro-batches."""
        return {name: pair.tolist() for name, pair in self._sums.items()}

    def add_sums(self, sums: dict[str, list[float]]) -> None:
        """Adds the exact sums of a checkpoint, see ``sums``."""
        for name, (numerator, denominator) in sums.items():
            self.add(name, torch.tensor(numerator, dtype=torch.float64), denominator)


# ---- objective of an optimiser step
#
# Lightning divides by the number of accumulated micro-batches and DDP averages over ranks. The
# factors below undo both.


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
        totals: ``step_normalisers`` of its batch. If empty, terms use the normaliser of the batch.
        accumulate: Number of micro-batches of an optimiser step.
        world_size: Number of ranks.
        device: Device of the terms.

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
    """Returns the factor on the sum of a term, 0 if its normaliser is 0.

    Means over micro-batches have equal weights, also in an epoch's last step with fewer of them.
    """
    if totals and term.over is not None:
        # divides by the count of the whole step, and undoes the means over ranks and micro-batches
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
