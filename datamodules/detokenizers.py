"""Detokenisers that turn the spaced-out tokens of benchmarks back into running text.

The benchmarks were published as space-separated tokens. Current models were trained on running
text, so papers undo those spaces before they score (Radford et al., 2019, section 3.1, and every
paper since). Each function here is a list of rules, applied from first to last.

The rules agree with the usual scripts on ordinary sentences. NOTE(paper): they differ in a few rare
cases in which those scripts damage text. In Wikipedia a row of dots (``. . .``) closes up, every
``don 't`` is joined, no space next to an apostrophe is removed by mistake, and a letter N between
two words remains (the scripts write 1, which is right for PTB only).
"""

import re
from collections.abc import Callable

Detokenizer = Callable[[str], str]
_Rule = tuple[re.Pattern[str], str]

VERSION = 1
"""Incremented when a rule changes, so that text stored under the old rules is not reused."""

_END = r"(?= |$)"  # before a space, or at the end of the text; not before a line ending


def _rules(*pairs: tuple[str, str]) -> list[_Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


def _apply(rules: list[_Rule], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


# Text within a pair of marks loses the spaces next to both.
_PAIRS = _rules(
    (r"\( *([^()]*?) *\)", r"(\1)"),
    (r"\[ *([^][]*?) *\]", r"[\1]"),
    (r"\{ *([^{}]*?) *\}", r"{\1}"),
    (r'(?<!\w)" ([^"]+?) "(?!\w)', r'"\1"'),
    (r"(?<!\w)' ([^']+?) '(?!\w)", r"'\1'"),
)

_PTB = _rules(
    (r" (?='s\b)", ""),  # company 's
    (r"(?<=s) '(?= )", "'"),  # workers ' pay
    (r" (?=n't\b)", ""),  # is n't
    (r"\\/", "/"),  # 1\/2
    (r"(?<= )N(?= )", "1"),  # a number
    (r"([$#]) (?=1)", r"\1"),  # $ N million
    (r"<unk>", "?"),  # a rare word
)

_LINE_ENDS = _rules((r" ?\n ?", "\n"))

_WIKITEXT = [
    *_rules(
        (rf"(?<=s) '{_END}", "'"),
        (r"(?<=\w) '(?=\w)", "'"),  # don 't
        (r" @([-,.])@ ", r"\1"),  # well @-@ known, 1 @,@ 000, 3 @.@ 5
        (rf" ([.,;:!?]){_END}", r"\1"),
    ),
    *_PAIRS,
    *_rules(
        (r"(?<==) (?==)", ""),  # = = Section = =
        (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
        (r" (?='s\b)", ""),  # after a quotation mark or bracket
    ),
]

_LM1B = [
    *_rules(
        (r"\b(https?) : / / ", r"\1://"),
        (r" '(?=\w)", "'"),  # don 't, Bush 's
        (rf"(?<= )(\w+) \.{_END}", r"\1."),
        (rf" ([?!]){_END}", r"\1"),
        (r" ([,:;])(?= )", r"\1"),
        (r" / ", "/"),
    ),
    *_PAIRS,
    *_rules(("([$\N{POUND SIGN}]) ", r"\1")),
]

_STRAIGHT = str.maketrans(
    {"\N{LEFT DOUBLE QUOTATION MARK}": '"', "\N{RIGHT DOUBLE QUOTATION MARK}": '"'}
)


def ptb(text: str) -> str:
    """Returns a sentence of the Penn Treebank: suffixes joined, N as 1, ``<unk>`` as ?."""
    return _apply(_PTB, text)


def wikitext(text: str) -> str:
    """Returns a line of WikiText: marks joined, ``@-@`` undone, headings as ``== Heading ==``."""
    return _apply(_WIKITEXT, text)


def lm1b(text: str) -> str:
    """Returns a sentence of the One Billion Word Benchmark with its marks joined."""
    return _apply(_LM1B, text)


def lambada(text: str) -> str:
    """Returns a passage of LAMBADA after a line ending, with straight double quotation marks."""
    return "\n" + text.translate(_STRAIGHT).strip()


def scientific_papers(text: str) -> str:
    """Returns a paper of PubMed or arXiv, after the rules of WikiText and LM1B, in that order.

    Each line is a sentence. Its full stop stays separate (``word .``), as in the usual scripts,
    whose rules require a space after it.
    """
    return _apply([*_LINE_ENDS, *_WIKITEXT, *_LM1B], text)


def unchanged(text: str) -> str:
    """Returns the text unchanged."""
    return text
