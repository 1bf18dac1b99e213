"""Sentences by number, documents cut into streams, and streams dealt to batches.

Batches are within both bounds, nothing is lost, and every epoch has equally many.
"""

import math
import pickle

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from datamodules.sentences import corpus as indexing
from datamodules.sentences import streams as dealing
from datamodules.sentences.streams import (
    Batches,
    Bounds,
    Curriculum,
    cut_documents,
    deal_evenly,
    distribute,
    longest_prefix,
    num_batches_for,
)

LONGEST = 8  # words of a sentence
documents = st.lists(
    st.lists(st.integers(1, LONGEST), min_size=1, max_size=40), min_size=1, max_size=40
)
# Long documents of long sentences, and many of a single word: both bounds are tight at once.
two_kinds = st.lists(
    st.sampled_from([[1], [1], [1], [LONGEST] * 8, [LONGEST] * 30]), min_size=20, max_size=200
)
quick = settings(max_examples=80, deadline=None)


def spans(streams) -> list[tuple[int, int]]:
    return [(int(f), int(f + n)) for f, n in zip(streams.first, streams.sentences, strict=True)]


@quick
@given(documents=documents)
def test_the_index_counts_sentences_documents_and_words(make_index, documents):
    index = make_index(documents)
    flat = [n for words in documents for n in words]
    assert len(index) == len(flat)
    assert index.document_ends.tolist() == np.cumsum([len(d) for d in documents]).tolist()
    numbers = np.arange(len(flat))
    assert index.lexical(numbers, numbers + 1).tolist() == flat
    assert (index.stream.gather(index.starts(numbers)) == 1).all()
    assert (index.stream.gather(index.ends - 1) == 2).all()
    last = index.ends_document(numbers + 1)
    assert ((index.stream.gather(index.ends - 2) == 3) == last).all()
    assert index.lexical(numbers, numbers).tolist() == [0] * len(flat)


def straight_cut(words: list[int], first: int, most: int, lexical: int) -> list[tuple[int, int]]:
    """The same rule as a loop over sentences."""
    found, start, total = [], 0, 0
    for i, n in enumerate(words):
        if i - start == most or total + n > lexical:
            found.append((first + start, first + i))
            start, total = i, 0
        total += n
    return [*found, (first + start, first + len(words))]


@quick
@given(documents=documents, most=st.integers(1, 12), lexical=st.integers(9, 60))
def test_documents_are_cut_where_a_limit_is_met(make_index, documents, most, lexical):
    index = make_index(documents)
    streams = cut_documents(index, max_sentences=most, max_lexical=lexical)
    expected, first = [], 0
    for words in documents:
        expected += straight_cut(words, first, most, lexical)
        first += len(words)
    assert spans(streams) == expected
    flat = [n for words in documents for n in words]
    assert streams.lexical.tolist() == [sum(flat[a:b]) for a, b in expected]
    longer = cut_documents(index, max_sentences=most + 3, max_lexical=lexical)
    assert len(longer) <= len(streams)


@quick
@given(words=st.lists(st.integers(1, 9), min_size=1, max_size=20), room=st.integers(0, 60))
def test_the_longest_prefix_that_fits(make_index, words, room):
    index = make_index([words])
    first = np.arange(len(words))
    stop = np.full(len(words), len(words))
    expected = [max(b for b in range(a, len(words) + 1) if sum(words[a:b]) <= room) for a in first]
    assert longest_prefix(index, first, stop, room).tolist() == expected


def test_streams_grow_with_the_epochs():
    curriculum = Curriculum()
    assert [curriculum.at(e) for e in (0, 4, 5, 9, 10, 24)] == [30, 30, 42, 42, 54, 78]
    limited = Curriculum(max_sentences=4, step=3, epochs=2, limit=9)
    assert [limited.at(e) for e in range(8)] == [4, 4, 7, 7, 9, 9, 9, 9]
    assert {Curriculum(max_sentences=40, step=0).at(e) for e in range(99)} == {40}


# The index as a file


@pytest.fixture
def stored(sentences, monkeypatch):
    """A prepared split that is large enough for a file, and what its index holds."""
    data = sentences()
    expected = data.sentences("train").ends.tolist()
    monkeypatch.setattr(indexing, "SHARED_FROM", 1)
    monkeypatch.setattr(indexing, "_PART", 100)
    return data, expected


def test_a_large_index_is_a_file_that_is_made_once(stored, monkeypatch):
    data, expected = stored
    index = data.sentences("train")
    assert index.ends.tolist() == expected
    assert isinstance(index.ends, np.memmap)
    assert (data.store_dir / "train-sentences").stat().st_size == 8 * len(expected)
    monkeypatch.setattr(indexing, "_scan", None)
    assert data.sentences("train").ends.tolist() == expected
    data.setup()  # the store does not mind the file


