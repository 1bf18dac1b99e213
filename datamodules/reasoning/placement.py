"""Where in a question each step of its solution can be taken: a rule that reads numbers alone.

A step is an equation. Its operands come from the question (`mentions_of`) or are results of earlier
steps. Its marker stands at the earliest place where all of them have appeared, and never before
the marker of an earlier step.

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
| ``seven``, ``twenty-five``, ``a thousand`` | the number | |
| ``3 million``, ``two hundred``, ``two dozen`` | the product, and its parts | |
| words of `STATED` (twice, half, dozen, ...) | theirs | |
| words of `IMPLIED` (week, foot, cent, ...) | | theirs |
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

# ---- which numbers a text mentions


def _table(text: str) -> dict[str, tuple[Fraction, ...]]:
    """Returns the values of the words of a table, such as "twice 2, half 1/2 2"."""
    rows = (row.split() for row in text.split(","))
    return {word: tuple(map(Fraction, values)) for word, *values in rows}


STATED = _table("""
    half 1/2 2 1, halve 1/2 2 1, quarter 1/4 4 1, once 1, twice 2, double 2, couple 2, pair 2,
    both 2, twin 2, thrice 3, triple 3, triplet 3, quadruple 4, dozen 12
""")
"""Words that say a number by themselves; it may be multiplied by, or divided by."""

IMPLIED = _table("""
    minute 60, hour 60 24, day 24 7 30 365, week 7 52 4 5, weekend 2, month 12 30 4,
    year 12 365 52, decade 10, century 100, dollar 100, cent 100 1/100, penny 1/100,
    nickel 5 1/20, dime 10 1/10, quarter 25, percent 100, percentage 100, average 2 3,
    inch 12, foot 12 3, feet 12 3, yard 3 36, ounce 16, pound 16, gallon 4 16,
    square 4, triangle 3, bicycle 2, car 4, parent 2
""")
"""What a word lets a reader know without saying it: 12 for a year, 100 for a percentage.

Words of both tables are in the singular and without endings.
"""

_ONES = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_CARDINALS = {word: value for value, word in enumerate(_ONES.split(), start=1)}
_CARDINALS |= {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth"
_PARTS = {"half": 2, "halve": 2, "quarter": 4}
_PARTS |= {word: value for value, word in enumerate(_ORDINALS.split(), start=3)}


def _any(words: Iterable[str]) -> str:
    """Returns a group that matches the longest of the words."""
    return f"(?:{'|'.join(sorted(words, key=len, reverse=True))})"


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_SCALE, _PART = _any(_SCALES), _any(_PARTS)
_CARDINAL = (
    rf"(?:{_any(_TENS.split())}[-\s]{_any(_ONES.split()[:9])}|{_any(_CARDINALS)}"
    rf"|a(?=[-\s](?:{_PART}|{_SCALE})\b))"
)
_NUMBER = re.compile(
    rf"(?:(?<![\w.])(?P<digits>{_DIGITS})(?:\s?/\s?(?P<below>{_DIGITS}))?"
    rf"|\b(?P<words>{_CARDINAL})\b)"
    r"(?:(?P<percent>\s?%|[-\s]percent\b)|(?P<cents>\s?\u00a2|[-\s]cents?\b))?",
    re.IGNORECASE,
)
_FOLLOWING = re.compile(  # what makes another number of the one before it
    rf"[-\s](?P<scale>{_SCALE})s?\b"
    rf"|[-\s](?P<part>{_PART})s?\b"
    r"|\sand\s(?:a|one)[-\s](?P<half>half)\b"
    rf"|[-\s](?:and\s)?(?P<above>\d+)/(?P<below>\d+)",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]+|[$%]")
_SIGNS = {"$": "dollar", "%": "percent"}


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
        words = (match["words"] or "").lower()
        value = _cardinal(words) if words else number(match["digits"])
        following = _FOLLOWING.match(text, match.end())
        if match["percent"]:
            yield from _percent(value, match.end())
        elif match["cents"]:
            yield from (Mention(v, match.end()) for v in (value, value / 100))
        elif words != "a":
            yield Mention(value, match.end("words" if words else "digits"))
        if match["below"] and number(match["below"]):
            yield from _fraction(value, number(match["below"]), match.end())
        if following is not None:
            yield from _composed(value, following)


def _cardinal(words: str) -> Fraction:
    """Returns the value of "seven", "twenty-five", or 1 for "a"."""
    return Fraction(sum(_CARDINALS.get(word, 1) for word in re.findall("[a-z]+", words)))


def _composed(value: Fraction, following: re.Match[str]) -> Iterator[Mention]:
    """Yields what a number means together with what stands after it."""
    end = following.end()
    if following["scale"]:
        yield Mention(value * _SCALES[following["scale"].lower()], end)
    elif following["part"]:
        yield from _fraction(value, Fraction(_PARTS[following["part"].lower()]), end)
    elif following["half"]:
        yield Mention(value + Fraction(1, 2), end)
    elif int(following["below"]):
        yield Mention(value + Fraction(int(following["above"]), int(following["below"])), end)


def _fraction(above: Fraction, below: Fraction, end: int) -> Iterator[Mention]:
    """Yields a fraction and its denominator; the numerator is mentioned before it."""
    yield from (Mention(value, end) for value in (below, above / below))
    yield from (Mention(v, end, stated=False) for v in (1 - above / below, below - above))


def _percent(value: Fraction, end: int) -> Iterator[Mention]:
    yield from (Mention(stated, end) for stated in (value, value / 100))
    hundred = Fraction(100)
    for implied in (hundred, hundred - value, hundred + value):
        yield Mention(implied, end, stated=False)
    for implied in (1 - value / 100, 1 + value / 100, 1 / hundred):
        yield Mention(implied, end, stated=False)


def _words(text: str) -> Iterator[Mention]:
    """Yields what single words say and imply."""
    for match in _WORD.finditer(text):
        word = match[0].lower()
        word = _SIGNS.get(word, word)
        for form in _stems(word):
            yield from (Mention(value, match.end()) for value in STATED.get(form, ()))
            yield from (
                Mention(value, match.end(), stated=False) for value in IMPLIED.get(form, ())
            )


def _stems(word: str) -> set[str]:
    """Returns a word without endings: "halves", "doubled", "tripling", "yearly"."""
    bare = {word.removesuffix(ending) for ending in ("", "s", "es", "d", "ed", "ly")}
    return bare | {word.removesuffix("ing") + "e"}


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
    """Returns the numbers before the last "=" of an equation, in order, repeated as there."""
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
