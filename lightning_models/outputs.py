"""What a method returns: terms of the objective from ``loss``, log-likelihoods from ``score``."""

import dataclasses
from typing import Literal, NamedTuple

from torch import Tensor

Likelihood = Literal["exact", "lower_bound", "estimate", "noncausal"]


class Term(NamedTuple):
    """One summand of the objective: ``sum / normaliser``, both scalars.

    ``over`` names the entry of ``batch["step_normalisers"]`` that holds this normaliser summed
    over the whole optimiser step (all ranks, all accumulated micro-batches); the base divides by
    that one. None declares a mean over the micro-batch, for terms that depend on the model.
    """

    sum: Tensor
    normaliser: Tensor | float
    over: str | None = None


@dataclasses.dataclass
class LossOutput:
    """What ``LanguageModel.loss`` returns.

    ``terms`` add up to the objective; the one named ``nll`` (nats) is reported as ``train/loss``.
    ``stats`` are detached scalars, logged as they are.
    """

    terms: dict[str, Term]
    stats: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class Scores(NamedTuple):
    """Log-likelihood of a batch in nats.

    ``log_prob`` (B, T) float32, 0 where nothing is counted; ``sequence_term`` (B,) belongs to a
    whole sequence (minus a KL divergence) and is not spread over tokens; ``num_targets`` (B,) says
    how many tokens of each row are counted, 0 for rows that only fill up a batch; ``kind`` says
    what the sum is.
    """

    log_prob: Tensor
    sequence_term: Tensor
    num_targets: Tensor
    kind: Likelihood

    def total(self) -> Tensor:
        """Returns the batch's log-likelihood, a float64 scalar; filling rows have no sequence."""
        sequences = self.sequence_term.detach()[self.num_targets > 0]
        return self.log_prob.detach().double().sum() + sequences.double().sum()
