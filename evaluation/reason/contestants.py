"""Who is asked by ``evaluate.py reason``, and what: questions of a checkpoint or of a task."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from callbacks.answer_accuracy import Question, questions_in
from callbacks.dials import dialled
from datamodules import LanguageDataModule
from datamodules.recipe import parameters
from datamodules.store import Split
from evaluation.arguments import CARRIED
from evaluation.load import build_data, build_model, known_changes
from evaluation.runs import find_checkpoints, make_labels, path_names
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Recipe, Which
from lightning_models.recipe import resolve_class

LATENTS = "eval_latents"
"""Field of a config: how many latent thoughts a model has at inference; null: as in training."""

# ---- questions: tasks, and the data that have them


Task = Literal["parity", "vars", "gsm8k", "two_hop", "kinship"]

TASKS: dict[Task, Recipe] = {
    "parity": {"class_path": "datamodules.StateTracking", "init_args": {"task": "parity"}},
    "vars": {"class_path": "datamodules.StateTracking", "init_args": {"task": "vars"}},
    "gsm8k": {"class_path": "datamodules.ReasoningGSM8K", "init_args": {}},
    "two_hop": {"class_path": "datamodules.TwoHop", "init_args": {}},
    "kinship": {"class_path": "datamodules.Kinship", "init_args": {}},
}
SHARED = (*CARRIED, "step_separator")
"""Options that data of another task take over from a checkpoint's, where they have them."""
WORDED = "answer_prefix"
"""An option that goes with the task."""
QUESTION_FIRST = "question_first"
GROWTH = 2
"""Rows become longer by their question at most, where that comes first."""


def with_task(checkpoint: Checkpoint, task: Task | None) -> Checkpoint:
    """Returns the checkpoint, whose tokenizer stays, with the data of a task in place of its own.

    Without a task, or with that of its own data, they stay as they are.
    """
    if task is None:
        return checkpoint
    recipe = _of_task(task, checkpoint.data_recipe)
    recipes = {**checkpoint.content["recipe"], "data": recipe}
    return dataclasses.replace(checkpoint, content={**checkpoint.content, "recipe": recipes})


def _of_task(task: Task, own: Recipe | None) -> Recipe:
    path, fixed = TASKS[task]["class_path"], TASKS[task]["init_args"]
    arguments = {} if own is None else dict(own["init_args"])
    if own is not None and not _same_class(own["class_path"], path):
        taken = set(SHARED) & parameters(resolve_class(path, LanguageDataModule))
        arguments = {key: value for key, value in arguments.items() if key in taken}
    elif any(arguments.get(key) != value for key, value in fixed.items()):
        arguments.pop(WORDED, None)
    return {"class_path": path, "init_args": {**arguments, **fixed}}


def check_task(task: Task | None, recipe: Recipe | None) -> None:
    """Checks that a task and data that are named next to it are the same.

    Raises:
        ValueError: if they are not; the message has both.
    """
    if task is None or recipe is None:
        return
    same = _same_class(recipe["class_path"], TASKS[task]["class_path"])
    if not same or not TASKS[task]["init_args"].items() <= recipe["init_args"].items():
        raise ValueError(f"task ({task}) and data ({recipe['class_path']}) differ; name one only")


def _same_class(first: str, second: str) -> bool:
    found: list[Any] = [resolve_class(path, LanguageDataModule) for path in (first, second)]
    return found[0] is found[1]


def build_questions(checkpoint: Checkpoint, recipe: Recipe | None) -> Any:
    """Returns a data module that has questions, not yet prepared.

    Without a recipe they are the checkpoint's, whose tokenizer all data take.

    Raises:
        ValueError: if they cannot be built, or have none.
    """
    data = build_data(checkpoint, recipe)
    if not hasattr(data, "is_right"):
        raise ValueError(
            f"data ({type(data).__name__}) has no questions with one right answer; name such data "
            f"with --task {' or '.join(TASKS)}, or with --data, e.g. --data datamodules.Kinship"
        )
    return data


