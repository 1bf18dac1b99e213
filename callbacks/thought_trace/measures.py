"""Numbers of thoughts, as tables: one line a chunk, a thought, a number of rounds, a group.

A thought is right if it is the gold one token by token. The model thinks for itself all along the
query, so after a wrong thought later ones may be wrong in consequence; ``first_wrong`` is not.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from callbacks.thought_trace.findings import Row

Records = list[dict[str, Any]]


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Returns means over all chunks, or all queries, of at least one.

    Of chunks: ``accuracy``, the share whose thought is right; ``accuracy_nontrivial``, of those
    with a gold thought; ``missed``, the share of these after which nothing is thought;
    ``invented``, the share of the others after which anything is; ``trivial`` and
    ``gold_trivial``, the share of chunks without a thought. Of queries: ``all_right``, the share
    without a wrong thought; ``rounds``; ``nontrivial``, chunks with a thought; ``longest``, tokens
    of the longest thought of all (the model cuts those above max_thought_tokens). nan without what
    it is the share of.
    """
    pairs = [pair for row in rows for pair in _pairs(row)]
    judged = [row for row in rows if row.gold is not None]
    own = [thought for row in rows for thought in row.own]
    return {
        "accuracy": mean(a == b for a, b in pairs),
        "accuracy_nontrivial": mean(a == b for a, b in pairs if b),
        "missed": mean(not a for a, b in pairs if b),
        "invented": mean(bool(a) for a, b in pairs if not b),
        "trivial": mean(not thought for thought in own),
        "gold_trivial": mean(not b for _, b in pairs),
        "all_right": mean(row.first_wrong is None for row in judged),
        "rounds": mean(row.rounds for row in rows),
        "nontrivial": mean(sum(map(bool, row.own)) for row in rows),
        "longest": float(max(map(len, own), default=0)),
    }


def _pairs(row: Row) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns own and gold thought of each chunk, where there is gold."""
    return [] if row.gold is None else list(zip(row.own, row.gold, strict=True))


def chunks(rows: Sequence[Row]) -> Records:
    """Returns a table with one line a chunk, numbered from the query's beginning.

    ``rows`` that have so many chunks and gold; ``accuracy``; ``trivial`` and ``gold_trivial``;
    ``first_wrong``, queries whose first wrong thought this is, and their share of all of them.
    """
    judged = [row for row in rows if row.gold is not None]
    wrong = Counter(row.first_wrong for row in judged)
    records = []
    for number in range(max((len(row.own) for row in judged), default=0)):
        pairs = [_pairs(row)[number] for row in judged if number < len(row.own)]
        records.append(
            {
                "chunk": number,
                "rows": len(pairs),
                "accuracy": mean(a == b for a, b in pairs),
                "trivial": mean(not a for a, _ in pairs),
                "gold_trivial": mean(not b for _, b in pairs),
                "first_wrong": wrong[number],
                "first_wrong_share": wrong[number] / len(judged),
            }
        )
    return records


def thoughts(rows: Sequence[Row]) -> Records:
    """Returns a table with one line a gold thought, by its order in the query, from 1.

    ``rows`` that have so many; ``accuracy``, the share of which is thought so in its chunk.
    """
    found: dict[int, list[bool]] = {}
    for row in rows:
        right = [a == b for a, b in _pairs(row) if b]
        for order, is_right in enumerate(right, start=1):
            found.setdefault(order, []).append(is_right)
    return [
        {"thought": order, "rows": len(flags), "accuracy": mean(flags)}
        for order, flags in sorted(found.items())
    ]


def rounds(rows: Sequence[Row]) -> Records:
    """Returns a table with one line a number of rounds: ``rows`` that took them, their ``share``.

    ``nontrivial``: their chunks with a thought, on average; speculation takes one round more at
    most.
    """
    records = []
    for number in sorted({row.rounds for row in rows}):
        chosen = [row for row in rows if row.rounds == number]
        records.append(
            {
                "rounds": number,
                "rows": len(chosen),
                "share": len(chosen) / len(rows),
                "nontrivial": mean(sum(map(bool, row.own)) for row in chosen),
            }
        )
    return records


def groups(rows: Sequence[Row]) -> Records:
    """Returns a table with one line a group of queries: ``rows`` and numbers of ``summary``."""
    records = []
    for group in sorted({row.group for row in rows}):
        chosen = [row for row in rows if row.group == group]
        found = summary(chosen)
        names = ("accuracy", "accuracy_nontrivial", "all_right", "rounds", "nontrivial")
        numbers = {name: found[name] for name in names}
        records.append({"group": group, "rows": len(chosen), **numbers})
    return records


def mean(values: Iterable[float]) -> float:
    """Returns the mean of numbers or truth values; nan of none."""
    own = list(values)
    return sum(own) / len(own) if own else math.nan
