"""``evaluate.py reason``: the same questions, with known right answers, for any models.

Thinking States and its baselines write answers to reasoning rows: Tables 1 to 3 and Figs. 3 and 5
of *Latent Reasoning with Supervised Thinking States*: accuracy by exact match, wall-clock time
against chain of thought in the same run, passes of the prefill, questions put first, and which
questions one method solves and another does not. Models of windows take the likeliest of all
possible answers to kinship stories (Thoughtbubbles, Fig. 7), or write theirs (``--mode generate``).

NOTE(paper): batch sizes of the paper's timings are not published; here ``--timing_batch_size``.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from callbacks.answer_accuracy import room_for
from datamodules.store import SPLITS, Split
from evaluation.arguments import (
    add_data_arguments,
    add_file_arguments,
    add_run_arguments,
    add_which_argument,
    chosen,
    data_recipe,
    first_look,
)
from evaluation.devices import Precision, pick_device
from evaluation.figures import check_picture, write_figure
from evaluation.load import changed_fields, prepare, prepare_for_all
from evaluation.output import check_targets, report_result, write_jsonl
from evaluation.provenance import describe_data, trained_on
from evaluation.reason.asking import Asked, Asking, Mode, Timing, pick_mode
from evaluation.reason.contestants import (
    TASKS,
    Contestant,
    Task,
    asked_batches,
    build_contestants,
    build_questions,
    check_readers,
    check_same_questions,
    check_task,
    pick_baseline,
    same_batches,
    with_baseline,
    with_question_first,
    with_task,
)
from evaluation.reason.report import (
    answer_row,
    measure_answers,
    overlaps,
    points_of,
    reason_figure,
    reason_table,
    settings_of,
)
from evaluation.runs import find_checkpoints
from lightning_models.checkpoint import Checkpoint
from lightning_models.recipe import import_packages

# ---- asking and timing


@dataclass(frozen=True, kw_only=True)
class ReasonConfig:
    """How models are asked, and timed; the command checks ranges."""

    mode: Mode | None = None
    """rank: the likeliest of all possible answers; generate: greedy text must be right; null: rank
    where the data list all possible answers."""
    max_new_tokens: int | None = None
    """Most tokens that a model may write, steps included; null: twice as many as the longest right
    text has, with all its steps, and of windows as many as a batch's longest answer."""
    rounds: int | None = 5
    """Rounds of timing, in each of which every model answers the same questions; null: nothing is
    timed."""
    timing_batches: int = 8
    """That many batches are timed, the first ones."""
    timing_batch_size: int | None = None
    """Questions in a timed batch; null: as in the others."""


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
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what models answer to the questions of a split, and how long it takes them.

    That is the content of the JSON file, and all answers, see ``answer_row``: model after model, in
    the questions' order.

    Args:
        contestants: at least one.
        data: prepared and set up.
        config: how they are asked, and timed.
        split: which questions.
        precision: of the matrix products.
        limit_batches: ask only that many batches; None: all.
        baseline: the one of them that speed-ups are over.
        question_first: data of the same questions with the question first; None: not asked so.

    Raises:
        ValueError: if the split is empty, or the two data have other questions, or mode 'rank' has
            no list of answers.
    """
    batches, available = asked_batches(data, split, limit_batches)
    questions, context = [*chain(*batches)], data.row_tokens(split)
    room = config.max_new_tokens
    if data.rows != "windows":  # of a window, a batch's own answers say what fits
        room = room_for(questions, data, room)
    asking = Asking(data, pick_mode(data, config.mode), room, precision)
    first = [asking.replies(one, batches, context) for one in contestants]
    rows = [_rows(*pair, data.tokenizer) for pair in zip(contestants, first, strict=True)]
    again: list[list[dict[str, Any]] | None] = [None] * len(contestants)
    if question_first is not None:
        fewer = data.left_out(split) > 0  # which fit into the longer rows of the other data
        other, _ = asked_batches(question_first, split, None if fewer else limit_batches)
        other = same_batches(batches, other) if fewer else other
        check_same_questions(batches, other)
        turned = dataclasses.replace(asking, data=question_first)
        replies = [turned.replies(one, other, context) for one in contestants]
        pairs = zip(contestants, replies, strict=True)
        again = [_rows(*pair, data.tokenizer, question_first=True) for pair in pairs]
    size = config.timing_batch_size or data.eval_batch_size
    timed = questions[: config.timing_batches * size if config.rounds else 0]
    cut = [timed[start : start + size] for start in range(0, len(timed), size)]
    timings = asking.time(contestants, cut, config.rounds)
    rival = None if baseline is None else timings[contestants.index(baseline)]
    content = {
        "results": [
            _result(*each, data=data, rival=rival)
            for each in zip(contestants, first, rows, again, timings, strict=True)
        ],
        "overlap": overlaps({one.label: own for one, own in zip(contestants, rows, strict=True)}),
        "baseline": None if baseline is None else baseline.label,
        "data": {
            **describe_data(contestants[0].checkpoint, data, split),
            "moved_steps": _moved_steps(data, contestants),
        },
        "settings": {
            **vars(config),
            "mode": asking.mode,
            "max_new_tokens": asking.room,
            "timing_batch_size": size,
            "timed_questions": len(timed),
            "batches": len(batches),
            "of_batches": available,
            "batch_size": data.eval_batch_size,
            "precision": precision,
            "device": str(contestants[0].model.device),
        },
    }
    both = zip(rows, again, strict=True)
    return content, [row for own, turned_rows in both for row in (*own, *(turned_rows or ()))]


def _result(
    one: Contestant,
    asked: Asked,
    rows: Sequence[dict[str, Any]],
    question_first: Sequence[dict[str, Any]] | None,
    timing: Timing | None,
    *,
    data: Any,
    rival: Timing | None,
) -> dict[str, Any]:
    """Returns a model's numbers; speed-ups are over ``rival``."""
    return {
        **_source(one),
        **measure_answers(rows, data.group_name, question_first),
        **({} if timing is None else timing.as_dict(rival)),
        **_choice(one, asked, data),
        **asked.cost,
    }


