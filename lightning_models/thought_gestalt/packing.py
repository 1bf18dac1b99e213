"""Packing of sentences, so that no padding is computed.

A batch holds streams of sentences. Sentence step t processes the t-th sentence of all streams that
have one. Its slots are concatenated into one packed sequence, which is scattered into a padded grid
(streams, slots) for attention alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_models.output_layer import IGNORE_INDEX


@dataclass(frozen=True)
class Packing:
    """Maps the P packed slots of a sentence step to the cells of its grid (A, U)."""

    cell: Tensor
    """int64 (P,): flat index of each slot's cell, row * U + column."""
    rows: int
    """A, the number of streams with this sentence, which are the first A of the sorted batch."""
    width: int
    """U, the number of slots of the longest of these sentences."""

    def to_grid(self, x: Tensor) -> Tensor:
        """Scatters packed slots (P, C) into a grid (A, U, C), with zeros in empty cells."""
        grid = x.new_zeros(self.rows * self.width, x.shape[-1])  # (A U, C)
        return grid.index_copy(0, self.cell, x).view(self.rows, self.width, -1)

    def from_grid(self, grid: Tensor) -> Tensor:
        """Gathers the packed slots (P, C) from a grid (A, U, C)."""
        return grid.flatten(0, 1).index_select(0, self.cell)  # (A U, C) -> (P, C)

    def prefixed(self, prefix: int) -> "Packing":
        """Returns a packing with ``prefix`` additional slots at the start of every row.

        In packed order the A * prefix additional slots come first, row by row.
        """
        if prefix == 0:
            return self
        width = self.width + prefix
        # the old slots keep their rows and move right by ``prefix`` columns
        row, column = self.cell // self.width, self.cell % self.width
        shifted = row * width + column + prefix  # (P,)
        added = torch.arange(self.rows, device=shifted.device)[:, None] * width
        added = added + torch.arange(prefix, device=shifted.device)  # (A, prefix)
        return Packing(torch.cat((added.flatten(), shifted)), self.rows, width)


@dataclass(frozen=True)
class SentenceStep:
    """The t-th sentences of all streams that have one."""

    packing: Packing
    tokens: Tensor
    """int64 (P,): token of each slot."""
    targets: Tensor
    """int64 (P,): the next token, or -100 if nothing is predicted, as at EOS, the last slot of a
    sentence."""
    positions: Tensor
    """int64 (P,): index in the sentence tensor, from 0 at BOS; EOD and EOS have its last two."""
    content: Tensor
    """Bool (P,): true for tokens of the text, false for BOS, EOD and EOS."""
    target_kind: Tensor
    """int64 (P,): LEXICAL, EOS or EOD, the class of each target."""
    bos: Tensor
    """int64 (A,): index of each sentence's BOS among the packed slots."""
    eos: Tensor
    """int64 (A,): index of each sentence's EOS among the packed slots."""
    source: Tensor
    """int64 (P,): index of each slot in the flattened tokens (B, S, U) of the batch."""
    num_targets: int | None = None
    """Number of slots with a target, or None if no targets were packed."""
    parents: Tensor | None = None
    """int64 (A,): index of each stream in the previous step, or None if the streams continue in
    order."""


LEXICAL, EOS, EOD = 0, 1, 2
"""Classes of targets."""


