"""Accuracy of a model on questions with known answers, measured after validations.

A batch of reasoning rows has ``query``, ``steps`` and ``targets`` (``datamodules.reasoning``); a
batch of windows marks the positions of the answer (``datamodules.answers``). The data module
judges answers with ``is_right(text, answer)``. ``evaluate.py reason`` uses the same functions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L

from callbacks.hooks import EvaluationHooks, check_minimum, gather
from callbacks.random_state import undisturbed
from callbacks.recorded_thoughts import RowThinking

ROOM = 2
"""Length that a model may write, as a multiple of the longest correct text with steps."""


@dataclass(frozen=True)
class Question:
    """A question of a batch, as tokens.

    Attributes:
        query: BOS or EOS, followed by the question.
        answer: The correct answer, without EOS.
        steps: The reasoning steps; empty for windows.
        group: Value of the property by which accuracies are grouped.
        sequence_id: Id of the question, independent of its batch.
    """

    query: list[int]
    answer: list[int]
    steps: list[list[int]]
    group: int
    sequence_id: int


@dataclass(frozen=True)
class Reply:
    """Answer of a model to a question.

    Attributes:
        question: The question.
        written: Generated token ids, including EOS if it was generated.
        text: The answer after its prefix; empty if the prefix was not generated.
        right: Whether the answer is correct.
        thinking: Thoughts while reading, or None if they were not recorded.
    """

    question: Question
    written: list[int]
    text: str
    right: bool
    thinking: RowThinking | None = None


def questions_in(batch: dict[str, Any]) -> list[Question]:
    """Returns the questions of a batch, without padding rows."""
    questions = []
    for row, targets in enumerate(batch["targets"]):
        counted = batch["answer"][row] if "answer" in batch else targets >= 0
        answer = targets[counted].tolist()[:-1]  # without EOS
        if answer:
            query, steps = _query_and_steps(batch, row)
            group, sequence_id = int(batch["group"][row]), int(batch["sequence_id"][row])
            questions.append(Question(query, answer, steps, group, sequence_id))
    return questions


def _query_and_steps(batch: dict[str, Any], row: int) -> tuple[list[int], list[list[int]]]:
    if "query" not in batch:
        last = int(batch["answer"][row].int().argmax())  # predicts the answer's first token
        return batch["tokens"][row, : last + 1].tolist(), []
    lengths = batch["step_lengths"][row].tolist()
    steps = zip(batch["steps"][row].tolist(), lengths, strict=True)
    query = batch["query"][row, : int(batch["query_lengths"][row])].tolist()
    return query, [ids[:length] for ids, length in steps if length]


def room_for(questions: Sequence[Question], data: Any, limit: int | None = None) -> int:
    """Returns the maximum number of tokens that a model may write to each question.

    Args:
        questions: At least one question.
        data: The data module, which has the templates of answers.
        limit: Maximum to return. None means twice the length of the longest correct text with all
            its steps, or, for windows, whose length is limited, the longest answer and EOS.
    """
    if limit:
        return limit
    if data.rows == "windows":
        return max(len(question.answer) for question in questions) + 1
    return ROOM * longest_text(questions, data)


def longest_text(questions: Sequence[Question], data: Any) -> int:
    """Returns the length of the longest correct text: all steps, answer prefix, answer and EOS.

    Args:
        questions: At least one question.
        data: The data module of reasoning rows, which has the templates of answers.
    """
    wording = data.wording()
    separator, prefix = len(wording.step_separator), len(wording.answer_prefix)
    return max(
        sum(separator + len(step) for step in question.steps) + prefix + len(question.answer) + 1
        for question in questions
    )


def ask(model: Any, data: Any, questions: Sequence[Question], max_new_tokens: int) -> list[Reply]:
    """Generates a model's answers to questions and judges them; see `write` and `judge`."""
    written = write(model, data, questions, max_new_tokens)
    return [judge(model, data, *pair) for pair in zip(questions, written, strict=True)]


def write(
    model: Any, data: Any, questions: Sequence[Question], max_new_tokens: int
) -> list[list[int]]:
    """Decodes an answer to each question greedily; returns token ids, including EOS.

    Args:
        model: The model.
        data: The data module, with the tokenizer.
        questions: At least one question.
        max_new_tokens: Maximum length of an answer, see `room_for`.
    """
    written: list[list[int]] = model.generate_ids(
        [question.query for question in questions],
        tokenizer=data.tokenizer,
        max_new_tokens=max_new_tokens,
        temperature=0,
        # Random draws of latent vectors depend on the question, not on the batch.
        streams=[question.sequence_id for question in questions],
    )
    return written


