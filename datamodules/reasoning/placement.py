"""A rule that places each step of a solution in its question, based on numbers alone.

A step is an equation. Its operands come from the question (`mentions_of`) or are results of earlier
steps. Its marker is at the earliest position at which all of them have appeared, and never before
the marker of an earlier step.

Ties: a number may be mentioned several times, or be mentioned and also be a result. The rule takes
the earliest of these sources; a step that uses a value k times takes the k earliest. A source that
is only implied (12 by a "year") counts only for a value without any other. An operand 1 needs no
source. Any other operand without a source is missing: the step then goes to the end of the
question, and so do all later steps.

NOTE(paper): in the paper a language model places the steps (`teacher`), which understands the
question. The rule places a step as soon as its numbers have appeared, even if only the question at
the end says that they are to be added. `PlacementRule.at` and `PlacementRule.last_at_end` wait
longer.

Numbers that a text mentions:

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
"""Words that state a number, which may be a factor or a divisor."""

IMPLIED = _table("""
    minute 60, hour 60 24, day 24 7 30 365, week 7 52 4 5, weekend 2, month 12 30 4,
    year 12 365 52, decade 10, century 100, dollar 100, cent 100 1/100, penny 1/100,
    nickel 5 1/20, dime 10 1/10, quarter 25, percent 100, percentage 100, average 2 3,
    inch 12, foot 12 3, feet 12 3, yard 3 36, ounce 16, pound 16, gallon 4 16,
    square 4, triangle 3, bicycle 2, car 4, parent 2
""")
"""Numbers that a word implies: 12 for a year, 100 for a percentage.

Words of both tables are singular and without endings.
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


def _any(choices: Iterable[str]) -> str:
    """Returns a group that matches the longest of the words."""
    return f"(?:{'|'.join(sorted(choices, key=len, reverse=True))})"


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
_FOLLOWING = re.compile(  # modifies the number before it
    rf"[-\s](?P<scale>{_SCALE})s?\b"
    rf"|[-\s](?P<part>{_PART})s?\b"
    r"|\sand\s(?:a|one)[-\s](?P<half>half)\b"
    rf"|[-\s](?:and\s)?(?P<above>\d+)/(?P<below>\d+)",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]+|[$%]")
_SIGNS = {"$": "dollar", "%": "percent"}


@dataclass(frozen=True)
class NumberMention:
    """A number in a text.

    Attributes:
        value: The number.
        end: Offset after its last character.
        stated: Whether the text states it; otherwise the text implies it.
    """

    value: Fraction
    end: int
    stated: bool = True


def parse_digits(digits: str) -> Fraction:
    """Returns the exact value of digits, as in "1,200.50" and ".5"."""
    return Fraction(digits.replace(",", ""))


def mentions_of(text: str) -> list[NumberMention]:
    """Returns all numbers that a text mentions, in order; several may end at one position."""
    mentions = [*_numbers(text), *_number_words(text)]
    unique = dict.fromkeys(sorted(mentions, key=lambda m: (m.end, not m.stated, m.value)))
    return list(unique)


def _numbers(text: str) -> Iterator[NumberMention]:
    for match in _NUMBER.finditer(text):
        spelled = (match["words"] or "").lower()
        value = _cardinal(spelled) if spelled else parse_digits(match["digits"])
        following = _FOLLOWING.match(text, match.end())
        if match["percent"]:
            yield from _percent(value, match.end())
        elif match["cents"]:
            yield from (NumberMention(v, match.end()) for v in (value, value / 100))
        elif spelled != "a":
            yield NumberMention(value, match.end("words" if spelled else "digits"))
        if match["below"] and parse_digits(match["below"]):
            yield from _fraction(value, parse_digits(match["below"]), match.end())
        if following is not None:
            yield from _composed(value, following)


def _cardinal(spelled: str) -> Fraction:
    """Returns the value of "seven", "twenty-five", or 1 for "a"."""
    return Fraction(sum(_CARDINALS.get(word, 1) for word in re.findall("[a-z]+", spelled)))


def _composed(value: Fraction, following: re.Match[str]) -> Iterator[NumberMention]:
    """Yields the number that a value forms with the text after it."""
    end = following.end()
    if following["scale"]:
        yield NumberMention(value * _SCALES[following["scale"].lower()], end)
    elif following["part"]:
        yield from _fraction(value, Fraction(_PARTS[following["part"].lower()]), end)
    elif following["half"]:
        yield NumberMention(value + Fraction(1, 2), end)
    elif int(following["below"]):
        yield NumberMention(value + Fraction(int(following["above"]), int(following["below"])), end)


def _fraction(numerator: Fraction, denominator: Fraction, end: int) -> Iterator[NumberMention]:
    """Yields a fraction and its denominator; the numerator is mentioned before it."""
    yield from (NumberMention(value, end) for value in (denominator, numerator / denominator))
    yield from (
        NumberMention(v, end, stated=False)
        for v in (1 - numerator / denominator, denominator - numerator)
    )


def _percent(value: Fraction, end: int) -> Iterator[NumberMention]:
    yield from (NumberMention(stated, end) for stated in (value, value / 100))
    hundred = Fraction(100)
    for implied in (hundred, hundred - value, hundred + value):
        yield NumberMention(implied, end, stated=False)
    for implied in (1 - value / 100, 1 + value / 100, 1 / hundred):
        yield NumberMention(implied, end, stated=False)


