"""Sentences of a split by number, and documents cut into streams."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.sentences import corpus as indexing
from datamodules.sentences.streams import Curriculum, cut_documents, longest_prefix

documents = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=30), min_size=1, max_size=9)
quick = settings(max_examples=60, deadline=None)


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


def test_an_index_that_cannot_be_written_is_kept_in_memory(stored, monkeypatch):
    data, expected = stored

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(indexing, "FileLock", full)
    with pytest.warns(UserWarning, match=r"train-sentences cannot be written .No space left"):
        assert data.sentences("train").ends.tolist() == expected


def test_a_read_only_index_is_read(stored, monkeypatch):
    data, expected = stored
    assert data.sentences("train").ends.tolist() == expected

    def read_only(*_):
        raise PermissionError("Read-only file system")

    monkeypatch.setattr(indexing, "FileLock", read_only)
    monkeypatch.setattr(indexing, "_scan", None)
    assert data.sentences("train").ends.tolist() == expected


def test_an_index_is_pickled_by_path(stored):
    data, expected = stored
    index = data.sentences("train")
    assert index.ends.tolist() == expected
    pickled = pickle.dumps(index)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).ends.tolist() == expected