def with_question_first(checkpoint: Checkpoint, recipe: Recipe, longest: int) -> Any:
    """Returns data of the same questions, each with what is asked at the beginning (Fig. 5).

    ``longest`` is the block_size of the data as they are.

    Raises:
        ValueError: if they have it there already, or cannot.
    """
    arguments = recipe["init_args"]
    if arguments.get(QUESTION_FIRST):
        raise ValueError(
            f"{QUESTION_FIRST}: the data have the question first already (data.{QUESTION_FIRST} "
            "is true); leave one of the two out"
        )
    changed = {**arguments, QUESTION_FIRST: True, "block_size": GROWTH * longest}
    return build_questions(checkpoint, {**recipe, "init_args": changed})


def asked_batches(data: Any, split: Split, limit: int | None) -> tuple[list[list[Question]], int]:
    """Returns the questions of a split, batch by batch, and how many batches it has.

    The data are prepared; of a ``limit`` only the first batches are asked.

    Raises:
        ValueError: if the split is empty, or none of these batches has a question.
    """
    source = data.evaluation_source(split)
    count = len(source) if limit is None else min(limit, len(source))
    batches = [questions_in(source.batch(n)) for n in range(count)]
    asked = [batch for batch in batches if batch]
    if not asked:
        cure = "choose another split" if limit is None else "raise it or leave it out"
        raise ValueError(
            f"split ({split}): its first {count} batches, of {len(source)}, have no question "
            f"(limit_batches {'null' if limit is None else limit}); {cure}"
        )
    return asked, len(source)


def same_batches(
    first: Sequence[Sequence[Question]], second: Sequence[Sequence[Question]]
) -> list[list[Question]]:
    """Returns the questions of ``second`` that ``first`` has, by number, in the same batches."""
    by_number = {question.number: question for batch in second for question in batch}
    return [
        [by_number[question.number] for question in batch if question.number in by_number]
        for batch in first
    ]


def check_same_questions(
    first: Sequence[Sequence[Question]], second: Sequence[Sequence[Question]]
) -> None:
    """Checks that two wordings are of the same questions, in the same batches.

    Raises:
        ValueError: if they are not.
    """
    known, other = (
        [[(question.number, question.answer) for question in batch] for batch in batches]
        for batches in (first, second)
    )
    if known != other:
        raise ValueError(
            f"{QUESTION_FIRST}: with the question first the data have other questions, so they "
            "cannot be compared"
        )


# ---- models: checkpoints, Coconut's at several numbers of latents


@dataclass(frozen=True)
class Contestant:
    """A model that is asked.

    Attributes:
        label: Stands for it in tables; no other has the same.
        checkpoint: Where it comes from.
        model: On its device, in eval mode; contestants of one checkpoint share it, so it is asked
            within ``ready``.
        latents: Number of latent thoughts that was asked for; None: none was.
    """

    label: str
    checkpoint: Checkpoint
    model: LanguageModel
    latents: int | None = None

    @contextmanager
    def ready(self) -> Iterator[LanguageModel]:
        """Inside, the model that is returned has this contestant's number of latent thoughts."""
        with _with_latents(self.model, self.latents):
            yield self.model

    @property
    def is_chain_of_thought(self) -> bool:
        """Whether it writes all steps before its answer, so that others are compared with it.

        Models of a curriculum do so for a while, too.
        """
        return bool(getattr(self.model, "writes_chain", False)) and not hasattr(
            self.model, "stages"
        )


def with_baseline(
    checkpoints: Sequence[Checkpoint], word: str | None, which: Which = "last"
) -> tuple[list[Checkpoint], Path | None]:
    """Returns the checkpoints and that of ``--baseline``, and where this one is, if there is one.

    Raises:
        ValueError: if the word leads to none or to several.
    """
    if word is None:
        return list(checkpoints), None
    found = find_checkpoints([word], "baseline", which)
    if len(found) > 1:
        raise ValueError(f"baseline ({word}) names {len(found)} checkpoints; name one")
    places = {checkpoint.path.resolve() for checkpoint in checkpoints}
    place = found[0].path.resolve()
    return [*checkpoints, *([] if place in places else found)], place


