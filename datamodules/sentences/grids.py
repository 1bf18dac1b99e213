"""Sentences as tensors (B, S, U): streams, sentences, slots.

A sentence takes ``BOS w.. EOS``, the last of a document ``BOS w.. EOD EOS``, from slot 0 on without
gaps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from datamodules.loader import Batch
from datamodules.sentences.index import SentenceIndex
from datamodules.windows import IGNORE


def grid_batch(
    tokens: Tensor, lengths: Tensor, is_last: Tensor, sequence_id: Tensor, *, is_open: bool = False
) -> Batch:
    """Returns the batch dict of sentences.

    Keys: ``tokens`` (B, S, U) int64, 0 in unused slots; ``lengths`` (B, S) int64, slots used, 0
        after a row's last sentence; ``is_last`` (B, S) bool, the sentence ends its document;
        ``targets`` (B, S, U) int64, the token after each slot, -100 at EOS and after; ``mask``
        (B, S, U) bool, used slots; ``lexical`` (B, S, U) bool, the target is a word;
        ``sequence_id`` (B,) int64.

    Args:
        tokens: (B, S, U); unused slots hold anything.
        lengths: (B, S).
        is_last: (B, S).
        sequence_id: (B,).
        is_open: Whether the EOS of each row's last sentence is no target, as more might follow.
    """
    slots, used = torch.arange(tokens.shape[-1]), lengths[..., None]
    mask = slots < used
    behind = torch.full_like(tokens, IGNORE)
    behind[..., :-1] = tokens[..., 1:]
    predicted = slots < used - 1
    if is_open:
        row, last = torch.arange(len(lengths)), (lengths > 0).sum(1) - 1
        predicted[row, last] &= slots < used[row, last] - 2
    return {
        "tokens": tokens.where(mask, 0),
        "lengths": lengths,
        "is_last": is_last,
        "targets": behind.where(predicted, IGNORE),
        "mask": mask,
        "lexical": slots < used - 2 - is_last[..., None].long(),
        "sequence_id": sequence_id,
    }


def stored_batch(
    index: SentenceIndex, first: np.ndarray, sentences: np.ndarray, sequence_id: np.ndarray
) -> Batch:
    """Returns the batch of stored runs of sentences; see `grid_batch`.

    Args:
        index: Sentences of the split.
        first: First sentence of each row (B,), int64.
        sentences: How many each row has (B,), at least 1.
        sequence_id: (B,) int64.
    """
    stop = first + sentences
    places = np.arange(sentences.max())
    numbers = np.minimum(first[:, None] + places, stop[:, None] - 1)
    starts = index.starts(numbers)
    lengths = np.where(places < sentences[:, None], index.ends[numbers] - starts, 0)
    positions = starts[..., None] + np.arange(lengths.max())
    tokens = index.stream.gather(np.minimum(positions, len(index.stream) - 1))
    is_last = (places == sentences[:, None] - 1) & index.ends_document(stop)[:, None]
    parts = (tokens, lengths, is_last, sequence_id)
    return grid_batch(*(torch.from_numpy(part) for part in parts))


def written_batch(
    rows: Sequence[Sequence[Sequence[int]]], sequence_id: Sequence[int], *, bos_id: int, eos_id: int
) -> Batch:
    """Returns the batch of unfinished documents, their last sentence open; see `grid_batch`.

    Args:
        rows: Words of each sentence of each document.
        sequence_id: Number of each.
        bos_id: Begins a sentence.
        eos_id: Ends it.
    """
    most = max(map(len, rows))
    longest = max(len(words) for row in rows for words in row)
    tokens = torch.zeros(len(rows), most, longest + 2, dtype=torch.int64)
    lengths = torch.zeros(len(rows), most, dtype=torch.int64)
    for r, row in enumerate(rows):
        for s, words in enumerate(row):
            lengths[r, s] = len(words) + 2
            tokens[r, s, : len(words) + 2] = torch.tensor([bos_id, *words, eos_id])
    is_last = torch.zeros_like(lengths, dtype=torch.bool)
    return grid_batch(tokens, lengths, is_last, torch.tensor(sequence_id), is_open=True)


def empty_batch() -> Batch:
    """Returns a batch of one row without sentences, for a rank that has nothing to score."""
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    return grid_batch(nothing[..., None], nothing, nothing.bool(), torch.tensor([-1]))


def with_bytes(batch: Batch, token_bytes: Tensor) -> Batch:
    """Returns the batch with ``num_bytes`` (B,) int64, UTF-8 bytes of the targets.

    Args:
        batch: See `grid_batch`.
        token_bytes: UTF-8 bytes of each id, (V,) int64.
    """
    targets = batch["targets"]
    sizes = token_bytes[targets.clamp(min=0)].where(targets != IGNORE, 0)
    return {**batch, "num_bytes": sizes.flatten(1).sum(1)}
