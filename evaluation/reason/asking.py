"""Replies of models to questions, generated or chosen among all possible answers, and timings."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from callbacks.answer_accuracy import Question, Reply, ask, room_for, write
from callbacks.recorded_thoughts import Recorded
from datamodules import Tokenizer, answer_batch
from datamodules.text import IGNORE
from evaluation.cost import ComputeCounter, Cost, GeneratedSteps, price
from evaluation.devices import Precision, autocast
from evaluation.reason.contestants import Contestant
from evaluation.reason.controls import Control, LatentsByRow, latents_of, replacement, replacing
from evaluation.scoring import score_batch
from lightning_models import LanguageModel
from lightning_models.layers import recording
from lightning_models.outputs import Likelihood
from lightning_models.thinking_states.backbone import ReplaceLatents

Mode = Literal["rank", "generate"]


def pick_mode(data: Any, mode: Mode | None) -> Mode:
    """Returns the mode of the command line. Defaults to 'rank' if the data list all answers.

    Raises:
        ValueError: If the mode is 'rank' and the data do not list all possible answers.
    """
    lists_all = hasattr(data, "candidates") and data.candidates() is not None
    if mode == "rank" and not lists_all:
        raise ValueError(
            f"mode (rank) needs a list of all possible answers, and {type(data).__name__} has "
            "none; use --mode generate"
        )
    return mode or ("rank" if lists_all else "generate")


@dataclass(frozen=True)
class ModelAnswers:
    """Answers of one model.

    Attributes:
        replies: Replies to all questions, in their order.
        likelihood: Kind of the likelihood of answers after their questions, or None if the model
            wrote its answers.
        cost: FLOPs and steps of a token, and seconds of all replies.
    """

    replies: list[Reply]
    likelihood: Likelihood | None
    cost: Cost


@dataclass(frozen=True)
class AnswerProtocol:
    """Settings under which all models answer.

    Attributes:
        data: The data module, with the tokenizer and the rule for correct answers.
        mode: 'rank' takes the most likely of all possible answers, 'generate' decodes greedily.
        room: Maximum number of tokens to write. Defaults to what a batch of windows needs.
        precision: Precision of the matrix products.
        following: The question whose latents a question gets if latents are swapped, by its
            ``sequence_id``.
        noise_seed: Seed of the noise that replaces latents.
    """

    data: Any
    mode: Mode
    room: int | None = None
    precision: Precision = "32"
    following: Mapping[int, Question] = field(default_factory=dict)
    noise_seed: int = 0

    def replies(
        self, contestant: Contestant, batches: Sequence[Sequence[Question]], context: int
    ) -> ModelAnswers:
        """Asks a model all questions; rows have ``context`` tokens on average."""
        steps, compute, start = GeneratedSteps(), ComputeCounter(), time.perf_counter()
        replies: list[Reply] = []
        likelihood: Likelihood | None = None
        progress = tqdm(batches, desc=f"asking {contestant.label}", unit=" batches", disable=None)
        with contestant.ready() as model, recording(generated_steps=steps.count):
            for questions in progress:
                if self.mode == "rank":
                    ranked, likelihood = rank(model, self.data, questions, self.precision, compute)
                    replies += ranked
                else:
                    replies += self._written(model, questions, contestant.control)
            executed = compute.mean if self.mode == "rank" else steps.mean
            seconds = time.perf_counter() - start
            cost = price(model, context, executed, seconds, compute.flops_per_token)
        return ModelAnswers(replies, likelihood, cost)

    def _written(
        self, model: LanguageModel, questions: Sequence[Question], control: Control | None
    ) -> list[Reply]:
        seen, room = Recorded(), room_for(questions, self.data, self.room)
        with autocast(model.device, self.precision):
            replaced: Any = nullcontext()
            if control is not None:
                replaced = replacing(model, self._replacement(control, model, questions, room))
            with replaced, recording(thoughts=seen.take):
                replies = ask(model, self.data, questions, room)
        if seen.rows is None:
            return replies
        return [
            dataclasses.replace(reply, thinking=row.within(reply.question.query))
            for reply, row in zip(replies, seen.rows, strict=True)
        ]

    def _replacement(
        self, control: Control, model: LanguageModel, questions: Sequence[Question], room: int
    ) -> ReplaceLatents:
        def others() -> LatentsByRow:
            asked = [self.following[question.sequence_id] for question in questions]
            return latents_of(model, lambda: write(model, self.data, asked, room))

        ids = [question.sequence_id for question in questions]
        return replacement(control, model, ids, self.noise_seed, others)

    def answer(self, contestant: Contestant, batches: Sequence[Sequence[Question]]) -> None:
        """Generates a model's answers to all questions without recording anything, for timing."""
        with contestant.ready() as model, autocast(model.device, self.precision):
            for questions in batches:
                if self.mode == "rank":
                    rank(model, self.data, questions, self.precision)
                else:
                    room = room_for(questions, self.data, self.room)
                    write(model, self.data, questions, room)


# ---- the most likely of all possible answers


