"""Which streams make a batch: uniform token-budget bucketing (App. B.1).

Streams are dealt to a fixed number of batches, those with the most sentences first (in buckets of
five, shuffled inside), so that each batch gets as many long ones as any other. A batch takes a
stream only if it stays within its budget of words and its number of streams.

Nothing is lost, and every epoch has equally many batches. A stream that fits nowhere is cut between
sentences; if even a sentence fits nowhere, all streams are dealt evenly (`even_batches`), which
always ends well:

- Each round of dealing places a stream or a sentence, or stops: it terminates.
- Let a batch take W words and C streams, and let no sentence have more than m. A sentence finds
  no place only if each batch has C streams, or more than W - m words. Streams are only cut to
  fill a batch to more than W - m, so at most P / C batches are of the first kind, and at most
  total / (W - m + 1) of the second: it cannot happen with more batches than the sum of both.
- With fewer, `number_of_batches` gives enough for `even_batches`.

NOTE(paper): there total / budget batches are estimated, and what becomes of streams without a place
is not said. Here are 2 % more and one (whole streams never fill them to the last word), and no
stream is lost, so that an epoch is an epoch.
"""

from dataclasses import dataclass

import numpy as np

from datamodules.sentences.dealing import Bounds, deal
from datamodules.sentences.even_batches import deal_evenly
from datamodules.sentences.index import SentenceIndex
from datamodules.sentences.streams import Streams, joined, runs

BUCKET = 5  # sentences that the streams of a bucket differ by, at most
SLACK = 1.02  # batches, where 1 would have to be filled to the last word

# Second half of the Philox keys; `windows`, `document_order` and `shuffling` have the others.
_STREAMS, _BATCHES = 4, 5


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The streams of an epoch by batch.

    Attributes:
        first: First sentence of each stream, int64.
        sentences: How many it has, int64.
        offsets: Where the streams of each batch begin, and where the last one's end; int64. Batch
            ``step * world_size + rank`` is that of a rank at a step.
    """

    first: np.ndarray
    sentences: np.ndarray
    offsets: np.ndarray

    def streams(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns first sentences, and their numbers, of the streams of consecutive batches."""
        part = slice(int(self.offsets[begin]), int(self.offsets[end]))
        return self.first[part], self.sentences[part]


def number_of_batches(total: int, streams: int, bounds: Bounds, world_size: int) -> int:
    """Returns the batches of every epoch, over all ranks.

    Args:
        total: Words of the split.
        streams: Most streams that any epoch has (the first epochs have the shortest).
        bounds: Bounds of a batch.
        world_size: Ranks, each of which takes equally many batches.
    """
    words, most, longest = bounds.lexical, bounds.streams, bounds.sentence
    number = max(_ceil(SLACK * total / words), _ceil(SLACK * streams / most)) + 1
    # Enough to place every sentence, by the argument above, or by that of `even_batches`, or
    # because every stream has a batch of its own.
    enough = min(streams // most + total // (words - longest + 1) + 1, streams)
    if most > 1 and words > longest:
        even = max(_ceil(total / (words - longest)), _ceil(streams / (most - 1)))
        enough = min(enough, even)
    return _ceil(max(number, enough) / world_size) * world_size


def _ceil(value: float) -> int:
    return int(-(-value // 1))


def distribute(
    streams: Streams,
    index: SentenceIndex,
    *,
    number: int,
    bounds: Bounds,
    seed: int,
    epoch: int,
    world_size: int = 1,
) -> Batches:
    """Returns an epoch's batches; a pure function of its arguments.

    Args:
        streams: All streams of the epoch.
        index: Sentences of the split.
        number: Batches over all ranks, from `number_of_batches`.
        bounds: Bounds of a batch.
        seed: Non-negative.
        epoch: Number of the epoch.
        world_size: Ranks; at each step they get batches with a similar number of sentence steps.

    Raises:
        ValueError: There are fewer sentences than batches.
    """
    streams = at_least(streams, index, number)
    shuffled = streams[_bucket_order(streams.sentences, seed, epoch)]
    dealt = deal(shuffled, index, number, bounds)
    if dealt is None:
        dealt = deal_evenly(shuffled, index, number=number)
        assert _within(*dealt, number, bounds), "number_of_batches gave too few"
    return _ordered(*dealt, number, seed, epoch, world_size)


def at_least(streams: Streams, index: SentenceIndex, number: int) -> Streams:
    """Returns the streams, the longest of them halved until there are so many.

    Raises:
        ValueError: There are fewer sentences.
    """
    if int(streams.sentences.sum()) < number:
        raise ValueError(
            f"batch_tokens, batch_size: an epoch has {number} batches (over all devices), each of "
            f"which needs a sentence, but the train split has only {int(streams.sentences.sum())}. "
            "Raise them, or use more text or fewer devices."
        )
    while len(streams) < number:
        order = np.argsort(-streams.sentences, kind="stable")
        longest = streams[order[: number - len(streams)]]
        longest = longest[longest.sentences > 1]
        middle = longest.first + longest.sentences // 2
        parts = [runs(index, longest.first, middle)]
        parts += [runs(index, middle, longest.first + longest.sentences)]
        streams = joined([streams[order[len(longest) :]], *parts])
    return streams


def _bucket_order(sentences: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Returns the streams' numbers, the longest bucket first, shuffled inside buckets."""
    philox = np.random.Philox(key=[seed, _STREAMS], counter=[0, 0, 0, epoch])
    bucket = ((sentences - 1) // BUCKET).astype(np.uint64)
    bits = np.uint64(int(bucket.max(initial=0)).bit_length())
    # The bucket in the upper bits, random ones below: one sort for both.
    keys = philox.random_raw(len(sentences)) >> bits
    keys |= (bucket.max(initial=0) - bucket) << (np.uint64(63) - bits) << np.uint64(1)
    return np.argsort(keys, kind="stable")


def _within(streams: Streams, batch: np.ndarray, number: int, bounds: Bounds) -> bool:
    """Returns whether no batch is empty or breaks a bound."""
    words = np.bincount(batch, streams.lexical, number).max()
    counts = np.bincount(batch, minlength=number)
    return bool(words <= bounds.lexical and counts.max() <= bounds.streams and counts.all())


def _ordered(
    streams: Streams, batch: np.ndarray, number: int, seed: int, epoch: int, world_size: int
) -> Batches:
    """Returns the batches in the order in which they are trained on.

    Neighbours by length, one a rank, make a step; the steps are shuffled.
    """
    length = np.zeros(number, dtype=np.int64)
    np.maximum.at(length, batch, streams.sentences)
    philox = np.random.Philox(key=[seed, _BATCHES], counter=[0, 0, 0, epoch])
    steps = np.argsort(philox.random_raw(number // world_size), kind="stable")
    by_length = np.argsort(length, kind="stable").reshape(-1, world_size)
    place = np.empty(number, dtype=np.int64)
    place[by_length[steps].ravel()] = np.arange(number)
    order = np.argsort(place[batch], kind="stable")
    counts = np.bincount(place[batch], minlength=number)
    return Batches(
        first=streams.first[order],
        sentences=streams.sentences[order],
        offsets=np.append(0, np.cumsum(counts)),
    )
