"""Rows of text: query, what a method writes in between, answer prefix, answer.

Layouts are frozen dataclasses of plain values: the loss and the data's counter share them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_models.thinking_states.rows import (
    Joined,
    answer_of,
    constant,
    join,
    next_tokens,
    query_of,
    within,
)

Batch = dict[str, Any]
Segment = tuple[Tensor, Tensor]
"""Right-padded tokens (B, W) and their lengths (B,)."""

NOTHING, QUERY, THINKING, CHAIN, PREFIX, ANSWER = range(-1, 5)
"""What a token of a row is; padding is nothing."""


class TextRows(NamedTuple):
    """Text as a network reads it.

    Attributes:
        tokens: (B, T) int64.
        targets: The next token where it is predicted, else -100 (B, T).
        answers: Which targets are of the answer, its EOS among them (B, T) bool.
        kinds: What each token is (B, T) int64.
    """

    tokens: Tensor
    targets: Tensor
    answers: Tensor
    kinds: Tensor


def line_up(*parts: tuple[int, Segment]) -> Joined:
    """Returns segments one behind the other; ``segment`` holds the kind given with each."""
    joined = join(*(segment for _, segment in parts))
    names = [*(kind for kind, _ in parts), NOTHING]  # -1, behind a row's end, takes the last
    kinds = torch.tensor(names, device=joined.tokens.device)
    return joined._replace(segment=kinds[joined.segment])


def shortened(segment: Segment, removed: Tensor, side: str) -> Segment:
    """Returns a segment without its first tokens, or without its last.

    Args:
        segment: as everywhere.
        removed: tokens to remove, at most the length (B,) int64.
        side: left or right.
    """
    tokens, lengths = segment
    lengths = lengths - removed
    if side == "left" and tokens.shape[1]:
        places = torch.arange(tokens.shape[1], device=tokens.device) + removed[:, None]
        tokens = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))
    return tokens.masked_fill(~within(lengths, tokens.shape[1]), 0), lengths


@dataclass(frozen=True)
class TextLayout:
    """Query, answer prefix, answer: the text without reasoning, and the base of all others.

    Called with a batch it counts the tokens that the loss predicts there.
    """

    answer_prefix: tuple[int, ...]
    """Begins every answer."""
    step_separator: tuple[int, ...] = ()
    """Stands in front of each step."""
    lm_on_query: bool = False
    """Whether the query's tokens are predicted, too."""

    def __call__(self, batch: Batch) -> dict[str, float]:
        """Returns the normaliser of ``nll``: ``targets``, predicted tokens of the batch."""
        return {"targets": float((self.training(batch).targets >= 0).sum())}

    def training(self, batch: Batch, stage: int = 0) -> TextRows:
        """Returns the text to be learned.

        Args:
            batch: of questions.
            stage: of a curriculum, where the batch does not say how far training is.
        """
        chain, learned = self.chain(batch, stage)
        prefix = constant(self.answer_prefix, batch["query"])
        return self.arrange(batch, (CHAIN, chain), (PREFIX, prefix), learned=learned)

    def scored(self, batch: Batch, middle: Segment) -> TextRows:
        """Returns the text whose answer is scored: ``middle`` ends with the answer prefix."""
        return self.arrange(batch, (PREFIX, middle))

    def chain(self, batch: Batch, stage: int) -> tuple[Segment, Tensor]:
        """Returns the reasoning that is learned, and in which rows its end is learned (B,) bool.

        The end of a chain is the answer prefix; where there is never a chain, it is just given.
        """
        none = constant((), batch["query"])
        return none, none[1] > 0

    def arrange(
        self, batch: Batch, *middle: tuple[int, Segment], learned: Tensor | None = None
    ) -> TextRows:
        """Returns rows of query, ``middle`` and answer; see ``predict`` for the other argument."""
        line = line_up((QUERY, query_of(batch)), *middle, (ANSWER, answer_of(batch)))
        return self.predict(line, learned)

    def predict(self, line: Joined, learned: Tensor | None) -> TextRows:
        """Returns rows with what is predicted in them.

        Args:
            line: tokens, and as ``segment`` their kinds.
            learned: rows whose answer prefix is predicted (B,) bool; None: no row.
        """
        kinds = line.segment
        predicted = (kinds == CHAIN) | (kinds == ANSWER)
        if self.lm_on_query:
            before = kinds.roll(1, dims=1)  # nothing stands in front of a query's first token
            predicted = predicted | (kinds == QUERY) & (before == QUERY)
        if learned is not None:
            predicted = predicted | (kinds == PREFIX) & learned[:, None]
        targets = next_tokens(line, predicted)
        answers = next_tokens(line, kinds == ANSWER) >= 0
        return TextRows(line.tokens, targets, answers, kinds)


@dataclass(frozen=True)
class ChainLayout(TextLayout):
    """Query, chain, answer prefix, answer: a chain of thought, which is learned with its end.

    Raises:
        ValueError: if there is no answer prefix: nothing would tell where a chain ends.
    """

    def __post_init__(self) -> None:
        """Checks that chains have an end."""
        if not self.answer_prefix:
            raise ValueError(
                "answer_prefix () ends a chain of thought, so it must not be empty; train with "
                "reasoning data, which have one (data.answer_prefix), or set it to token ids"
            )
