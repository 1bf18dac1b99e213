"""How far back sentences are read, and how far back gradients reach, by age.

The vector of sentence t - j has age j at sentence t: 1 is the previous sentence.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Ages:
    """Sums and numbers of summands by age, from 1 to the highest that was added."""

    def __init__(self) -> None:
        """Starts empty."""
        self.sums = np.zeros(0)
        """float64 (ages,)."""
        self.counts = np.zeros(0)
        """float64 (ages,); it never grows with age."""

    def add(self, sums: np.ndarray, counts: float | np.ndarray) -> None:
        """Adds sums (ages,) of ages 1, 2, ..., of so many summands each."""
        grown = max(0, len(sums) - len(self.sums))
        self.sums, self.counts = (np.pad(old, (0, grown)) for old in (self.sums, self.counts))
        self.sums[: len(sums)] += sums
        self.counts[: len(sums)] += counts

    @property
    def number(self) -> float:
        """How many summands there are at age 1, the most there are at any."""
        return float(self.counts[0]) if len(self.counts) else 0.0

    @property
    def means(self) -> np.ndarray:
        """float64 (ages,): means of the summands that there are."""
        return self.sums / self.counts

    @property
    def spread(self) -> np.ndarray:
        """float64 (ages,): means over all, a missing summand counting as 0."""
        return self.sums / self.number

    @property
    def even(self) -> np.ndarray:
        """float64 (ages,): what ``spread`` would be if each summand were 1 / (its highest age)."""
        highest = self.counts - np.append(self.counts[1:], 0.0)  # how many end at this age
        each = highest / np.arange(1, len(highest) + 1)
        return each[::-1].cumsum()[::-1] / self.number


class Findings:
    """What has been found about a model's use of memory; ranks' findings can be merged."""

    def __init__(self) -> None:
        """Starts empty."""
        self.reach = Ages()
        """Norms of d nll[t] / d s_{t-j} by age j; a summand is a stream at a sentence t."""
        self.attention: defaultdict[int, Ages] = defaultdict(Ages)
        """Attention weights by layer (1-based) and age; a summand is a slot that reads memory."""
        self.entropies: defaultdict[int, float] = defaultdict(float)
        """Sums of the entropies of these weights in nats, by layer."""

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.reach.number or self.attention)

    def merge(self, other: "Findings") -> None:
        """Adds what another rank has found."""
        self.reach.add(other.reach.sums, other.reach.counts)
        for layer, ages in other.attention.items():
            self.attention[layer].add(ages.sums, ages.counts)
            self.entropies[layer] += other.entropies[layer]

    def consumer(self) -> Callable[..., None]:
        """Returns what takes ``memory_attention``: weights (P, M_t) over memory, oldest first."""

        def take(*, layer: int, weights: Tensor, **_: Any) -> None:
            weights = weights.detach().double()
            self.attention[layer].add(weights.sum(dim=0).flip(0).cpu().numpy(), len(weights))
            self.entropies[layer] += float(torch.special.entr(weights).sum())

        return take

    def mean_age(self, layer: int) -> float:
        """Returns the mean age of what a layer reads, weighted by attention, in sentences."""
        spread = self.attention[layer].spread
        return float(spread @ np.arange(1, len(spread) + 1))

    def entropy(self, layer: int) -> float:
        """Returns the mean entropy of a slot's weights (mean over heads) over memory, in nats."""
        return self.entropies[layer] / self.attention[layer].number

    def beyond(self, memory_size: int) -> float | None:
        """Returns the share in [0, 1] of the reach that is at ages beyond ``memory_size``.

        It is that of the mean norms' sum. None if no age is as high, or no gradient reaches back.
        """
        means = self.reach.means
        if len(means) <= memory_size or not means.any():
            return None
        return float(means[memory_size:].sum() / means.sum())


def add_reach(ages: Ages, vectors: Sequence[Tensor], losses: Sequence[Tensor], probes: int) -> None:
    """Adds how strongly losses depend on earlier sentence vectors, at ``probes`` sentences.

    These lie at equal distances in the second half, the last sentence is one of them: so nearly
    all ages are seen from each. The gradient d nll[t] / d s_t-j counts every way there is: through
    memory, BOS, and all younger sentences. Its 2-norm is added for every stream that has a sentence
    t. ``.grad`` stays as it is.

    Args:
        ages: gets the norms, nats per unit of a sentence vector.
        vectors: (A_t, D) of each sentence step, with graph; later ones have the first rows.
        losses: summed loss of each sentence step, scalars with graph.
        probes: at how many sentences.
    """
    last = len(vectors) - 1
    chosen = {round(last * (1 + part / probes) / 2) for part in range(1, probes + 1)} - {0}
    for t in sorted(chosen) if last > 0 else ():
        gradients = torch.autograd.grad(
            losses[t], list(vectors[:t]), retain_graph=True, materialize_grads=True
        )
        rows = len(vectors[t])
        norms = [each[:rows].float().norm(dim=-1).sum() for each in gradients]
        ages.add(torch.stack(norms).flip(0).double().cpu().numpy(), rows)


def cut(batch: Mapping[str, Any], max_streams: int, max_sentences: int) -> dict[str, Any]:
    """Returns the longest streams of a batch of sentences, and of these the first sentences.

    Tensors (B, S, ...) are cut in both, tensors (B, ...) in the first; the rest stays. What is cut
    is a copy, which takes part in graphs even if the batch was made in inference mode.

    Args:
        batch: with ``lengths`` (B, S), 0 after a stream's last sentence.
        max_streams: streams to keep.
        max_sentences: sentences of each to keep.
    """
    lengths: Tensor = batch["lengths"]
    numbers = (lengths > 0).sum(dim=1)
    rows = numbers.argsort(descending=True, stable=True)[:max_streams]
    sentences = min(max_sentences, int(numbers.max()))

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:1] != lengths.shape[:1]:
            return value
        chosen = value[rows]
        return chosen[:, :sentences] if value.shape[1:2] == lengths.shape[1:] else chosen

    return {key: part(value) for key, value in batch.items()}
