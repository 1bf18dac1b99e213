"""Streams dealt to batches in rounds, as whole as can be."""

from dataclasses import dataclass

import numpy as np

from datamodules.sentences.index import SentenceIndex
from datamodules.sentences.streams import Streams, joined, longest_prefix


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a batch of one device may hold.

    Attributes:
        lexical: Most words.
        streams: Most streams.
        sentence: Most words of any sentence.
    """

    lexical: int
    streams: int
    sentence: int


def deal(
    streams: Streams, index: SentenceIndex, number: int, bounds: Bounds
) -> tuple[Streams, np.ndarray] | None:
    """Returns the streams, some of them cut, and the batch of each; None: a sentence fits nowhere.

    In each round every batch that may take one more is dealt a stream, the fullest batch the
    shortest of them. One that fits nowhere is cut: its beginning fills a batch up, the rest waits
    with those that did not fit.

    Args:
        streams: The longest first; at least one a batch.
        index: Sentences of the split.
        number: Number of batches.
        bounds: Bounds of a batch.
    """
    room, slots = np.full(number, bounds.lexical), np.full(number, bounds.streams)
    placed: list[Streams] = []
    batches: list[np.ndarray] = []
    waiting, begin = streams[:0], 0
    while len(waiting) or begin < len(streams):
        open_batches = np.flatnonzero((slots > 0) & (room > 0))
        if not len(open_batches):
            return None
        end = begin + max(0, len(open_batches) - len(waiting))
        now, begin = joined([waiting, streams[begin:end]]), end
        now = now[np.argsort(-now.lexical, kind="stable")]
        to = open_batches[np.argsort(-room[open_batches], kind="stable")][: len(now)]
        fitting, rest = _fit(now[: len(to)], index, room[to])
        taken = fitting.sentences > 0
        if not taken.any():
            return None  # not even the first sentence of the longest, where there is most room
        fitting, to = fitting[taken], to[taken]
        placed.append(fitting)
        batches.append(to)
        room[to] -= fitting.lexical
        slots[to] -= 1
        waiting = joined([rest, now[len(taken) :]])
    return joined(placed), np.concatenate(batches)


def _fit(streams: Streams, index: SentenceIndex, room: np.ndarray) -> tuple[Streams, Streams]:
    """Returns what of each stream is placed, nothing or all or a beginning, and what is left.

    Args:
        streams: The longest first.
        index: Sentences of the split.
        room: Words that its batch has room for, the most first.
    """
    whole, nowhere = streams.lexical <= room, streams.lexical > room[0]
    sentences = np.where(whole, streams.sentences, 0)
    lexical = np.where(whole, streams.lexical, 0)
    if nowhere.any():
        first = streams.first[nowhere]
        end = longest_prefix(index, first, first + streams.sentences[nowhere], room[nowhere])
        sentences[nowhere], lexical[nowhere] = end - first, index.lexical(first, end)
    fitting = Streams(first=streams.first, sentences=sentences, lexical=lexical)
    rest = Streams(
        first=streams.first + sentences,
        sentences=streams.sentences - sentences,
        lexical=streams.lexical - lexical,
    )
    return fitting, rest[rest.sentences > 0]
