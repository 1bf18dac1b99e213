"""Scores that are strictly causal by construction: each target from the prefix before it alone.

In a window that is scored in one pass, later tokens may decide how much is computed for earlier
ones (Thoughtbubbles' top-k over the whole sequence). Here the model never holds a later token: for
a sample of targets it scores x_{t+1} after the prefix up to t, which has a budget of its own
(arXiv 2510.00219, section 5.1 and App. E.1). The same targets are scored blockwise too, so that
the difference is paired.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from datamodules import BatchSource, Tokenizer
from datamodules.text import IGNORE
from evaluation.cost import ComputeCounter
from evaluation.devices import Precision
from evaluation.scoring import Totals, score_batch, standard_error
from lightning_models import LanguageModel
from lightning_models.layers import recording
from lightning_models.outputs import Likelihood

Batch = dict[str, Any]

# Second half of the Philox key; `datamodules.text` and `.order` have 1 and 2 for training data.
_POSITIONS = 3


@dataclass(frozen=True)
class DrawnTargets:
    """Targets drawn from a split, and the windows that they lie in."""

    windows: dict[str, Tensor]
    """Keys of the split's batches, (R, ...) each: the windows with at least one drawn target."""
    row: Tensor
    """Window of each target, int64 (N,), below R."""
    column: Tensor
    """Place of each target in its window, int64 (N,): its prefix has ``column + 1`` tokens."""
    of: int
    """Targets that these were drawn from."""
    num_bytes: Tensor | None = None
    """UTF-8 bytes of each target, int64 (N,); None where the data do not count them by target."""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class PairedScores:
    """Negative log-likelihoods of the same targets in nats, from their prefixes and blockwise."""

    prefix: Tensor
    """Float64 (N,)."""
    blockwise: Tensor | None
    """Float64 (N,); None where a part of the likelihood belongs to whole windows only."""
    num_bytes: int | None
    """UTF-8 bytes of the targets; None where they are not known."""
    of: int
    """Targets that these were drawn from."""
    likelihood: Likelihood
    """Kind of the blockwise likelihood."""
    causal: bool
    """Whether the blockwise scores are causal; those from prefixes always are."""
    prefix_likelihood: Likelihood
    """Kind of the likelihood from prefixes.

    What made ``noncausal`` ones inexact is gone: each conditional sees its prefix only, and is
    normalised. Methods that infer something from the prefix make estimates.
    """

    @property
    def totals(self) -> Totals:
        """The sums over the scores from prefixes."""
        return Totals(self.prefix.sum().item(), len(self.prefix), self.num_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Returns what goes with ``totals``, as plain values under the keys of the JSON file.

        ``difference`` is autoregressive minus blockwise, with the error of paired differences.
        """
        blockwise, difference = None, None
        if self.blockwise is not None:
            totals = Totals(self.blockwise.sum().item(), len(self.blockwise), self.num_bytes)
            blockwise = {
                **totals.as_dict(self.likelihood),
                "standard_error": standard_error(self.blockwise),
                "likelihood": self.likelihood,
                "causal": self.causal,
            }
            gaps = self.prefix - self.blockwise
            difference = {
                "nats_per_token": gaps.mean().item(),
                "standard_error": standard_error(gaps),
            }
        return {
            "standard_error": standard_error(self.prefix),
            "positions": len(self.prefix),
            "of_positions": self.of,
            "blockwise": blockwise,
            "difference": difference,
        }


def draw_targets(
    source: BatchSource, *, batches: int, positions: int | None, seed: int
) -> DrawnTargets:
    """Returns targets drawn uniformly without replacement, in the order of the split.

    Each target gets a random number of its own, by its number in the split, and the smallest win:
    the same targets for every model and batch size, and those of a small draw are in larger ones.

    Drawn from are the split's first ``batches``; ``positions`` may be more than there are, or None
    for all.

    Raises:
        ValueError: if these batches have no targets.
    """
    philox = np.random.Philox(key=[seed, _POSITIONS])
    keys: list[np.ndarray] = []
    places: list[np.ndarray] = []  # each (n, 3): number of the batch, row, column
    count = 0
    for n in tqdm(range(batches), desc="drawing", unit=" batches", disable=None):
        found = np.argwhere(source.batch(n)["targets"].numpy() != IGNORE)
        count += len(found)
        keys.append(philox.random_raw(len(found)))
        places.append(np.insert(found, 0, n, axis=1))
        if positions is not None:
            keys, places = _smallest(np.concatenate(keys), np.concatenate(places), positions)
    if not count:
        raise ValueError("the split has no targets to draw positions from; choose another --split")
    return _as_drawn(source, np.concatenate(places), count)


def _smallest(
    keys: np.ndarray, places: np.ndarray, number: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the ``number`` smallest keys and their places, in the order that they came in."""
    kept = np.sort(np.argsort(keys, kind="stable")[:number])
    return [keys[kept]], [places[kept]]


def _as_drawn(source: BatchSource, places: np.ndarray, of: int) -> DrawnTargets:
    windows, row = np.unique(places[:, :2], axis=0, return_inverse=True)
    return DrawnTargets(
        _windows(source, windows),
        torch.from_numpy(row.reshape(-1)),
        torch.from_numpy(places[:, 2].copy()),
        of,
        _sizes(source, places),
    )


def _sizes(source: BatchSource, places: np.ndarray) -> Tensor | None:
    """Returns the UTF-8 bytes of the targets at ``places`` (N, 3), batch numbers ascending."""
    if not hasattr(source, "target_sizes"):
        return None
    parts = []
    for n in np.unique(places[:, 0]).tolist():
        rows, columns = places[places[:, 0] == n, 1:].T
        parts.append(source.target_sizes(n)[rows, columns])
    return torch.cat(parts)


def _windows(source: BatchSource, places: np.ndarray) -> dict[str, Tensor]:
    """Returns the windows at ``places`` (R, 2), batch numbers ascending and rows in them."""
    parts: list[dict[str, Tensor]] = []
    for n in np.unique(places[:, 0]):
        batch = source.batch(int(n))
        rows = torch.from_numpy(places[places[:, 0] == n, 1])
        parts.append({key: value[rows] for key, value in batch.items() if torch.is_tensor(value)})
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def score_pairs(
    model: LanguageModel,
    drawn: DrawnTargets,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    precision: Precision = "32",
    compute: ComputeCounter | None = None,
) -> PairedScores:
    """Returns what the model makes of the drawn targets, from their prefixes and blockwise.

    The tokenizer's EOS stands at padded inputs; a batch of prefixes has no more tokens than
    ``batch_size`` windows. ``compute`` counts the additional steps of the targets after their
    prefixes, and the FLOPs of their whole windows.
    """
    compute = ComputeCounter() if compute is None else compute
    most_tokens = batch_size * drawn.windows["tokens"].shape[1]
    groups = list(bucket_by_length(drawn.column + 1, most_tokens))
    batches = compute.watch(prefix_batch(drawn, chosen, tokenizer.eos_id) for chosen in groups)
    with recording(**compute.steps):
        prefix, kind = _prefix_nats(model, groups, batches, precision)
    with recording(flops=compute.count_flops):
        blockwise = _blockwise_nats(model, drawn, batch_size, precision)
    return PairedScores(
        prefix=prefix,
        prefix_likelihood="exact" if kind == "noncausal" else kind,
        blockwise=blockwise,
        num_bytes=None if drawn.num_bytes is None else int(drawn.num_bytes.sum()),
        of=drawn.of,
        likelihood=model.likelihood,
        causal=model.causal,
    )


def _prefix_nats(
    model: LanguageModel, groups: list[Tensor], batches: Iterable[Batch], precision: Precision
) -> tuple[Tensor, Likelihood]:
    """Returns the nats (N,) of all targets and their kind; ``groups`` has those of each batch."""
    total = sum(map(len, groups))
    nats = torch.empty(total, dtype=torch.float64)
    kind = model.likelihood
    with tqdm(total=total, desc="prefixes", unit=" positions", disable=None) as bar:
        for chosen, batch in zip(groups, batches, strict=True):
            scores = score_batch(model, batch, precision)
            likelihood = scores.log_prob.double().sum(dim=1) + scores.sequence_term.double()
            nats[chosen], kind = -likelihood.detach().cpu(), scores.kind
            bar.update(len(chosen))
    return nats, kind


def bucket_by_length(lengths: Tensor, most_tokens: int) -> Iterator[Tensor]:
    """Yields the numbers (n,) of rows of similar ``lengths``, int64 (N,), each number once.

    A group takes at most ``most_tokens`` with its padding; a longer row is a group of its own. The
    longest come first, so that too little memory shows at once.
    """
    order = lengths.argsort(stable=True, descending=True)
    start = 0
    while start < len(order):
        size = max(1, most_tokens // int(lengths[order[start]]))
        yield order[start : start + size]
        start += size


def prefix_batch(drawn: DrawnTargets, chosen: Tensor, eos_id: int) -> Batch:
    """Returns the batch of the prefixes of the targets numbered ``chosen`` (B,).

    It has the keys of `datamodules.text.as_batch` but ``num_bytes``, and ``context``, the tokens
    of each prefix. The only target of a row is
    the one after its prefix. Prefixes keep the number of their window, so that what a method
    draws at random is the same in each of them and blockwise.
    """
    row, last = drawn.row[chosen], drawn.column[chosen, None]
    place = torch.arange(int(last.max()) + 1)
    tokens, targets, mask = (
        drawn.windows[key][row, : len(place)] for key in ("tokens", "targets", "mask")
    )
    mask = mask & (place <= last)
    return {
        "tokens": torch.where(mask, tokens, eos_id),
        "targets": torch.where(place == last, targets, IGNORE),
        "mask": mask,
        "sequence_id": drawn.windows["sequence_id"][row],
        "context": drawn.column[chosen] + 1,
    }


def _blockwise_nats(
    model: LanguageModel, drawn: DrawnTargets, batch_size: int, precision: Precision
) -> Tensor | None:
    """Returns the nats (N,) in whole windows; None if those have terms that no target owns."""
    parts = []
    groups = torch.arange(len(drawn.windows["tokens"])).split(batch_size)
    for rows in tqdm(groups, desc="blockwise", unit=" batches", disable=None):
        batch = {key: value[rows] for key, value in drawn.windows.items()}
        scores = score_batch(model, batch, precision)
        if scores.sequence_term.any():
            return None
        parts.append(scores.log_prob.detach().double().cpu())
    return -torch.cat(parts)[drawn.row, drawn.column]
