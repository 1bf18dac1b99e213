"""Answers, times and numbers of one model, and the overlap of two."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from callbacks.reasoning.questions import Question, judge, write
from callbacks.reasoning.thinking import Recorded, RowThinking
from evaluation.load import Precision, autocast
from evaluation.output import format_columns
from evaluation.scoring import Share, share_of
from lightning_models import LanguageModel
from lightning_models.layers import recording

# ---- seconds, measured in turn in the same run, and speed-ups

Answering = Callable[[], object]
"""Has a model answer the questions that are timed, all of them."""


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


def time_in_turn(
    answering: Sequence[Answering], rounds: int, questions: int, device: torch.device
) -> list[Timing]:
    """Returns the time of each model: every round asks each, and begins with another.

    A round before the first warms up and does not count.

    Args:
        answering: one a model; each asks the same questions.
        rounds: at least 1.
        questions: how many are asked.
        device: where the models are.
    """
    taken: list[list[float]] = [[] for _ in answering]
    for number in tqdm(range(rounds + 1), desc="timing", unit=" rounds", disable=None):
        first = number % len(answering)
        for place in [*range(first, len(answering)), *range(first)]:
            seconds = _seconds(answering[place], device)
            if number:
                taken[place].append(seconds)
    return [Timing(tuple(times), questions) for times in taken]


def _seconds(run: Answering, device: torch.device) -> float:
    """Returns the wall-clock time of a call, with what it has queued on a GPU."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- answers, greedy, and the thoughts recorded with them


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


# ---- numbers of one model


@dataclass(frozen=True)
class ReasonResult:
    """Answers of one model."""

    label: str
    checkpoint: str
    model: str
    """Name of its class."""
    replies: Sequence[Reply]
    """To all questions, at least one, in their order."""
    timing: Timing | None = None
    speed_up: float | None = None
    """Over the baseline; None where it was not timed, or there is none."""
    question_first: Sequence[Reply] | None = None
    """To the same questions with the question in front."""
    latents: int | None = None
    cost: Mapping[str, float] = field(default_factory=dict)
    """FLOPs and steps of a token, see ``evaluation.cost``."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What it was trained on, and what was changed."""

    @property
    def accuracy(self) -> Share:
        """Of all questions."""
        return share_of(reply.right for reply in self.replies)

    def by_group(self) -> dict[int, Share]:
        """Returns the accuracy of each group, groups ascending."""
        groups = sorted({reply.question.group for reply in self.replies})
        return {
            group: share_of(r.right for r in self.replies if r.question.group == group)
            for group in groups
        }

    @property
    def written_tokens(self) -> float:
        """Tokens written after a question, on average: chain, answer and EOS."""
        return statistics.fmean(len(reply.written) for reply in self.replies)

    def thinking(self) -> dict[str, float]:
        """Returns means over the questions of what is thought while they are read.

        ``rounds``: passes of the backbone; ``chunks``: all; ``nontrivial_chunks``: with a thought;
        ``thought_tokens``. Empty for models that record nothing.
        """
        rows = [reply.thinking for reply in self.replies if reply.thinking is not None]
        if not rows:
            return {}
        return {
            "rounds": statistics.fmean(row.rounds for row in rows),
            "chunks": statistics.fmean(len(row.thoughts) for row in rows),
            "nontrivial_chunks": statistics.fmean(row.nontrivial for row in rows),
            "thought_tokens": statistics.fmean(row.length for row in rows),
        }

    def with_question_first(self) -> dict[str, Share]:
        """Returns the shares of right answers with the question first (Fig. 5), by name.

        ``accuracy``: of all questions; ``recovered``: of those answered wrongly before;
        ``intervention``: of all, had only those been asked again (Sec. 4.5). Empty where it was not
        asked so.
        """
        if self.question_first is None:
            return {}
        pairs = list(zip(self.replies, self.question_first, strict=True))
        return {
            "accuracy": share_of(now.right for _, now in pairs),
            "recovered": share_of(now.right for before, now in pairs if not before.right),
            "intervention": share_of(before.right or now.right for before, now in pairs),
        }

    def speed(self) -> dict[str, Any]:
        """Returns seconds per question and the speed-up; empty where it was not timed."""
        if self.timing is None:
            return {}
        per_question = [seconds / self.timing.questions for seconds in self.timing.rounds]
        return {
            "seconds_per_question": self.timing.seconds,
            "speed_up": self.speed_up,
            "seconds_per_question_by_round": per_question,
        }

    def as_dict(self, group_name: str) -> dict[str, Any]:
        """Returns the numbers under the keys of the JSON file.

        Args:
            group_name: what a group counts.
        """
        latents = {} if self.latents is None else {"latents": self.latents}
        return {
            "label": self.label,
            "model": self.model,
            **latents,
            **self.accuracy.as_dict(),
            "written_tokens": self.written_tokens,
            **self.speed(),
            **self.cost,
            **self.thinking(),
            **self._question_first(),
            "by_group": [
                {group_name: group, **share.as_dict()} for group, share in self.by_group().items()
            ],
            "checkpoint": self.checkpoint,
            "settings": self.settings,
        }

    def _question_first(self) -> dict[str, float]:
        values = {}
        for name, share in self.with_question_first().items():
            values[f"question_first_{name}"] = share.value
            values[f"question_first_{name}_standard_error"] = share.error
        return values


# ---- overlap: questions that one model solves and another does not (Sec. 4.5)


class Overlap(NamedTuple):
    """Questions that one model solves and another does not.

    Attributes:
        solves: Label of the one.
        fails: Label of the other.
        questions: How many.
        solved: All questions that the one solves.
        asked: All questions.
    """

    solves: str
    fails: str
    questions: int
    solved: int
    asked: int

    @property
    def of_solved(self) -> float:
        """Their share of what the one solves: the paper's 12 %; nan if it solves nothing."""
        return self.questions / self.solved if self.solved else math.nan

    @property
    def of_asked(self) -> float:
        """Their share of all questions."""
        return self.questions / self.asked

    def as_dict(self) -> dict[str, Any]:
        """Returns it under the keys of the JSON file."""
        return {
            "solves": self.solves,
            "fails": self.fails,
            "questions": self.questions,
            "share_of_solved": self.of_solved,
            "share_of_questions": self.of_asked,
        }


def overlaps(results: Sequence[ReasonResult]) -> list[Overlap]:
    """Returns all ordered pairs of models that have answered the same questions."""
    return [_overlap(one, other) for one, other in permutations(results, 2)]


def _overlap(one: ReasonResult, other: ReasonResult) -> Overlap:
    pairs = [(a.right, b.right) for a, b in zip(one.replies, other.replies, strict=True)]
    return Overlap(
        solves=one.label,
        fails=other.label,
        questions=sum(solved and not too for solved, too in pairs),
        solved=sum(solved for solved, _ in pairs),
        asked=len(pairs),
    )


def overlap_table(results: Sequence[ReasonResult]) -> str:
    """Returns, for people, the share of what a row's model solves that a column's does not."""
    found = {(each.solves, each.fails): each for each in overlaps(results)}
    labels = [result.label for result in results]
    rows = [["solved by, not by", *labels]]
    for one in labels:
        cells = [_cell(found.get((one, other))) for other in labels]
        rows.append([one, *cells])
    return format_columns(rows)


def _cell(overlap: Overlap | None) -> str:
    if overlap is None or math.isnan(overlap.of_solved):
        return "-"
    return f"{overlap.of_solved:.4f} ({overlap.questions:,})"
