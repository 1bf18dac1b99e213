"""A question with its reasoning: which step can be inferred where, and the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MARKER = "<T>"
"""Stands in a marked query where a step can be inferred (Thinking States, Sec. 3.4)."""


@dataclass(frozen=True)
class Example:
    """A question, its reasoning steps in order, and its answer.

    Attributes:
        query: Text without markers.
        steps: Text of each reasoning step.
        markers: Where in the query each step's marker stands, in characters, non-decreasing: the
            text before it suffices to infer the step.
        answer: Text of the answer, with the space that separates it from what stands before.
        group: What accuracies are grouped by, e.g. the number of operations.

    Raises:
        ValueError: A text is empty, the numbers of steps and markers differ, or a marker is out of
            order or place.
    """

    query: str
    steps: tuple[str, ...]
    markers: tuple[int, ...]
    answer: str
    group: int = 0

    def __post_init__(self) -> None:
        """Checks the texts and the markers."""
        if not (self.query and self.answer and all(self.steps)):
            raise ValueError(f"query, answer or a step is empty: {self}")
        if len(self.steps) != len(self.markers):
            raise ValueError(f"{len(self.steps)} steps have {len(self.markers)} markers")
        places = (0, *self.markers, len(self.query))
        if any(before > after for before, after in pairwise(places)):
            raise ValueError(f"markers={self.markers} are not in order within the query")

    @classmethod
    def from_marked(
        cls, marked: str, steps: Sequence[str], answer: str, group: int = 0, marker: str = MARKER
    ) -> "Example":
        """Returns the example of a query that has its markers in it; spaces stay where they are.

        Raises:
            ValueError: There are not as many markers as steps.
        """
        parts = marked.split(marker)
        ends, place = [], 0
        for part in parts[:-1]:
            place += len(part)
            ends.append(place)
        return cls("".join(parts), tuple(steps), tuple(ends), answer, group)

    def marked(self, marker: str = MARKER) -> str:
        """Returns the query with its markers."""
        text, start = "", 0
        for place in self.markers:
            text += self.query[start:place] + marker
            start = place
        return text + self.query[start:]

    def after(self, text: str) -> "Example":
        """Returns the example with a text in front of its query."""
        markers = tuple(place + len(text) for place in self.markers)
        return replace(self, query=text + self.query, markers=markers)
