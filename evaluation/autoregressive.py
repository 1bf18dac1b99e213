"""Strictly causal scores: each sampled target given its prefix only.

In a window scored in one pass, later tokens may decide how much is computed for earlier ones
(Thoughtbubbles' top-k over the whole sequence). Here the model never sees a later token: for a
sample of targets it scores x_{t+1} after the prefix up to t, with a separate budget for each
prefix (arXiv 2510.00219, section 5.1 and App. E.1). The same targets are also scored blockwise,
for paired differences.
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

# Second half of the Philox key; `datamodules.text` and `.order` use 1 and 2 for training data.
_POSITIONS = 3


@dataclass(frozen=True)
class DrawnTargets:
    """Targets drawn from a split, and the windows that contain them."""

    windows: dict[str, Tensor]
    """The R windows with at least one drawn target, under the keys of batches, (R, ...) each."""
    row: Tensor
    """Window of each target, int64 (N,), below R."""
    column: Tensor
    """Position of each target in its window, int64 (N,): its prefix has ``column + 1`` tokens."""
    of: int
    """Number of targets drawn from."""
    num_bytes: Tensor | None = None
    """UTF-8 bytes of each target, int64 (N,), or None if the data do not count them by target."""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class PairedScores:
    """Negative log-likelihoods of the same targets in nats, from their prefixes and blockwise."""

    prefix: Tensor
    """Float64 (N,)."""
    blockwise: Tensor | None
    """Float64 (N,), or None if part of the likelihood belongs to whole windows only."""
    num_bytes: int | None
    """UTF-8 bytes of the targets, or None if unknown."""
    of: int
    """Number of targets drawn from."""
    likelihood: Likelihood
    """Kind of the blockwise likelihood."""
    causal: bool
    """Whether the blockwise scores are causal; scores from prefixes always are."""
    prefix_likelihood: Likelihood
    """Kind of the likelihood from prefixes.

    It is exact for ``noncausal`` models too: each conditional sees its prefix only, and is
    normalised. Methods that infer latents from the prefix give estimates.
    """

    @property
    def totals(self) -> Totals:
        """Sums of the scores from prefixes."""
        return Totals(self.prefix.sum().item(), len(self.prefix), self.num_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the entries of the JSON file except ``totals``, as plain values.

        ``difference`` is autoregressive minus blockwise, with the standard error of paired
        differences.
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
    """Draws targets uniformly without replacement, in the order of the split.

    Each target has a random number that depends on its index in the split only, and the smallest
    ones win: the draw is the same for every model and batch size, and a larger draw contains it.

    Args:
        source: Batches of the split.
        batches: Number of batches to draw from, starting with the first.
        positions: Number of targets to draw; None, or more than there are, draws all.
        seed: Seed of the draw.

    Raises:
        ValueError: If these batches have no targets.
    """
    philox = np.random.Philox(key=[seed, _POSITIONS])
    keys: list[np.ndarray] = []
    targets: list[np.ndarray] = []  # each (n, 3): index of the batch, row, column
    count = 0
    for n in tqdm(range(batches), desc="drawing", unit=" batches", disable=None):
        indices = np.argwhere(source.batch(n)["targets"].numpy() != IGNORE)  # (n, 2)
        count += len(indices)
        keys.append(philox.random_raw(len(indices)))
        targets.append(np.insert(indices, 0, n, axis=1))
        if positions is not None:
            keys, targets = _smallest(np.concatenate(keys), np.concatenate(targets), positions)
    if not count:
        raise ValueError("the split has no targets to draw positions from; choose another --split")
    return _as_drawn(source, np.concatenate(targets), count)


def _smallest(
    keys: np.ndarray, targets: np.ndarray, count: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the ``count`` smallest keys and their targets, in the order of the input."""
    smallest = np.sort(np.argsort(keys, kind="stable")[:count])
    return [keys[smallest]], [targets[smallest]]


def _as_drawn(source: BatchSource, targets: np.ndarray, total: int) -> DrawnTargets:
    windows, row = np.unique(targets[:, :2], axis=0, return_inverse=True)
    return DrawnTargets(
        _windows(source, windows),
        torch.from_numpy(row.reshape(-1)),
        torch.from_numpy(targets[:, 2].copy()),
        total,
        _sizes(source, targets),
    )


def _sizes(source: BatchSource, targets: np.ndarray) -> Tensor | None:
    """Returns the UTF-8 bytes of the targets at ``targets`` (N, 3), batch indices ascending."""
    if not hasattr(source, "target_sizes"):
        return None
    parts = []
    for n in np.unique(targets[:, 0]).tolist():
        rows, columns = targets[targets[:, 0] == n, 1:].T
        parts.append(source.target_sizes(n)[rows, columns])
    return torch.cat(parts)


