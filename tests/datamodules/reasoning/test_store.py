"""What is stored of examples comes back, and what is derived from it."""

import pickle

import numpy as np
import pytest

from datamodules.reasoning import Example
from datamodules.store import SPLITS
from tests.datamodules.reasoning.reasoning_tasks import OWN, task


def texts_of(data, split):
    """(query, steps, places, answer, group) of each stored example, decoded."""
    examples, decode = data.stored(split), data.tokenizer.decode

    def text(start, length):
        return decode(examples.stream.gather(np.arange(start, start + length)).tolist())

    found = []
    for i in np.arange(len(examples)):
        steps = np.arange(int(examples.num_steps(i)))
        starts, lengths, places = examples.steps(np.full_like(steps, i), steps)
        own = [text(*span) for span in zip(starts, lengths, strict=True)]
        query, answer = text(*examples.queries(i)), text(*examples.answers(i))
        found.append((query, own, places.tolist(), answer, int(examples.groups(i))))
    return found


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:265"])
def test_everything_comes_back(make, tokenizer):
    data = make(tokenizer=tokenizer)
    for split in SPLITS:
        expected = [Example.from_marked(*row, group=i) for i, row in enumerate(OWN[split])]
        found = texts_of(data, split)
        assert [(q, s, a, g) for q, s, _, a, g in found] == [
            (one.query, list(one.steps), one.answer, one.group) for one in expected
        ]
        for (query, _, places, *_), example in zip(found, expected, strict=True):
            ids = data.tokenizer.encode(query)
            for place, marker in zip(places, example.markers, strict=True):
                assert data.tokenizer.decode(ids[:place]).startswith(query[:marker].rstrip())


def test_places_of_bytes(make):
    places = [row[2] for row in texts_of(make(), "train")]
    assert places == [[3, 11], [0, 5, 5, 5], [], [3], [9, 15]]  # the e acute has two bytes
    assert make().report()["train"]["steps joined at the end of their query"] == 2


def test_a_moved_step_may_cross_into_another_chunk(make):
    data = make(
        task(train=[("abcdefgh<T><T>ij", ["1", "2"], " a"), ("ab<T><T>cd", ["1", "2"], " a")])
    )
    # rows of 11 and 5 tokens with EOS; chunks end with the query
    crossed = {c: data.stored("train").crossings(c) for c in (1, 2, 3, 4, 8, 64)}
    assert crossed == {1: 2, 2: 2, 3: 0, 4: 0, 8: 0, 64: 0}
    key = "examples with a step moved out of its chunk of 2"
    assert data.report(chunk_size=2)["train"][key] == 2
    assert data.report(chunk_size=2)["test"][key] == 0


def test_the_longest_thought_is_the_longest_chunk_of_steps_joined(make):
    data = make()  # the longest one is about a query of 6 tokens with EOS, places 0, 5, 5, 5
    joined = len("bb") + len("ccc") + len("dddd") + 2
    assert {c: data.longest_thought(c) for c in (1, 5, 6, 64)} == {
        1: joined,
        5: joined,
        6: joined + len("a") + 1,
        64: joined + len("a") + 1,
    }
    assert make(task(train=[("One two", [], " a")]), repeats=2).longest_thought(4) == 0
    neighbours = [("ab<T>", ["12"], " a"), ("<T>b", ["345"], " a")]  # two thoughts, not one
    assert make(task(train=neighbours), repeats=3).longest_thought(64) == 3


def test_rows_are_as_long_as_a_scored_one_is_on_average(make):
    data = make()
    rows = [1 + len(q.replace("<T>", "")) + 14 + len(a) + 1 for q, _, a in OWN["val"]]
    assert data.row_tokens("val") == pytest.approx(sum(rows) / 3, abs=0.5)


def test_examples_are_pickled_by_path(make):
    data = make(repeats=200)
    examples = data.stored("train")
    pickled = pickle.dumps(examples)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    everything = np.arange(len(examples))
    assert len(again) == 1000
    for name in ("queries", "answers"):
        for mine, theirs in zip(
            getattr(again, name)(everything), getattr(examples, name)(everything), strict=True
        ):
            assert np.array_equal(mine, theirs)