def _number_words(text: str) -> Iterator[NumberMention]:
    """Yields the numbers that single words state and imply."""
    for match in _WORD.finditer(text):
        word = match[0].lower()
        word = _SIGNS.get(word, word)
        for form in _stems(word):
            yield from (NumberMention(value, match.end()) for value in STATED.get(form, ()))
            yield from (
                NumberMention(value, match.end(), stated=False) for value in IMPLIED.get(form, ())
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
class StepPlacement:
    """Positions of a question's steps, and the rule's verdicts.

    Attributes:
        markers: Offset in the question of each step's marker, non-decreasing.
        verdicts: For each step, 'decided' if no choice of sources would move its marker, 'tie' if
            one would, 'missing' if an operand has no source.
        implied: For each step, whether a source is only implied.
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


def counts_of(placed: StepPlacement) -> dict[str, int]:
    """Returns the counts of a problem's verdicts, by description for reports."""
    steps = {f"rule: steps {_WORDS[v]}": placed.verdicts.count(v) for v in VERDICTS}
    examples = {f"rule: examples {_WORDS[v]}": int(v == placed.verdict) for v in VERDICTS}
    implied = {"rule: steps with an operand that is only implied": sum(placed.implied)}
    return {**steps, **implied, **examples}


def operands(equation: str) -> list[Fraction]:
    """Returns the numbers before the last "=" of an equation, in order and with repeats."""
    return [parse_digits(digits) for digits in _OPERAND.findall(_sides(equation)[0])]


def result(equation: str) -> Fraction | None:
    """Returns the number after the last "=" of an equation, or None unless there is exactly one."""
    digits = _OPERAND.findall(_sides(equation)[1])
    return parse_digits(digits[0]) if len(digits) == 1 else None


def _sides(equation: str) -> tuple[str, str]:
    left, _, right = equation.strip().removeprefix("<<").removesuffix(">>").rpartition("=")
    return left, right


@dataclass(frozen=True)
class PlacementRule:
    """The placement rule and its options.

    Attributes:
        at: Position of a marker: right after the last operand, or at the end of its clause or
            sentence.
        last_at_end: Whether the last step is always at the end of the question.

    Raises:
        ValueError: If `at` is not one of its values.
    """

    at: At = "operand"
    last_at_end: bool = False

    def __post_init__(self) -> None:
        """Checks the value."""
        if self.at not in get_args(At):
            raise ValueError(f"place_at={self.at!r} must be one of {', '.join(get_args(At))}.")

    def __call__(self, query: str, equations: Sequence[str]) -> StepPlacement:
        """Places the steps of a question.

        Args:
            query: Text of the question.
            equations: Its steps, such as ``<<48/2=24>>``.
        """
        sources = _Sources(query)
        markers: list[int] = []
        verdicts: list[Verdict] = []
        implied: list[bool] = []
        for index, equation in enumerate(equations):
            match = sources.of(operands(equation), markers[-1] if markers else 0)
            end = self._end_after(query, match.offset)
            if self.last_at_end and index == len(equations) - 1:
                end = len(query)
            markers.append(end)
            verdicts.append(match.verdict)
            implied.append(match.implied)
            sources.add(result(equation))
        return StepPlacement(tuple(markers), tuple(verdicts), tuple(implied))

    def _end_after(self, query: str, offset: int) -> int:
        """Returns the end of the operand, clause or sentence at an offset."""
        if self.at == "operand" or not offset:
            return offset
        match = _ENDS[self.at].search(query, offset - 1)
        return match.end() if match else len(query)


@dataclass(frozen=True)
class _Match:
    offset: int
    verdict: Verdict
    implied: bool


class _Sources:
    """Positions at which the values of a question and results become available."""

    def __init__(self, query: str) -> None:
        self._end = len(query)
        self._stated: dict[Fraction, list[int]] = defaultdict(list)
        self._implied: dict[Fraction, list[int]] = defaultdict(list)
        self._results: Counter[Fraction] = Counter()
        for mention in mentions_of(query):
            (self._stated if mention.stated else self._implied)[mention.value].append(mention.end)

    def add(self, value: Fraction | None) -> None:
        """Adds the result of a step."""
        if value is not None:
            self._results[value] += 1

    def of(self, values: Sequence[Fraction], bound: int) -> _Match:
        """Returns the first position at or after `bound` at which all values have appeared."""
        earliest = latest = bound
        missing = implied = False
        for value, uses in Counter(values).items():
            positions, available = self._positions(value, bound)
            implied |= not available
            if not positions:
                missing |= value != 1
                continue
            earliest = max(earliest, positions[min(uses, len(positions)) - 1])
            latest = max(latest, positions[-1])
        if missing:
            return _Match(self._end, "missing", implied)
        return _Match(earliest, "decided" if earliest == latest else "tie", implied)

    def _positions(self, value: Fraction, bound: int) -> tuple[list[int], bool]:
        """Returns the positions of a value, ascending, and whether it is stated or a result."""
        available = [bound] * self._results[value] + [max(bound, p) for p in self._stated[value]]
        if available:
            return available, True
        known = [max(bound, offset) for offset in self._implied[value]]
        return known, not known