def test_a_damaged_file_is_made_again(stored):
    data, expected = stored
    path = data.store_dir / "train-sentences"
    half = len(expected) // 2
    changed = np.array([*expected[half::-1], *expected[half + 1 :]])  # ends where the stream does
    for content in (b"", b"123", np.array([3, 9]).tobytes(), changed.tobytes()):
        path.write_bytes(content)
        assert data.sentences("train").ends.tolist() == expected
        assert path.stat().st_size == 8 * len(expected)


def test_an_index_is_pickled_by_path(stored):
    data, expected = stored
    index = data.sentences("train")
    assert index.ends.tolist() == expected
    pickled = pickle.dumps(index)
    assert len(pickled) < 1000 + index.stream.token_bytes.nbytes
    assert pickle.loads(pickled).ends.tolist() == expected


# ---- streams dealt to batches


def dealt(batches: Batches) -> list[set[tuple[int, int]]]:
    found = []
    for b in range(len(batches.offsets) - 1):
        first, sentences = batches.streams(b, b + 1)
        found.append({(int(f), int(f + n)) for f, n in zip(first, sentences, strict=True)})
    return found


def check(batches: Batches, index, number: int, bounds: Bounds) -> None:
    found = dealt(batches)
    assert len(found) == number
    for batch in found:
        first, stop = (np.array(side) for side in zip(*batch, strict=True))
        assert 1 <= len(batch) <= bounds.streams
        assert index.lexical(first, stop).sum() <= bounds.lexical
    every = sorted(stream for batch in found for stream in batch)
    assert [a for a, _ in every] == [0, *(b for _, b in every[:-1])]
    assert every[-1][1] == len(index)
    inside = np.searchsorted(index.document_ends, [a for a, _ in every], side="right")
    assert (index.document_ends[inside] >= [b for _, b in every]).all()


def setting(index, words: int, most: int, world_size: int, max_sentences: int = 5):
    """Streams of the first stage, the bounds, and the number of batches."""
    bounds = Bounds(lexical=words, streams=most, sentence=LONGEST)
    streams = cut_documents(index, max_sentences=max_sentences, max_lexical=words)
    total = int(streams.lexical.sum())
    return streams, bounds, num_batches_for(total, len(streams), bounds, world_size)


@quick
@given(
    documents=st.one_of(documents, two_kinds),
    words=st.integers(LONGEST, 200),
    most=st.integers(1, 9),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 2**40),
)
def test_every_epoch_has_every_sentence_in_as_many_batches(
    make_index, documents, words, most, world_size, seed
):
    index = make_index(documents)
    _, bounds, number = setting(index, words, most, world_size)
    assume(len(index) >= number)
    assert number % world_size == 0
    for epoch, longest in enumerate((5, 8, 60)):
        streams = cut_documents(index, max_sentences=longest, max_lexical=words)
        batches = distribute(
            streams,
            index,
            num_batches=number,
            bounds=bounds,
            seed=seed,
            epoch=epoch,
            world_size=world_size,
        )
        check(batches, index, number, bounds)


@quick
@given(documents=st.one_of(documents, two_kinds), words=st.integers(9, 90), most=st.integers(2, 9))
def test_dealing_evenly_keeps_the_bounds_it_promises(make_index, documents, words, most):
    index = make_index(documents)
    streams, bounds, _ = setting(index, words, most, 1)
    total = int(streams.lexical.sum())
    number = max(math.ceil(total / (words - LONGEST)), math.ceil(len(streams) / (most - 1)))
    assume(len(index) >= number)
    pieces, batch = deal_evenly(
        dealing.split_until(streams, index, number), index, num_batches=number
    )
    check(dealing._ordered(pieces, batch, number, 0, 0, 1), index, number, bounds)


def test_streams_that_leave_a_sentence_over_are_dealt_evenly(make_index, monkeypatch):
    # The long streams fill batches to the last word, and the others are too many for the rest.
    index = make_index([[LONGEST] * 16] * 60 + [[1]] * 900)
    streams, bounds, number = setting(index, 128, 16, 1, max_sentences=16)
    called = []
    monkeypatch.setattr(
        dealing, "deal_evenly", lambda *a, **k: called.append(1) or deal_evenly(*a, **k)
    )
    batches = distribute(streams, index, num_batches=number, bounds=bounds, seed=0, epoch=0)
    assert called
    check(batches, index, number, bounds)


@pytest.mark.parametrize(
    ("total", "streams", "most", "world_size", "expected"),
    [
        (1_000_000, 1000, 64, 1, math.ceil(1.02 * 1_000_000 / 8192) + 1),
        (1_000_000, 90_000, 64, 1, math.ceil(1.02 * 90_000 / 64) + 1),
        (1_000_000, 1000, 64, 8, 128),
        (100, 5, 64, 1, 2),
        (100, 5, 64, 4, 4),
    ],
)
def test_num_batches_for(total, streams, most, world_size, expected):
    bounds = Bounds(lexical=8192, streams=most, sentence=64)
    assert num_batches_for(total, streams, bounds, world_size) == expected


