"""Replies of models and their seconds: written, or the likeliest of all possible answers."""

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
    """Returns how questions are asked: as the command line says, else by rank where that is known.

    Raises:
        ValueError: if 'rank' is asked for and the data do not list all possible answers.
    """
    lists_all = hasattr(data, "candidates") and data.candidates() is not None
    if mode == "rank" and not lists_all:
        raise ValueError(
            f"mode (rank) chooses among all possible answers, which {type(data).__name__} does not "
            "list; use --mode generate"
        )
    return mode or ("rank" if lists_all else "generate")


@dataclass(frozen=True)
class Asked:
    """What one model has answered.

    Attributes:
        replies: To all questions, in their order.
        likelihood: Kind of the likelihood of answers after their questions; None where the model
            wrote them.
        cost: FLOPs and steps of a token, and seconds of all replies.
    """

    replies: list[Reply]
    likelihood: Likelihood | None
    cost: Cost


@dataclass(frozen=True)
class Asking:
    """The conditions under which all models are asked.

    Attributes:
        data: The data module, with the tokenizer and the rule of what is right.
        mode: 'rank' takes the likeliest of all possible answers, 'generate' decodes greedily.
        room: Most tokens that models may write, by default as many as a batch of windows needs.
        precision: Of the matrix products.
        following: By number of a question the one whose latents it is given if they are swapped.
        noise_seed: Seed of the noise that replaces latents.
    """

    data: Any
    mode: Mode
    room: int | None = None
    precision: Precision = "32"
    following: Mapping[int, Question] = field(default_factory=dict)
    noise_seed: int = 0

    def replies(
        self, one: Contestant, batches: Sequence[Sequence[Question]], context: int
    ) -> Asked:
        """Asks a model all questions; rows have ``context`` tokens on average."""
        steps, compute, start = GeneratedSteps(), ComputeCounter(), time.perf_counter()
        replies: list[Reply] = []
        kind: Likelihood | None = None
        shown = tqdm(batches, desc=f"asking {one.label}", unit=" batches", disable=None)
        with one.ready() as model, recording(generated_steps=steps.count):
            for questions in shown:
                if self.mode == "rank":
                    ranked, kind = rank(model, self.data, questions, self.precision, compute)
                    replies += ranked
                else:
                    replies += self._written(model, questions, one.control)
            executed = compute.mean if self.mode == "rank" else steps.mean
            seconds = time.perf_counter() - start
            cost = price(model, context, executed, seconds, compute.flops_per_token)
        return Asked(replies, kind, cost)

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
            asked = [self.following[question.number] for question in questions]
            return latents_of(model, lambda: write(model, self.data, asked, room))

        numbers = [question.number for question in questions]
        return replacement(control, model, numbers, self.noise_seed, others)

    def answer(self, one: Contestant, batches: Sequence[Sequence[Question]]) -> None:
        """Has a model answer all questions, which takes the time that is measured."""
        with one.ready() as model, autocast(model.device, self.precision):
            for questions in batches:
                if self.mode == "rank":
                    rank(model, self.data, questions, self.precision)
                else:
                    room = room_for(questions, self.data, self.room)
                    write(model, self.data, questions, room)


# ---- the likeliest of all possible answers


def rank(
    model: LanguageModel,
    data: Any,
    questions: Sequence[Question],
    precision: Precision = "32",
    compute: ComputeCounter | None = None,
) -> tuple[list[Reply], Likelihood]:
    """Returns the answers of highest likelihood of all candidates, and that likelihood's kind.

    The likelihood includes the EOS after the answer: without the EOS, "son" could never
    be less likely than "son-in-law". It comes from ``LanguageModel.score``, so this works for
    methods that only bound or estimate it: one that infers something from the question alone makes
    estimates.

    Each question, of windows, takes as many rows as there are ``data.candidates()``, of which
    ``data.eval_batch_size`` are scored at once; ``compute`` counts what that computes.
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
    nats = [one.log_prob.double().sum(dim=1) + one.sequence_term.double() for one in scores]
    best = torch.cat(nats).view(len(questions), len(texts)).argmax(dim=1).tolist()
    replies = [
        Reply(question, encoded[n], texts[n], encoded[n][:-1] == question.answer)
        for question, n in zip(questions, best, strict=True)
    ]
    return replies, scores[0].kind


def _candidate_batch(
    tokenizer: Tokenizer, pairs: Sequence[tuple[Question, tuple[np.ndarray, np.ndarray]]]
) -> dict[str, Any]:
    """Returns a batch of questions, each with an answer that ends in EOS, and its bytes."""
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
        # One number for all answers of a question: what a method draws is the same for each.
        np.array([question.number for question, _ in pairs]),
        first_answers=lengths - 1,
        groups=np.array([question.group for question, _ in pairs]),
        loss_on="answer",
        eos_id=tokenizer.eos_id,
    )
    return {**batch, "context": torch.from_numpy(lengths)}


# ---- seconds, measured in turn in the same run, and speed-ups


@dataclass(frozen=True)
class Timing:
    """Wall-clock time of one model.

    Attributes:
        rounds: Seconds that all questions took, by round; at least one.
        questions: How many these were.
    """

    rounds: tuple[float, ...]
    questions: int

    @property
    def seconds(self) -> float:
        """Seconds per question, the median over the rounds."""
        return statistics.median(self.rounds) / self.questions

    def speed_up(self, baseline: "Timing") -> float:
        """Returns how many times faster than another model, the median over the rounds.

        Both were timed in the same rounds: what slows the machine down meanwhile, slows both.
        """
        pairs = zip(baseline.rounds, self.rounds, strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)

    def as_dict(self, baseline: "Timing | None") -> dict[str, Any]:
        """Returns the times under the keys of the JSON file, with the speed-up if there is one."""
        return {
            "seconds_per_question": self.seconds,
            "speed_up": None if baseline is None else self.speed_up(baseline),
            "seconds_per_question_by_round": [each / self.questions for each in self.rounds],
        }


def time_in_turn(
    answering: Sequence[Callable[[], object]], rounds: int, questions: int, device: torch.device
) -> list[Timing]:
    """Returns the time of each model: every round asks each, and begins with another.

    A round before the first warms up and does not count. Each of ``answering``, one a model,
    answers the same questions, all of them, on ``device``.
    """
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    taken: list[list[float]] = [[] for _ in answering]
    for idx in tqdm(range(rounds + 1), desc="timing", unit=" rounds", disable=None):
        first = idx % len(answering)
        for place in [*range(first, len(answering)), *range(first)]:
            wait()
            start = time.perf_counter()
            answering[place]()
            wait()
            if idx:
                taken[place].append(time.perf_counter() - start)
    return [Timing(tuple(times), questions) for times in taken]
