"""Batches with nearly equal numbers of words and of streams, however the streams are.

Slower than dealing, and without buckets: only for splits whose streams fill the budgets of words
and of streams both, so that dealing leaves a sentence over.
"""

from bisect import insort

import numpy as np

from datamodules.sentences.index import SentenceIndex
from datamodules.sentences.streams import Streams, longest_prefix, runs

Piece = tuple[int, int, int]  # words, first sentence, the sentence after the last one


def deal_evenly(
    streams: Streams, index: SentenceIndex, *, number: int
) -> tuple[Streams, np.ndarray]:
    """Returns streams, some of them cut, and the batch of each.

    With K streams and R batches left, a batch takes c = K // R streams: the x longest and the c - x
    shortest, with x the most that leaves them at most their share of the words left; and of the
    next longest stream as many sentences as make up that share. (They suffice: with that whole
    stream, for the longest of the short ones or next to them, it would be more.) So a batch has at
    most c + 1 streams, and less than one sentence more than its share. Neither K / R (but up to
    the next whole number) nor the share grows from batch to batch. Hence with P streams at first
    no batch has more than ceil(P / number) + 1 streams, or than total / number words and a
    sentence.

    Args:
        streams: Streams, at least `number`.
        index: Sentences of the split.
        number: Number of batches.
    """
    pool = sorted(
        zip(
            streams.lexical.tolist(),
            streams.first.tolist(),
            (streams.first + streams.sentences).tolist(),
            strict=True,
        )
    )
    words, sentences = int(streams.lexical.sum()), int(streams.sentences.sum())
    taken: list[Piece] = []
    batch: list[int] = []
    for b in range(number):
        left = number - b
        pieces = _take(pool, index, words / left, left, sentences)
        words -= sum(piece[0] for piece in pieces)
        sentences -= sum(piece[2] - piece[1] for piece in pieces)
        taken += pieces
        batch += [b] * len(pieces)
    first, stop = (np.array([piece[i] for piece in taken], dtype=np.int64) for i in (1, 2))
    return runs(index, first, stop), np.array(batch)


def _take(
    pool: list[Piece], index: SentenceIndex, share: float, left: int, sentences: int
) -> list[Piece]:
    """Returns a batch of about `share` words, taken out of the sorted pool."""
    if left == 1:
        pieces, pool[:] = list(pool), []
        return pieces
    count = len(pool) // left
    longest = _longest(pool, count, share)
    short = pool[: count - longest]
    long = pool[len(pool) - longest :]
    del pool[len(pool) - longest :], pool[: count - longest]
    pieces = short + long
    missing = share - sum(piece[0] for piece in pieces)
    # The batches after this one need a sentence each.
    spare = sentences - sum(piece[2] - piece[1] for piece in pieces) - (left - 1)
    if missing > 0 and pool and spare > 0:
        _, first, stop = pool.pop()
        cut = min(_reach(index, first, stop, missing), first + spare)
        pieces.append(_piece(index, first, cut))
        if cut < stop:
            insort(pool, _piece(index, cut, stop))
    return pieces


def _longest(pool: list[Piece], count: int, share: float) -> int:
    """Returns how many of `count` streams can be the longest, the others being the shortest."""
    words = [piece[0] for piece in pool[:count]]
    heavy = [piece[0] for piece in pool[len(pool) - count :]][::-1]
    total = sum(words)
    for x in range(count):
        total += heavy[x] - words[count - 1 - x]
        if total > share:
            return x
    return count


def _reach(index: SentenceIndex, first: int, stop: int, words: float) -> int:
    """Returns where the shortest prefix ends that has so many words, `stop` if there is none."""
    below = int(np.ceil(words)) - 1
    prefix = longest_prefix(index, np.array([first]), np.array([stop]), below)
    return min(int(prefix[0]) + 1, stop)


def _piece(index: SentenceIndex, first: int, stop: int) -> Piece:
    return int(index.lexical(np.array([first]), np.array([stop]))[0]), first, stop
