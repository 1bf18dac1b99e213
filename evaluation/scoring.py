"""Perplexity: nats, tokens and bytes summed over a corpus, and their reported quotients."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from tqdm import tqdm

from evaluation.devices import Precision, autocast
from lightning_models import LanguageModel, Scores
from lightning_models.outputs import PERPLEXITY_NAMES, bits

PERPLEXITY_KEYS = {**PERPLEXITY_NAMES, "exact": "perplexity"}
"""Name of exp(nats per token) in results, by the kind of its likelihood."""


@dataclass(frozen=True)
class Totals:
    """Sums over all scored targets."""

    nats: float
    """Negative log-likelihood of the reported targets, including terms per sequence."""
    tokens: int
    """Number of reported targets."""
    bytes: int | None
    """UTF-8 bytes of the targets, or None if the data do not count them."""
    all_nats: float | None = None
    """Negative log-likelihood of all targets if only the lexical ones are reported, else None."""
    sequence_nats: float = 0.0
    """Part of ``nats`` that belongs to whole sequences: their KL divergences."""

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood of a token in nats; nan without tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Exponential of ``nats_per_token``; infinite on overflow."""
        return bounded_exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float | None:
        """Negative log-likelihood of all targets in bits per byte, or None without a byte count."""
        nats = self.nats if self.all_nats is None else self.all_nats
        return bits(nats) / self.bytes if self.bytes else None

    def as_dict(self, likelihood: str) -> dict[str, float | int | str | None]:
        """Returns the numbers under the keys of the JSON files, which name the likelihood."""
        return {
            "nats_per_token": self.nats_per_token,
            PERPLEXITY_KEYS[likelihood]: self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "counted": "all" if self.all_nats is None else "lexical",
            "bytes": self.bytes,
            **(self._parts() if likelihood == "lower_bound" else {}),
        }

    def _parts(self) -> dict[str, float]:
        divergence = self.sequence_nats / self.tokens if self.tokens else math.nan
        return {
            "elbo_per_token": -self.nats_per_token,
            "nll_per_token": self.nats_per_token - divergence,
            "kl_per_token": divergence,
        }


def bounded_exp(value: float) -> float:
    """Returns the exponential, or infinity on overflow."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def standard_error(values: Tensor) -> float:
    """Returns the standard error of the mean of a sample (N,); nan for fewer than two values.

    There is no correction for a finite population, so the error of a sample that is most of its
    population is overestimated.
    """
    return (values.double().std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan


def score_batches(
    model: LanguageModel,
    batches: Iterable[dict[str, Any]],
    *,
    precision: Precision = "32",
    num_batches: int | None = None,
) -> Totals:
    """Sums scores over ``batches`` in float64 on the model's device.

    The model must be in eval mode; ``num_batches`` is the length of the progress bar.
    """
    # nats of reported targets, all targets, and whole sequences
    nats = torch.zeros(3, dtype=torch.float64, device=model.device)
    tokens, num_bytes, counted, lexical = 0, 0, True, False
    for batch in tqdm(batches, total=num_batches, desc="scoring", unit=" batches", disable=None):
        batch = _to(model, batch)
        scores = score_batch(model, batch, precision)
        reported, count = scores.reported(batch)
        nats -= torch.stack((reported, scores.total(), scores.sequence_total()))
        tokens += int(count)
        lexical = lexical or "lexical" in batch
        counted = counted and "num_bytes" in batch
        num_bytes += int(batch["num_bytes"].sum()) if counted else 0
    of_reported, of_all, of_sequences = nats.tolist()
    return Totals(
        of_reported,
        tokens,
        num_bytes if counted else None,
        of_all if lexical else None,
        of_sequences,
    )


def score_batch(model: LanguageModel, batch: dict[str, Any], precision: Precision) -> Scores:
    """Moves a batch to the model's device and scores it."""
    with torch.inference_mode(), autocast(model.device, precision):
        return model.score(_to(model, batch))


def _to(model: LanguageModel, batch: dict[str, Any]) -> dict[str, Any]:
    moved: dict[str, Any] = move_data_to_device(batch, model.device)
    return moved


class Share(NamedTuple):
    """A share of questions in [0, 1] and its standard error; both are nan without questions.

    The error assumes independent questions.
    """

    value: float
    error: float
    questions: int

    def __str__(self) -> str:
        return f"{self.value:.4f} +- {self.error:.4f} of {self.questions:,}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the accuracy under the keys of the JSON files."""
        return {"accuracy": self.value, "standard_error": self.error, "questions": self.questions}


def share_of(flags: Iterable[bool]) -> Share:
    """Returns the share of flags that are true."""
    values = list(flags)
    if not values:
        return Share(math.nan, math.nan, 0)
    share = sum(values) / len(values)
    return Share(share, math.sqrt(share * (1 - share) / len(values)), len(values))
