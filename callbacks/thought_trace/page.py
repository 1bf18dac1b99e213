"""Queries with their thoughts as one HTML file, and as plain text."""

from collections.abc import Mapping, Sequence
from typing import Any

from callbacks.analysis.page import document, number, table, token
from callbacks.thought_trace.findings import ShownRow, ShownThought

TEXT, RIGHT, WRONG = range(3)
MEANING = f"{TEXT} text, {RIGHT} a right thought, {WRONG} a wrong one"
HEAD = ("chunk", "queries", "share right", "without a thought", "gold without", "first wrong")


def page(title: str, chunks: Sequence[Mapping[str, Any]], rows: Sequence[ShownRow]) -> str:
    """Returns the page: a table of chunks, and each query cut into chunks with their thoughts.

    Args:
        title: of the page.
        chunks: see ``measures.chunks``.
        rows: the queries to show.
    """
    shares = ("accuracy", "trivial", "gold_trivial")
    lines = (
        [
            *(str(line[name]) for name in ("chunk", "rows")),
            *(number(line[name]) for name in shares),
            str(line["first_wrong"]),
        ]
        for line in chunks
    )
    return document(
        title,
        table(HEAD, lines) if chunks else "",
        MEANING,
        range(3),
        [_spans(row) for row in rows],
        unit="chunks",
    )


def _spans(row: ShownRow) -> list[str]:
    """Returns the chunks of a query, each with its thought; the last one with what is after it."""
    spans = [
        token(TEXT, [f"chunk {chunk}"], part) + _thought(chunk, thought)
        for chunk, (part, thought) in enumerate(zip(row.parts, row.thoughts, strict=False))
    ]
    rest = token(TEXT, ["after the last thought"], row.parts[-1]) if row.parts[-1] else ""
    return [*spans[:-1], spans[-1] + rest] if spans else [rest]


def _thought(chunk: int, thought: ShownThought) -> str:
    if thought.own is None and thought.right:
        return ""
    own, gold = ("nothing" if text is None else text for text in (thought.own, thought.gold))
    tip = [f"after chunk {chunk}", f"gold: {gold}"]
    return token(RIGHT if thought.right else WRONG, tip, f"[{own}]")


def plain_text(rows: Sequence[ShownRow]) -> str:
    """Returns the queries with their thoughts, an empty line between two."""
    return "\n\n".join(row.told() for row in rows) + "\n"


def markdown(rows: Sequence[ShownRow]) -> str:
    """Returns the same as verbatim blocks, for TensorBoard."""
    return "\n\n---\n\n".join(
        "\n".join("    " + line for line in row.told().splitlines() or [""]) for row in rows
    )
