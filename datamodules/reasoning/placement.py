"""Where in a question each step of its solution can be taken: a rule that reads numbers alone.

A step is an equation. Its operands come from the question (`mentions_of`) or are results of earlier
steps. Its marker stands at the earliest place where all of them have appeared, and never in front
of the marker of an earlier step.

Ties: a number may be mentioned several times, or be mentioned and also be a result. The rule takes
the earliest of these sources; a step that uses a value k times takes the k earliest. A source that
is only implied (12 by a "year") counts only for a value without any other. An operand 1 that is
mentioned nowhere is taken for granted. Any other operand without a source is missing: the step
then goes to the end of the question, and so do all after it.

NOTE(paper): the paper lets a language model place the steps (`teacher`), which reads what the
question is about. The rule does not: it places a step as soon as its numbers are there, also where
only the question at the end says that they are to be added. `Placing.at` and
`Placing.last_at_end` wait longer.

What a text mentions:

| written | stated | implied |
|---|---|---|
| ``7``, ``1,200.50``, ``.5``, ``$3`` | the number | |
| ``30%``, ``30 percent`` | 30, 3/10 | 100, what is left (70, 7/10), what it grows to (13/10) |
| ``40 cents`` | 40, 2/5 | 100 |
| ``3/4``, ``three quarters`` | 3/4, 3, 4 | what is left (1/4, 1) |
| ``1 1/2``, ``2 and a half`` | the sum, and its parts | |
| ``seven``, ``twenty-five``, ``two hundred and six``, ``a thousand`` | the number | |
| ``3 million``, ``two dozen`` | the product, and its parts | |
| words of `STATED` (twice, half, dozen, ...) | theirs | |
| words of `IMPLIED` (week, foot, cent, ...) | | theirs |
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

# ---- what words say about numbers


_UNITS = "one two three four five six seven eight nine"
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
UNITS = {word: value for value, word in enumerate(_UNITS.split(), start=1)}
TEENS = {word: value for value, word in enumerate(_TEENS.split(), start=10)}
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
TENS = {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
"""May stand after a number in digits or words, or after "a"."""

DENOMINATORS = {
    "half": 2,
    "halve": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
}
"""After a numerator ("a", "one", "two thirds") a fraction."""

_STATED: dict[str, list[int | str]] = {
    "zero": [0],
    "half": ["1/2", 2, 1],
    "halve": ["1/2", 2, 1],
    "quarter": ["1/4", 4, 1],
    "once": [1],
    "twice": [2],
    "double": [2],
    "twofold": [2],
    "couple": [2],
    "pair": [2],
    "both": [2],
    "twin": [2],
    "thrice": [3],
    "triple": [3],
    "threefold": [3],
    "triplet": [3],
    "trio": [3],
    "quadruple": [4],
    "quintuple": [5],
    "dozen": [12],
}
STATED = {word: tuple(map(Fraction, values)) for word, values in _STATED.items()}
"""Words that say a number by themselves; it may be multiplied by, or divided by."""

_IMPLIED: dict[str, list[int | str]] = {
    # time
    "minute": [60],
    "hour": [60, 3600, 24],
    "day": [24, 7, 30, 365],
    "week": [7, 52, 4, 5],
    "weekend": [2],
    "weekday": [5],
    "workday": [5],
    "fortnight": [14],
    "month": [30, 4, 12, 31, 28],
    "year": [12, 365, 52, 366],
    "annual": [12, 365, 52],
    "decade": [10],
    "century": [100],
    "february": [28, 29],
    **{word: [30] for word in ("april", "june", "september", "november")},
    **{word: [31] for word in ("january", "march", "july", "august", "october", "december")},
    # money
    "dollar": [100],
    "cent": [100, "1/100"],
    "penny": [1, "1/100", 100],
    "nickel": [5, "1/20", 20],
    "dime": [10, "1/10"],
    "quarter": [25],
    "percent": [100],
    "percentage": [100],
    # length, weight, volume
    "inch": [12],
    "foot": [12, 3],
    "feet": [12, 3],
    "yard": [3, 36],
    "mile": [5280],
    "centimeter": [100, 10],
    "cm": [100, 10],
    "meter": [100, 1000],
    "kilometer": [1000],
    "km": [1000],
    "gram": [1000],
    "kilogram": [1000],
    "kg": [1000],
    "liter": [1000],
    "ml": [1000],
    "ounce": [16, 8, 32, 128],
    "pound": [16, 2000],
    "ton": [2000, 1000],
    "cup": [16, 8, 2],
    "pint": [16, 2, 8],
    "quart": [4, 32, 2],
    "gallon": [4, 128, 16, 8],
    # shapes and bodies
    "triangle": [3],
    "square": [4, 2],
    "rectangle": [2, 4],
    "rectangular": [2, 4],
    "cube": [6],
    "pentagon": [5],
    "hexagon": [6],
    "octagon": [8],
    "circle": [2, 360],
    "perimeter": [2, 4],
    "average": [2, 3],
    "dog": [4],
    "cat": [4],
    "cow": [4],
    "horse": [4],
    "chicken": [2],
    "spider": [8],
    "insect": [6],
    "finger": [10],
    "parent": [2],
    # wheels
    "bicycle": [2],
    "bike": [2],
    "tricycle": [3],
    "car": [4],
}
IMPLIED = {word: tuple(map(Fraction, values)) for word, values in _IMPLIED.items()}
"""What a word lets a reader know without saying it: 12 for a year, 100 for a percentage."""


# ---- which numbers a text mentions


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
_FOLLOWING = re.compile(  # what makes another number of the one in front
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
        following = _FOLLOWING.match(text, match.end())
        if match["percent"]:
            yield from _percent(value, match.end())
        elif match["cents"]:
            yield from (Mention(v, match.end()) for v in (value, value / 100))
        elif (match["words"] or "").lower() != "a":
            yield Mention(value, match.end("words" if match["words"] else "digits"))
        if match["below"] and number(match["below"]):
            yield from _fraction(value, number(match["below"]), match.end())
        if following is not None:
            yield from _composed(value, following)


def _composed(value: Fraction, following: re.Match[str]) -> Iterator[Mention]:
    """Yields what a number means together with what stands after it."""
    end = following.end()
    if following["scale"]:
        yield Mention(value * {**SCALES, "dozen": 12}[following["scale"].lower()], end)
    elif following["part"]:
        yield from _fraction(value, Fraction(DENOMINATORS[following["part"].lower()]), end)
    elif following["half"]:
        yield Mention(value + Fraction(1, 2), end)
    elif int(following["below"]):
        yield Mention(value + Fraction(int(following["above"]), int(following["below"])), end)


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


# ---- the rule


At = Literal["operand", "clause", "sentence"]
Verdict = Literal["decided", "tie", "missing"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

_OPERAND = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
_ENDS: dict[At, re.Pattern[str]] = {
    "clause": re.compile(r"[.,;:!?](?=\s|$)"),
    "sentence": re.compile(r"[.!?](?=\s|$)"),
}


@dataclass(frozen=True)
class Placed:
    """Where the steps of a question were placed, and how.

    Attributes:
        markers: Offset in the question of each step's marker, non-decreasing.
        verdicts: Of each step: 'decided' if its sources leave no choice that would move its marker,
            'tie' if they do, 'missing' if an operand has no source.
        implied: Of each step: whether a source is only implied.
    """

    markers: tuple[int, ...]
    verdicts: tuple[Verdict, ...]
    implied: tuple[bool, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the steps; 'decided' without any."""
        return max(self.verdicts, key=VERDICTS.index, default="decided")


