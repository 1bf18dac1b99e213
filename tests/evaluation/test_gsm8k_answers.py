"""The number that a text gives as its answer."""

from pathlib import Path

import pytest

from datamodules.gsm8k import Problem, read_problems, without_annotations
from evaluation.gsm8k import extract_answer, gold_answer, plain_number

COPY = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # after ####
        (" 2 * 9 = 18\n#### 18", "18"),
        ("#### 18\nThat leaves 3.", "18"),
        ("####18", "18"),
        ("#### $18.00 and 4 more", "18"),
        ("#### The answer is 7 of 9", "7"),
        ("#### 1\n#### 2", "1"),
        ("It is 12\n####", "12"),
        ("It is 12\n#### none\nor 13", "13"),
        # the last number
        (" She has 3 cats and 4 dogs, which makes 7.", "7"),
        ("16 - 3 - 4 = 9 eggs", "9"),
        ("", None),
        (" many, many", None),
        # before the next question
        (" 5 apples\n\nQuestion: How many are 3 and 4?\nAnswer: 7\n#### 7", "5"),
        ("Question: 7", None),
        # forms of one number
        ("18.00", "18"),
        ("18.50", "18.5"),
        ("018", "18"),
        ("0.50", "0.5"),
        (" .5", "0.5"),
        ("18.", "18"),
        ("$1,234,567.80.", "1234567.8"),
        ("1,000", "1000"),
        ("1, 2, 3", "3"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("40%", "40"),
        ("\u20ac40", "40"),
        ("\u00a340", "40"),
        ("Rs.50", "50"),
        ("20th", "20"),
        ("**42**", "42"),
        ("\\boxed{42}", "42"),
        ("000", "0"),
        ("\u0664\u0662 and 6", "6"),
        # negative ones
        ("-7", "-7"),
        ("= -7.0 degrees", "-7"),
        ("\u22127", "-7"),
        ("-$7", "-7"),
        ("$-7", "-7"),
        ("10-7", "7"),
        ("10 - 7", "7"),
        ("(2)-7", "7"),
        ("a 5-7", "7"),
        ("-0", "0"),
        # fractions are not worked out
        ("1/2", "1/2"),
        ("$3/4", "3/4"),
        ("6/2 = 3", "3"),
        ("$20/hour", "20"),
    ],
)
def test_extraction(text, expected):
    assert extract_answer(text) == expected


def test_long_numbers_keep_all_digits():
    digits = "12345678901234567890123456789012345678901"
    assert extract_answer(f"= {digits}") == digits
    assert extract_answer(f"= {digits}.10") == f"{digits}.1"
    assert plain_number("0.1") != plain_number("0.10000000000000001")


def test_gold_answers():
    assert gold_answer(Problem("q", "5\n#### -1,080.00"), "question 1") == "-1080"
    assert gold_answer(Problem("q", "5\n#### $40%"), "question 1") == "40"
    with pytest.raises(ValueError, match="question 3: the result, '5 apples', is not a number"):
        gold_answer(Problem("q", "5\n#### 5 apples"), "question 3")


@pytest.mark.skipif(not COPY.is_dir(), reason="there is no copy of GSM8K next to the project")
@pytest.mark.parametrize("split", ["train", "test"])
def test_published_answers_are_found_right(split):
    problems = read_problems(COPY / f"{split}.jsonl", "files").rows
    without_mark = 0
    for number, problem in enumerate(problems):
        gold = gold_answer(problem, f"question {number}")
        # A second way to the same number: digits, sign and point, no pattern.
        plain = problem.answer.split("####")[1].replace(",", "").strip()
        assert float(gold) == float(plain)
        for answer in (problem.answer, without_annotations(problem.answer)):
            assert extract_answer(f" {answer}\n\nQuestion: How many are 99?") == gold
        solution = without_annotations(problem.answer).partition("####")[0]
        without_mark += extract_answer(solution) == gold
    # Most solutions end in their result, so the last number is a fair guess without the mark.
    assert without_mark > 0.85 * len(problems)
