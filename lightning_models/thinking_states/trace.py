"""What a model thought while it read: the thoughts of each chunk, for inspection and statistics.

Recorded (``layers.recording``) as ``record("thoughts", trace=Trace)``, the model's own thoughts of
a scored or answered batch, and ``record("gold_thoughts", trace=Trace)``, those that the batch's
steps make, of a scored one. Both have the rows of the batch in its order, and the same chunks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class Thought(NamedTuple):
    """What was thought behind one chunk.

    Attributes:
        tokens: Ids without the end; empty: a trivial thought, whose state is zero. Steps of one
            chunk are separated by the id of ``step``, which no tokenizer knows. As many tokens as
            ``max_thought_tokens`` say that the thought may have been cut.
        end: Index of the chunk's last token in the row: of the query, or from its length on of the
            answer's prefix and the answer.
    """

    tokens: list[int]
    end: int


@dataclass
class Trace:
    """The thoughts of a batch.

    What is thought while an answer is written (``think_in_decode``, and the query's last chunk
    where the answer fills it up) is added to the same object when it is thought.
    """

    rows: list[list[Thought]]
    """The chunks of each row that have thought, in their order; trivial thoughts too."""
    rounds: list[int] = field(default_factory=list)
    """Passes of the backbone over each row's query, or over a part of it; empty for gold."""

    @property
    def nontrivial(self) -> list[int]:
        """Returns how many thoughts of each row have tokens."""
        return [sum(1 for thought in row if thought.tokens) for row in self.rows]

    def at(self, row: int) -> dict[int, list[int]]:
        """Returns the tokens of a row's non-trivial thoughts by ``Thought.end``."""
        return {thought.end: thought.tokens for thought in self.rows[row] if thought.tokens}
