"""Corpora of questions with one correct answer; each window is a question with a marked answer.

The text store has question and answer as two consecutive documents, so each is tokenised
separately: the start of the answer is exact for every tokenizer, and the same answer always has the
same tokens.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from datamodules.base import choice_problems, raise_problems
from datamodules.encoding import Continuation
from datamodules.order import NO_GROUP, Order, RowOrder
from datamodules.sources import Batch, Rows, RowSource
from datamodules.store import SPLITS, Split, TokenStream
from datamodules.text import IGNORE, TextDataModule, as_batch, target_bytes

LossOn = Literal["answer", "all"]


class AnswerDataModule(TextDataModule):
    """Batches of questions and answers, one question per row, padded on the right.

    Rows are as wide as the longest question of their split with its answer; `block_size` is only an
    upper limit. Batches have the keys of `TextDataModule` and two more: ``answer`` (B, T)
    bool, true where the target is a token of the answer or the EOS after it; ``group`` (B,) int64,
    the group for accuracies (`group_name`), -1 in padding rows.

    Args:
        loss_on: Targets of the loss, in training and evaluation: 'answer' (and the EOS after it),
            or 'all' tokens. Questions are drawn at random: apart from their wording, there is
            nothing to learn from them, and they have more tokens than the answers.
        train_windows: 'packed' visits each question once per epoch, in a new order; 'random' draws
            questions with replacement.
        **kwargs: See `TextDataModule`.

    Raises:
        ValueError: If an argument is out of range; in `setup`, if a training question is longer
            than block_size.
    """

    not_in_source: ClassVar[frozenset[str]] = TextDataModule.not_in_source | {"loss_on"}
    may_overlap: ClassVar[bool] = False
    document_noun: ClassVar[str] = "question"
    group_name: ClassVar[str] = "group"
    """Name of ``group`` in results."""

    def __init__(
        self,
        *,
        loss_on: LossOn = "answer",
        train_windows: Literal["packed", "random"] = "packed",
        **kwargs: Any,
    ) -> None:
        super().__init__(train_windows=train_windows, **kwargs)
        raise_problems(choice_problems(("answer", "all"), loss_on=loss_on))
        self.loss_on: LossOn = loss_on

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.eval_stride is not None:
            problems.append(
                f"eval_stride={self.eval_stride} is for running text; here each question is one row"
            )
        return problems

    # ---- implemented by subclasses

    @abstractmethod
    def questions(self, split: Split) -> Iterable[tuple[str, str]]:
        """Yields (question, answer) of a split, none empty, in an order that never changes.

        The answer continues the question: a space between them is part of the answer.
        """

    def candidates(self) -> list[str] | None:
        """Returns all possible answers, as `questions` writes them, or None if unknown."""
        return None

    def groups(self, split: Split, indices: np.ndarray) -> np.ndarray:
        """Returns the group of each question, int64 with the shape of `indices`."""
        return np.zeros_like(indices)

    def is_right(self, text: str, answer: str) -> bool:
        """Returns whether a generated answer is correct, ignoring surrounding whitespace."""
        return text.strip() == answer.strip()

    # ---- text and batches

    def documents(self, split: Split) -> Iterator[str]:
        """Yields question and answer in turn; the answer continues the question."""
        for question, answer in self.questions(split):
            yield question
            yield Continuation(answer)

    def setup(self, stage: str | None = None) -> None:
        """Opens the text store.

        Raises:
            ValueError: If it is missing or damaged, or a training question is longer than
                block_size.
        """
        super().setup(stage)
        self._leave_out({split: self._lengths(split) for split in SPLITS}, stage)

    def _lengths(self, split: Split) -> np.ndarray:
        """Returns the length in tokens of each question with its answer, int64."""
        start, _, end = _spans(self.stream(split), self.tokenizer.text_bos_id)
        return end - start - 1  # without the EOS in the middle

    def training_source(self) -> "AnswerSource":
        return self._source("train", self._training_rows(), self.train_windows)

    def evaluation_source(self, split: Split) -> "AnswerSource":
        """Returns this rank's batches, which cover every question of a split once, in order.

        Questions longer than block_size are left out; see `left_out`.

        Raises:
            ValueError: If the split is empty, or all of its questions are too long.
        """
        self._refuse_empty(split, len(self.stream(split)))
        rows: Rows = {"batch_size": self.eval_batch_size, **self._ranks()}
        return self._source(split, rows, None)

    def _source(self, split: Split, rows: Rows, order: Order | None) -> "AnswerSource":
        stream = self.stream(split)
        return AnswerSource(
            stream,
            groups=self.groups(split, np.arange(len(stream.document_ends) // 2)),
            order=order,
            seed=self.seed,
            kept=self._fitting(split) if order is None else None,
            loss_on=self.loss_on,
            eos_id=self.tokenizer.eos_id,
            bos_id=self.tokenizer.text_bos_id,
            **rows,
        )


# ---- batches of rows by index


def _spans(stream: TokenStream, bos_id: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the start of each question, the start of its answer, and the end of the answer.

    A BOS may precede the question's start. An EOS precedes the answer's start, and another one is
    the answer's last token.
    """
    ends = np.asarray(stream.document_ends)
    assert len(ends) % 2 == 0, "a question or an answer without text"
    starts = np.concatenate([[0], ends[1:-1:2]])[: len(ends) // 2]
    return starts + (bos_id is not None), ends[::2], ends[1::2]


class AnswerSource(RowSource):
    """Batches of one question per row: BOS or EOS, question, answer, EOS, and then -100.

    Args:
        stream: Tokens of one split, alternating between questions and answers.
        groups: Group of each question, int64 (number of questions,).
        order: Order of the questions in rows; see `RowOrder`.
        seed: Seed of that order.
        kept: Indices of the questions to evaluate; all by default.
        loss_on: See `AnswerDataModule`.
        eos_id: Token at padded inputs, and before a question without BOS.
        bos_id: Token before a question, or None if texts begin without BOS.
        **rows: See `RowSource`.

    Raises:
        ValueError: If training has fewer questions than one batch takes.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        groups: np.ndarray,
        order: Order | None,
        seed: int,
        kept: np.ndarray | None = None,
        loss_on: LossOn,
        eos_id: int,
        bos_id: int | None = None,
        **rows: int,
    ) -> None:
        super().__init__(**rows)
        self._stream, self._groups, self._loss_on = stream, groups, loss_on
        self._eos_id, self._start_id = eos_id, eos_id if bos_id is None else bos_id
        self._start, self._middle, self._end = _spans(stream, bos_id)
        widths = self._end - self._start
        self._width = int((widths if kept is None else widths[kept]).max(initial=1))
        self._order = RowOrder(
            len(widths), order=order, rows_per_batch=self._rows_per_step, seed=seed, kept=kept
        )

    def __len__(self) -> int:
        """Returns the number of batches per rank and epoch."""
        return self._order.batches * self._accumulate

    def counts(self, n: int) -> dict[str, float]:
        """Returns the targets of batch `n` over all ranks."""
        examples = self._order.examples(self._all_indices(n))
        first = self._middle[examples] if self._loss_on == "answer" else self._start[examples] + 1
        return {"targets": float((self._end[examples] - first).sum())}

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank; see `answer_batch`."""
        indices = self._indices(n)
        examples = self._order.examples(indices)  # -1 in padding rows
        positions, clipped = self._token_positions(examples)
        rows = self._stream.gather(clipped)
        sizes = self._stream.bytes_at(clipped, rows)
        rows[:, 0] = self._start_id
        rows[(positions >= self._end[examples, None]) | (examples < 0)[:, None]] = IGNORE
        return answer_batch(
            rows,
            sizes,
            self._order.sequence_ids(indices),
            first_answers=self._middle[examples] - 1 - self._start[examples],
            groups=np.where(examples < 0, NO_GROUP, self._groups[examples]),
            loss_on=self._loss_on,
            eos_id=self._eos_id,
        )

    def target_sizes(self, n: int) -> Tensor:
        """Returns the UTF-8 bytes of each target of batch `n`, (B, T) int64."""
        _, clipped = self._token_positions(self._order.examples(self._indices(n)))
        sizes = self._stream.bytes_at(clipped, self._stream.gather(clipped))
        return torch.from_numpy(sizes[:, 1:])

    def _token_positions(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns positions of the rows' tokens in the stream (B, T+1), unclipped and clipped."""
        start = self._start[examples, None]
        offsets = np.arange(self._width) - 1  # (T+1,); -1 is the BOS or EOS before the question
        # skips the EOS between question and answer
        positions = start + offsets + (offsets >= self._middle[examples, None] - 1 - start)
        return positions, np.clip(positions, 0, len(self._stream) - 1)


def answer_batch(
    rows: np.ndarray,
    sizes: np.ndarray,
    indices: np.ndarray,
    *,
    first_answers: np.ndarray,
    groups: np.ndarray,
    loss_on: LossOn,
    eos_id: int,
) -> Batch:
    """Returns the batch dict of rows (B, T+1) with the answers marked.

    Its keys are the keys of `text.as_batch`, ``answer`` (B, T) bool and ``group`` (B,) int64.

    Args:
        rows: BOS or EOS, question, answer, EOS, then -100.
        sizes: UTF-8 bytes of each token of the rows, (B, T+1) int64.
        indices: Index of each row (B,).
        first_answers: Position of the first answer token among the targets of each row (B,).
        groups: Group of each row (B,), int64.
        loss_on: Targets to keep; the others become -100.
        eos_id: Token at padded inputs.
    """
    positions = np.arange(rows.shape[1] - 1)
    answer = torch.from_numpy((positions >= first_answers[:, None]) & (rows[:, 1:] != IGNORE))
    batch = as_batch(rows, sizes, indices, eos_id=eos_id)
    batch |= {"answer": answer, "group": torch.from_numpy(groups)}
    if loss_on == "answer":
        targets = torch.where(answer, batch["targets"], IGNORE)
        batch |= {"targets": targets, "num_bytes": target_bytes(targets, sizes[:, 1:])}
    return batch