def make_text(rng) -> list[list[int]]:
    return [rng.integers(1, LONGEST + 1, size=n).tolist() for n in rng.integers(1, 60, size=300)]


@pytest.fixture
def text(make_index):
    return make_index(make_text(np.random.default_rng(0)))


def deal(index, *, seed=0, epoch=0, world_size=1, words=300, most=20):
    streams, bounds, number = setting(index, words, most, world_size)
    return distribute(
        streams,
        index,
        num_batches=number,
        bounds=bounds,
        seed=seed,
        epoch=epoch,
        world_size=world_size,
    )


def test_batches_are_evenly_filled_with_words_and_long_streams(text):
    batches = deal(text)
    loads, long = [], []
    for batch in dealt(batches):
        first, stop = (np.array(side) for side in zip(*batch, strict=True))
        loads.append(text.lexical(first, stop).sum())
        long.append((stop - first > 4).sum())
    assert min(loads) > 0.9 * max(loads)
    assert max(long) < 1.3 * np.mean(long)
    assert min(long) > 0.7 * np.mean(long)


def test_the_longest_bucket_is_dealt_first_and_shuffled_inside():
    sentences = np.random.default_rng(0).integers(1, 31, size=500)
    order = dealing._bucket_order(sentences, 3, 1)
    assert sorted(order.tolist()) == list(range(500))
    buckets = np.split(sentences[order], np.flatnonzero(np.diff((sentences[order] - 1) // 5)) + 1)
    assert [(b.min(), b.max()) for b in buckets] == [(n + 1, n + 5) for n in range(25, -1, -5)]
    assert all((np.diff(b) > 0).any() and (np.diff(b) < 0).any() for b in buckets)
    assert order.tolist() != dealing._bucket_order(sentences, 3, 2).tolist()


def test_the_order_is_the_same_everywhere(make_index):
    index = make_index([[2] * n for n in (7, 1, 3, 12, 4, 9, 2, 6)])
    batches = deal(index, seed=7, epoch=1, words=20, most=3)
    assert batches.first.tolist() == FROZEN_FIRST
    assert batches.offsets.tolist() == FROZEN_OFFSETS


def test_the_batches_are_those_of_one_device_whatever_the_number_of_ranks(text):
    """As long as the number of batches is the same, only their order differs."""
    streams, bounds, number = setting(text, 300, 20, 4)
    options = {"num_batches": number, "bounds": bounds, "seed": 0, "epoch": 0}
    alone = distribute(streams, text, **options, world_size=1)
    shared = distribute(streams, text, **options, world_size=4)
    assert sorted(map(sorted, dealt(alone))) == sorted(map(sorted, dealt(shared)))


def test_ranks_have_batches_of_similar_length_in_every_step(make_index):
    rng = np.random.default_rng(1)
    index = make_index([[1] * n for n in rng.integers(1, 40, size=60)])
    streams, bounds, number = setting(index, 60, 4, 4, max_sentences=40)
    batches = distribute(
        streams, index, num_batches=number, bounds=bounds, seed=0, epoch=0, world_size=4
    )
    steps = np.maximum.reduceat(batches.sentences, batches.offsets[:-1]).reshape(-1, 4)
    assert steps.max() - steps.min() > 10
    in_order = np.sort(steps.max(1))
    assert (np.sort(steps.min(1))[1:] >= in_order[:-1]).all()  # groups do not overlap
    assert steps.max(1).tolist() != in_order.tolist()  # but they are shuffled


def test_a_split_with_fewer_sentences_than_batches_is_refused(make_index):
    index = make_index([[3, 3]])
    streams, bounds, number = setting(index, 100, 4, 4)
    with pytest.raises(ValueError, match=r"4 batches .*the train split has only 2"):
        distribute(streams, index, num_batches=number, bounds=bounds, seed=0, epoch=0, world_size=4)


def test_too_few_streams_are_halved(make_index):
    index = make_index([[1] * 9])
    streams, bounds, number = setting(index, 100, 4, 4, max_sentences=30)
    assert (len(streams), number) == (1, 4)
    batches = distribute(
        streams, index, num_batches=number, bounds=bounds, seed=0, epoch=0, world_size=4
    )
    check(batches, index, number, bounds)
    assert sorted(batches.sentences.tolist()) == [2, 2, 2, 3]


FROZEN_FIRST = [36, 32, 21, 23, 43, 11, 7, 38, 0, 8, 5, 27, 16]
FROZEN_OFFSETS = [0, 2, 4, 6, 8, 9, 11, 12, 13]
