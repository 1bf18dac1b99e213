"""Documents to streams, and streams to batches: what each training batch of an epoch holds.

A stream is a run of sentences of one document through which gradients flow; memory is empty where
it begins. How long streams may be grows with the epochs (section 2.3).

Batches follow uniform token-budget bucketing (App. B.1): streams are dealt to a fixed number of
batches, those with the most sentences first (in buckets of five, shuffled inside), so that each
batch gets as many long ones as any other. A batch takes a stream only if it stays within its budget
of words and its number of streams. All is a pure function of the data, the seed and the epoch.

Nothing is lost, and every epoch has equally many batches. A stream that fits nowhere is cut between
sentences; if even a sentence fits nowhere, all streams are dealt evenly (`deal_evenly`), which
always ends well:

- Each round of dealing places a stream or a sentence, or stops: it terminates.
- Let a batch take W words and C streams, and let no sentence have more than m. A sentence finds
  no place only if each batch has C streams, or more than W - m words. Streams are only cut to
  fill a batch to more than W - m, so at most P / C batches are of the first kind, and at most
  total / (W - m + 1) of the second: it cannot happen with more batches than the sum of both.
- With fewer, `num_batches_for` gives enough for `deal_evenly`.

Neither way is enough alone: rounds may leave a sentence over, and dealing evenly has no buckets. In
batches of 8 streams of three novels and poems, 36 % of the slots are padding dealt in rounds, and
53 % dealt evenly.

NOTE(paper): there total / budget batches are estimated, and what becomes of streams without a place
is not said. Here are 2 % more and one (whole streams never fill them to the last word), and no
stream is lost, so that an epoch is an epoch.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datamodules.sentences.corpus import SentenceIndex

# ---- documents to streams


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """How many sentences a stream may have in each epoch.

    Attributes:
        max_sentences: S of the first epochs.
        step: How much it grows.
        epochs: After how many epochs it grows.
        limit: Largest S; None: it grows on.
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
    """What a batch of one device may hold.

    Attributes:
        lexical: Most words.
        streams: Most streams.
        sentence: Most words of any sentence.
    """

    lexical: int
    streams: int
    sentence: int


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Runs of sentences, each inside one document.

    Attributes:
        first: Number of the first sentence, int64.
        sentences: How many there are, int64.
        lexical: Their words, int64.
    """

    first: np.ndarray
    sentences: np.ndarray
    lexical: np.ndarray

    def __len__(self) -> int:
        """Returns how many streams there are."""
        return len(self.first)

    def __getitem__(self, which: np.ndarray | slice) -> "Streams":
        """Returns the streams with those numbers, in a slice, or where a mask is true."""
        return Streams(**{key: values[which] for key, values in vars(self).items()})


def joined(parts: Sequence[Streams]) -> Streams:
    """Returns the streams of all parts, in that order."""
    keys = vars(parts[0])
    return Streams(**{key: np.concatenate([vars(part)[key] for part in parts]) for key in keys})


def runs(index: SentenceIndex, first: np.ndarray, stop: np.ndarray) -> Streams:
    """Returns the streams with those first sentences, and those after their last ones."""
    return Streams(first=first, sentences=stop - first, lexical=index.lexical(first, stop))


def cut_documents(index: SentenceIndex, *, max_sentences: int, max_lexical: int) -> Streams:
    """Returns all documents cut into runs, each the longest that both limits allow, in order.

    The longest first pieces give the fewest: longer limits never give more streams.

    Args:
        index: Sentences of the split.
        max_sentences: Most sentences of a run (S).
        max_lexical: Most words of a run; no sentence has more.
    """
    stops = index.document_ends
    first = np.append(0, stops[:-1])[: len(stops)]
    firsts, ends = [first[:0]], [first[:0]]
    while len(first):  # rounds of one run a document
        stop = longest_prefix(index, first, np.minimum(first + max_sentences, stops), max_lexical)
        firsts.append(first)
        ends.append(stop)
        left = stop < stops
        first, stops = stop[left], stops[left]
    return runs(index, np.sort(np.concatenate(firsts)), np.sort(np.concatenate(ends)))


def longest_prefix(
    index: SentenceIndex, first: np.ndarray, stop: np.ndarray, max_lexical: np.ndarray | int
) -> np.ndarray:
    """Returns where the longest prefixes of runs end that have at most that many words.

    Args:
        index: Sentences of the split.
        first: First sentence of each run.
        stop: The sentence after its last one.
        max_lexical: Most words; where even the first sentence has more, its prefix is empty.
    """
    low, high = first, stop  # a prefix up to low fits
    while (low < high).any():
        middle = (low + high + 1) // 2
        some = np.maximum(middle, first + 1)  # of a settled, empty prefix nothing is asked
        fits = index.lexical(first, some) <= max_lexical
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        high = np.maximum(low, high)
    return low


# ---- an epoch's batches


BUCKET = 5  # sentences that the streams of a bucket differ by, at most
SLACK = 1.02  # batches, where 1 would have to be filled to the last word

# Second half of the Philox keys; `text` and `order` have the others.
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


def num_batches_for(total: int, streams: int, bounds: Bounds, world_size: int) -> int:
    """Returns the batches of every epoch, over all ranks.

    Args:
        total: Words of the split.
        streams: Most streams that any epoch has (the first epochs have the shortest).
        bounds: Bounds of a batch.
        world_size: Ranks, each of which takes equally many batches.
    """
    budget, most, longest = bounds.lexical, bounds.streams, bounds.sentence
    num_batches = max(_ceil(SLACK * total / budget), _ceil(SLACK * streams / most)) + 1
    # Enough to place every sentence, by the argument above, or by that of `even_batches`, or
    # because every stream has a batch of its own.
    enough = min(streams // most + total // (budget - longest + 1) + 1, streams)
    if most > 1 and budget > longest:
        even = max(_ceil(total / (budget - longest)), _ceil(streams / (most - 1)))
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
        num_batches: Batches over all ranks, from `num_batches_for`.
        bounds: Bounds of a batch.
        seed: Non-negative.
        epoch: Number of the epoch.
        world_size: Ranks; at each step they get batches with a similar number of sentence steps.

    Raises:
        ValueError: There are fewer sentences than batches.
    """
    streams = split_until(streams, index, num_batches)
    shuffled = streams[_bucket_order(streams.sentences, seed, epoch)]
    dealt = deal(shuffled, index, num_batches, bounds)
    if dealt is None:
        dealt = deal_evenly(shuffled, index, num_batches=num_batches)
        assert _within(*dealt, num_batches, bounds), "num_batches_for gave too few"
    return _ordered(*dealt, num_batches, seed, epoch, world_size)


