"""The numbers that a text mentions, and the rule that places equations by them."""

from fractions import Fraction

import pytest

from datamodules.reasoning.placement import (
    IMPLIED,
    STATED,
    PlacementRule,
    counts_of,
    mentions_of,
    operands,
    result,
)

# ---- numbers


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
        ("two hundred", {"2", "200"}),
        ("a hundred, a thousand", {"100", "1000"}),
        ("3 million", {"3", "3000000"}),
        ("two dozen", {"2", "12", "24"}),
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


# ---- the rule


def marked(query, *equations, **options):
    """The query with a bar at each marker, and the verdicts."""
    placed = PlacementRule(**options)(query, equations)
    text = query
    for place in sorted(placed.markers, reverse=True):
        text = text[:place] + "|" + text[place:]
    return text, list(placed.verdicts)


def test_sides_of_an_equation():
    assert operands("<<30/100*2,000=600>>") == [30, 100, 2000]
    assert operands("<<.5+5*5=25.5>>") == [Fraction(1, 2), 5, 5]
    assert result("<<.5+5*5=25.5>>") == Fraction(51, 2)
    assert operands("<<5=5>>") == [5]
    assert result("<<2=x>>") is None


def test_the_example_of_the_paper():
    query = (
        "Hannah has three dogs. The first dog eats 1.5 cups of dog food a day. The second dog eats "
        "twice as much while the third dog eats 2.5 cups more than the second dog. How many cups "
        "does she need for her three dogs?"
    )
    text, verdicts = marked(query, "<<1.5*2=3>>", "<<3+2.5=5.5>>", "<<1.5+3+5.5=10>>")
    assert text == query.replace("twice", "twice|").replace("eats 2.5", "eats 2.5||")
    assert verdicts == ["decided", "tie", "tie"]  # 3 cups, or three dogs


TIE, SURE, LACKS = "tie", "decided", "missing"


@pytest.mark.parametrize(
    ("query", "steps", "expected", "verdicts"),
    [
        # from the text, or from earlier steps
        ("4 and 5, then 6.", ["4+5=9", "9-6=3", "9*3=27"], "4 and 5|, then 6||.", [SURE] * 3),
        # markers never go back
        ("A 3, a 4, a 5.", ["4+5=9", "3+4=7"], "A 3, a 4, a 5||.", [SURE] * 2),
        # a tie takes the earliest source
        ("2 of 9, or 9 of them", ["2*9=18"], "2 of 9|, or 9 of them", [TIE]),
        ("9 of 9, then 2", ["2*9=18"], "9 of 9, then 2|", [SURE]),
        # a value that is used twice needs two sources, if there are two
        ("Ann has 5, Bob 5, Cem 5.", ["5+5=10"], "Ann has 5, Bob 5|, Cem 5.", [TIE]),
        ("A square of 5 ft.", ["5*5=25"], "A square of 5| ft.", [SURE]),
        # a result is a source of its value
        ("6 and 2, later 8 and 3.", ["6+2=8", "8/2=4"], "6 and 2||, later 8 and 3.", [SURE, TIE]),
        # a missing operand sends the step, and those after it, to the end; 1 is taken for granted
        (
            "2 and 3 and 4.",
            ["2+3=5", "7*3=21", "2+4=6"],
            "2 and 3| and 4.||",
            [SURE, LACKS, SURE],
        ),
        ("Take 6.", ["6-1=5"], "Take 6|.", [SURE]),
    ],
)
def test_where_steps_go(query, steps, expected, verdicts):
    assert marked(query, *(f"<<{step}>>" for step in steps)) == (expected, verdicts)


def test_implied_numbers_count_only_without_others():
    placed = PlacementRule()("He saves $3 each month of the year.", ["<<3*12=36>>"])
    assert placed.implied == (True,)
    assert placed.verdicts == ("tie",)  # a month may be 12 of something, too
    assert placed.markers == (len("He saves $3 each month"),)
    text, verdicts = marked("Each month of the year $3 for 12 men.", "<<3*12=36>>")
    assert (text, verdicts) == ("Each month of the year $3 for 12| men.", ["decided"])


def test_waiting_for_the_clause_the_sentence_or_the_end():
    query = "Buy 4.5 lbs at $2 each, Mr. X. What is it, for 3?"
    steps = ("<<4.5*2=9>>", "<<9*3=27>>")
    assert marked(query, *steps)[0] == "Buy 4.5 lbs at $2| each, Mr. X. What is it, for 3|?"
    assert marked(query, *steps, at="clause")[0] == (
        "Buy 4.5 lbs at $2 each,| Mr. X. What is it, for 3?|"
    )
    assert marked(query, *steps, at="sentence")[0] == (
        "Buy 4.5 lbs at $2 each, Mr.| X. What is it, for 3?|"
    )
    assert marked("2 of 3, or so", "<<2*3=6>>", at="sentence")[0] == "2 of 3, or so|"
    last = marked("2 and 3. And?", "<<2+3=5>>", "<<5+2=7>>", last_at_end=True)[0]
    assert last == "2 and 3|. And?|"
    with pytest.raises(ValueError, match=r"place_at='word' must be one of operand, clause"):
        PlacementRule(at="word")


def test_reports_count_steps_and_the_worst_of_an_example():
    placed = PlacementRule()("2 and 3 and 2.", ["<<2+3=5>>", "<<7*3=21>>"])
    counts = {name: count for name, count in counts_of(placed).items() if count}
    assert counts == {
        "rule: steps decided by a tie": 1,
        "rule: steps missing an operand": 1,
        "rule: examples missing an operand": 1,
    }
    assert PlacementRule()("Why?", []).verdict == "decided"
