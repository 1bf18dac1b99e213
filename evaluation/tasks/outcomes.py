"""What comes back of a request: what the harness expects, and how it came about beside it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_models.outputs import Likelihood


@dataclass(frozen=True)
class Facts:
    """How a log-likelihood came about.

    Attributes:
        scored: Tokens whose log-probabilities it is the sum of.
        read: Tokens that the model has read for it, those of all its passes together.
        flops: Forward FLOPs of reading them, additional steps and inference included: those that
            ran, where the model records them.
        steps: Additional steps of the scored tokens together; None where the model tells of none.
        likelihood: Kind of the log-likelihood.
        causal: Whether no token's probability depends on later tokens.
        nominal_flops: FLOPs of reading them as the configuration plans.
    """

    scored: int
    read: int
    flops: float
    steps: float | None
    likelihood: Likelihood
    causal: bool
    nominal_flops: float = 0.0


class LogLikelihood(tuple[float, bool]):
    """What the harness wants of a continuation, with the facts.

    A pair for the harness: log-probability in nats, and whether greedy decoding writes it.
    """

    facts: Facts

    def __new__(cls, log_prob: float, greedy: bool, facts: Facts) -> "LogLikelihood":
        """Returns the pair."""
        pair = super().__new__(cls, (log_prob, greedy))
        pair.facts = facts
        return pair

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what a cache file or another process rebuilds it from."""
        return LogLikelihood, (*self, self.facts)


class RollingLogLikelihood(float):
    """Log-likelihood of a whole text in nats, with the facts."""

    facts: Facts

    def __new__(cls, log_prob: float, facts: Facts) -> "RollingLogLikelihood":
        """Returns the number."""
        number = super().__new__(cls, log_prob)
        number.facts = facts
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what a cache file or another process rebuilds it from."""
        return RollingLogLikelihood, (float(self), self.facts)


@dataclass(frozen=True)
class Spent:
    """What log-likelihoods have cost together.

    Attributes:
        scored: Scored tokens.
        read: Tokens read.
        flops: Forward FLOPs.
        steps: Additional steps of the scored tokens; None where the model tells of none.
        requests: How many log-likelihoods these are.
        kinds: Kinds of those that score anything, each once.
        causal: Whether all are causal; None where there are none.
        nominal_flops: Forward FLOPs as the configuration plans.
    """

    scored: int
    read: int
    flops: float
    steps: float | None
    requests: int
    kinds: tuple[Likelihood, ...]
    causal: bool | None
    nominal_flops: float = 0.0

    @classmethod
    def of(cls, outcomes: Iterable[Any]) -> "Spent":
        """Returns the sums over those outcomes that carry facts."""
        facts = [o.facts for o in outcomes if isinstance(o, LogLikelihood | RollingLogLikelihood)]
        known = [f.steps for f in facts if f.steps is not None]
        return cls(
            scored=sum(f.scored for f in facts),
            read=sum(f.read for f in facts),
            flops=sum(f.flops for f in facts),
            steps=sum(known) if known else None,
            requests=len(facts),
            kinds=tuple(dict.fromkeys(f.likelihood for f in facts if f.scored)),
            causal=all(f.causal for f in facts) if facts else None,
            nominal_flops=sum(f.nominal_flops for f in facts),
        )

    @property
    def length(self) -> int:
        """Tokens of a request on average, rounded up; at least 1."""
        return max(1, -(-self.read // max(1, self.requests)))

    @property
    def mean_steps(self) -> float | None:
        """Additional steps of a scored token; None where the model tells of none."""
        return None if self.steps is None else self.steps / max(1, self.scored)