def check_readers(checkpoints: Sequence[Checkpoint], data: LanguageDataModule) -> None:
    """Checks, before models are built, that they read rows as the data have them.

    Raises:
        ValueError: if one does not.
    """
    for checkpoint in checkpoints:
        kind = resolve_class(checkpoint.model_recipe["class_path"], LanguageModel)
        if kind.reads != data.rows:
            raise ValueError(
                f"ckpt ({checkpoint.path}): {kind.__name__} reads {kind.reads}, and the questions "
                f"({type(data).__name__}) are {data.rows}; leave it out, or name other questions "
                "with --task or --data"
            )


def pick_baseline(contestants: Sequence[Contestant], place: Path | None) -> Contestant | None:
    """Returns the model that speed-ups are over: the one named, or the first that writes steps.

    ``place`` is the checkpoint of the one that was named, None if none was.
    """
    if place is None:
        return next((one for one in contestants if one.is_chain_of_thought), None)
    return next(one for one in contestants if one.checkpoint.path.resolve() == place)


def build_contestants(
    checkpoints: Sequence[Checkpoint],
    *,
    changes: Mapping[str, Any],
    latents: Sequence[int],
    label: str | None,
    device: torch.device,
    block_size: int = 1,
) -> list[Contestant]:
    """Returns the models of checkpoints, one for each number of latents where a model has them.

    Args:
        checkpoints: in their order.
        changes: fields of configs to change where a config has them.
        latents: numbers of latent thoughts; empty: as trained.
        label: keys of the configs that name the models, separated by commas; None: found.
        device: where they run.
        block_size: tokens of the longest reasoning row, where longer than in training; what a query
            leaves of it is what a chain of thought may take.

    Raises:
        ValueError: if no config has a field, or one refuses a value.
    """
    built: list[tuple[Checkpoint, int | None, LanguageModel]] = []
    fields = known_changes(checkpoints, changes)
    numbered_too = known_changes(checkpoints, {LATENTS: None} if latents else {})
    for checkpoint, fixed, with_latents in zip(checkpoints, fields, numbered_too, strict=True):
        known = checkpoint.model_recipe["init_args"].get("config", {})
        if known.get("block_size", block_size) < block_size:
            fixed.setdefault("block_size", block_size)
        model = build_model(checkpoint, fixed).to(device)  # one set of weights for all its numbers
        built += [(checkpoint, count, model) for count in (latents if with_latents else [None])]
    return [
        Contestant(name, checkpoint, model, number)
        for name, (checkpoint, number, model) in zip(_labels(built, label), built, strict=True)
    ]


def _with_latents(
    model: LanguageModel, number: int | None
) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if number is None else dialled(model, LATENTS, number)


# ---- labels


def _labels(
    built: Sequence[tuple[Checkpoint, int | None, LanguageModel]], keys: str | None
) -> list[str]:
    """Returns a label for each model, see `make_labels`, with its number of latent thoughts."""
    firsts = {checkpoint.path: (checkpoint, model) for checkpoint, _, model in built}
    checkpoints = [checkpoint for checkpoint, _ in firsts.values()]
    labels = make_labels(
        path_names(checkpoints),
        [checkpoint.run_name for checkpoint in checkpoints],
        [model.recipe() for _, model in firsts.values()],
        keys,
    )
    found = dict(zip(firsts, labels, strict=True))
    return numbered(
        [
            found[checkpoint.path] + ("" if number is None else f", {LATENTS} {number}")
            for checkpoint, number, _ in built
        ]
    )


def numbered(labels: list[str]) -> list[str]:
    """Returns the labels, with a number from 2 on after those that were there before."""
    counts = [labels[: place + 1].count(label) for place, label in enumerate(labels)]
    return [
        f"{label} #{count}" if count > 1 else label
        for label, count in zip(labels, counts, strict=True)
    ]
