"""Numbers about forks, gathered while a model scores batches."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from callbacks.analysis.batch_parts import real_tokens

MEASURES = {
    "per_token": "forks per token after the fork layer",
    "created": "new forks per token",
    "kept": "older forks kept, per token",
    "deleted": "older forks deleted, per token",
    "survival": "share of older forks that are kept",
    "deletion": "share of older forks that are deleted",
    "orphans": "share of new forks whose parent is deleted",
    "score_originals": "mean P of originals",
    "score_forks": "mean P of forks",
    "budget_use": "streams as a share of kappa",
    "attention_self": "attention of forked tokens' originals to themselves, per key",
    "attention_own_forks": "their attention to the token's own forks, per key",
    "attention_others": "their attention to other tokens' streams, per key",
}
"""What is measured at every fork layer, in the order in which it is reported."""


@dataclass(frozen=True)
class TokenRow:
    """The real tokens of one analysed row (T of them), as numpy arrays."""

    ids: np.ndarray
    """int64 (T,)."""
    streams: np.ndarray
    """int64 (fork layers, T): streams of each token after each fork layer, at least 1."""
    original_score: np.ndarray
    """float64 (T,): P of the original after the last fork layer, in [0, 1]."""
    fork_score: np.ndarray
    """float64 (T,): mean P of the token's forks there; nan without any."""
    entropy: np.ndarray
    """float64 (T,): of the output distribution at the token, in nats."""
    reference_entropy: np.ndarray | None = None
    """float64 (T,): the same of the reference model."""

    @property
    def forks(self) -> np.ndarray:
        """int64 (T,): forks of each token after the last fork layer."""
        return self.streams[-1] - 1

    def with_reference(self, entropy: np.ndarray) -> "TokenRow":
        """Returns this row with the reference's entropies (T,)."""
        return replace(self, reference_entropy=entropy)


@dataclass
class Mean:
    """A mean over all that is added; nan before."""

    total: float = 0.0
    count: float = 0.0

    def add(self, total: float, count: float) -> None:
        """Adds ``count`` values that add up to ``total``."""
        self.total += total
        self.count += count

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count if self.count else math.nan


