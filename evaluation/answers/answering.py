"""Whether a model's answers are right, through the contract that every method keeps.

Works on batches of any data module that marks answers in them (``answer`` and ``group``, see
`datamodules.answers`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules import Tokenizer, answer_batch
from datamodules.windows import IGNORE
from evaluation.checkpoint.device import Precision, autocast
from evaluation.cost import ComputeCounter
from evaluation.perplexity.scoring import score_batch
from lightning_models import LanguageModel
from lightning_models.generation import SamplingConfig, generate
from lightning_models.outputs import Likelihood


@dataclass(frozen=True)
class Question:
    """A question of a batch, as tokens.

    Attributes:
        prompt: EOS and the question.
        answer: The right answer and the EOS behind it.
        group: What accuracies are told apart by.
        number: Stable across batch composition.
    """

    prompt: list[int]
    answer: list[int]
    group: int
    number: int


class Judged(NamedTuple):
    """What became of questions.

    Attributes:
        right: Whether each is answered rightly.
        likelihood: Kind of the likelihood that decided it; None where none did.
    """

    right: list[bool]
    likelihood: Likelihood | None


Judge = Callable[[Sequence[Question]], Judged]
"""From questions to whether each is answered rightly."""


def questions_in(batch: dict[str, Any]) -> list[Question]:
    """Returns the questions of a batch; rows that only fill it up are left out."""
    found = []
    for row, marks in enumerate(batch["answer"]):
        answer = batch["targets"][row][marks].tolist()
        if answer:
            first = int(marks.int().argmax())  # the input here is the question's last token
            found.append(
                Question(
                    prompt=batch["tokens"][row, : first + 1].tolist(),
                    answer=answer,
                    group=int(batch["group"][row]),
                    number=int(batch["sequence_id"][row]),
                )
            )
    return found


def rank_judge(
    model: LanguageModel,
    tokenizer: Tokenizer,
    candidates: Sequence[str],
    *,
    batch_size: int,
    precision: Precision = "32",
    compute: ComputeCounter | None = None,
) -> Judge:
    """Returns a judge: right is whose true answer has the highest likelihood of all candidates.

    The likelihood is that of the answer with the EOS behind it: without the EOS, "son" could never
    be less likely than "son-in-law". It comes from ``LanguageModel.score``, so this works for
    methods that only bound or estimate it.

    Args:
        model: On its device, in eval mode.
        tokenizer: Encodes the candidates.
        candidates: All possible answers.
        batch_size: Rows to score at once; each question takes as many rows as there are candidates.
        precision: Of the matrix products.
        compute: Counts what scoring the candidates computes.
    """
    compute = ComputeCounter() if compute is None else compute
    encoded = [[*tokenizer.encode(text), tokenizer.eos_id] for text in candidates]

    def judge(questions: Sequence[Question]) -> Judged:
        if not questions:
            return Judged([], None)
        pairs = [(question, answer) for question in questions for answer in encoded]
        parts = [pairs[i : i + batch_size] for i in range(0, len(pairs), batch_size)]
        batches = compute.watch(_batch_of(tokenizer, part) for part in parts)
        with compute.recording():
            scored = [_likelihoods(model, batch, precision) for batch in batches]
        totals = torch.cat([nats for nats, _ in scored]).view(len(questions), len(encoded))
        right = [
            encoded[best] == question.answer
            for question, best in zip(questions, totals.argmax(dim=1).tolist(), strict=True)
        ]
        return Judged(right, scored[0][1])

    return judge


def _batch_of(tokenizer: Tokenizer, pairs: Sequence[tuple[Question, list[int]]]) -> dict[str, Any]:
    """Returns a batch of questions, each with an answer."""
    width = max(len(question.prompt) + len(answer) for question, answer in pairs)
    rows = np.full((len(pairs), width), IGNORE, dtype=np.int64)
    for row, (question, answer) in zip(rows, pairs, strict=True):
        row[: len(question.prompt) + len(answer)] = [*question.prompt, *answer]
    batch = answer_batch(
        rows,
        # One number for all answers of a question: what a method draws is the same for each.
        np.array([question.number for question, _ in pairs]),
        first_answers=np.array([len(question.prompt) - 1 for question, _ in pairs]),
        groups=np.array([question.group for question, _ in pairs]),
        loss_on="answer",
        eos_id=tokenizer.eos_id,
        token_bytes=tokenizer.token_bytes,
    )
    batch["context"] = torch.tensor([len(question.prompt) for question, _ in pairs])
    return batch


def _likelihoods(
    model: LanguageModel, batch: dict[str, Any], precision: Precision
) -> tuple[Tensor, Likelihood]:
    """Returns the log-likelihood of each answer after its question, (N,) float64 in nats.

    And its kind: a method that infers something from the question alone makes estimates.
    """
    scores = score_batch(model, batch, precision)
    totals = scores.log_prob.double().sum(dim=1) + scores.sequence_term.double()
    return totals.cpu().detach(), scores.kind


def generate_judge(
    model: LanguageModel, tokenizer: Tokenizer, *, precision: Precision = "32"
) -> Judge:
    """Returns a judge: right is whose greedy continuation is the true answer, then EOS.

    Texts are compared without the spaces around them.

    Args:
        model: On its device, in eval mode.
        tokenizer: The one the model was trained with.
        precision: Of the matrix products.
    """

    def judge(questions: Sequence[Question]) -> Judged:
        if not questions:
            return Judged([], None)
        with autocast(model.device, precision):
            written = generate(
                model,
                [question.prompt for question in questions],
                max_new_tokens=max(len(question.answer) for question in questions),
                sampling=SamplingConfig(temperature=0),
                eos_id=tokenizer.eos_id,
                vocab_size=tokenizer.vocab_size,
                device=model.device,
                # Numbers in a batch follow upon one another, filling rows being last: each question
                # has its own as its stream, whatever the batch size.
                first_row=questions[0].number,
            )
        right = [
            ids[-1:] == [tokenizer.eos_id] and _text(tokenizer, ids) == _text(tokenizer, q.answer)
            for ids, q in zip(written, questions, strict=True)
        ]
        return Judged(right, None)

    return judge


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode([i for i in ids if i != tokenizer.eos_id]).strip()