_WORDS: dict[Verdict, str] = {
    "decided": "decided alone",
    "tie": "decided by a tie",
    "missing": "missing an operand",
}


def counts_of(placed: Placed) -> dict[str, int]:
    """Returns how the rule placed the steps of one problem, in words for reports."""
    steps = {f"rule: steps {_WORDS[v]}": placed.verdicts.count(v) for v in VERDICTS}
    examples = {f"rule: examples {_WORDS[v]}": int(v == placed.verdict) for v in VERDICTS}
    implied = {"rule: steps with an operand that is only implied": sum(placed.implied)}
    return {**steps, **implied, **examples}


def operands(equation: str) -> list[Fraction]:
    """Returns the numbers in front of the last "=" of an equation, in order, repeated as there."""
    return [number(digits) for digits in _OPERAND.findall(_sides(equation)[0])]


def result(equation: str) -> Fraction | None:
    """Returns the number after the last "=" of an equation; None if there is not just one."""
    found = _OPERAND.findall(_sides(equation)[1])
    return number(found[0]) if len(found) == 1 else None


def _sides(equation: str) -> tuple[str, str]:
    left, _, right = equation.strip().removeprefix("<<").removesuffix(">>").rpartition("=")
    return left, right


@dataclass(frozen=True)
class Placing:
    """The rule, with how long it waits.

    Attributes:
        at: Where a marker stands: right after the last operand, or at the end of the clause or
            the sentence that it is in.
        last_at_end: Whether the last step always stands at the end of the question.

    Raises:
        ValueError: `at` is none of its values.
    """

    at: At = "operand"
    last_at_end: bool = False

    def __post_init__(self) -> None:
        """Checks the value."""
        if self.at not in get_args(At):
            raise ValueError(f"place_at={self.at!r} must be one of {', '.join(get_args(At))}.")

    def __call__(self, query: str, equations: Sequence[str]) -> Placed:
        """Returns where the steps of a question go.

        Args:
            query: The question.
            equations: Its steps, such as ``<<48/2=24>>``.
        """
        sources = _Sources(query)
        markers: list[int] = []
        verdicts: list[Verdict] = []
        implied: list[bool] = []
        for index, equation in enumerate(equations):
            found = sources.of(operands(equation), markers[-1] if markers else 0)
            end = self._end_after(query, found.place)
            if self.last_at_end and index == len(equations) - 1:
                end = len(query)
            markers.append(end)
            verdicts.append(found.verdict)
            implied.append(found.implied)
            sources.add(result(equation))
        return Placed(tuple(markers), tuple(verdicts), tuple(implied))

    def _end_after(self, query: str, place: int) -> int:
        """Returns the end of the operand, clause or sentence that ends with, or holds, a place."""
        if self.at == "operand" or not place:
            return place
        match = _ENDS[self.at].search(query, place - 1)
        return match.end() if match else len(query)


