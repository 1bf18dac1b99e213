"""Questions that one model solves and another does not (Thinking States, Sec. 4.5)."""

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any, NamedTuple

from evaluation.console import format_columns
from evaluation.reason.result import ReasonResult


class Overlap(NamedTuple):
    """Questions that one model solves and another does not.

    Attributes:
        solves: Label of the one.
        fails: Label of the other.
        questions: How many.
        solved: All questions that the one solves.
        asked: All questions.
    """

    solves: str
    fails: str
    questions: int
    solved: int
    asked: int

    @property
    def of_solved(self) -> float:
        """Their share of what the one solves: the paper's 12 %; nan if it solves nothing."""
        return self.questions / self.solved if self.solved else math.nan

    @property
    def of_asked(self) -> float:
        """Their share of all questions."""
        return self.questions / self.asked

    def as_dict(self) -> dict[str, Any]:
        """Returns it under the keys of the JSON file."""
        return {
            "solves": self.solves,
            "fails": self.fails,
            "questions": self.questions,
            "share_of_solved": self.of_solved,
            "share_of_questions": self.of_asked,
        }


def overlaps(results: Sequence[ReasonResult]) -> list[Overlap]:
    """Returns all ordered pairs of models that have answered the same questions."""
    return [_overlap(one, other) for one, other in permutations(results, 2)]


def _overlap(one: ReasonResult, other: ReasonResult) -> Overlap:
    pairs = [(a.right, b.right) for a, b in zip(one.replies, other.replies, strict=True)]
    return Overlap(
        solves=one.label,
        fails=other.label,
        questions=sum(solved and not too for solved, too in pairs),
        solved=sum(solved for solved, _ in pairs),
        asked=len(pairs),
    )


def overlap_table(results: Sequence[ReasonResult]) -> str:
    """Returns, for people, the share of what a row's model solves that a column's does not."""
    found = {(each.solves, each.fails): each for each in overlaps(results)}
    labels = [result.label for result in results]
    rows = [["solved by, not by", *labels]]
    for one in labels:
        cells = [_cell(found.get((one, other))) for other in labels]
        rows.append([one, *cells])
    return format_columns(rows)


def _cell(overlap: Overlap | None) -> str:
    if overlap is None or math.isnan(overlap.of_solved):
        return "-"
    return f"{overlap.of_solved:.4f} ({overlap.questions:,})"