def split_until(streams: Streams, index: SentenceIndex, num_batches: int) -> Streams:
    """Returns the streams, the longest of them halved until there are that many.

    Raises:
        ValueError: There are fewer sentences.
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
    """Returns the streams' numbers, the longest bucket first, shuffled inside buckets."""
    philox = np.random.Philox(key=[seed, _STREAMS], counter=[0, 0, 0, epoch])
    bucket = ((sentences - 1) // BUCKET).astype(np.uint64)
    bits = np.uint64(int(bucket.max(initial=0)).bit_length())
    # The bucket in the upper bits, random ones below: one sort for both.
    keys = philox.random_raw(len(sentences)) >> bits
    keys |= (bucket.max(initial=0) - bucket) << (np.uint64(63) - bits) << np.uint64(1)
    return np.argsort(keys, kind="stable")


def _within(streams: Streams, batch: np.ndarray, num_batches: int, bounds: Bounds) -> bool:
    """Returns whether no batch is empty or breaks a bound."""
    lexical = np.bincount(batch, streams.lexical, num_batches).max()
    counts = np.bincount(batch, minlength=num_batches)
    return bool(lexical <= bounds.lexical and counts.max() <= bounds.streams and counts.all())


def _ordered(
    streams: Streams, batch: np.ndarray, num_batches: int, seed: int, epoch: int, world_size: int
) -> Batches:
    """Returns the batches in the order in which they are trained on.

    Neighbours by length, one a rank, make a step; the steps are shuffled.
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
    """Returns the streams, some of them cut, and the batch of each; None: a sentence fits nowhere.

    In each round every batch that may take one more is dealt a stream, the fullest batch the
    shortest of them. One that fits nowhere is cut: its beginning fills a batch up, the rest waits
    with those that did not fit.

    Args:
        streams: The longest first; at least one a batch.
        index: Sentences of the split.
        num_batches: Number of batches.
        bounds: Bounds of a batch.
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


# ---- a step shared by devices


def parts_of_step(step: Bounds, part: Bounds) -> int:
    """Returns the parts of which `share_step` needs no more, whatever a step holds.

    A sentence finds no place only if each part has as many streams as it may, or more than
    W - m words (see the module's docstring). A part of the first kind without such words has whole
    streams and ends of streams alone, of which at least one is not placed yet.
    """
    if step.lexical <= part.lexical and step.streams <= part.streams:
        return 1
    full = (step.lexical - 1) // (part.lexical - part.sentence + 1)
    return (step.streams - 1) // part.streams + full + 1


def share_step(
    streams: Streams, index: SentenceIndex, *, count: int, bounds: Bounds
) -> tuple[Streams, np.ndarray]:
    """Returns the streams of a step and the part of each, parts of similar length side by side.

    The longest stream goes first, to the part with the most room. It is cut, between sentences,
    only if it has more words than that. Parts may stay empty.

    Args:
        streams: Streams of the step, in order.
        index: Sentences of the split.
        count: Number of parts, at least `parts_of_step`.
        bounds: Bounds of a part.
    """
    if count == 1:
        return streams, np.zeros(len(streams), dtype=np.int64)
    room, slots = np.full(count, bounds.lexical), np.full(count, bounds.streams)
    pool = sorted(
        _span(index, first, first + length)
        for first, length in zip(streams.first.tolist(), streams.sentences.tolist(), strict=True)
    )
    taken: list[Span] = []
    parts: list[int] = []
    while pool:
        lexical, first, stop = pool.pop()
        part = int(np.where(slots > 0, room, -1).argmax())
        if lexical > room[part]:
            cut = int(longest_prefix(index, np.array([first]), np.array([stop]), room[part])[0])
            assert first < cut < stop, "parts_of_step gave too few"
            insort(pool, _span(index, cut, stop))
            lexical, first, stop = _span(index, first, cut)
        taken.append((lexical, first, stop))
        parts.append(part)
        room[part] -= lexical
        slots[part] -= 1
    starts, stops = (np.array([piece[i] for piece in taken], dtype=np.int64) for i in (1, 2))
    longest = np.zeros(count, dtype=np.int64)
    np.maximum.at(longest, parts, stops - starts)
    by_length = np.empty(count, dtype=np.int64)
    by_length[np.argsort(-longest, kind="stable")] = np.arange(count)
    return runs(index, starts, stops), by_length[parts]


# ---- dealing evenly


Span = tuple[int, int, int]  # words, first sentence, the sentence after the last one


def deal_evenly(
    streams: Streams, index: SentenceIndex, *, num_batches: int
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
    taken: list[Span] = []
    batch: list[int] = []
    for b in range(num_batches):
        left = num_batches - b
        pieces = _take(pool, index, lexical / left, left, sentences)
        lexical -= sum(piece[0] for piece in pieces)
        sentences -= sum(piece[2] - piece[1] for piece in pieces)
        taken += pieces
        batch += [b] * len(pieces)
    first, stop = (np.array([piece[i] for piece in taken], dtype=np.int64) for i in (1, 2))
    return runs(index, first, stop), np.array(batch)


def _take(
    pool: list[Span], index: SentenceIndex, share: float, left: int, sentences: int
) -> list[Span]:
    """Returns a batch of about `share` words, taken out of the sorted pool."""
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
    # The batches after this one need a sentence each.
    spare = sentences - sum(piece[2] - piece[1] for piece in pieces) - (left - 1)
    if missing > 0 and pool and spare > 0:
        _, first, stop = pool.pop()
        cut = min(_reach(index, first, stop, missing), first + spare)
        pieces.append(_span(index, first, cut))
        if cut < stop:
            insort(pool, _span(index, cut, stop))
    return pieces


def _num_longest(pool: list[Span], count: int, share: float) -> int:
    """Returns how many of `count` streams can be the longest, the others being the shortest."""
    lexical = [piece[0] for piece in pool[:count]]
    heavy = [piece[0] for piece in pool[len(pool) - count :]][::-1]
    total = sum(lexical)
    for x in range(count):
        total += heavy[x] - lexical[count - 1 - x]
        if total > share:
            return x
    return count


def _reach(index: SentenceIndex, first: int, stop: int, lexical: float) -> int:
    """Returns where the shortest prefix ends that has that many words, `stop` if there is none."""
    below = int(np.ceil(lexical)) - 1
    prefix = longest_prefix(index, np.array([first]), np.array([stop]), below)
    return min(int(prefix[0]) + 1, stop)


def _span(index: SentenceIndex, first: int, stop: int) -> Span:
    return int(index.lexical(np.array([first]), np.array([stop]))[0]), first, stop