def rank(
    model: LanguageModel,
    data: Any,
    questions: Sequence[Question],
    precision: Precision = "32",
    compute: ComputeCounter | None = None,
) -> tuple[list[Reply], Likelihood]:
    """Returns the most likely candidate for each question, and the kind of the likelihood.

    The likelihood includes the EOS after the answer: without EOS, "son" could never be less likely
    than "son-in-law". ``LanguageModel.score`` computes it, so methods that only bound or estimate
    it work too; methods that infer latents from the question give estimates.

    Each question takes one row for each of ``data.candidates()``, and ``data.eval_batch_size`` rows
    are scored at once; ``compute`` counts their steps and FLOPs.
    """
    compute = ComputeCounter() if compute is None else compute
    tokenizer, texts = data.tokenizer, data.candidates()
    measured = [
        (np.append(ids, tokenizer.eos_id), np.append(sizes, 0))
        for ids, sizes in tokenizer.measure_continuations(texts)
    ]
    encoded = [ids.tolist() for ids, _ in measured]
    pairs = [(question, answer) for question in questions for answer in measured]
    size = data.eval_batch_size
    parts = (_candidate_batch(tokenizer, pairs[i : i + size]) for i in range(0, len(pairs), size))
    with compute.recording():
        scores = [score_batch(model, batch, precision) for batch in compute.watch(parts)]
    log_probs = [
        score.log_prob.double().sum(dim=1) + score.sequence_term.double() for score in scores
    ]
    # (questions * candidates,) to (questions, candidates), as `pairs` are ordered
    best = torch.cat(log_probs).view(len(questions), len(texts)).argmax(dim=1).tolist()
    replies = [
        Reply(question, encoded[n], texts[n], encoded[n][:-1] == question.answer)
        for question, n in zip(questions, best, strict=True)
    ]
    return replies, scores[0].kind


def _candidate_batch(
    tokenizer: Tokenizer, pairs: Sequence[tuple[Question, tuple[np.ndarray, np.ndarray]]]
) -> dict[str, Any]:
    """Returns a batch of questions followed by answers, which end in EOS."""
    width = max(len(question.query) + len(answer) for question, (answer, _) in pairs)
    rows = np.full((len(pairs), width), IGNORE, dtype=np.int64)
    sizes = np.zeros_like(rows)
    for row, counts, (question, (answer, covered)) in zip(rows, sizes, pairs, strict=True):
        start, end = len(question.query), len(question.query) + len(answer)
        row[:start], row[start:end], counts[start:end] = question.query, answer, covered
    lengths = np.array([len(question.query) for question, _ in pairs])
    batch = answer_batch(
        rows,
        sizes,
        # One id for all answers to a question, so that a method's random draws are the same.
        np.array([question.sequence_id for question, _ in pairs]),
        first_answers=lengths - 1,
        groups=np.array([question.group for question, _ in pairs]),
        loss_on="answer",
        eos_id=tokenizer.eos_id,
    )
    return {**batch, "context": torch.from_numpy(lengths)}


# ---- wall-clock time, measured in turn in the same run, and speed-ups


@dataclass(frozen=True)
class Timing:
    """Wall-clock time of one model.

    Attributes:
        rounds: Seconds for all questions in each round, at least one.
        questions: Number of questions.
    """

    rounds: tuple[float, ...]
    questions: int

    @property
    def seconds(self) -> float:
        """Seconds per question, the median over the rounds."""
        return statistics.median(self.rounds) / self.questions

    def speed_up(self, baseline: "Timing") -> float:
        """Returns the speed-up over another model, the median over the rounds.

        Both are timed in the same rounds, so other load on the machine affects both.
        """
        pairs = zip(baseline.rounds, self.rounds, strict=True)
        return statistics.median(first / second for first, second in pairs)

    def as_dict(self, baseline: "Timing | None") -> dict[str, Any]:
        """Returns the times under the keys of the JSON file, with the speed-up over a baseline."""
        return {
            "seconds_per_question": self.seconds,
            "speed_up": None if baseline is None else self.speed_up(baseline),
            "seconds_per_question_by_round": [seconds / self.questions for seconds in self.rounds],
        }


def time_in_turn(
    answering: Sequence[Callable[[], object]], rounds: int, questions: int, device: torch.device
) -> list[Timing]:
    """Times models in turn: every round runs each of them, starting with a different one.

    A warm-up round precedes the others and does not count.

    Args:
        answering: For each model, a function that answers all of the same questions.
        rounds: Number of timed rounds.
        questions: Number of questions.
        device: Device of the models.
    """
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    taken: list[list[float]] = [[] for _ in answering]
    for idx in tqdm(range(rounds + 1), desc="timing", unit=" rounds", disable=None):
        first = idx % len(answering)
        for model_idx in [*range(first, len(answering)), *range(first)]:
            wait()
            start = time.perf_counter()
            answering[model_idx]()
            wait()
            if idx:
                taken[model_idx].append(time.perf_counter() - start)
    return [Timing(tuple(times), questions) for times in taken]
