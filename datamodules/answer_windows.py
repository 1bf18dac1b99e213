"""Rows of one question and its answer, by number, and their batches.

The stream holds question and answer in turn, as two documents (see `answers`).
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from datamodules.loader import Batch
from datamodules.row_order import NO_GROUP, Order, RowOrder
from datamodules.store import TokenStream
from datamodules.windows import IGNORE, WindowSource, as_batch

LossOn = Literal["answer", "all"]


class Questions:
    """Where questions and answers lie in a stream whose documents are them in turn.

    Args:
        stream: Tokens of the split.
    """

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        assert len(stream.document_ends) % 2 == 0, "a question or an answer without text"

    def __len__(self) -> int:
        """Returns the number of questions."""
        return len(self.stream.document_ends) // 2

    def spans(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns, of each question, its start, its answer's start, and the answer's end.

        An EOS lies in front of the answer's start, and one is the answer's last token.
        """
        ends = self.stream.document_ends
        first = 2 * numbers
        return np.where(first > 0, ends[first - 1], 0), ends[first], ends[first + 1]

    def lengths(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of each question, and of each answer with its EOS."""
        start, middle, end = self.spans(numbers)
        return middle - 1 - start, end - middle

    @property
    def longest(self) -> int:
        """Most tokens that a question and its answer have, the EOS after it counted."""
        question, answer = self.lengths(np.arange(len(self)))
        return int((question + answer).max(initial=0))


class AnswerRows:
    """One question a row: EOS, question, answer, EOS, and -100 up to the common width.

    Args:
        questions: Of one split.
        eos_id: The token in front of a question.
        groups: Group of each question, int64.
        order: Which question is row n; see `RowOrder`.
        rows_per_batch: The same.
        seed: The same.

    Raises:
        ValueError: There are fewer questions than one batch takes.
    """

    def __init__(
        self,
        questions: Questions,
        *,
        eos_id: int,
        groups: np.ndarray,
        order: Order | None = None,
        rows_per_batch: int = 1,
        seed: int = 0,
    ) -> None:
        self._questions, self._eos_id, self._groups = questions, eos_id, groups
        self._order = RowOrder(
            len(questions), order=order, rows_per_batch=rows_per_batch, seed=seed
        )
        self.block_size = questions.longest

    def __len__(self) -> int:
        """Returns the rows per epoch."""
        return len(self._order)

    def question_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Returns which question each row has; -1 for rows too many."""
        return self._order.examples(numbers)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns rows (B, T+1) for numbers (B,); all -100 in rows too many."""
        which = self.question_numbers(numbers)
        start, middle, end = (part[:, None] for part in self._questions.spans(which.clip(min=0)))
        behind = np.arange(self.block_size + 1) - 1  # tokens after the EOS in front
        positions = np.where(behind < middle - 1 - start, start + behind, start + behind + 1)
        last = len(self._questions.stream) - 1
        rows = self._questions.stream.gather(np.clip(positions, 0, last))
        rows[:, 0] = self._eos_id
        rows[(positions >= end) | (which[:, None] < 0)] = IGNORE
        return rows

    def first_answers(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the place of each answer's first token among its row's targets."""
        question, _ = self._questions.lengths(self.question_numbers(numbers).clip(min=0))
        return question

    def row_groups(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the group of each row."""
        which = self.question_numbers(numbers)
        return np.where(which < 0, NO_GROUP, self._groups[which])

    def num_targets(self, numbers: np.ndarray, loss_on: LossOn) -> int:
        """Returns the targets of these rows together."""
        question, answer = self._questions.lengths(self.question_numbers(numbers))
        return int((answer if loss_on == "answer" else question + answer).sum())


class AnswerSource(WindowSource):
    """Batches of one rank with marked answers.

    Args:
        order: Rows by number.
        loss_on: See `AnswerDataModule`.
        **kwargs: See `WindowSource`.
    """

    def __init__(self, order: AnswerRows, *, loss_on: LossOn, **kwargs: Any) -> None:
        super().__init__(order, **kwargs)
        self._answer_rows, self._loss_on = order, loss_on

    def counts(self, n: int) -> dict[str, float]:
        """Returns the targets of batch `n` over all ranks."""
        rows = self._batch_size * self._world_size
        numbers = np.arange(n * rows, (n + 1) * rows)
        return {"targets": float(self._answer_rows.num_targets(numbers, self._loss_on))}

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank; see `answer_batch`."""
        first = (n * self._world_size + self._rank) * self._batch_size
        numbers = np.arange(first, first + self._batch_size)
        return answer_batch(
            self._answer_rows.rows(numbers),
            numbers,
            first_answers=self._answer_rows.first_answers(numbers),
            groups=self._answer_rows.row_groups(numbers),
            loss_on=self._loss_on,
            eos_id=self._eos_id,
            token_bytes=self._token_bytes,
        )


def answer_batch(
    rows: np.ndarray,
    numbers: np.ndarray,
    *,
    first_answers: np.ndarray,
    groups: np.ndarray,
    loss_on: LossOn,
    eos_id: int,
    token_bytes: Tensor,
) -> Batch:
    """Returns the batch dict of rows (B, T+1), answers marked.

    Keys: those of `windows.as_batch`, ``answer`` (B, T) bool and ``group`` (B,) int64.

    Args:
        rows: EOS, question, answer, EOS, then -100.
        numbers: Number of each row (B,).
        first_answers: Place of the first answer token among the targets of each row (B,).
        groups: Group of each row (B,), int64.
        loss_on: Which targets stay; the others become -100.
        eos_id: Token that stands at padded inputs.
        token_bytes: UTF-8 bytes of each id, (V,) int64.
    """
    places = np.arange(rows.shape[1] - 1)
    answer = torch.from_numpy((places >= first_answers[:, None]) & (rows[:, 1:] != IGNORE))
    batch = as_batch(rows, numbers, eos_id=eos_id, token_bytes=token_bytes)
    batch |= {"answer": answer, "group": torch.from_numpy(groups)}
    if loss_on == "answer":
        targets = torch.where(answer, batch["targets"], IGNORE)
        sizes = torch.where(answer, token_bytes[targets.clamp(min=0)], 0)
        batch |= {"targets": targets, "num_bytes": sizes.sum(1)}
    return batch
