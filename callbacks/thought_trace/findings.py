"""What a model has thought along the queries of batches, and what it should have."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from callbacks.reasoning.thinking import RowThinking, Thought, insert, parts_of, thought_text

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """Thoughts along one query of n chunks, the ends of thoughts left out.

    Attributes:
        own: What the model thinks after each chunk, n of them; empty: nothing.
        gold: What the data's steps make; None where the data know no steps, so that nothing can be
            said of the model's.
        rounds: Passes through the backbone that reading the query took.
        group: What queries are grouped by, e.g. the number of operations.
    """

    own: tuple[Tokens, ...]
    gold: tuple[Tokens, ...] | None
    rounds: int
    group: int

    @property
    def right(self) -> list[bool]:
        """Whether each chunk's thought is the gold one; of no chunk without that."""
        return (
            [] if self.gold is None else [a == b for a, b in zip(self.own, self.gold, strict=True)]
        )

    @property
    def first_wrong(self) -> int | None:
        """Number of the first chunk whose thought is another, from 0; None: there is none."""
        return next((chunk for chunk, right in enumerate(self.right) if not right), None)


@dataclass(frozen=True)
class ShownThought:
    """A thought next to the gold one, as text; None: nothing is thought.

    Attributes:
        own: What the model thinks.
        gold: What it should; the same as ``own`` where the data know no steps.
        right: Whether they are the same, token by token.
    """

    own: str | None
    gold: str | None
    right: bool


@dataclass(frozen=True)
class ShownRow:
    """A query that is written out.

    Attributes:
        parts: Its text, cut after each chunk; n, and what is after the last one.
        thoughts: One after each of the first n parts.
    """

    parts: Sequence[str]
    thoughts: Sequence[ShownThought]

    def told(self) -> str:
        """Returns the query with all thoughts where they are thought; with wrong ones the gold."""
        marks = [_mark(thought) for thought in self.thoughts]
        return "".join(map(insert, self.parts, [*marks, ""])).strip()


def _mark(thought: ShownThought) -> str:
    if thought.right:
        return "" if thought.own is None else f"[T: {thought.own}]"
    own, gold = ("nothing" if text is None else text for text in (thought.own, thought.gold))
    return f"[T: {own} | not {gold}]"


@dataclass
class Findings:
    """What was found in batches; ranks' can be merged."""

    rows: list[Row] = field(default_factory=list)
    shown: list[ShownRow] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything was found."""
        return bool(self.rows)

    def merge(self, other: "Findings") -> None:
        """Adds what was found in other batches."""
        self.rows += other.rows
        self.shown += other.shown

    def add(
        self,
        batch: dict[str, Any],
        own: Sequence[RowThinking],
        gold: Sequence[RowThinking] | None,
        tokenizer: Any,
        shown: int,
    ) -> None:
        """Adds the queries of a batch; rows that only fill it up are left out.

        Args:
            batch: of reasoning rows.
            own: what the model thinks along each row.
            gold: what the steps make, with the same chunks; None: the model does not say.
            tokenizer: the data's; None: nothing is written out.
            shown: how many queries in all are to be written out.
        """
        for row, thinking in enumerate(own):
            if not bool((batch["targets"][row] >= 0).any()):
                continue
            query = batch["query"][row, : int(batch["query_lengths"][row])].tolist()
            known = gold is not None and bool(batch["step_lengths"][row].any())
            theirs = gold[row].within(query).thoughts if known and gold is not None else None
            mine = thinking.within(query)
            self.rows.append(_row(mine, theirs, int(batch["group"][row])))
            if tokenizer is not None and len(self.shown) < shown:
                self.shown.append(_shown(tokenizer, query, mine.thoughts, theirs))


def _row(own: RowThinking, gold: Sequence[Thought] | None, group: int) -> Row:
    return Row(
        own=tuple(thought.tokens for thought in own.thoughts),
        gold=None if gold is None else tuple(thought.tokens for thought in gold),
        rounds=own.rounds,
        group=group,
    )


def _shown(
    tokenizer: Any, query: Sequence[int], own: Sequence[Thought], gold: Sequence[Thought] | None
) -> ShownRow:
    pairs = zip(own, own if gold is None else gold, strict=True)
    return ShownRow(
        parts_of(tokenizer, query, [thought.end for thought in own]),
        [
            ShownThought(_text(tokenizer, a), _text(tokenizer, b), a.tokens == b.tokens)
            for a, b in pairs
        ],
    )


def _text(tokenizer: Any, thought: Thought) -> str | None:
    return thought_text(tokenizer, thought.tokens) if thought.tokens else None