def pack(
    tokens: Tensor,
    lengths: Tensor,
    is_last: Tensor,
    slots: int,
    targets: Tensor | None = None,
    owners: Sequence[Sequence[int]] | None = None,
) -> tuple[list[SentenceStep], Tensor]:
    """Packs a batch into sentence steps.

    Streams are sorted by their number of sentences, longest first, so that the streams of every
    step come first in the sorted batch.

    Args:
        tokens: int64 (B, S, U): BOS, the sentence, EOD at the end of a document, EOS, then padding.
        lengths: int64 (B, S): Number of used slots of each sentence, 0 after the last sentence.
        is_last: Bool (B, S): Whether a sentence is the last one of its document.
        slots: Number of positions of a sentence tensor (67). EOS has the last, EOD the one before.
        targets: int64 (B, S, U): Target of each slot, or -100 for none. Defaults to the next token.
        owners: Lists (B, S) with the index of the stream that computes each sentence: the stream
            itself, or one with the same sentences so far that continues after this one. By default
            every stream computes its sentences.

    Returns:
        The steps, and the order int64 (B,) of the sorted streams.
    """
    order = (lengths > 0).sum(dim=1).argsort(descending=True, stable=True)
    predicted = lengths.new_zeros(lengths.shape) if targets is None else _counts(lengths, targets)
    # One transfer to the host for the whole batch: 2 x (B, S) -> 2 x (S, B). The counts are only
    # summed over streams, so they need no sorting.
    sizes, num_targets = torch.stack((lengths[order], predicted)).cpu().transpose(1, 2).tolist()
    stride = tokens.shape[1] * tokens.shape[2]  # from one stream to the next in flattened tokens
    steps = []
    for t, row_lengths in enumerate(sizes):
        used = [length for length in row_lengths if length > 0]
        if not used:
            break
        streams, parents = order[: len(used)], None
        if owners is not None:
            computed, parents = _computed(owners, streams.tolist(), t)
            used, streams = [used[index] for index in computed], streams[computed]
            parents = None if parents is None else parents.to(tokens.device)
        step = _step(tokens, lengths, streams, used, is_last, slots, t, stride)
        if targets is not None:
            packed = targets.reshape(-1)[step.source]  # (P,)
            step = replace(step, targets=packed, num_targets=sum(num_targets[t]))
        steps.append(replace(step, parents=parents))
    return steps, order


def _computed(
    owners: Sequence[Sequence[int]], streams: Sequence[int], t: int
) -> tuple[list[int], Tensor | None]:
    """Selects the streams that compute sentence t and the parent of each.

    Returns:
        Indices into ``streams`` of the selected ones, and for each the index of its owner among the
        streams that computed sentence t - 1, or None for the first sentence.
    """
    computed = [index for index, stream in enumerate(streams) if owners[stream][t] == stream]
    if t == 0:
        return computed, None
    # Streams that ended with sentence t - 1 were sorted to the end, so the indices of the
    # remaining ones are the same with and without them.
    before = [stream for stream in streams if owners[stream][t - 1] == stream]
    index_of = {stream: index for index, stream in enumerate(before)}
    return computed, torch.tensor([index_of[owners[streams[i]][t - 1]] for i in computed])


def _counts(lengths: Tensor, targets: Tensor) -> Tensor:
    """Returns the number of targets (B, S) in the used slots of each sentence."""
    used = torch.arange(targets.shape[2], device=targets.device) < lengths[..., None]  # (B, S, U)
    return ((targets != IGNORE_INDEX) & used).sum(dim=2)


def _step(
    tokens: Tensor,
    lengths: Tensor,
    streams: Tensor,
    used: list[int],
    is_last: Tensor,
    slots: int,
    t: int,
    stride: int,
) -> SentenceStep:
    device = tokens.device
    total, width = sum(used), max(used)  # P and U
    sizes = lengths[streams, t]  # (A,), equal to ``used`` but on the device already
    # (P,), row of each slot: 0 repeated sizes[0] times, then 1, and so on
    row = torch.repeat_interleave(torch.arange(len(used), device=device), sizes, output_size=total)
    starts = sizes.cumsum(0) - sizes  # (A,), first slot of each sentence
    column = torch.arange(total, device=device) - starts[row]  # (P,), 0 at BOS
    # (P,), index into the flattened tokens (B, S, U)
    source = streams[row] * stride + t * tokens.shape[2] + column
    packed = tokens.reshape(-1)[source]
    from_end = sizes[row] - 1 - column  # (P,), 0 at EOS
    last = is_last[streams, t][row]  # (P,), whether the slot's sentence ends its document
    eod = last & (from_end == 1)
    positions = torch.where(from_end == 0, slots - 1, torch.where(eod, slots - 2, column))
    # The next packed slot holds the next token, except after EOS, where another row begins.
    targets = torch.where(from_end == 0, IGNORE_INDEX, packed.roll(-1))
    # The slot before EOS predicts EOS. In a last sentence that slot is EOD, which the one before
    # it predicts.
    target_kind = torch.where(from_end == 1, EOS, torch.where(last & (from_end == 2), EOD, LEXICAL))
    return SentenceStep(
        packing=Packing(row * width + column, len(used), width),
        tokens=packed,
        targets=targets,
        positions=positions,
        content=(column > 0) & (from_end > 0) & ~eod,
        target_kind=target_kind,
        bos=starts,
        eos=starts + sizes - 1,
        source=source,
    )
