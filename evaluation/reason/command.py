"""``evaluate.py reason``: asks several models the same questions with known answers.

Thinking States and its baselines write their answers, for Tables 1 to 3 and Fig. 3 of *Latent
Reasoning with Supervised Thinking States*: accuracy by exact match, wall-clock time relative to
chain of thought in the same run, and the number of prefill passes. Scripts in docs/papers compute
Fig. 5 and the overlaps of Sec. 4.5 from the answers file.

Window models rank all possible answers to kinship stories (Thoughtbubbles, Fig. 7), or write their
answers (``--mode generate``).

NOTE(paper): the batch size of the timings is unpublished; ``--timing_batch_size`` sets ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt

from callbacks.answer_accuracy import Question, questions_in, room_for
from datamodules.store import Split
from evaluation.arguments import (
    add_data_arguments,
    add_file_arguments,
    add_labelled_checkpoints,
    chosen,
    data_recipe,
)
from evaluation.devices import Precision, pick_device
from evaluation.figures import check_picture, write_figure
from evaluation.load import changed_fields, prepare_for_all
from evaluation.output import check_targets, report_result, write_jsonl
from evaluation.provenance import describe_data, trained_on
from evaluation.reason.asking import (
    AnswerProtocol,
    Mode,
    ModelAnswers,
    Timing,
    pick_mode,
    time_in_turn,
)
from evaluation.reason.contestants import (
    CONTROL,
    Contestant,
    build_contestants,
    build_questions,
)
from evaluation.reason.controls import Control
from evaluation.reason.scores import (
    answer_row,
    measure_answers,
    points_of,
    reason_figure,
    reason_table,
    settings_of,
)
from evaluation.runs import find_named
from lightning_models.recipe import import_packages

# ---- answers and timings


@dataclass(frozen=True, kw_only=True)
class ReasonConfig:
    """Settings for asking and timing models."""

    mode: Mode | None = None
    """rank: take the most likely of all possible answers; generate: compare greedily decoded text.
    Null means rank if the data list all possible answers, else generate."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens that a model may write, including steps. Null means twice the
    longest correct text with all its steps; for windows, the longest answer in the batch."""
    rounds: PositiveInt | None = 5
    """Number of timing rounds, in each of which every model answers the same questions. Null means
    no timing."""
    timing_batches: PositiveInt = 8
    """Number of batches to time, from the first."""
    timing_batch_size: PositiveInt | None = None
    """Number of questions in a timed batch. Null means as in other batches."""


def measure_reason(
    contestants: Sequence[Contestant],
    data: Any,
    *,
    config: ReasonConfig = ReasonConfig(),
    split: Split = "test",
    precision: Precision = "32",
    limit_batches: int | None = None,
    noise_seed: int = 0,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Asks models the questions of a split, and times them.

    Args:
        contestants: The models. Models whose latents are replaced are not timed.
        data: Datamodule, prepared and set up.
        config: Settings for asking and timing.
        split: Split of the questions.
        precision: Precision of the matrix products.
        limit_batches: Number of batches to ask. Defaults to all.
        noise_seed: Seed of the noise that replaces latents.

    Returns:
        The content of the JSON file, and all answers (see ``answer_row``), model by model in the
        order of the questions.

    Raises:
        ValueError: If the split is empty, mode 'rank' has no list of answers, or latents are to be
            swapped and there is only one question.
    """
    source = data.evaluation_source(split)
    count = len(source) if limit_batches is None else min(limit_batches, len(source))
    batches = [questions_in(source.batch(n)) for n in range(count)]
    questions, context = [*chain(*batches)], data.row_tokens(split)
    room = config.max_new_tokens
    if data.rows != "windows":  # for windows, the answers of each batch determine the room
        room = room_for(questions, data, room)
    following: dict[int, Question] = {}
    if any(contestant.control == "swap" for contestant in contestants):
        following = _following(questions, questions_in(source.batch(count % len(source)))[0])
    mode = pick_mode(data, config.mode)
    protocol = AnswerProtocol(data, mode, room, precision, following, noise_seed)
    all_answers = [protocol.replies(contestant, batches, context) for contestant in contestants]
    rows = [
        [answer_row(data.tokenizer, contestant.label, reply) for reply in answers.replies]
        for contestant, answers in zip(contestants, all_answers, strict=True)
    ]
    size = config.timing_batch_size or data.eval_batch_size
    timed = questions[: config.timing_batches * size if config.rounds else 0]
    cut = [timed[start : start + size] for start in range(0, len(timed), size)]
    timings: list[Timing | None] = [None] * len(contestants)
    if config.rounds:
        plain = [idx for idx, contestant in enumerate(contestants) if contestant.control is None]
        answering = [partial(protocol.answer, contestants[idx], cut) for idx in plain]
        device = contestants[0].model.device
        measured = time_in_turn(answering, config.rounds, len(timed), device)
        for idx, timing in zip(plain, measured, strict=True):
            timings[idx] = timing
    chains = (idx for idx, contestant in enumerate(contestants) if contestant.is_chain_of_thought)
    first = next(chains, None) if config.rounds else None
    baseline = None if first is None else timings[first]
    return {
        "results": [
            _result(*parts, data=data, baseline=baseline, noise_seed=noise_seed)
            for parts in zip(contestants, all_answers, rows, timings, strict=True)
        ],
        "baseline": None if first is None else contestants[first].label,
        "data": describe_data(contestants[0].checkpoint, data, split),
        "settings": {
            **vars(config),
            "mode": protocol.mode,
            "max_new_tokens": protocol.room,
            "timing_batch_size": size,
            "timed_questions": len(timed),
            "batches": count,
            "of_batches": len(source),
            "batch_size": data.eval_batch_size,
            "precision": precision,
            "device": str(contestants[0].model.device),
        },
    }, [*chain(*rows)]


