"""Problems with their markers, from a file that ``align`` wrote or of your own (`aligned_file`).

A line is a JSON object; other keys than these two are for people:

    {"query": "A robe takes 2 bolts of blue fiber and half that much<T> white fiber. ...<T>",
     "thinking": ["<<2/2=1>>", "<<2+1=3>>"]}

A line counts for a problem if its query without markers and its steps are exactly the problem's
(App. A.5.2).
"""

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

from datamodules.readers import read_rows
from datamodules.reasoning.examples import MARKER
from datamodules.reasoning.gsm8k.solved import Solved


class MarkedProblems:
    """Where the steps of problems go, by problem.

    Args:
        path: jsonl, also as .gz or .zst.

    Attributes:
        counts: Lines read, and those that were left out and why.

    Raises:
        ValueError: A line is not such an object.
    """

    def __init__(self, path: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._markers: dict[str, tuple[int, ...]] = {}
        for where, row in read_rows(path):
            self._add(row, where)

    def _add(self, row: Any, where: str) -> None:
        marked, steps = fields_of(row, where)
        self.counts["aligned file: lines"] += 1
        markers = offsets(marked)
        if len(markers) != len(steps):
            self.counts["aligned file: lines with another number of markers than steps"] += 1
            return
        problem = Solved(marked.replace(MARKER, ""), steps, "")
        self._markers.setdefault(problem.identity, markers)

    def find(self, problem: Solved) -> tuple[int, ...] | None:
        """Returns the markers' offsets in a problem's question; None where the file has none."""
        return self._markers.get(problem.identity)


def offsets(marked: str) -> tuple[int, ...]:
    """Returns where the markers of a marked text stand in the text without them."""
    return tuple(accumulate(map(len, marked.split(MARKER)[:-1])))


def fields_of(row: Any, where: str) -> tuple[str, tuple[str, ...]]:
    """Returns the marked query and the steps of a row.

    Args:
        row: A line of the file, or a teacher's reply.
        where: Where it is, for the message.

    Raises:
        ValueError: It is not an object with these two.
    """
    query = row.get("query") if isinstance(row, dict) else None
    steps = row.get("thinking") if isinstance(row, dict) else None
    listed = isinstance(steps, list) and all(isinstance(step, str) for step in steps)
    if isinstance(query, str) and isinstance(steps, list) and listed:
        return query, tuple(steps)
    raise ValueError(
        f"{where}: expected an object with the text 'query', which has {MARKER} markers, and the "
        "list of texts 'thinking'"
    )
