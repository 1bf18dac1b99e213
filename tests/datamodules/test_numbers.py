"""Spellings of numbers, each with its value by hand, for every command that judges answers."""

import pytest

from datamodules import ReasoningGSM8K
from datamodules.numbers import numbers_in, read_number
from evaluation.tasks.pass_at_k import extract_answer, pass_rates

SPELLINGS = [
    ("5%", "5"),
    ("5 percent", None),  # words are not read
    ("12.50 %", "12.5"),
    ("\u22125", "-5"),
    ("\u20135", "-5"),
    ("- 5", "-5"),
    ("+5", "5"),
    ("\u00a35", "5"),
    ("\u20ac 1,200.00", "1200"),
    ("5\u20ac", "5"),
    ("-$5", "-5"),
    ("$-5.", "-5"),
    ("1_000", "1000"),
    ("1_0", None),  # no thousands
    ("1'000", "1000"),
    ("1\u202f000", "1000"),
    ("1 000", None),  # may be two numbers
    ("1,234,567", "1234567"),
    ("12,34,567", "1234567"),
    ("1,2", None),
    ("1.234", "1.234"),
    ("\u0664\u0662", "42"),
    ("\u0661\u066c\u0662\u0663\u0664\u066b\u0665", "1234.5"),
    ("\uff11\uff12", "12"),
    ("1e3", "1000"),
    ("2.5E-1", "0.25"),
    ("1/2", "0.5"),
    ("2/6", "1/3"),
    ("1 1/2", "1.5"),
    ("-1 1/2", "-1.5"),
    ("1\u00bd", "1.5"),
    ("\u2153", "1/3"),
    ("\\frac{3}{4}", "0.75"),
    ("-1\\dfrac12", "-1.5"),
    ("\\boxed{1{,}234}", "1234"),
    ("$\\boxed{\\frac{1}{2}}$.", "0.5"),
    ("\\(1\\,234\\)", "1234"),
    ("\\$5", "5"),
    ("5\\%", "5"),
    ("**7**", "7"),
    ("007.0", "7"),
    (".5", "0.5"),
    ("-0", "0"),
    ("", None),
    ("nan", None),
    ("five", None),
    ("5 apples", None),
    ("1/0", "1/0"),
    ("10/12/2020", "10/12/2020"),
]


@pytest.mark.parametrize(("text", "value"), SPELLINGS)
def test_spellings(text, value):
    assert read_number(text) == value
    assert read_number(f" {text}\n") == value
    if value is not None:
        judge = ReasoningGSM8K.is_right
        assert judge(None, f" {text}", f" {value}")
        assert judge(None, value, text)
        assert not judge(None, f" {text}", f"{value}1")
        assert extract_answer(f" {text}") == extract_answer(f"It is 3.\n#### {text}") == value
        assert pass_rates({"answer": f"It is 3.\n#### {text}"}, [[value]])["pass_at_k"] == 1


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("10-4 = 6, not -6 or \u22127", ["10", "4", "6", "-6", "-7"]),
        ("- 5 cats, 9 - 5 dogs, = - 5", ["5", "9", "5", "-5"]),  # only one of them is a sign
        ("2 1/2 hours at $1,234.50 an hour", ["2.5", "1234.5"]),
        ("1_000 is 1e3, 5e and 20th", ["1000", "1000", "5", "20"]),
        ("\u0664\u0662 and 6", ["42", "6"]),
    ],
)
def test_numbers_of_running_text(text, values):
    assert numbers_in(text) == values


def test_long_numbers_keep_all_digits():
    digits = "12345678901234567890123456789012345678901"
    assert read_number(digits) == digits
    assert read_number(f"{digits}.10") == f"{digits}.1"
    assert read_number("0.1") != read_number("0.10000000000000001")
    assert read_number("9" * 5000) == "9" * 5000  # more than Python turns into an int


def test_answers_that_are_no_numbers_are_compared_as_text():
    judge = ReasoningGSM8K.is_right
    assert judge(None, " a half. ", "a half")
    assert not judge(None, "1200 cats", " 1200")
    assert not judge(None, "", " 1200")
