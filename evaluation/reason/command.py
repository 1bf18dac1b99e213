"""``evaluate.py reason``: questions answered by methods that think, side by side.

Tables 1 to 3 and Figs. 3 and 5 of Thinking States (*Latent Reasoning with Supervised Thinking
States*): accuracy by exact match, wall-clock time against chain of thought in the same run, passes
of the prefill, questions in front, and which questions one method solves and another does not.

NOTE(paper): batch sizes of the paper's timings are not published; here ``--timing_batch_size``.
"""

import dataclasses
from argparse import ArgumentParser as PlainParser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from callbacks.reasoning.questions import Question, room_for, write
from evaluation.arguments import (
    Split,
    add_data_arguments,
    add_run_arguments,
    add_which_argument,
    chosen,
    data_recipe,
)
from evaluation.cost import price_steps
from evaluation.figures import check_picture, table_path, write_csv, write_picture
from evaluation.load import Precision, autocast, changed_fields, describe_data, pick_device, prepare
from evaluation.output import check_targets, write_json, write_jsonl
from evaluation.reason.data import (
    TASKS,
    Task,
    asked_batches,
    build_questions,
    check_same_questions,
    check_task,
    moved_steps,
    prepare_for_all,
    with_question_first,
    with_task,
)
from evaluation.reason.models import (
    Contestant,
    build_contestants,
    find_readers,
    pick_baseline,
    with_baseline,
)
from evaluation.reason.report import ReasonReport, points_of, reason_figure, settings_of
from evaluation.reason.result import ReasonResult, Reply, Timing, ask, time_in_turn
from lightning_models.checkpoint import Checkpoint
from lightning_models.recipe import import_packages

# ---- asking and timing

_LEAST = {"max_new_tokens": 1, "rounds": 1, "timing_batches": 1, "timing_batch_size": 1}


@dataclass(frozen=True, kw_only=True)
class ReasonConfig:
    """How models are asked, and timed.

    Raises:
        ValueError: if a value is out of its range.
    """

    max_new_tokens: int | None = None
    """Most tokens that a model may write, steps included; null: twice as many as the longest right
    text has, with all its steps."""
    rounds: int | None = 5
    """Rounds of timing, in each of which every model answers the same questions; null: nothing is
    timed."""
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
        self, data: Any, batches: Sequence[Sequence[Question]], rounds: int | None
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


# ---- the command


