"""Has models answer questions, and times them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from callbacks.reasoning.questions import Question, room_for, write
from evaluation.arguments import Split
from evaluation.checkpoint.device import Precision, autocast
from evaluation.checkpoint.provenance import describe_data
from evaluation.checkpoint.rebuild import changed_fields
from evaluation.cost import price_steps
from evaluation.reason.answers import Reply, ask
from evaluation.reason.data import asked_batches, check_same_questions, moved_steps
from evaluation.reason.models import Contestant
from evaluation.reason.report import ReasonReport
from evaluation.reason.result import ReasonResult
from evaluation.reason.timing import Timing, time_in_turn

_LEAST = {"max_new_tokens": 1, "rounds": 0, "timing_batches": 1, "timing_batch_size": 1}


@dataclass(frozen=True, kw_only=True)
class ReasonConfig:
    """How models are asked, and timed.

    Raises:
        ValueError: if a value is out of its range.
    """

    max_new_tokens: int | None = None
    """Most tokens that a model may write, steps included; null: twice as many as the longest right
    text has, with all its steps."""
    rounds: int = 5
    """Rounds of timing, in each of which every model answers the same questions; 0: none."""
    timing_batches: int = 8
    """So many batches are timed, the first ones."""
    timing_batch_size: int | None = None
    """Questions in a timed batch; null: as in the others."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        for key, least in _LEAST.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"{key} ({value}) must be at least {least}")


def measure_reason(
    contestants: Sequence[Contestant],
    data: Any,
    *,
    config: ReasonConfig = ReasonConfig(),
    split: Split = "test",
    precision: Precision = "32",
    limit_batches: int | None = None,
    baseline: Contestant | None = None,
    question_first: Any = None,
) -> ReasonReport:
    """Returns what models answer to the questions of a split, and how long it takes them.

    Args:
        contestants: at least one.
        data: prepared and set up.
        config: how they are asked, and timed.
        split: which questions.
        precision: of the matrix products.
        limit_batches: ask only so many batches; None: all.
        baseline: the one of them that speed-ups are over.
        question_first: data of the same questions with the question in front; None: not asked so.

    Raises:
        ValueError: if the split is empty, or the two data have other questions.
    """
    batches, available = asked_batches(data, split, limit_batches)
    session = _Session(
        contestants, room_for([*chain(*batches)], data, config.max_new_tokens), precision
    )
    replies = session.ask(data, batches)
    again: Sequence[list[Reply] | None] = [None] * len(contestants)
    if question_first is not None:
        other, _ = asked_batches(question_first, split, limit_batches)
        check_same_questions(batches, other)
        again = session.ask(question_first, other)
    timed = _timed(list(chain(*batches)), config, data.eval_batch_size)
    timings = session.time(data, timed, config.rounds)
    context = data.row_tokens(split)
    results = [
        _result(*parts, context=context)
        for parts in zip(contestants, replies, again, timings, strict=True)
    ]
    return ReasonReport(
        results=_with_speed_ups(results, baseline),
        group_name=data.group_name,
        baseline=None if baseline is None else baseline.label,
        data={
            **describe_data(contestants[0].checkpoint, data, split),
            "moved_steps": moved_steps(data, _chunk_sizes(contestants)),
        },
        settings={
            **dataclasses.asdict(config),
            "max_new_tokens": session.room,
            "timing_batch_size": config.timing_batch_size or data.eval_batch_size,
            "timed_questions": sum(map(len, timed)),
            "batches": len(batches),
            "of_batches": available,
            "batch_size": data.eval_batch_size,
            "precision": precision,
            "device": str(session.device),
        },
    )


def _chunk_sizes(contestants: Sequence[Contestant]) -> list[int]:
    """Returns the chunk sizes of the models that read in chunks, ascending."""
    configs = [one.model.config for one in contestants]
    return sorted({config.chunk_size for config in configs if hasattr(config, "chunk_size")})


@dataclass(frozen=True)
class _Session:
    """Models that are asked under one set of conditions."""

    contestants: Sequence[Contestant]
    room: int
    """Most tokens that they may write."""
    precision: Precision

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.contestants[0].model.device

    def ask(self, data: Any, batches: Sequence[Sequence[Question]]) -> list[list[Reply]]:
        """Returns what each of them answers."""
        options: dict[str, Any] = {"max_new_tokens": self.room, "precision": self.precision}
        replies = []
        for one in self.contestants:
            with one.ready() as model:
                replies.append(ask(model, data, batches, name=one.label, **options))
        return replies

    def time(
        self, data: Any, batches: Sequence[Sequence[Question]], rounds: int
    ) -> Sequence[Timing | None]:
        """Returns the time of each of them; None without rounds."""
        if not rounds:
            return [None] * len(self.contestants)
        answering = [partial(self._answer, one, data, batches) for one in self.contestants]
        return time_in_turn(answering, rounds, sum(map(len, batches)), self.device)

    def _answer(self, one: Contestant, data: Any, batches: Sequence[Sequence[Question]]) -> None:
        with one.ready() as model, autocast(model.device, self.precision):
            for questions in batches:
                write(model, data, questions, self.room)


def _timed(
    questions: Sequence[Question], config: ReasonConfig, batch_size: int
) -> list[Sequence[Question]]:
    """Returns the batches that are timed; none without rounds."""
    size = config.timing_batch_size or batch_size
    chosen = questions[: config.timing_batches * size if config.rounds else 0]
    return [chosen[start : start + size] for start in range(0, len(chosen), size)]


def _result(
    one: Contestant,
    replies: Sequence[Reply],
    again: Sequence[Reply] | None,
    timing: Timing | None,
    *,
    context: int,
) -> ReasonResult:
    checkpoint, model = one.checkpoint, one.model
    with one.ready():
        changed = changed_fields(checkpoint, model)
        flops, thinking = model.flops_per_token(context), price_steps(model, context, None)
    stage = {"stage": model.stage} if hasattr(model, "stages") else {}  # of a curriculum
    return ReasonResult(
        label=one.label,
        checkpoint=str(checkpoint.path),
        model=type(model).__name__,
        replies=replies,
        timing=timing,
        question_first=again,
        latents=one.latents,
        cost={"flops_per_token": flops, **thinking.as_dict()},
        settings={
            "trained_on": checkpoint.data_state.get("fingerprint"),
            "step": checkpoint.step,
            "which": checkpoint.which,
            **stage,
            "set": changed,
        },
    )


def _with_speed_ups(
    results: Sequence[ReasonResult], baseline: Contestant | None
) -> list[ReasonResult]:
    """Returns the results with their speed-ups over the baseline, where both were timed."""
    rival = next((r.timing for r in results if baseline and r.label == baseline.label), None)
    if rival is None:
        return list(results)
    return [
        dataclasses.replace(result, speed_up=result.timing.speed_up(rival))
        for result in results
        if result.timing is not None
    ]
