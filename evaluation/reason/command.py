"""``evaluate.py reason``: questions answered by methods that think, side by side.

Tables 1 to 3 and Figs. 3 and 5 of Thinking States (*Latent Reasoning with Supervised Thinking
States*): accuracy by exact match, wall-clock time against chain of thought in the same run, passes
of the prefill, questions in front, and which questions one method solves and another does not.

NOTE(paper): batch sizes of the paper's timings are not published; here ``--timing_batch_size``.
"""

import dataclasses
from argparse import ArgumentParser as PlainParser
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from evaluation.arguments import (
    add_data_arguments,
    add_run_arguments,
    add_which_argument,
    check_limits,
    data_recipe,
)
from evaluation.checkpoint.corpus import prepare
from evaluation.checkpoint.device import pick_device
from evaluation.output import check_targets, write_json, write_jsonl
from evaluation.picture import check_picture, table_path, write_csv, write_picture
from evaluation.reason.data import (
    TASKS,
    Task,
    build_questions,
    check_task,
    prepare_for_all,
    with_question_first,
    with_task,
)
from evaluation.reason.figure import points_of, reason_figure, settings_of
from evaluation.reason.models import (
    build_contestants,
    find_readers,
    pick_baseline,
    with_baseline,
)
from evaluation.reason.run import ReasonConfig, measure_reason
from lightning_models.checkpoint import Checkpoint
from lightning_models.recipe import import_packages


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
        help="Figure to write, .svg or .png, of accuracies by group; its points beside it as .csv.",
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
    check_limits(settings)
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
        ValueError: if a number is too low.
    """
    for number in settings.latents:
        if number < 0:
            raise ValueError(f"latents ({number}) must be at least 0")
    return ReasonConfig(
        **{field.name: settings[field.name] for field in dataclasses.fields(ReasonConfig)}
    )