def _windows(source: BatchSource, targets: np.ndarray) -> dict[str, Tensor]:
    """Returns the windows at ``targets`` (R, 2), sorted by the index of the batch, then by row."""
    parts: list[dict[str, Tensor]] = []
    for n in np.unique(targets[:, 0]):
        batch = source.batch(int(n))
        rows = torch.from_numpy(targets[targets[:, 0] == n, 1])
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
    """Scores the drawn targets given their prefixes, and blockwise.

    Prefixes are padded with the tokenizer's EOS; a batch of prefixes has no more tokens than
    ``batch_size`` windows. ``compute`` counts the additional steps of the targets after their
    prefixes, and the FLOPs of their whole windows.
    """
    compute = ComputeCounter() if compute is None else compute
    most_tokens = batch_size * drawn.windows["tokens"].shape[1]
    groups = list(bucket_by_length(drawn.column + 1, most_tokens))
    batches = compute.watch(prefix_batch(drawn, indices, tokenizer.eos_id) for indices in groups)
    with recording(**compute.steps):
        prefix, likelihood = _prefix_nats(model, groups, batches, precision)
    with recording(flops=compute.count_flops):
        blockwise = _blockwise_nats(model, drawn, batch_size, precision)
    return PairedScores(
        prefix=prefix,
        prefix_likelihood="exact" if likelihood == "noncausal" else likelihood,
        blockwise=blockwise,
        num_bytes=None if drawn.num_bytes is None else int(drawn.num_bytes.sum()),
        of=drawn.of,
        likelihood=model.likelihood,
        causal=model.causal,
    )


def _prefix_nats(
    model: LanguageModel, groups: list[Tensor], batches: Iterable[Batch], precision: Precision
) -> tuple[Tensor, Likelihood]:
    """Returns the nats (N,) of all targets and the kind of likelihood.

    ``groups`` has the indices of the targets of each batch.
    """
    total = sum(map(len, groups))
    nats = torch.empty(total, dtype=torch.float64)
    likelihood = model.likelihood
    with tqdm(total=total, desc="prefixes", unit=" positions", disable=None) as bar:
        for indices, batch in zip(groups, batches, strict=True):
            scores = score_batch(model, batch, precision)
            # a row has one target, so the sum over its columns is that target's log-probability
            log_prob = scores.log_prob.double().sum(dim=1) + scores.sequence_term.double()
            nats[indices], likelihood = -log_prob.detach().cpu(), scores.kind
            bar.update(len(indices))
    return nats, likelihood


def bucket_by_length(lengths: Tensor, most_tokens: int) -> Iterator[Tensor]:
    """Yields groups of indices (n,) of rows of similar ``lengths``, int64 (N,), each index once.

    A group has at most ``most_tokens`` tokens with its padding; a longer row is a group by itself.
    The longest rows come first, so that a lack of memory shows at once.
    """
    order = lengths.argsort(stable=True, descending=True)
    start = 0
    while start < len(order):
        size = max(1, most_tokens // int(lengths[order[start]]))
        yield order[start : start + size]
        start += size


def prefix_batch(drawn: DrawnTargets, indices: Tensor, eos_id: int) -> Batch:
    """Returns the batch of the prefixes of the targets at ``indices`` (B,).

    It has the keys of `datamodules.text.as_batch` except ``num_bytes``, and ``context``, the length
    of each prefix. The only target of a row is the one after its prefix. Prefixes keep the
    ``sequence_id`` of their window, so that a method's random draws are the same as blockwise.
    """
    row, last = drawn.row[indices], drawn.column[indices, None]  # (B,), (B, 1)
    position = torch.arange(int(last.max()) + 1)  # (T,), T the longest prefix
    tokens, targets, mask = (
        drawn.windows[key][row, : len(position)] for key in ("tokens", "targets", "mask")
    )
    mask = mask & (position <= last)  # (B, T), padding follows each prefix
    return {
        "tokens": torch.where(mask, tokens, eos_id),
        "targets": torch.where(position == last, targets, IGNORE),
        "mask": mask,
        "sequence_id": drawn.windows["sequence_id"][row],
        "context": drawn.column[indices] + 1,
    }


def _blockwise_nats(
    model: LanguageModel, drawn: DrawnTargets, batch_size: int, precision: Precision
) -> Tensor | None:
    """Returns the nats (N,) in whole windows, or None if windows have terms of no single target."""
    parts = []
    groups = torch.arange(len(drawn.windows["tokens"])).split(batch_size)
    for rows in tqdm(groups, desc="blockwise", unit=" batches", disable=None):
        batch = {key: value[rows] for key, value in drawn.windows.items()}
        scores = score_batch(model, batch, precision)
        if scores.sequence_term.any():
            return None
        parts.append(scores.log_prob.detach().double().cpu())
    return -torch.cat(parts)[drawn.row, drawn.column]
