"""What models answer to questions, greedily, and what they think meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from callbacks.reasoning.questions import Question, judge, write
from callbacks.reasoning.thinking import Recorded, RowThinking
from evaluation.checkpoint.device import Precision, autocast
from lightning_models import LanguageModel
from lightning_models.layers import recording


@dataclass(frozen=True)
class Reply:
    """What a model answers to a question.

    Attributes:
        question: What was asked.
        written: Token ids that it has written, EOS included where it came to that.
        text: Its answer in them.
        right: Whether that is right.
        thinking: What it has thought while it read; None for models that record nothing.
    """

    question: Question
    written: list[int]
    text: str
    right: bool
    thinking: RowThinking | None


def ask(
    model: LanguageModel,
    data: Any,
    batches: Sequence[Sequence[Question]],
    *,
    max_new_tokens: int,
    precision: Precision = "32",
    name: str = "model",
) -> list[Reply]:
    """Returns what a model answers to all questions, in their order.

    Args:
        model: on its device, in eval mode.
        data: the data module, with the tokenizer and the rule of what is right.
        batches: the questions.
        max_new_tokens: upper bound on what it writes to each.
        precision: of the matrix products.
        name: stands in front of the progress bar.
    """
    replies: list[Reply] = []
    for questions in tqdm(batches, desc=f"asking {name}", unit=" batches", disable=None):
        seen = Recorded()
        with recording(thoughts=seen.take), autocast(model.device, precision):
            written = write(model, data, questions, max_new_tokens)
        rows: Sequence[RowThinking | None] = seen.rows or [None] * len(questions)
        for question, ids, row in zip(questions, written, rows, strict=True):
            answer = judge(model, data, question, ids)
            thinking = None if row is None else row.within(question.query)
            replies.append(Reply(question, ids, answer.text, answer.right, thinking))
    return replies