def _moved_steps(data: Any, contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """Returns how many questions have a step that was moved out of its marker's chunk, by split.

    A step moves on where another one has its token (see `datamodules.reasoning`). They are counted
    for every chunk size of the models that read in chunks.
    """
    if data.rows == "windows":
        return []
    configs = [one.model.config for one in contestants]
    sizes = {config.chunk_size for config in configs if hasattr(config, "chunk_size")}
    return [
        {
            "chunk_size": chunk_size,
            "split": split,
            "questions": data.stored(split).crossings(chunk_size),
            "of": len(data.stored(split)),
        }
        for chunk_size in sorted(sizes)
        for split in SPLITS
    ]


def _source(one: Contestant) -> dict[str, Any]:
    """Returns who answers, what it was trained on, and what was changed."""
    checkpoint, model = one.checkpoint, one.model
    with one.ready():
        changed = changed_fields(checkpoint, model)
    return {
        "label": one.label,
        "model": type(model).__name__,
        **({} if one.latents is None else {"latents": one.latents}),
        "checkpoint": str(checkpoint.path),
        "settings": {
            "trained_on": trained_on(checkpoint),
            "step": checkpoint.step,
            "which": checkpoint.which,
            **({"stage": model.stage} if hasattr(model, "stages") else {}),  # of a curriculum
            "set": changed,
        },
    }


def _choice(one: Contestant, asked: Asked, data: Any) -> dict[str, Any]:
    """Returns among how many answers was chosen, by what; empty where they are written."""
    if asked.likelihood is None:
        return {}
    return {
        "candidates": len(data.candidates()),
        "likelihood": asked.likelihood,
        # an estimate after the question is inferred from that alone
        "causal": one.model.causal or asked.likelihood == "estimate",
    }


def _rows(
    one: Contestant, asked: Asked, tokenizer: Any, *, question_first: bool = False
) -> list[dict[str, Any]]:
    return [answer_row(tokenizer, one.label, reply, question_first) for reply in asked.replies]


# ---- the command


def first_checkpoint(argv: Sequence[str]) -> Checkpoint | None:
    """Returns the first checkpoint of a command line, with the data of its task; None without.

    Needed before the command line can be parsed, as data options default to its data.

    Raises:
        ValueError: if it cannot be read, or the task is not known.
    """
    found = first_look(argv, also=["task"])
    if found is None:
        return None
    if found.task not in (None, "null", *TASKS):
        raise ValueError(f"task ({found.task}) is none of {', '.join(TASKS)}")
    checkpoint = find_checkpoints(found.ckpt, "ckpt", found.which)[0]
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
        help="Ask all questions once more with the question before what it is about.",
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
    add_file_arguments(
        parser,
        output="JSON file to write.",
        answers_file="JSONL file, an answer a line.",
        figure="Figure to write, .svg or .png, of accuracies by group; points as .csv next to it.",
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
        find_checkpoints(settings.ckpt, "ckpt", settings.which), settings.baseline, settings.which
    )
    recipe = data_recipe(settings)
    check_task(settings.task, recipe)
    data = build_questions(checkpoints[0], recipe)
    check_readers(checkpoints, data)
    pick_mode(data, config.mode)
    turned = None
    if settings.question_first:
        turned = with_question_first(checkpoints[0], data.recipe(), data.block_size)
    contestants = build_contestants(
        checkpoints,
        changes=settings["set"],
        latents=settings.latents,
        label=settings.label,
        device=pick_device(settings.device),
        block_size=1 if data.rows == "windows" else (turned or data).block_size,
    )
    against = None if settings.against is None else settings_of(contestants, settings.against)
    prepare_for_all(data, [(one.checkpoint, one.model) for one in contestants], "ckpt")
    if turned is not None:
        prepare(turned, checkpoints[0])
    content, rows = measure_reason(
        contestants,
        data,
        config=config,
        **{key: settings[key] for key in ("split", "precision", "limit_batches")},
        baseline=pick_baseline(contestants, place),
        question_first=turned,
    )
    report_result(reason_table(content), content, target)
    if answers is not None:
        write_jsonl(answers, rows)
    if picture is not None:
        results = content["results"]
        draw = partial(reason_figure, results, against)
        write_figure(draw, points_of(results, against), picture)


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
