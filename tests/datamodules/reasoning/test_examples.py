"""A question with markers, and with them written into it."""

import pytest

from datamodules.reasoning import Example


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
        ({"query": "", "markers": (0, 0)}, "query, answer or a step is empty"),
        ({"answer": ""}, "query, answer or a step is empty"),
    ],
)
def test_broken_examples(change, message):
    right = {"query": "one two", "steps": ("a", "b"), "markers": (0, 7), "answer": " 4"}
    Example(**right)
    with pytest.raises(ValueError, match=message):
        Example(**{**right, **change})