@dataclass(frozen=True)
class _Found:
    place: int
    verdict: Verdict
    implied: bool


class _Sources:
    """Where the values that a question mentions, and results, are to be had."""

    def __init__(self, query: str) -> None:
        self._end = len(query)
        self._stated: dict[Fraction, list[int]] = defaultdict(list)
        self._implied: dict[Fraction, list[int]] = defaultdict(list)
        self._results: Counter[Fraction] = Counter()
        for mention in mentions_of(query):
            (self._stated if mention.stated else self._implied)[mention.value].append(mention.end)

    def add(self, value: Fraction | None) -> None:
        """Notes the result of a step."""
        if value is not None:
            self._results[value] += 1

    def of(self, values: Sequence[Fraction], bound: int) -> _Found:
        """Returns where all of the values have appeared, at or after `bound`."""
        earliest = latest = bound
        missing = implied = False
        for value, uses in Counter(values).items():
            places, said = self._places(value, bound)
            implied |= not said
            if not places:
                missing |= value != 1
                continue
            earliest = max(earliest, places[min(uses, len(places)) - 1])
            latest = max(latest, places[-1])
        if missing:
            return _Found(self._end, "missing", implied)
        return _Found(earliest, "decided" if earliest == latest else "tie", implied)

    def _places(self, value: Fraction, bound: int) -> tuple[list[int], bool]:
        """Returns where a value is to be had, ascending, and whether it is said or a result."""
        said = [bound] * self._results[value] + [max(bound, p) for p in self._stated[value]]
        if said:
            return said, True
        known = [max(bound, place) for place in self._implied[value]]
        return known, not known
