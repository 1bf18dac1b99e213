"""Recorded thoughts of a model reading queries, as plain values and as text within the query."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from callbacks.analysis.token_text import EOS, PART, pieces

JOINT = "; "
"""Separator between the steps of a thought."""


@dataclass(frozen=True)
class Thought:
    """Thought after a chunk.

    Attributes:
        end: Index of the chunk's last token in the query (the EOS before it has index 0).
        tokens: Token ids without the end of the thought, empty for a trivial thought.
    """

    end: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class RowThinking:
    """Thoughts along a row.

    Attributes:
        thoughts: One for each chunk of the query, in order, followed by one for each chunk of the
            answer if the model also thinks there.
        rounds: Number of passes through the backbone for reading the query, 0 if not recorded.
    """

    thoughts: tuple[Thought, ...]
    rounds: int = 0

    @property
    def nontrivial(self) -> int:
        """Number of thoughts that are not trivial."""
        return sum(bool(thought.tokens) for thought in self.thoughts)

    @property
    def length(self) -> int:
        """Total number of tokens in the thoughts."""
        return sum(len(thought.tokens) for thought in self.thoughts)

    def within(self, query: Sequence[int]) -> "RowThinking":
        """Returns the thoughts along a query of these tokens, without the answer."""
        thoughts = tuple(thought for thought in self.thoughts if thought.end < len(query))
        return RowThinking(thoughts, self.rounds)


class Recorded:
    """Record of one batch, ``thoughts`` or ``gold_thoughts``."""

    def __init__(self) -> None:
        self._trace: Any = None

    def take(self, *, trace: Any, **_: Any) -> None:
        """Records the trace of a model, which may extend it while decoding."""
        self._trace = trace

    @property
    def rows(self) -> list[RowThinking] | None:
        """Thoughts along each row of the batch, or None if nothing was recorded."""
        if self._trace is None:
            return None
        rounds = self._trace.rounds or [0] * len(self._trace.rows)
        return [
            RowThinking(tuple(map(_thought, thoughts)), int(passes))
            for thoughts, passes in zip(self._trace.rows, rounds, strict=True)
        ]


def _thought(recorded: Any) -> Thought:
    return Thought(int(recorded.end), tuple(map(int, recorded.tokens)))


def thought_text(tokenizer: Any, tokens: Iterable[int]) -> str:
    """Returns the text of a thought; ids outside the vocabulary separate its steps."""
    runs = groupby(tokens, key=lambda i: i < tokenizer.vocab_size)
    texts = [tokenizer.decode_continuation(list(run)).strip() for is_text, run in runs if is_text]
    return JOINT.join(texts)


def parts_of(tokenizer: Any, query: Sequence[int], ends: Sequence[int]) -> list[str]:
    """Splits a query's text after the tokens at ``ends``, without the EOS before it.

    A character that spans several tokens belongs to the last one.

    Args:
        tokenizer: Tokenizer of the data.
        query: Token ids of the query, EOS first.
        ends: Ascending indices; the result has one part more.
    """
    texts = ["" if text in (EOS, PART) else text for text in pieces(tokenizer, query)]
    starts = [0, *(end + 1 for end in ends)]
    stops = [*starts[1:], len(texts)]
    return ["".join(texts[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def insert(part: str, mark: str) -> str:
    """Inserts a mark at the end of a part of a query, before its trailing spaces."""
    text = part.rstrip()
    return f"{text} {mark}{part[len(text) :]}" if mark else part


def query_with_thoughts(tokenizer: Any, query: Sequence[int], thinking: RowThinking) -> str:
    """Returns a query with its thoughts inserted, as in the paper's Fig. 4."""
    full = [thought for thought in thinking.within(query).thoughts if thought.tokens]
    texts = parts_of(tokenizer, query, [thought.end for thought in full])
    marks = [f"[T: {thought_text(tokenizer, thought.tokens)}]" for thought in full]
    return "".join(map(insert, texts, [*marks, ""])).strip()
