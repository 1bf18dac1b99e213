"""Numbers that a text mentions."""

import pytest

from datamodules.reasoning.placement import IMPLIED, STATED, mentions_of


def stated(text):
    """(value as text, where it ends as the text in front) of what is said."""
    return {(str(m.value), text[: m.end]) for m in mentions_of(text) if m.stated}


def values(text, *, said=True):
    return {str(m.value) for m in mentions_of(text) if m.stated is said}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 and 1,200.50, or .5", {"7", "2401/2", "1/2"}),
        ("$3, -4, 5th, 6-inch, 7x", {"3", "4", "5", "6", "7"}),
        ("12,34", {"12", "34"}),
        ("30% and 40 percent", {"30", "3/10", "40", "2/5"}),
        ("fifty percent", {"50", "1/2"}),
        ("40 cents, 5¢", {"40", "2/5", "5", "1/20"}),
        ("3/4", {"3", "4", "3/4"}),
        ("1 1/2", {"1", "3/2", "1/2", "2"}),
        ("three quarters", {"3", "4", "3/4", "1/4", "1"}),
        ("a third", {"3", "1/3"}),
        ("one-fifth", {"1", "5", "1/5"}),
        ("the third", set()),
        ("2 and a half", {"2", "5/2", "1/2", "1"}),
        ("twenty-five", {"25"}),
        ("Twenty five", {"25"}),
        ("two hundred and six", {"206"}),
        ("a hundred", {"100"}),
        ("three thousand, two hundred", {"3200"}),
        ("3 million", {"3", "3000000"}),
        ("two dozen", {"2", "12", "24"}),
        ("half a dozen", {"1/2", "2", "1", "12", "6"}),
        ("doubled, twice, both", {"2"}),
        ("tripling", {"3"}),
        ("someone often", set()),
        ("B12", set()),
        ("1/0", {"1"}),
    ],
)
def test_numbers_that_are_said(text, expected):
    assert values(text) == expected


def test_a_number_ends_where_it_is_complete():
    text = "He ate 30% of twenty-five cakes, half of 2 dozen"
    assert stated(text) >= {
        ("3/10", "He ate 30%"),
        ("30", "He ate 30%"),
        ("25", "He ate 30% of twenty-five"),
        ("1/2", "He ate 30% of twenty-five cakes, half"),
        ("24", text),
    }


def test_numbers_that_are_implied():
    assert values("20% off", said=False) == {"100", "80", "120", "4/5", "6/5", "1/100"}
    assert values("2/5 of it", said=False) == {"3/5", "3"}
    assert {"12", "365", "52"} <= values("yearly", said=False) | values("years", said=False)
    assert values("$", said=False) == {"100"}


@pytest.mark.parametrize("table", [STATED, IMPLIED])
def test_every_word_of_the_tables_is_found(table):
    for word, expected in table.items():
        found = values(word, said=table is STATED)
        assert set(map(str, expected)) <= found, word


def test_a_long_text_of_numbers_takes_no_long_time():
    text = "one hundred and " * 500 + "1 1/2 " * 500
    assert len(mentions_of(text)) > 1000  # patterns that backtrack would not come back
