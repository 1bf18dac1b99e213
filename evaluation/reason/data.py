"""What questions ``evaluate.py reason`` asks: those of a checkpoint's data, or of another task."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from callbacks.reasoning.questions import REASONING, Question, questions_in
from datamodules import LanguageDataModule
from datamodules.store import SPLITS
from evaluation.arguments import Split
from evaluation.load import build_data, check_fit, check_tokenizer, prepare
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Recipe
from lightning_models.recipe import resolve_class

Task = Literal["parity", "vars", "gsm8k", "two_hop"]

TASKS: dict[Task, Recipe] = {
    "parity": {"class_path": "datamodules.StateTracking", "init_args": {"task": "parity"}},
    "vars": {"class_path": "datamodules.StateTracking", "init_args": {"task": "vars"}},
    "gsm8k": {"class_path": "datamodules.ReasoningGSM8K", "init_args": {}},
    "two_hop": {"class_path": "datamodules.TwoHop", "init_args": {}},
}
SHARED = (
    "tokenizer",
    "cache_dir",
    "num_proc",
    "num_workers",
    "batch_size",
    "eval_batch_size",
    "block_size",
    "step_separator",
)
"""Options that data of another task take over from a checkpoint's."""
WORDED = "answer_prefix"
"""An option that goes with the task."""
QUESTION_FIRST = "question_first"
GROWTH = 2
"""Rows become longer by their question at most, where that comes in front."""


def with_task(checkpoint: Checkpoint, task: Task | None) -> Checkpoint:
    """Returns the checkpoint with the data of a task in place of its own.

    Args:
        checkpoint: where the tokenizer and the like come from.
        task: None, or that of its own data: they stay as they are.
    """
    if task is None:
        return checkpoint
    recipe = _of_task(task, checkpoint.data_recipe)
    recipes = {**checkpoint.content["recipe"], "data": recipe}
    return dataclasses.replace(checkpoint, content={**checkpoint.content, "recipe": recipes})


def _of_task(task: Task, own: Recipe | None) -> Recipe:
    chosen, fixed = TASKS[task]["class_path"], TASKS[task]["init_args"]
    if own is None:
        return {"class_path": chosen, "init_args": dict(fixed)}
    arguments = dict(own["init_args"])
    if not _same_class(own["class_path"], chosen):
        arguments = {key: arguments[key] for key in SHARED if key in arguments}
    elif any(arguments.get(key) != value for key, value in fixed.items()):
        arguments.pop(WORDED, None)
    return {"class_path": chosen, "init_args": {**arguments, **fixed}}


def check_task(task: Task | None, recipe: Recipe | None) -> None:
    """Checks that a task and data that are named next to it are the same.

    Raises:
        ValueError: if they are not; the message has both.
    """
    if task is None or recipe is None:
        return
    chosen, fixed = TASKS[task]["class_path"], TASKS[task]["init_args"]
    arguments = recipe["init_args"]
    if not _same_class(recipe["class_path"], chosen) or any(
        arguments.get(key) != value for key, value in fixed.items()
    ):
        raise ValueError(f"task ({task}) and data ({recipe['class_path']}) differ; name one only")


def _same_class(first: str, second: str) -> bool:
    found: list[Any] = [resolve_class(path, LanguageDataModule) for path in (first, second)]
    return found[0] is found[1]


def build_questions(checkpoint: Checkpoint, recipe: Recipe | None) -> Any:
    """Returns a data module that has questions, not yet prepared.

    Args:
        checkpoint: its data are the default, its tokenizer that of any other.
        recipe: of the data; None: the checkpoint's.

    Raises:
        ValueError: if they cannot be built, or have none.
    """
    data = build_data(checkpoint, recipe)
    if data.rows != REASONING:
        raise ValueError(
            f"data ({type(data).__name__}) have no questions with reasoning; name such data with "
            f"--task {' or '.join(TASKS)}, or with --data"
        )
    return data


def prepare_for_all(
    data: LanguageDataModule, models: Sequence[tuple[Checkpoint, LanguageModel]]
) -> None:
    """Prepares data that all models are asked about.

    Args:
        data: as `build_questions` returns it.
        models: with the checkpoints that they come from.

    Raises:
        ValueError: if one of them cannot read the data, or has another tokenizer.
    """
    for checkpoint, model in models:
        with _named(checkpoint):
            check_fit(model, data)
    prepare(data, models[0][0])
    for checkpoint, _ in models[1:]:
        with _named(checkpoint):
            check_tokenizer(data, checkpoint)


@contextlib.contextmanager
def _named(checkpoint: Checkpoint) -> Iterator[None]:
    """Has messages of errors name the checkpoint, and say why it matters."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"ckpt ({checkpoint.path}): {error}; all checkpoints answer the same questions, those "
            "of the first one's data, of --task or of --data"
        ) from error


def asked_batches(data: Any, split: Split, limit: int | None) -> tuple[list[list[Question]], int]:
    """Returns the questions of a split, batch by batch, and how many batches it has.

    Args:
        data: prepared.
        split: which questions.
        limit: so many batches only; None: all.

    Raises:
        ValueError: if the split is empty.
    """
    source = data.evaluation_source(split)
    count = len(source) if limit is None else min(limit, len(source))
    batches = [questions_in(source.batch(n)) for n in range(count)]
    return [batch for batch in batches if batch], len(source)


def moved_steps(data: Any, chunk_sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Returns how many questions have a step that was moved out of its marker's chunk.

    A step moves on where another one has its token (see `datamodules.reasoning`).

    Args:
        data: prepared.
        chunk_sizes: tokens of a chunk; counted for each of them.
    """
    return [
        {
            "chunk_size": chunk_size,
            "split": split,
            "questions": data.stored(split).crossings(chunk_size),
            "of": len(data.stored(split)),
        }
        for chunk_size in chunk_sizes
        for split in SPLITS
    ]


def with_question_first(checkpoint: Checkpoint, recipe: Recipe, longest: int) -> Any:
    """Returns data of the same questions, each with what is asked in front (Fig. 5).

    Args:
        checkpoint: where the tokenizer comes from.
        recipe: of the data as they are.
        longest: their block_size.

    Raises:
        ValueError: if they have it in front already, or cannot.
    """
    arguments = recipe["init_args"]
    if arguments.get(QUESTION_FIRST):
        raise ValueError(
            f"{QUESTION_FIRST}: the data have the question in front already (data.{QUESTION_FIRST} "
            "is true); leave one of the two out"
        )
    changed = {**arguments, QUESTION_FIRST: True, "block_size": GROWTH * longest}
    return build_questions(checkpoint, {**recipe, "init_args": changed})


def check_same_questions(
    first: Sequence[Sequence[Question]], second: Sequence[Sequence[Question]]
) -> None:
    """Checks that two wordings are of the same questions, in the same batches.

    Raises:
        ValueError: if they are not.
    """

    def answers(batches: Sequence[Sequence[Question]]) -> list[list[tuple[int, list[int]]]]:
        return [[(question.number, question.answer) for question in batch] for batch in batches]

    if answers(first) != answers(second):
        raise ValueError(
            f"{QUESTION_FIRST}: with the question in front the data have other questions, so they "
            "cannot be compared"
        )
