"""Where a text mentions numbers, and which.

| written | stated | implied |
|---|---|---|
| ``7``, ``1,200.50``, ``.5``, ``$3`` | the number | |
| ``30%``, ``30 percent`` | 30, 3/10 | 100, what is left (70, 7/10), what it grows to (13/10) |
| ``40 cents`` | 40, 2/5 | 100 |
| ``3/4``, ``three quarters`` | 3/4, 3, 4 | what is left (1/4, 1) |
| ``1 1/2``, ``2 and a half`` | the sum, and its parts | |
| ``seven``, ``twenty-five``, ``two hundred and six``, ``a thousand`` | the number | |
| ``3 million``, ``two dozen`` | the product, and its parts | |
| words of `number_words.STATED` (twice, half, dozen, ...) | theirs | |
| words of `number_words.IMPLIED` (week, foot, cent, ...) | | theirs |
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from datamodules.reasoning.gsm8k.number_words import (
    DENOMINATORS,
    IMPLIED,
    SCALES,
    STATED,
    TEENS,
    TENS,
    UNITS,
)

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"


def _any(words: Iterable[str]) -> str:
    """Returns a group that matches the longest of the words."""
    return f"(?:{'|'.join(sorted(words, key=len, reverse=True))})"


_UNIT, _SCALE, _PART = _any(UNITS), _any([*SCALES, "dozen"]), _any(DENOMINATORS)
_LARGE = _any(scale for scale in SCALES if scale != "hundred")
_SMALL = rf"(?:{_any(TENS)}(?:[-\s]{_UNIT}\b)?|{_any(TEENS)}|{_UNIT})"
_HUNDREDS = rf"(?:(?:{_SMALL}|a)[-\s]hundred\b(?:(?:\sand)?\s{_SMALL}\b)?|{_SMALL})"
_THOUSANDS = rf"(?:{_HUNDREDS}|a)[-\s]{_LARGE}\b(?:,?(?:\sand)?\s{_HUNDREDS}\b)?"
_CARDINAL = rf"(?:{_THOUSANDS}|{_HUNDREDS}|a(?=\s{_PART}))"
_NUMBER = re.compile(
    rf"(?:(?<![\w.])(?P<digits>{_DIGITS})(?:\s?/\s?(?P<below>{_DIGITS}))?"
    rf"|\b(?P<words>{_CARDINAL})\b)"
    r"(?:(?P<percent>\s?%|[-\s]percent\b)|(?P<cents>\s?¢|[-\s]cents?\b))?",
    re.IGNORECASE,
)
_BEHIND = re.compile(  # what makes another number of the one in front
    rf"[-\s](?P<scale>{_SCALE})s?\b"
    rf"|[-\s](?P<part>{_PART})s?\b"
    r"|\sand\s(?:a|one)[-\s](?P<half>half)\b"
    rf"|[-\s](?:and\s)?(?P<above>\d+)/(?P<below>\d+)",
    re.IGNORECASE,
)
_HALF_DOZEN = re.compile(r"\bhalf[-\s](?:a[-\s])?dozen\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+|[$%]")
_ENDINGS = ("", "s", "es", "d", "ed", "ly")


def _forms(word: str) -> Iterator[str]:
    """Yields a word of the tables with its endings."""
    yield from (word + ending for ending in _ENDINGS)
    yield word.removesuffix("e") + "ing"
    yield word.removesuffix("y") + "ies"


def _meanings() -> dict[str, list[tuple[Fraction, bool]]]:
    """Returns, for every form of a word of the tables, its values and whether it states them."""
    found: dict[str, list[tuple[Fraction, bool]]] = {"$": [], "%": []}
    for table, stated in ((STATED, True), (IMPLIED, False)):
        for word, values in table.items():
            for form in dict.fromkeys(_forms(word)):
                found.setdefault(form, []).extend((value, stated) for value in values)
    return {**found, "$": found["dollar"], "%": found["percent"]}


_MEANINGS = _meanings()


@dataclass(frozen=True)
class Mention:
    """A number in a text.

    Attributes:
        value: The number.
        end: Offset after its last character.
        stated: Whether it is said, else a reader knows it from what is said.
    """

    value: Fraction
    end: int
    stated: bool = True


def number(written: str) -> Fraction:
    """Returns the exact value of digits, as in "1,200.50" and ".5"."""
    return Fraction(written.replace(",", ""))


def mentions_of(text: str) -> list[Mention]:
    """Returns all numbers that a text mentions, in their order; a place may mention several."""
    found = [*_numbers(text), *_words(text)]
    unique = dict.fromkeys(sorted(found, key=lambda m: (m.end, not m.stated, m.value)))
    return list(unique)


def _numbers(text: str) -> Iterator[Mention]:
    for match in _NUMBER.finditer(text):
        value = _cardinal(match["words"]) if match["words"] else number(match["digits"])
        behind = _BEHIND.match(text, match.end())
        if match["percent"]:
            yield from _percent(value, match.end())
        elif match["cents"]:
            yield from (Mention(v, match.end()) for v in (value, value / 100))
        elif (match["words"] or "").lower() != "a":
            yield Mention(value, match.end("words" if match["words"] else "digits"))
        if match["below"] and number(match["below"]):
            yield from _fraction(value, number(match["below"]), match.end())
        if behind is not None:
            yield from _composed(value, behind)


def _composed(value: Fraction, behind: re.Match[str]) -> Iterator[Mention]:
    """Yields what a number means together with what stands after it."""
    end = behind.end()
    if behind["scale"]:
        yield Mention(value * {**SCALES, "dozen": 12}[behind["scale"].lower()], end)
    elif behind["part"]:
        yield from _fraction(value, Fraction(DENOMINATORS[behind["part"].lower()]), end)
    elif behind["half"]:
        yield Mention(value + Fraction(1, 2), end)
    elif int(behind["below"]):
        yield Mention(value + Fraction(int(behind["above"]), int(behind["below"])), end)


def _fraction(above: Fraction, below: Fraction, end: int) -> Iterator[Mention]:
    """Yields a fraction and its denominator; the numerator is mentioned in front of it."""
    yield from (Mention(value, end) for value in (below, above / below))
    yield from (Mention(v, end, stated=False) for v in (1 - above / below, below - above))


def _percent(value: Fraction, end: int) -> Iterator[Mention]:
    yield from (Mention(stated, end) for stated in (value, value / 100))
    hundred = Fraction(100)
    for implied in (hundred, hundred - value, hundred + value):
        yield Mention(implied, end, stated=False)
    for implied in (1 - value / 100, 1 + value / 100, 1 / hundred):
        yield Mention(implied, end, stated=False)


def _cardinal(words: str) -> Fraction:
    """Returns the value of a number in words, e.g. of "two hundred and six"."""
    total, group = 0, 0
    for word in re.findall("[a-z]+", words.lower()):
        if word == "hundred":
            group = max(group, 1) * 100
        elif word in SCALES:
            total, group = total + max(group, 1) * SCALES[word], 0
        else:
            group += UNITS.get(word) or TEENS.get(word) or TENS.get(word) or 0
    return Fraction(max(total + group, 1))  # "a"


def _words(text: str) -> Iterator[Mention]:
    """Yields what single words say and imply."""
    for match in _HALF_DOZEN.finditer(text):
        yield Mention(Fraction(6), match.end())
    for match in _WORD.finditer(text):
        for value, stated in _MEANINGS.get(match[0].lower(), ()):
            yield Mention(value, match.end(), stated)