def first_checkpoint(argv: Sequence[str]) -> Checkpoint | None:
    """Returns the first checkpoint of a command line, with the data of its task; None without.

    Needed before the command line can be parsed, as data options default to its data.

    Raises:
        ValueError: if it cannot be read, or the task is not known.
    """
    scan = PlainParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--ckpt", nargs="+", default=[])
    scan.add_argument("--which", default="last")
    scan.add_argument("--task")
    scan.add_argument("--packages", default="")
    found, _ = scan.parse_known_args(list(argv))
    if not found.ckpt or {"-h", "--help"} & set(argv):
        return None
    if found.task not in (None, "null", *TASKS):
        raise ValueError(f"task ({found.task}) is none of {', '.join(TASKS)}")
    import_packages(found.packages)
    checkpoint = find_readers(found.ckpt, which=found.which)[0]
    return with_task(checkpoint, None if found.task == "null" else found.task)


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options; data options default to those in the first checkpoint."""
    parser.add_argument(
        "--ckpt",
        type=str,
        nargs="+",
        required=True,
        help="Checkpoints, folders of runs, or patterns in quotes. All have one tokenizer.",
    )
    add_which_argument(parser)
    parser.add_argument(
        "--task",
        type=Task | None,
        default=None,
        help="Questions of another task than the first checkpoint's (null: of its own data). "
        "--data.NAME changes their options, e.g. --data.test_operations [41,100].",
    )
    add_run_arguments(parser)
    add_data_arguments(parser, argv, first_checkpoint)
    parser.set_defaults({"split": "test"})
    parser.add_argument(
        "--question_first",
        action="store_true",
        help="Ask all questions a second time with the question in front of what it is about.",
    )
    parser.add_argument(
        "--latents",
        type=int,
        nargs="+",
        default=[],
        help="Numbers of latent thoughts with which every model that has them is asked.",
    )
    parser.add_argument(
        "--baseline",
        type=str | None,
        default=None,
        help="Checkpoint that speed-ups are over (null: the first that writes its steps, CoT).",
    )
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Keys of the models' config that name them, separated by commas, or model for the "
        "class. Found where models of one class differ in at most two.",
    )
    parser.add_class_arguments(ReasonConfig)
    parser.add_argument("--output", type=str | None, default=None, help="JSON file to write.")
    parser.add_argument(
        "--answers_file", type=str | None, default=None, help="JSONL file, an answer a line."
    )
    parser.add_argument(
        "--figure",
        type=str | None,
        default=None,
        help="Figure to write, .svg or .png, of accuracies by group; points as .csv next to it.",
    )
    parser.add_argument(
        "--against",
        type=str | None,
        default=None,
        help="Number in the models' config that the figure is over instead, with speed-ups, e.g. "
        "chunk_size; recurrence: the layers between injection and extraction (Fig. 3).",
    )


def run(settings: Namespace) -> None:
    """Asks the questions, prints tables and writes the files that are asked for."""
    config = _config(settings)
    target, answers = check_targets(output=settings.output, answers_file=settings.answers_file)
    picture = _picture(settings)
    import_packages(settings.packages)
    checkpoints, place = with_baseline(
        find_readers(settings.ckpt, which=settings.which), settings.baseline, settings.which
    )
    recipe = data_recipe(settings)
    check_task(settings.task, recipe)
    data = build_questions(checkpoints[0], recipe)
    turned = None
    if settings.question_first:
        turned = with_question_first(checkpoints[0], data.recipe(), data.block_size)
    contestants = build_contestants(
        checkpoints,
        changes=settings["set"],
        latents=settings.latents,
        label=settings.label,
        device=pick_device(settings.device),
        block_size=(turned or data).block_size,
    )
    against = None
    if settings.against is not None:
        against = (settings.against, settings_of(contestants, settings.against))
    prepare_for_all(data, [(one.checkpoint, one.model) for one in contestants])
    if turned is not None:
        prepare(turned, checkpoints[0])
    report = measure_reason(
        contestants,
        data,
        config=config,
        split=settings.split,
        precision=settings.precision,
        limit_batches=settings.limit_batches,
        baseline=pick_baseline(contestants, place),
        question_first=turned,
    )
    print(report.as_table())
    if target is not None:
        write_json(target, report.as_dict())
    if answers is not None:
        write_jsonl(answers, report.answers(data.tokenizer))
    if picture is not None:
        header, rows = points_of(report.results, report.group_name, against)
        write_csv(table_path(picture), header, rows)
        write_picture(reason_figure(report.results, report.group_name, against), picture)


def _picture(settings: Namespace) -> Path | None:
    """Returns where the figure goes, if there is to be one.

    Raises:
        ValueError: if it cannot be written, or only its axis is named.
    """
    if settings.figure is None and settings.against is not None:
        raise ValueError(
            f"against ({settings.against}) is the axis of a figure; add --figure F.svg"
        )
    return None if settings.figure is None else check_picture(settings.figure, "figure")


def _config(settings: Namespace) -> ReasonConfig:
    """Returns what the command line says of how models are asked.

    Raises:
        ValueError: if a number is too low, or a baseline of times is named and nothing is timed.
    """
    if settings.baseline is not None and not settings.rounds:
        raise ValueError(
            f"baseline ({settings.baseline}) is what speed-ups are over, and rounds (null) times "
            "nothing; set rounds, or leave baseline out"
        )
    return chosen(settings, ReasonConfig)
