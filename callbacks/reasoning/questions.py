"""Questions in batches of reasoning rows, and whether what a model writes answers them.

A batch of such rows has ``query``, ``steps`` and ``targets`` (see ``datamodules.reasoning``). What
is right is for the data to say: ``is_right(text, answer)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

REASONING = "reasoning"
"""What models and data of this kind say of their rows."""
ROOM = 2
"""What a model may write, as a multiple of the longest right text."""


@dataclass(frozen=True)
class Question:
    """A question of a batch, as tokens.

    Attributes:
        query: EOS and what is asked.
        answer: The right answer, without EOS.
        steps: The reasoning steps that the data know.
        group: What accuracies are grouped by.
        number: Stable across batch composition.
    """

    query: list[int]
    answer: list[int]
    steps: list[list[int]]
    group: int
    number: int


class Answer(NamedTuple):
    """What a model answers.

    Attributes:
        text: After the answer's prefix; empty where it does not come to that.
        right: Whether it is the right answer.
    """

    text: str
    right: bool


def questions_in(batch: dict[str, Any]) -> list[Question]:
    """Returns the questions of a batch; rows that only fill it up are left out."""
    found = []
    for row, targets in enumerate(batch["targets"].tolist()):
        answer = [i for i in targets if i >= 0][:-1]  # an EOS is after it
        if not answer:
            continue
        lengths = batch["step_lengths"][row].tolist()
        steps = batch["steps"][row].tolist()
        found.append(
            Question(
                query=batch["query"][row, : int(batch["query_lengths"][row])].tolist(),
                answer=answer,
                steps=[ids[:n] for ids, n in zip(steps, lengths, strict=True) if n],
                group=int(batch["group"][row]),
                number=int(batch["sequence_id"][row]),
            )
        )
    return found


def longest_text(questions: Sequence[Question], data: Any) -> int:
    """Returns the tokens of the longest right text: all steps, answer prefix, answer and EOS.

    Args:
        questions: At least one.
        data: The data module, which knows the wording.
    """
    wording = data.wording()
    separator, prefix = len(wording.step_separator), len(wording.answer_prefix)
    return max(
        sum(separator + len(step) for step in question.steps) + prefix + len(question.answer) + 1
        for question in questions
    )


def room_for(questions: Sequence[Question], data: Any, asked: int | None = None) -> int:
    """Returns how many tokens a model may write to each question.

    Args:
        questions: At least one.
        data: The data module, which knows the wording.
        asked: That many; None: twice the tokens of the longest right text, with all its steps.
    """
    return asked or ROOM * longest_text(questions, data)


def write(
    model: Any, data: Any, questions: Sequence[Question], max_new_tokens: int
) -> list[list[int]]:
    """Returns the token ids that a model writes after each question, greedily, EOS included.

    Args:
        model: Which thinks in its own way meanwhile.
        data: The data module, with the tokenizer.
        questions: At least one.
        max_new_tokens: Upper bound for each.
    """
    queries = [question.query for question in questions]
    written: list[list[int]] = model.generate_ids(
        queries, tokenizer=data.tokenizer, max_new_tokens=max_new_tokens, temperature=0
    )
    return written


def judge(model: Any, data: Any, question: Question, written: Sequence[int]) -> Answer:
    """Returns the answer in what a model has written.

    Args:
        model: Which knows where, in what it writes, the answer is.
        data: The data module, with the tokenizer.
        question: What was asked.
        written: Token ids.
    """
    tokenizer = data.tokenizer
    ids = [i for i in model.answer_tokens(list(written)) if i != tokenizer.stop_id]
    text = tokenizer.decode(ids)
    return Answer(text, bool(data.is_right(text, tokenizer.decode(question.answer))))


def not_asked(kind: str, reads: str) -> str:
    """Returns why a model, of a class and kind of rows, cannot be asked questions."""
    return (
        f"{kind} reads {reads}, and questions are for models that read {REASONING} rows "
        "(ThinkingStatesLM, CoTLM, NoCoTLM, ICoTLM, CoconutLM)"
    )
