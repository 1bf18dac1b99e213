"""Cuts documents into streams, and deals streams to the training batches of an epoch.

A stream is a run of sentences of one document through which gradients flow; it starts with empty
memory. The maximum length of streams grows with the epochs (section 2.3).

Batches follow uniform token-budget bucketing (App. B.1): streams are dealt to a fixed number of
batches in order of decreasing length (in buckets of five sentences, shuffled inside), so that long
streams are spread evenly. A batch takes a stream only if it stays within its budget of words and
its number of streams. The result is a pure function of the data, the seed and the epoch.

Nothing is lost, and every epoch has the same number of batches. A stream that fits nowhere is cut
between sentences; if even a sentence fits nowhere, all streams are dealt evenly (`deal_evenly`),
which always succeeds:

- Each round of dealing places a stream or a sentence, or stops, so it terminates.
- Let a batch take W words and C streams, and let a sentence have at most m words. A sentence fits
nowhere only if each batch has C streams, or more than W - m words. Streams are only cut to
fill a batch to more than W - m, so at most P / C batches are in the first case, and at most total /
(W - m + 1) in the second: with more batches than the sum of both, every sentence fits.
- With fewer batches, `num_batches_for` returns enough for `deal_evenly`.

Neither algorithm suffices alone: rounds may fail to place a sentence, and dealing evenly has no
buckets. In batches of 8 streams of three novels and poems, 36 % of the slots are padding after
dealing in rounds, and 53 % after dealing evenly.

NOTE(paper): the paper estimates total / budget batches and does not say what happens to streams
that fit nowhere. Here there are 2 % more plus one (whole streams never fill a batch to the last
word), and no stream is lost, so that an epoch covers all data.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datamodules.sentences.corpus import SentenceIndex

# ---- documents to streams


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Maximum number of sentences per stream, S, by epoch.

    Attributes:
        max_sentences: S in the first epochs.
        step: Increment of S.
        epochs: Number of epochs between increments.
        limit: Largest S, or None for no limit.
    """

    max_sentences: int = 30
    step: int = 12
    epochs: int = 5
    limit: int | None = None

    def at(self, epoch: int) -> int:
        """Returns S of an epoch: ``max_sentences + step * (epoch // epochs)``, limited."""
        grown = self.max_sentences + self.step * (epoch // self.epochs)
        return grown if self.limit is None else min(grown, self.limit)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of a batch of one device.

    Attributes:
        lexical: Maximum number of words.
        streams: Maximum number of streams.
        sentence: Maximum number of words in a sentence.
    """

    lexical: int
    streams: int
    sentence: int


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Runs of sentences, each inside one document.

    Attributes:
        first: Index of the first sentence, int64.
        sentences: Number of sentences, int64.
        lexical: Number of words, int64.
    """

    first: np.ndarray
    sentences: np.ndarray
    lexical: np.ndarray

    def __len__(self) -> int:
        """Returns the number of streams."""
        return len(self.first)

    def __getitem__(self, which: np.ndarray | slice) -> "Streams":
        """Returns the streams selected by indices, a slice or a mask."""
        return Streams(**{key: values[which] for key, values in vars(self).items()})


def joined(parts: Sequence[Streams]) -> Streams:
    """Concatenates streams."""
    keys = vars(parts[0])
    return Streams(**{key: np.concatenate([vars(part)[key] for part in parts]) for key in keys})


def runs(index: SentenceIndex, first: np.ndarray, stop: np.ndarray) -> Streams:
    """Returns the streams from sentence `first` (inclusive) to `stop` (exclusive)."""
    return Streams(first=first, sentences=stop - first, lexical=index.lexical(first, stop))


def cut_documents(index: SentenceIndex, *, max_sentences: int, max_lexical: int) -> Streams:
    """Cuts all documents greedily into the longest runs within both limits, in order.

    Greedy cuts give the fewest runs, so larger limits never give more streams.

    Args:
        index: Sentences of the split.
        max_sentences: Maximum number of sentences per run (S).
        max_lexical: Maximum number of words per run; no sentence has more.
    """
    stops = index.document_ends
    first = np.append(0, stops[:-1])[: len(stops)]
    firsts, ends = [first[:0]], [first[:0]]
    while len(first):  # each round cuts one run per document
        stop = longest_prefix(index, first, np.minimum(first + max_sentences, stops), max_lexical)
        firsts.append(first)
        ends.append(stop)
        left = stop < stops
        first, stops = stop[left], stops[left]
    return runs(index, np.sort(np.concatenate(firsts)), np.sort(np.concatenate(ends)))


def longest_prefix(
    index: SentenceIndex, first: np.ndarray, stop: np.ndarray, max_lexical: np.ndarray | int
) -> np.ndarray:
    """Returns the ends of the longest prefixes of runs with at most `max_lexical` words.

    Args:
        index: Sentences of the split.
        first: First sentence of each run.
        stop: Sentence after the last one.
        max_lexical: Maximum number of words; the prefix is empty if the first sentence has more.
    """
    low, high = first, stop  # bisection; the prefix up to low always fits
    while (low < high).any():
        middle = (low + high + 1) // 2
        ends = np.maximum(middle, first + 1)  # avoids empty runs for settled rows
        fits = index.lexical(first, ends) <= max_lexical
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        high = np.maximum(low, high)
    return low


# ---- an epoch's batches


BUCKET = 5  # bucket width in sentences
SLACK = 1.02  # factor for the number of batches; 1 would require full batches

# Second half of the Philox keys; `order` uses other values.
_STREAMS, _BATCHES = 4, 5


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The streams of an epoch by batch.

    Attributes:
        first: First sentence of each stream, int64.
        sentences: Number of sentences of each stream, int64.
        offsets: Start of each batch in the streams, and the end of the last; int64. Batch
            ``step * world_size + rank`` belongs to a rank at a step.
    """

    first: np.ndarray
    sentences: np.ndarray
    offsets: np.ndarray

    def streams(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns first sentences and sentence counts of the streams of consecutive batches."""
        part = slice(int(self.offsets[begin]), int(self.offsets[end]))
        return self.first[part], self.sentences[part]


def num_batches_for(total: int, streams: int, bounds: Bounds, world_size: int) -> int:
    """Returns the number of batches of every epoch, over all ranks.

    Args:
        total: Number of words in the split.
        streams: Maximum number of streams per epoch (streams are shortest in the first).
        bounds: Limits of a batch.
        world_size: Number of ranks, which take the same number of batches.
    """
    budget, max_streams, longest = bounds.lexical, bounds.streams, bounds.sentence
    num_batches = max(_ceil(SLACK * total / budget), _ceil(SLACK * streams / max_streams)) + 1
    # Enough to place every sentence, by the argument above, by that in `deal_evenly`, or because
    # every stream has a separate batch.
    enough = min(streams // max_streams + total // (budget - longest + 1) + 1, streams)
    if max_streams > 1 and budget > longest:
        even = max(_ceil(total / (budget - longest)), _ceil(streams / (max_streams - 1)))
        enough = min(enough, even)
    return _ceil(max(num_batches, enough) / world_size) * world_size


def _ceil(value: float) -> int:
    return int(-(-value // 1))


def distribute(
    streams: Streams,
    index: SentenceIndex,
    *,
    num_batches: int,
    bounds: Bounds,
    seed: int,
    epoch: int,
    world_size: int = 1,
) -> Batches:
    """Returns an epoch's batches; a pure function of its arguments.

    Args:
        streams: All streams of the epoch.
        index: Sentences of the split.
        num_batches: Number of batches over all ranks, from `num_batches_for`.
        bounds: Limits of a batch.
        seed: Non-negative seed.
        epoch: Index of the epoch.
        world_size: Number of ranks; at each step they get batches with similar numbers of sentence
            steps.

    Raises:
        ValueError: If there are fewer sentences than batches.
    """
    streams = split_until(streams, index, num_batches)
    shuffled = streams[_bucket_order(streams.sentences, seed, epoch)]
    dealt = deal(shuffled, index, num_batches, bounds)
    if dealt is None:
        dealt = deal_evenly(shuffled, index, num_batches=num_batches)
        assert _within(*dealt, num_batches, bounds), "num_batches_for gave too few"
    return _ordered(*dealt, num_batches, seed, epoch, world_size)


def split_until(streams: Streams, index: SentenceIndex, num_batches: int) -> Streams:
    """Halves the longest streams until there are at least `num_batches`.

    Raises:
        ValueError: If there are fewer sentences.
    """
    if int(streams.sentences.sum()) < num_batches:
        raise ValueError(
            f"batch_tokens, batch_size: an epoch has {num_batches} batches (over all devices), "
            "each of which needs a sentence, but the train split has only "
            f"{int(streams.sentences.sum())}. Raise them, or use more text or fewer devices."
        )
    while len(streams) < num_batches:
        order = np.argsort(-streams.sentences, kind="stable")
        longest = streams[order[: num_batches - len(streams)]]
        longest = longest[longest.sentences > 1]
        middle = longest.first + longest.sentences // 2
        parts = [runs(index, longest.first, middle)]
        parts += [runs(index, middle, longest.first + longest.sentences)]
        streams = joined([streams[order[len(longest) :]], *parts])
    return streams


def _bucket_order(sentences: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of the streams, the longest bucket first, shuffled inside buckets."""
    philox = np.random.Philox(key=[seed, _STREAMS], counter=[0, 0, 0, epoch])
    bucket = ((sentences - 1) // BUCKET).astype(np.uint64)
    bits = np.uint64(int(bucket.max(initial=0)).bit_length())
    # One sort for both: the bucket in the upper bits, random bits below.
    keys = philox.random_raw(len(sentences)) >> bits
    keys |= (bucket.max(initial=0) - bucket) << (np.uint64(63) - bits) << np.uint64(1)
    return np.argsort(keys, kind="stable")


def _within(streams: Streams, batch: np.ndarray, num_batches: int, bounds: Bounds) -> bool:
    """Returns whether no batch is empty or exceeds a limit."""
    lexical = np.bincount(batch, streams.lexical, num_batches).max()
    counts = np.bincount(batch, minlength=num_batches)
    return bool(lexical <= bounds.lexical and counts.max() <= bounds.streams and counts.all())


def _ordered(
    streams: Streams, batch: np.ndarray, num_batches: int, seed: int, epoch: int, world_size: int
) -> Batches:
    """Returns the batches in training order.

    Batches of similar length, one per rank, form a step; the steps are shuffled.
    """
    length = np.zeros(num_batches, dtype=np.int64)
    np.maximum.at(length, batch, streams.sentences)
    philox = np.random.Philox(key=[seed, _BATCHES], counter=[0, 0, 0, epoch])
    steps = np.argsort(philox.random_raw(num_batches // world_size), kind="stable")
    by_length = np.argsort(length, kind="stable").reshape(-1, world_size)
    position = np.empty(num_batches, dtype=np.int64)
    position[by_length[steps].ravel()] = np.arange(num_batches)
    order = np.argsort(position[batch], kind="stable")
    counts = np.bincount(position[batch], minlength=num_batches)
    return Batches(
        first=streams.first[order],
        sentences=streams.sentences[order],
        offsets=np.append(0, np.cumsum(counts)),
    )


# ---- dealing in rounds


def deal(
    streams: Streams, index: SentenceIndex, num_batches: int, bounds: Bounds
) -> tuple[Streams, np.ndarray] | None:
    """Returns the dealt streams, some of them cut, and the batch of each, or None on failure.

    In each round every open batch is dealt a stream, the fullest batch the shortest one. A stream
    that fits nowhere is cut: its beginning fills a batch, and the rest waits with the streams that
    did not fit. Dealing fails if a sentence fits nowhere.

    Args:
        streams: Streams, the longest first; at least one per batch.
        index: Sentences of the split.
        num_batches: Number of batches.
        bounds: Limits of a batch.
    """
    room, slots = np.full(num_batches, bounds.lexical), np.full(num_batches, bounds.streams)
    placed: list[Streams] = []
    batches: list[np.ndarray] = []
    waiting, begin = streams[:0], 0
    while len(waiting) or begin < len(streams):
        open_batches = np.flatnonzero((slots > 0) & (room > 0))
        if not len(open_batches):
            return None
        end = begin + max(0, len(open_batches) - len(waiting))
        dealt, begin = joined([waiting, streams[begin:end]]), end
        dealt = dealt[np.argsort(-dealt.lexical, kind="stable")]
        to = open_batches[np.argsort(-room[open_batches], kind="stable")][: len(dealt)]
        fitting, rest = _fit(dealt[: len(to)], index, room[to])
        fits = fitting.sentences > 0
        if not fits.any():
            return None  # not even the longest stream's first sentence fits into the emptiest batch
        fitting, to = fitting[fits], to[fits]
        placed.append(fitting)
        batches.append(to)
        room[to] -= fitting.lexical
        slots[to] -= 1
        waiting = joined([rest, dealt[len(fits) :]])
    return joined(placed), np.concatenate(batches)


def _fit(streams: Streams, index: SentenceIndex, room: np.ndarray) -> tuple[Streams, Streams]:
    """Returns the placed part of each stream (none, all or a prefix), and the rest.

    Args:
        streams: Streams, the longest first.
        index: Sentences of the split.
        room: Remaining number of words in each stream's batch, in descending order.
    """
    fits, too_long = streams.lexical <= room, streams.lexical > room[0]
    sentences = np.where(fits, streams.sentences, 0)
    lexical = np.where(fits, streams.lexical, 0)
    if too_long.any():
        first = streams.first[too_long]
        end = longest_prefix(index, first, first + streams.sentences[too_long], room[too_long])
        sentences[too_long], lexical[too_long] = end - first, index.lexical(first, end)
    fitting = Streams(first=streams.first, sentences=sentences, lexical=lexical)
    rest = Streams(
        first=streams.first + sentences,
        sentences=streams.sentences - sentences,
        lexical=streams.lexical - lexical,
    )
    return fitting, rest[rest.sentences > 0]


# ---- a step shared by devices


def parts_of_step(step: Bounds, part: Bounds) -> int:
    """Returns a number of parts that suffices for `share_step`, whatever the step contains.

    A sentence fits nowhere only if each part has its maximum of streams, or more than W - m words
    (see the module's docstring). A part in the first case only has whole streams and ends of
    streams, of which at least one is not placed yet.
    """
    if step.lexical <= part.lexical and step.streams <= part.streams:
        return 1
    full = (step.lexical - 1) // (part.lexical - part.sentence + 1)
    return (step.streams - 1) // part.streams + full + 1


def share_step(
    streams: Streams, index: SentenceIndex, *, count: int, bounds: Bounds
) -> tuple[Streams, np.ndarray]:
    """Returns the streams of a step and the part of each stream, with parts sorted by length.

    The longest stream goes first, to the part with the most room. It is cut between sentences only
    if it exceeds that room. Parts may stay empty.

    Args:
        streams: Streams of the step, in order.
        index: Sentences of the split.
        count: Number of parts, at least `parts_of_step`.
        bounds: Limits of a part.
    """
    if count == 1:
        return streams, np.zeros(len(streams), dtype=np.int64)
    room, slots = np.full(count, bounds.lexical), np.full(count, bounds.streams)
    pool = sorted(
        _span(index, first, first + length)
        for first, length in zip(streams.first.tolist(), streams.sentences.tolist(), strict=True)
    )
    spans: list[Span] = []
    parts: list[int] = []
    while pool:
        lexical, first, stop = pool.pop()
        part = int(np.where(slots > 0, room, -1).argmax())
        if lexical > room[part]:
            cut = int(longest_prefix(index, np.array([first]), np.array([stop]), room[part])[0])
            assert first < cut < stop, "parts_of_step gave too few"
            insort(pool, _span(index, cut, stop))
            lexical, first, stop = _span(index, first, cut)
        spans.append((lexical, first, stop))
        parts.append(part)
        room[part] -= lexical
        slots[part] -= 1
    starts, stops = (np.array([piece[i] for piece in spans], dtype=np.int64) for i in (1, 2))
    longest = np.zeros(count, dtype=np.int64)
    np.maximum.at(longest, parts, stops - starts)
    by_length = np.empty(count, dtype=np.int64)
    by_length[np.argsort(-longest, kind="stable")] = np.arange(count)
    return runs(index, starts, stops), by_length[parts]


# ---- dealing evenly


Span = tuple[int, int, int]  # words, first sentence, sentence after the last one


def deal_evenly(
    streams: Streams, index: SentenceIndex, *, num_batches: int
) -> tuple[Streams, np.ndarray]:
    """Returns the dealt streams, some of them cut, and the batch of each.

    With K streams and R batches left, a batch takes c = K // R streams: the x longest and the c - x
    shortest, with the largest x that keeps them within their share of the remaining words. It then
    takes sentences of the next longest stream until the share is reached. (They suffice: the whole
    stream, added or in place of the longest of the short ones, would exceed the share.) So a batch
    has at most c + 1 streams, and exceeds its share by less than one sentence. Neither the share
    nor K / R (except for rounding up) grows from batch to batch. Hence with P streams at first, no
    batch has more than ceil(P / num_batches) + 1 streams, or more than total / num_batches words
    plus a sentence.

    Args:
        streams: Streams, at least `num_batches`.
        index: Sentences of the split.
        num_batches: Number of batches.
    """
    pool = sorted(
        zip(
            streams.lexical.tolist(),
            streams.first.tolist(),
            (streams.first + streams.sentences).tolist(),
            strict=True,
        )
    )
    lexical, sentences = int(streams.lexical.sum()), int(streams.sentences.sum())
    spans: list[Span] = []
    batch: list[int] = []
    for b in range(num_batches):
        left = num_batches - b
        pieces = _take(pool, index, lexical / left, left, sentences)
        lexical -= sum(piece[0] for piece in pieces)
        sentences -= sum(piece[2] - piece[1] for piece in pieces)
        spans += pieces
        batch += [b] * len(pieces)
    first, stop = (np.array([piece[i] for piece in spans], dtype=np.int64) for i in (1, 2))
    return runs(index, first, stop), np.array(batch)


def _take(
    pool: list[Span], index: SentenceIndex, share: float, left: int, sentences: int
) -> list[Span]:
    """Removes a batch of about `share` words from the sorted pool, and returns it."""
    if left == 1:
        pieces, pool[:] = list(pool), []
        return pieces
    count = len(pool) // left
    longest = _num_longest(pool, count, share)
    short = pool[: count - longest]
    long = pool[len(pool) - longest :]
    del pool[len(pool) - longest :], pool[: count - longest]
    pieces = short + long
    missing = share - sum(piece[0] for piece in pieces)
    # Each later batch needs a sentence.
    spare = sentences - sum(piece[2] - piece[1] for piece in pieces) - (left - 1)
    if missing > 0 and pool and spare > 0:
        _, first, stop = pool.pop()
        cut = min(_reach(index, first, stop, missing), first + spare)
        pieces.append(_span(index, first, cut))
        if cut < stop:
            insort(pool, _span(index, cut, stop))
    return pieces


def _num_longest(pool: list[Span], count: int, share: float) -> int:
    """Returns how many of `count` streams can be the longest ones if the rest are the shortest."""
    lexical = [piece[0] for piece in pool[:count]]
    heavy = [piece[0] for piece in pool[len(pool) - count :]][::-1]
    total = sum(lexical)
    for x in range(count):
        total += heavy[x] - lexical[count - 1 - x]
        if total > share:
            return x
    return count


def _reach(index: SentenceIndex, first: int, stop: int, lexical: float) -> int:
    """Returns the end of the shortest prefix with `lexical` words, or `stop` if there is none."""
    below = int(np.ceil(lexical)) - 1
    prefix = longest_prefix(index, np.array([first]), np.array([stop]), below)
    return min(int(prefix[0]) + 1, stop)


def _span(index: SentenceIndex, first: int, stop: int) -> Span:
    return int(index.lexical(np.array([first]), np.array([stop]))[0]), first, stop
