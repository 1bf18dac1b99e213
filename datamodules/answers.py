"""Corpora of questions with one right answer: a window is one question, and its answer is marked.

The text store holds question and answer as two documents, one after the other, so each is
tokenised for itself: where the answer begins is exact for every tokenizer, and an answer has the
same tokens wherever it stands.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import numpy as np

from datamodules.answer_windows import AnswerRows, AnswerSource, LossOn, Questions
from datamodules.row_order import Order
from datamodules.store import SPLITS, Split
from datamodules.text import TextDataModule


class AnswerDataModule(TextDataModule):
    """Questions and answers as batches, one question a row, padded on the right.

    Rows are as wide as the longest question of their split with its answer, whatever `block_size`,
    which only has to be enough. Batches are those of `TextDataModule` with two more keys:
    ``answer`` (B, T) bool, true where the target is a token of the answer or the EOS after it;
    ``group`` (B,) int64, what accuracies are grouped by (`group_name`), -1 in filling rows.

    Args:
        loss_on: What is predicted, in training and evaluation: 'answer' (and the EOS after it), or
            'all' tokens. A question is drawn at random: beyond its wording there is nothing to
            learn in it, and its tokens outnumber the answer's.
        train_windows: 'packed' has each question once an epoch, in a new order; 'random' draws
            questions with replacement.
        **kwargs: See `TextDataModule`.

    Raises:
        ValueError: An argument is out of its range; in `setup`: a question is longer than
            block_size.
    """

    not_in_source: ClassVar[frozenset[str]] = TextDataModule.not_in_source | {"loss_on"}
    group_name: ClassVar[str] = "group"
    """What ``group`` counts, in results."""

    def __init__(
        self,
        *,
        loss_on: LossOn = "answer",
        train_windows: Literal["packed", "random"] = "packed",
        **kwargs: Any,
    ) -> None:
        super().__init__(train_windows=train_windows, **kwargs)
        if loss_on not in ("answer", "all"):
            raise ValueError(f"loss_on={loss_on!r} must be 'answer' or 'all'.")
        self.loss_on: LossOn = loss_on

    @abstractmethod
    def questions(self, split: Split) -> Iterable[tuple[str, str]]:
        """Yields (question, answer) of a split, none empty, in an order that never changes.

        The answer continues the question: a space between them is part of the answer.
        """

    def candidates(self) -> list[str] | None:
        """Returns all possible answers, as `questions` writes them; None: they are not listed."""
        return None

    def groups(self, split: Split, numbers: np.ndarray) -> np.ndarray:
        """Returns the group of each question, int64 of the shape of `numbers`; here all are 0."""
        return np.zeros_like(numbers)

    def documents(self, split: Split) -> Iterator[str]:
        """Yields question and answer in turn."""
        for question, answer in self.questions(split):
            yield question
            yield answer

    def setup(self, stage: str | None = None) -> None:
        """Opens the text store.

        Raises:
            ValueError: It is missing or damaged, or block_size is too short for a question.
        """
        super().setup(stage)
        for split in SPLITS:
            longest = Questions(self.stream(split)).longest
            if longest > self.block_size:
                raise ValueError(
                    f"block_size={self.block_size} is too short: a question of the {split} split "
                    f"has {longest} tokens with its answer. Set block_size={longest} or above; "
                    "rows are only as wide as their split needs."
                )

    def training_source(self) -> AnswerSource:
        """Returns the training batches of this rank by number."""
        rows_per_batch = self.batch_size * self._ranks()[1]
        return self._source("train", self.batch_size, order=(self.train_windows, rows_per_batch))

    def evaluation_source(self, split: Split) -> AnswerSource:
        """Returns the batches of this rank that have every question of a split once, in order.

        Raises:
            ValueError: The split is empty.
        """
        if not len(self.stream(split)):
            raise ValueError(f"The {split} split is empty. {self.how_to_get(split)}")
        return self._source(split, self.eval_batch_size)

    def _source(
        self, split: Split, batch_size: int, order: tuple[Order, int] | None = None
    ) -> AnswerSource:
        rank, world_size = self._ranks()
        questions = Questions(self.stream(split))
        rows = AnswerRows(
            questions,
            eos_id=self.tokenizer.eos_id,
            groups=self.groups(split, np.arange(len(questions))),
            order=None if order is None else order[0],
            rows_per_batch=1 if order is None else order[1],
            seed=self.seed,
        )
        return AnswerSource(
            rows,
            loss_on=self.loss_on,
            batch_size=batch_size,
            eos_id=self.tokenizer.eos_id,
            token_bytes=self.tokenizer.token_bytes,
            rank=rank,
            world_size=world_size,
            drop_last=order is not None,
        )