def _following(questions: Sequence[Question], final: Question) -> dict[int, Question]:
    """Maps the id of each question to the next question; ``final`` follows the last one."""
    if len(questions) == 1 and questions[0].sequence_id == final.sequence_id:
        raise ValueError(f"{CONTROL} (swap) needs at least 2 questions, and the split has 1")
    ids = (question.sequence_id for question in questions)
    return dict(zip(ids, [*questions[1:], final], strict=True))


def _result(
    contestant: Contestant,
    answers: ModelAnswers,
    rows: Sequence[dict[str, Any]],
    timing: Timing | None,
    *,
    data: Any,
    baseline: Timing | None,
    noise_seed: int,
) -> dict[str, Any]:
    checkpoint, model, chosen = contestant.checkpoint, contestant.model, {}
    with contestant.ready():
        changed = changed_fields(checkpoint, model)
    if answers.likelihood is not None:
        chosen = {
            "candidates": len(data.candidates()),
            "likelihood": answers.likelihood,
            # an estimate infers latents from the question only, so it is causal
            "causal": model.causal or answers.likelihood == "estimate",
        }
    return {
        "label": contestant.label,
        "model": type(model).__name__,
        **({} if contestant.latents is None else {"latents": contestant.latents}),
        **({} if contestant.control is None else {CONTROL: contestant.control}),
        **({"noise_seed": noise_seed} if contestant.control == "noise" else {}),
        "checkpoint": str(checkpoint.path),
        "settings": {
            "trained_on": trained_on(checkpoint),
            "step": checkpoint.step,
            "which": checkpoint.which,
            **({"stage": model.stage} if hasattr(model, "stages") else {}),  # curriculum
            "set": changed,
        },
        **measure_answers(rows, data.group_name),
        **({} if timing is None else timing.as_dict(baseline)),
        **chosen,
        **answers.cost,
    }


# ---- the command


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options; data default to the first checkpoint's."""
    add_labelled_checkpoints(
        parser,
        "All must have the same tokenizer. Speed-ups are over the first one that writes out steps.",
    )
    add_data_arguments(parser)
    parser.set_defaults({"split": "test"})
    parser.add_argument(
        "--latents",
        type=NonNegativeInt,
        nargs="+",
        default=[],
        help="Numbers of latent thoughts with which to ask every model that has latent thoughts.",
    )
    parser.add_argument(
        f"--{CONTROL}",
        type=Control,
        nargs="+",
        default=[],
        help="Controls: every model is asked again with its latents replaced by zeros, noise of "
        "their norm, the next question's latents (swap) or a latent without a thought (pause).",
    )
    parser.add_argument("--noise_seed", type=NonNegativeInt, default=0, help="Seed of the noise.")
    parser.add_argument(
        "--label",
        type=str | None,
        default=None,
        help="Config fields that name the models, separated by commas, or model for the class. "
        "Null means NAME, else the name of the run, else its path.",
    )
    parser.add_class_arguments(ReasonConfig)
    add_file_arguments(
        parser,
        output="JSON file to write.",
        answers_file="JSONL file to write, one answer per line.",
        figure="Figure of accuracies by group to write, .svg, .png or .pdf; its points are written "
        "next to it as .csv.",
    )
    parser.add_argument(
        "--against",
        type=str | None,
        default=None,
        help="Config field to plot accuracy and speed-up against instead of groups, e.g. "
        "chunk_size or recurrence, the number of layers between injection and extraction (Fig. 3).",
    )


def run(settings: Namespace) -> None:
    """Asks the questions, prints tables, and writes the requested files."""
    config = chosen(settings, ReasonConfig)
    target, answers = check_targets(output=settings.output, answers_file=settings.answers_file)
    picture = _picture(settings)
    import_packages(settings.packages)
    named = find_named(settings.ckpt, "ckpt", settings.which)
    checkpoints = [checkpoint for _, checkpoint in named]
    data = build_questions(checkpoints, data_recipe(settings, checkpoints[0]))
    pick_mode(data, config.mode)
    contestants = build_contestants(
        named,
        changes=settings["set"],
        latents=settings.latents,
        label=settings.label,
        device=pick_device(settings.device),
        block_size=1 if data.rows == "windows" else data.block_size,
        controls=settings[CONTROL],
    )
    against = None if settings.against is None else settings_of(contestants, settings.against)
    prepare_for_all(
        data, [(contestant.checkpoint, contestant.model) for contestant in contestants], "ckpt"
    )
    keys = ("split", "precision", "limit_batches", "noise_seed")
    content, rows = measure_reason(
        contestants,
        data,
        config=config,
        **{key: settings[key] for key in keys},
    )
    report_result(reason_table(content), content, target)
    if answers is not None:
        write_jsonl(answers, rows)
    if picture is not None:
        results = content["results"]
        draw = partial(reason_figure, results, against)
        write_figure(draw, points_of(results, against), picture)


def _picture(settings: Namespace) -> Path | None:
    if settings.figure is None and settings.against is not None:
        raise ValueError(
            f"against ({settings.against}) sets the x axis of a figure; add --figure F.svg"
        )
    return None if settings.figure is None else check_picture(settings.figure, "figure")