class ForkRecorder:
    """Takes what a network records, and keeps sums by fork layer and numbers by token."""

    def __init__(self, attention: bool = True) -> None:
        """Takes attention into account or not: it then runs on the slow backend."""
        self._attention = attention
        self._layers: defaultdict[int, defaultdict[str, Mean]] = defaultdict(
            lambda: defaultdict(Mean)
        )
        self.rows: list[TokenRow] = []
        """Real tokens of all analysed rows."""
        self.begin()

    def begin(self) -> None:
        """Forgets the latest pass of the network; its sums stay."""
        self._latest: Any = None
        self._ordinal = 0
        self._streams: list[Tensor] = []
        self._entropy: Tensor | None = None

    def consumers(self) -> dict[str, Callable[..., None]]:
        """Returns the functions to record with."""
        consumers: dict[str, Callable[..., None]] = {"fork": self.fork, "entropy": self.entropy}
        return consumers | ({"attention": self.attention} if self._attention else {})

    @property
    def measures(self) -> list[dict[str, float]]:
        """Of each fork layer, the means named in ``MEASURES``; nan where there was nothing."""
        return [
            {name: self._layers[ordinal][name].value for name in MEASURES}
            for ordinal in sorted(self._layers)
        ]

    # ---- consumers

    def fork(
        self,
        *,
        ordinal: int,
        before: Any,
        after: Any,
        parent: Tensor,
        is_fork: Tensor,
        budgets: Tensor | None = None,
    ) -> None:
        """Takes a fork layer's decision.

        Args:
            ordinal: which fork layer, from 0.
            before: streams in front of it, with ``token``, ``original``, ``real`` (B, N).
            after: streams after it, with ``log_p``, ``token``, ``count``, ``num_tokens`` too.
            parent: int64 (B, N'), indices into ``before``.
            is_fork: bool (B, N'), whether a stream is new.
            budgets: int64 (B,), kappa of each row; None where there is no budget.
        """
        self._latest, self._ordinal = after, ordinal
        self._streams.append(_by_token(after, after.count, after.original))
        alive = _kept(before, after, parent, is_fork)
        older = before.real & ~before.original
        forks = after.real & ~after.original
        p = after.log_p.detach().double().exp()
        sums = {
            "tokens": after.original,
            "forks": forks,
            "created": is_fork,
            "orphans": is_fork & ~alive.gather(1, parent),
            "older": older,
            "kept": older & alive,
            "p_originals": p * after.original,
            "p_forks": p * forks,
        }
        self._add_layer({name: float(values.sum()) for name, values in sums.items()})
        if budgets is not None:
            budget = float(budgets[after.lengths > 0].sum())
            self._layers[ordinal]["budget_use"].add(float(after.lengths.sum()), budget)

    def _add_layer(self, sums: dict[str, float]) -> None:
        layer, tokens, older = self._layers[self._ordinal], sums["tokens"], sums["older"]
        deleted = older - sums["kept"]
        for name, total, count in (
            ("per_token", sums["forks"], tokens),
            ("created", sums["created"], tokens),
            ("kept", sums["kept"], tokens),
            ("deleted", deleted, tokens),
            ("survival", sums["kept"], older),
            ("deletion", deleted, older),
            ("orphans", sums["orphans"], sums["created"]),
            ("score_originals", sums["p_originals"], tokens),
            ("score_forks", sums["p_forks"], sums["forks"]),
        ):
            layer[name].add(total, count)

    def attention(self, *, weights: Tensor) -> None:
        """Takes attention weights (B, H, N, N), of which only means are kept (Fig. 5).

        Counted are queries that are originals of forked tokens, after the first fork layer. The
        means are over heads, over the layers up to the next fork layer, over a query's keys, and
        over queries.
        """
        streams = self._latest
        if streams is None or weights.shape[2:] != 2 * streams.token.shape[1:]:
            return
        row, query = (streams.original & (streams.count > 1)).nonzero(as_tuple=True)
        token, own_forks = streams.token[row, query], streams.count[row, query] - 1
        seen = weights.detach()[row, :, query].double().mean(dim=1)  # (queries, N)
        of_self = seen.gather(1, query[:, None])[:, 0]
        of_token = (seen * (streams.token[row] == token[:, None])).sum(dim=1)
        others = query - own_forks  # all streams further left
        for name, total, keys in (
            ("attention_self", of_self, torch.ones_like(query)),
            ("attention_own_forks", of_token - of_self, own_forks),
            ("attention_others", seen.sum(dim=1) - of_token, others),
        ):
            some = keys > 0
            mean = float((total[some] / keys[some]).sum())
            self._layers[self._ordinal][name].add(mean, float(some.sum()))

    def entropy(self, *, entropy: Tensor) -> None:
        """Takes output entropies (B, T) in nats."""
        self._entropy = entropy.detach()

    # ---- tokens

    def end(self, batch: dict[str, Any]) -> bool:
        """Adds the rows of the batch that was scored; returns whether the network forked at all.

        Args:
            batch: with ``tokens`` (B, T), and ``mask`` where rows are padded.
        """
        if self._latest is None:
            return False
        scores = self._scores()
        entropy = self._entropy
        if entropy is None:
            entropy = torch.full_like(scores[0], torch.nan)
        by_layer = torch.stack(self._streams, dim=1).cpu().numpy()
        values = [_numpy(value) for value in (*scores, entropy)]
        ids = batch["tokens"].cpu().numpy()
        for row, real in enumerate(real_tokens(batch)):
            if real.any():
                numbers = [value[row, real] for value in values]
                self.rows.append(TokenRow(ids[row, real], by_layer[row][:, real], *numbers))
        return True

    def _scores(self) -> tuple[Tensor, Tensor]:
        """Returns P of each token's original, and the mean P of its forks (B, T)."""
        streams, forks = self._latest, self._latest.real & ~self._latest.original
        p = streams.log_p.detach().double().exp()
        of_forks = _by_token(streams, p, forks) / (self._streams[-1] - 1)
        return _by_token(streams, p, streams.original), of_forks


def _numpy(values: Tensor) -> np.ndarray:
    return values.double().cpu().numpy()


def _kept(before: Any, after: Any, parent: Tensor, is_fork: Tensor) -> Tensor:
    """Returns which streams (B, N) before a fork layer are there after it."""
    kept = (after.real & ~is_fork).long()
    return torch.zeros_like(before.token).scatter_add(1, parent, kept) > 0


def _by_token(streams: Any, values: Tensor, chosen: Tensor) -> Tensor:
    """Returns the sum (B, T) of each token's chosen streams' values (B, N)."""
    out = values.new_zeros(len(values), streams.num_tokens + 1)
    return out.scatter_add(1, streams.token, values * chosen)[:, :-1]
