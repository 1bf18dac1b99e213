"""Where in a question each step of its solution can be taken: a rule that looks at numbers alone.

A step is an equation. Its operands come from the question (`mentions.mentions_of`) or are results
of earlier steps. Its marker stands at the earliest place where all of them have appeared, and never
in front of the marker of an earlier step.

Ties: a number may be mentioned several times, or be mentioned and also be a result. The rule takes
the earliest of these sources; a step that uses a value k times takes the k earliest. A source that
is only implied (12 by a "year") counts only for a value without any other. An operand 1 that is
mentioned nowhere is taken for granted. Any other operand without a source is missing: the step
then goes to the end of the question, and so do all after it.

NOTE(paper): the paper lets a language model place the steps (`teacher/`), which reads what the
question is about. The rule does not: it places a step as soon as its numbers are there, also where
only the question at the end says that they are to be added. `Placing.at` and
`Placing.last_at_end` wait longer.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from datamodules.reasoning.gsm8k.mentions import mentions_of, number

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
            end = self._behind(query, found.place)
            if self.last_at_end and index == len(equations) - 1:
                end = len(query)
            markers.append(end)
            verdicts.append(found.verdict)
            implied.append(found.implied)
            sources.add(result(equation))
        return Placed(tuple(markers), tuple(verdicts), tuple(implied))

    def _behind(self, query: str, place: int) -> int:
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
