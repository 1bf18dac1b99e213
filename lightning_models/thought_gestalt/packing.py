"""Sentences without padding: which slots of a batch are computed, and in which order.

A batch holds streams of sentences. Sentence step t advances all streams that have a t-th sentence;
its tokens stand one after the other, packed, and are spread into a grid (streams, slots) only
where attention needs rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_models.output_layer import IGNORE_INDEX


@dataclass(frozen=True)
class Packing:
    """Where the packed slots of one sentence step stand in its grid (A, U)."""

    cell: Tensor
    """int64 (P,): cell of each slot, row * U + place."""
    rows: int
    """A, streams that have this sentence; they are the first A of the batch."""
    width: int
    """U, slots of the longest of these sentences."""

    def to_grid(self, x: Tensor) -> Tensor:
        """Returns packed (P, C) as a grid (A, U, C), zero where nothing stands."""
        grid = x.new_zeros(self.rows * self.width, x.shape[-1])
        return grid.index_copy(0, self.cell, x).view(self.rows, self.width, -1)

    def from_grid(self, grid: Tensor) -> Tensor:
        """Returns the slots (P, C) of a grid (A, U, C)."""
        return grid.flatten(0, 1).index_select(0, self.cell)

    def prefixed(self, prefix: int) -> "Packing":
        """Returns the packing in which every row begins with ``prefix`` more slots, those first.

        Row by row: the prefix, then the sentence.
        """
        if prefix == 0:
            return self
        width = self.width + prefix
        row, place = self.cell // self.width, self.cell % self.width
        own = row * width + place + prefix
        ahead = torch.arange(self.rows, device=own.device)[:, None] * width
        ahead = ahead + torch.arange(prefix, device=own.device)
        return Packing(torch.cat((ahead.flatten(), own)), self.rows, width)


@dataclass(frozen=True)
class SentenceStep:
    """The t-th sentences of all streams that have one."""

    packing: Packing
    tokens: Tensor
    """int64 (P,)."""
    targets: Tensor
    """int64 (P,): the token after each, -100 where nothing is predicted, as at EOS, after which
    the next sentence begins."""
    positions: Tensor
    """int64 (P,): slot numbers: 0 at BOS, then counting, EOD and EOS in the last two slots."""
    content: Tensor
    """Bool (P,): a token of the text, neither BOS nor EOD nor EOS."""
    target_kind: Tensor
    """int64 (P,): LEXICAL, EOS or EOD where there is a target."""
    bos: Tensor
    """int64 (A,): index of each sentence's BOS among the packed slots."""
    eos: Tensor
    """int64 (A,)."""
    source: Tensor
    """int64 (P,): index into the batch's tokens (B, S, U), flattened."""
    num_targets: int | None = None
    """How many slots predict something; None where no targets were packed."""
    parents: Tensor | None = None
    """int64 (A,): index of each stream in the step before; None where the streams are the same."""


LEXICAL, EOS, EOD = 0, 1, 2
"""Kinds of targets."""


def pack(
    tokens: Tensor,
    lengths: Tensor,
    is_last: Tensor,
    slots: int,
    targets: Tensor | None = None,
    owners: Sequence[Sequence[int]] | None = None,
) -> tuple[list[SentenceStep], Tensor]:
    """Returns the sentence steps of a batch, and the order (B,) in which they take its streams.

    Args:
        tokens: int64 (B, S, U): BOS, the sentence, EOD where a document ends, EOS, anything.
        lengths: int64 (B, S): slots of each sentence that are used; 0 after the last sentence.
        is_last: Bool (B, S): the sentence ends its document.
        slots: Positions that a sentence tensor has (67); EOS stands in the last one, EOD before it.
        targets: int64 (B, S, U): what each slot predicts, -100 for nothing; None: the token after.
        owners: The stream, of each stream and sentence (B, S), whose sentence is computed for it:
            itself, or another that is the same up to there and has a sentence after it. Without it
            each stream computes its sentences.
    """
    order = (lengths > 0).sum(dim=1).argsort(descending=True, stable=True)
    predicted = lengths.new_zeros(lengths.shape) if targets is None else _counts(lengths, targets)
    sizes, numbers = torch.stack((lengths[order], predicted)).cpu().transpose(1, 2).tolist()
    stride = tokens.shape[1] * tokens.shape[2]
    steps = []
    for t, row_lengths in enumerate(sizes):
        used = [length for length in row_lengths if length > 0]
        if not used:
            break
        streams, parents = order[: len(used)], None
        if owners is not None:
            alone, parents = _computed(owners, streams.tolist(), t)
            used, streams = [used[place] for place in alone], streams[alone]
            parents = None if parents is None else parents.to(tokens.device)
        step = _step(tokens, lengths, streams, used, is_last, slots, t, stride)
        if targets is not None:
            own = targets.reshape(-1)[step.source]
            step = replace(step, targets=own, num_targets=sum(numbers[t]))
        steps.append(replace(step, parents=parents))
    return steps, order


def _computed(
    owners: Sequence[Sequence[int]], streams: Sequence[int], t: int
) -> tuple[list[int], Tensor | None]:
    """Selects the streams that compute sentence t, with the index of each one's parent.

    The former are places among ``streams``, the latter among the streams that computed sentence
    t - 1; None for the first sentence.
    """
    alone = [place for place, stream in enumerate(streams) if owners[stream][t] == stream]
    if t == 0:
        return alone, None
    # streams that ended with sentence t - 1 stood behind the others: leaving them out moves nobody
    before = [stream for stream in streams if owners[stream][t - 1] == stream]
    places = {stream: place for place, stream in enumerate(before)}
    return alone, torch.tensor([places[owners[streams[place]][t - 1]] for place in alone])


def _counts(lengths: Tensor, targets: Tensor) -> Tensor:
    """Returns the number of targets (B, S) in the used slots of each sentence."""
    used = torch.arange(targets.shape[2], device=targets.device) < lengths[..., None]
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
    total, width = sum(used), max(used)
    sizes = lengths[streams, t]  # ``used`` once more, without a copy to the device
    # (P,), stream of each slot
    row = torch.repeat_interleave(torch.arange(len(used), device=device), sizes, output_size=total)
    starts = sizes.cumsum(0) - sizes  # (A,), first slot of each sentence
    place = torch.arange(total, device=device) - starts[row]  # (P,), 0 at BOS
    # index into (B, S, U), flattened
    source = streams[row] * stride + t * tokens.shape[2] + place
    own = tokens.reshape(-1)[source]
    from_end = sizes[row] - 1 - place  # 0 at EOS
    last = is_last[streams, t][row]  # (P,), its sentence ends the document
    eod = last & (from_end == 1)
    positions = torch.where(from_end == 0, slots - 1, torch.where(eod, slots - 2, place))
    targets = torch.where(from_end == 0, IGNORE_INDEX, own.roll(-1))
    kind = torch.where(from_end == 1, EOS, torch.where(last & (from_end == 2), EOD, LEXICAL))
    return SentenceStep(
        packing=Packing(row * width + place, len(used), width),
        tokens=own,
        targets=targets,
        positions=positions,
        content=(place > 0) & (from_end > 0) & ~eod,
        target_kind=kind,
        bos=starts,
        eos=starts + sizes - 1,
        source=source,
    )