def judge(model: Any, data: Any, question: Question, written: list[int]) -> Reply:
    """Extracts the answer from generated tokens and judges it.

    Args:
        model: The model, which locates the answer in its text.
        data: The data module, with the tokenizer.
        question: The question.
        written: Generated token ids.
    """
    tokenizer = data.tokenizer
    answer = model.answer_tokens(written) if hasattr(model, "answer_tokens") else written
    text = tokenizer.decode_continuation([i for i in answer if i not in tokenizer.stop_ids])
    right = bool(data.is_right(text, tokenizer.decode_continuation(question.answer)))
    if data.rows == "windows":  # a prefix of an answer may also be an answer: son, son-in-law
        right = right and bool(written) and written[-1] in tokenizer.stop_ids
    return Reply(question, written, text, right)


class AnswerAccuracy(EvaluationHooks):
    """Logs the accuracy of a model's answers to the questions of the first batches.

    The model decodes greedily, and the data module judges its answers. The accuracy over all ranks
    is logged as ``val/accuracy`` (or ``test/accuracy``), and with several groups of questions also
    as ``val/accuracy/<group>_<g>``; questions of the split that are longer than block_size are left
    out and counted in ``val/accuracy/left_out``. Each rank evaluates the questions of its batches,
    so more ranks evaluate more questions. Training is not affected: random states and modes are
    restored. ``--checkpoint.monitor val/accuracy --checkpoint.mode max`` keeps the checkpoint that
    answers best.

    Args:
        num_batches: Number of batches per rank whose questions to ask, or null for all.
        max_new_tokens: Maximum number of tokens that a model may write, including a chain
            of thought. Null means twice the tokens of the longest correct text of the batch with
            its steps, or, in windows, the tokens of its longest answer and EOS.
        by_group: Whether to log groups of questions as well.

    Raises:
        ValueError: If a number is too low.
    """

    def __init__(
        self,
        num_batches: int | None = 8,
        max_new_tokens: int | None = None,
        by_group: bool = True,
    ) -> None:
        check_minimum("num_batches", num_batches, 1)
        check_minimum("max_new_tokens", max_new_tokens, 1)
        self.num_batches = num_batches
        self.max_new_tokens = max_new_tokens
        self.by_group = by_group
        self._asked: Counter[int] = Counter()
        self._right: Counter[int] = Counter()

    # ---- hooks

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        data = _data_of(trainer)
        if not hasattr(data, "is_right"):
            raise ValueError(
                f"AnswerAccuracy: data ({type(data).__name__}) do not define correct answers; "
                "choose data with questions, e.g. datamodules.StateTracking for Thinking States or "
                "datamodules.Kinship for window models, or leave the callback out"
            )

    def evaluation_starts(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._asked, self._right = Counter(), Counter()

    def evaluation_batch_ends(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        if self.num_batches is not None and batch_idx >= self.num_batches:
            return
        questions = questions_in(batch)
        if not questions:
            return
        data = _data_of(trainer)
        room = room_for(questions, data, self.max_new_tokens)
        with undisturbed(pl_module):
            replies = ask(pl_module, data, questions, room)
        for reply in replies:
            self._asked[reply.question.group] += 1
            self._right[reply.question.group] += reply.right

    def evaluation_epoch_ends(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        # All ranks log the same names, before checkpoints are ranked.
        asked: Counter[int] = Counter()
        right: Counter[int] = Counter()
        for rank_asked, rank_right in gather((self._asked, self._right)):
            asked += rank_asked  # drops zeros
            right += rank_right
        if not asked:
            return
        name = f"{stage}/accuracy"
        values = {name: right.total() / asked.total()}
        if self.by_group and len(asked) > 1:
            label = getattr(_data_of(trainer), "group_name", "group")
            values |= {f"{name}/{label}_{g}": right[g] / asked[g] for g in sorted(asked)}
        data = _data_of(trainer)
        left_out = data.left_out(data.validation_split if stage == "val" else "test")
        if left_out:
            values[f"{name}/left_out"] = float(left_out)
        for key, value in values.items():
            pl_module.log(key, value, prog_bar=key == name, rank_zero_only=False)


def _data_of(trainer: L.Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]
