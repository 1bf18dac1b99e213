"""Word problems of both formats, and answers that are compared as numbers."""

from pathlib import Path

import pytest

from datamodules.reasoning.gsm8k import Solved, read_solved, same_number
from tests.datamodules.reasoning.gsm8k.word_problems import ROWS, equations, write


def test_problems_of_both_formats(tmp_path):
    path = Path(write(tmp_path / "a.jsonl", ROWS[:2]))
    first, _ = read_solved(path, "files")
    assert first == Solved(ROWS[0]["question"], tuple(equations(2)), "6000")
    augmented = tmp_path / "a.txt"
    augmented.write_text("A || B?||<<1+1=2>> <<2*.5=1>> #### 1\n\nWhy?|| #### 1,200\n")
    assert list(read_solved(augmented, "files"))[1:] == [Solved("Why?", (), "1200")]
    assert next(read_solved(augmented, "files")).question == "A"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "Why?", "line 1: expected 'question|| *"),
        ("a.txt", "ok||<<1=1>> #### 1\n||<<1=1>> #### 1", "line 2: expected 'question"),
        ("a.txt", "Why?||<<1=1>>", "line 1: expected 'question"),
        ("a.txt", "\n", r"files \(.*a\.txt\) is empty"),
        ("a.txt", None, "there is no such file"),
        ("a.jsonl", '{"question": "a"}', "line 1: expected an object with the texts 'question'"),
        ("a.parquet", "", "not from parquet"),
    ],
)
def test_files_that_hold_no_problems(tmp_path, name, content, expected):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=expected.replace("||", r"\|\|")):
        list(read_solved(path, "files"))


def test_another_solution_is_another_problem():
    one = Solved("a", ("b", "c"), "1")
    assert one.identity == Solved("a", ("b", "c"), "2").identity
    others = [Solved("a", ("bc",), "1"), Solved("ab", ("c",), "1"), Solved("a", ("c", "b"), "1")]
    assert len({one.identity, *(other.identity for other in others)}) == 4


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 1200", True),
        ("$1,200.00.", True),
        ("1200.0", True),
        ("12e2", True),
        ("1200 cats", False),
        ("-1200", False),
        ("", False),
    ],
)
def test_answers_are_compared_as_numbers(text, right):
    assert same_number(text, " 1200") is right


def test_answers_that_are_no_numbers_are_compared_as_text():
    assert same_number(" a half ", "a half")
    assert not same_number("0.1", "0.10000000000000001")
