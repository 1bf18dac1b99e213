"""Detokenizers on lines in the manner of each benchmark, and on what they must leave alone."""

import pytest

from datamodules import detokenizers as undo
from datamodules.zero_shot import ZERO_SHOT_SETS

PTB = [
    ("the company 's shares rose", "the company's shares rose"),
    ("the workers ' pay", "the workers' pay"),
    ("it is n't black monday", "it isn't black monday"),
    ("a loss of $ N million or N cents", "a loss of $1 million or 1 cents"),
    ("between N N and N N of it", "between 1 1 and 1 1 of it"),
    ("rose # N to N", "rose #1 to N"),
    ("sold 1\\/2 of mr. <unk> 's stake", "sold 1/2 of mr. ?'s stake"),
    ("dow jones inc.", "dow jones inc."),
    ("a 'small number", "a 'small number"),
]
WIKITEXT = [
    ("= Robert Boulter =", "= Robert Boulter ="),
    ("= = Early life = =", "== Early life =="),
    ("= = = Stage = = =", "=== Stage ==="),
    (
        "a well @-@ known band of 1 @,@ 500 and 3 @.@ 5 kg .",
        "a well-known band of 1,500 and 3.5 kg.",
    ),
    ("He asked : who , when ; and why ? Then !", "He asked: who, when; and why? Then!"),
    ("the play ( 2006 ) by [ sic ] { a }", "the play (2006) by [sic] {a}"),
    ('" Herons , " she said .', '"Herons," she said.'),
    ("the term ' plate ' , ( \" iron \" )", "the term 'plate', (\"iron\")"),
    ("Boulter 's role ; they don 't", "Boulter's role; they don't"),
    ("the dogs ' tails and the cats ' paws", "the dogs' tails and the cats' paws"),
    (
        "at 45 \N{DEGREE SIGN} N and on . . . and N in it",
        "at 45\N{DEGREE SIGN}N and on... and N in it",
    ),
]
LM1B = [
    ("Having a good time , he said .", "Having a good time, he said."),
    ("He doesn 't know Bush 's plan .", "He doesn't know Bush's plan."),
    ("See http : / / www.a.com / b and https : / / c", "See http://www.a.com/b and https://c"),
    ("Why ? Stop ! Now ?", "Why? Stop! Now?"),
    ("It is : a ; b , and / or c", "It is: a; b, and/or c"),
    ('" I am , " she said ( today ) [ sic ] .', '"I am," she said (today) [sic] .'),
    ("It cost $ 5 or \N{POUND SIGN} 3 .", "It cost $5 or \N{POUND SIGN}3."),
    ("the ' fixer ' left", "the 'fixer' left"),
    ("In the U.S. it rose 3.5 percent", "In the U.S. it rose 3.5 percent"),
]
PAPERS = [
    (
        "in 2011 , 314 ( 296 - 331 ) million were ill .",
        "in 2011, 314 (296 - 331) million were ill.",
    ),
    ("it rose .\nit fell .", "it rose .\nit fell."),
    ("it rose . \n it fell .", "it rose .\nit fell."),
    ("see fig . @xcite ; we can 't", "see fig. @xcite; we can't"),
    ("a and / or b , at $ 5 [ 3 ]", "a and/or b, at $5 [3]"),
]


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        *[(undo.ptb, *pair) for pair in PTB],
        *[(undo.wikitext, *pair) for pair in WIKITEXT],
        *[(undo.lm1b, *pair) for pair in LM1B],
        *[(undo.scientific_papers, *pair) for pair in PAPERS],
    ],
)
def test_spaces_of_the_tokenisation_are_undone(function, text, expected):
    assert function(text) == expected


def test_lambada_gets_straight_quotation_marks_and_a_line_end_in_front():
    text = " \N{LEFT DOUBLE QUOTATION MARK}go,\N{RIGHT DOUBLE QUOTATION MARK} he said\nto it \n"
    assert undo.lambada(text) == '\n"go," he said\nto it'


def test_text_as_people_write_it_stays():
    text = 'He said, "It\'s 3.5 (about $4)." Then? See http://a.com/b; it\'s "well-known" [1].'
    for function in (undo.ptb, undo.wikitext, undo.lm1b, undo.scientific_papers, undo.unchanged):
        assert function(text) == text


@pytest.mark.parametrize("name", ZERO_SHOT_SETS)
def test_a_text_twice_detokenised_is_the_same(name):
    row = "the firms ' 1 , 2 ( 3 ) said it was n't \" so \" . The man 's . \n And 4 @-@ 5 ?"
    once = ZERO_SHOT_SETS[name].detokenizer(row)
    assert ZERO_SHOT_SETS[name].detokenizer(once) == once
    assert once.strip()
