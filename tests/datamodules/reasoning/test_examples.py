"""A question with markers, and the token after which all in front of each has been read."""

import random
from itertools import pairwise

import numpy as np
import pytest

from datamodules.reasoning import Example
from datamodules.reasoning.examples import align, marker_tokens


def test_an_example_and_its_marked_text():
    marked = "<T>one<T> two<T><T>"
    example = Example.from_marked(marked, ["a", "b", "c", "d"], " 4", group=2)
    assert (example.query, example.markers) == ("one two", (0, 3, 7, 7))
    assert example.marked() == marked
    assert example.marked("|") == "|one| two||"
    assert Example.from_marked("x#y", ["s"], "a", marker="#").markers == (1,)


def test_text_in_front():
    example = Example.from_marked("Bob has 3.<T> He eats 1. How<T> many?<T>", "abc", " 2")
    after = example.after("Now. ")
    assert after.marked() == "Now. " + example.marked()
    assert (after.steps, after.answer) == (example.steps, example.answer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": ("a",)}, "1 steps have 2 markers"),
        ({"markers": (3, 1)}, r"markers=\(3, 1\) are not in order"),
        ({"markers": (1, 8)}, r"markers=\(1, 8\) are not in order within"),
        ({"markers": (-1, 2)}, r"markers=\(-1, 2\) are not in order within"),
        ({"steps": ("a", "")}, "a step is empty"),
        ({"query": "", "markers": (0, 0)}, "the query, the answer or a step is empty"),
        ({"answer": ""}, "the query, the answer or a step is empty"),
    ],
)
def test_broken_examples(change, message):
    right = {"query": "one two", "steps": ("a", "b"), "markers": (0, 7), "answer": " 4"}
    Example(**right)
    with pytest.raises(ValueError, match=message):
        Example(**{**right, **change})


# ---- the token of each step


def sizes_of(*tokens: str) -> np.ndarray:
    return np.array([len(token.encode()) for token in tokens])


def placed(marked: str, *tokens: str) -> list[int]:
    """Places of the markers of a text that consists of these tokens."""
    example = Example.from_marked(marked, ["s"] * marked.count("<T>"), "a")
    assert example.query == "".join(tokens)
    return align(example.query, example.markers, sizes_of(*tokens)).places.tolist()


HEADS = ["A", " coin", "'s", " state", " is", " heads", ".", " Alice", " flips", ","]
HEADS += [" then", " Bob", " flips", ".", " What's", " the", " state", "?"]
PAPER = "A coin's state is heads.<T> Alice flips,<T> then Bob flips.<T> What's the state?"
WORDS = ("one", " two", " three", " four")


@pytest.mark.parametrize(
    ("marked", "tokens", "places"),
    [
        (PAPER, HEADS, [7, 10, 14]),  # the EOS in front is 0
        # inside a token: that token
        ("one t<T>wo three", ("one", " two", " three"), [2]),
        ("one two<T>-three", ("one", " two-three"), [2]),
        # spaces in front of a marker do not count
        ("one <T>two three four", WORDS, [1]),
        ("one<T> two three four", WORDS, [1]),
        ("one  \n<T>two", ("one", "  \n", "two"), [1]),
        # nothing in front: the EOS in front of the query
        ("<T>one two", ("one", " two"), [0]),
        (" <T>one", (" one",), [0]),
        # at the end: the last token
        ("one two<T>", ("one", " two"), [2]),
        ("one two \n<T>", ("one", " two", " \n"), [2]),
        ("\u00fc\u4f60<T>\u597d", ("\u00fc", "\u4f60", "\u597d"), [2]),
        # consecutive markers: successive tokens, from the first one
        ("one<T><T><T> two three four", WORDS, [1, 2, 3]),
        ("one<T> <T>two<T> three four", WORDS, [1, 2, 3]),
        # a row moves later ones on, but no further than it must
        ("a<T><T><T>b<T>cde<T>fg", tuple("abcdefg"), [1, 2, 3, 4, 5]),
        ("a<T><T>bcde<T>fg", tuple("abcdefg"), [1, 2, 5]),
        # what would lie after the end is joined at the last token
        ("ab<T>c<T><T><T>", tuple("abc"), [2, 3, 3, 3]),
        ("<T><T><T>a", ("a",), [0, 1, 1]),
    ],
)
def test_places(marked, tokens, places):
    assert placed(marked, *tokens) == places


def test_tokens_that_cut_a_character():
    """It is read after the last of its bytes."""
    sizes = np.array([2, 1, 2, 3, 1])  # u umlaut, then three and one bytes of two characters
    assert marker_tokens("\u00fc\u4f60\u597d", [1, 2, 3], sizes).tolist() == [1, 3, 4]


def test_shifts_say_how_far_a_step_was_moved():
    found = align("abcde", (1, 1, 2, 5, 5), np.ones(5, dtype=np.int64))
    assert found.places.tolist() == [1, 2, 3, 5, 5]
    assert found.shifts.tolist() == [0, 1, 1, 0, 0]


# ---- against a slow version


def slow_places(query, markers, tokens):
    """Reads the query token by token, and gives each step the first token that is free."""
    places = []
    for marker in markers:
        front, read, token = query[:marker].rstrip().encode(), b"", 0
        while len(read) < len(front):
            read += tokens[token]
            token += 1
        while token in places and token < len(tokens):
            token += 1
        places.append(max(token, *places) if places else token)
    return places


def random_case(rng):
    query = "".join(
        rng.choice(["a", "b", " ", ".", "\u00e9", "\u4f60", "\U0001f600"])
        for _ in range(rng.randint(1, 12))
    )
    raw = query.encode()
    cuts = sorted({0, len(raw), *(rng.randrange(len(raw) + 1) for _ in range(rng.randint(0, 9)))})
    tokens = [raw[a:b] for a, b in pairwise(cuts)]
    markers = sorted(rng.randint(0, len(query)) for _ in range(rng.randint(0, 6)))
    return query, markers, tokens


def test_any_text_any_tokens():
    rng = random.Random(0)
    for _ in range(500):
        query, markers, tokens = random_case(rng)
        sizes = np.array([len(token) for token in tokens])
        found = align(query, markers, sizes)
        places = found.places.tolist()
        assert places == slow_places(query, markers, tokens), (query, markers, tokens)
        assert places == sorted(places)
        assert all(a < b or b == len(tokens) for a, b in pairwise(places))
        read = np.cumsum([0, *sizes])[found.places]
        needed = [len(query[:marker].rstrip().encode()) for marker in markers]
        assert all(read >= needed)
        own = marker_tokens(query, markers, sizes)
        assert (found.shifts == found.places - own).all()
        assert (found.shifts >= 0).all()
