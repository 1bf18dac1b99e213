"""Who is asked by ``evaluate.py reason``: checkpoints, Coconut's at several numbers of latents."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from callbacks.hooks import dialled
from callbacks.reasoning.questions import REASONING, not_asked
from evaluation.load import build_model
from evaluation.runs import MODEL, MOST_KEYS, differing, find_checkpoints, label_runs, short_names
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Recipe, Which
from lightning_models.recipe import resolve_class

LATENTS = "eval_latents"
"""Field of a config: how many latent thoughts a model has at inference; null: as in training."""
LONGEST = "block_size"
UNTOLD = ("architecture", "answer_prefix", "step_separator")
"""Fields of configs that no label shows."""


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
        """Whether it writes all steps in front of its answer, so that others are compared with it.

        Models of a curriculum do so for a while, too.
        """
        return bool(getattr(self.model, "writes_chain", False)) and not hasattr(
            self.model, "stages"
        )


def find_readers(
    words: Sequence[str], key: str = "ckpt", which: Which = "last"
) -> list[Checkpoint]:
    """Returns the checkpoints that a command line names, having looked whether they read questions.

    Args:
        words: files, folders of runs, or patterns.
        key: the option that has them, for messages.
        which: of a folder's run the furthest, or the best.

    Raises:
        ValueError: if there is none, or one cannot be asked.
    """
    checkpoints = find_checkpoints(words, key, which)
    for checkpoint in checkpoints:
        kind = resolve_class(checkpoint.model_recipe["class_path"], LanguageModel)
        if kind.reads != REASONING:
            raise ValueError(
                f"{key} ({checkpoint.path}): {not_asked(kind.__name__, kind.reads)}; for this one "
                "see evaluate.py answers and evaluate.py gsm8k"
            )
    return checkpoints


def with_baseline(
    checkpoints: Sequence[Checkpoint], word: str | None, which: Which = "last"
) -> tuple[list[Checkpoint], Path | None]:
    """Returns the checkpoints and that of ``--baseline``, and where this one is, if there is one.

    Raises:
        ValueError: if the word leads to none or to several.
    """
    if word is None:
        return list(checkpoints), None
    found = find_readers([word], "baseline", which)
    if len(found) > 1:
        raise ValueError(f"baseline ({word}) names {len(found)} checkpoints; name one")
    places = {checkpoint.path.resolve() for checkpoint in checkpoints}
    place = found[0].path.resolve()
    return [*checkpoints, *([] if place in places else found)], place


def pick_baseline(contestants: Sequence[Contestant], place: Path | None) -> Contestant | None:
    """Returns the model that speed-ups are over: the one named, or the first that writes steps.

    Args:
        contestants: all.
        place: the checkpoint of the one that was named; None: none was.
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
        block_size: tokens of the longest row they are asked about, where longer than in training;
            what a query leaves of it is what a chain of thought may take.

    Raises:
        ValueError: if no config has a field, or one refuses a value.
    """
    _check_known(checkpoints, [*changes, *([LATENTS] if latents else [])])
    built = [
        (checkpoint, number, model)
        for checkpoint in checkpoints
        for number, model in _models(checkpoint, changes, latents, block_size, device)
    ]
    labels = _labels(built, label)
    return [
        Contestant(name, checkpoint, model, number)
        for name, (checkpoint, number, model) in zip(labels, built, strict=True)
    ]


def _models(
    checkpoint: Checkpoint,
    changes: Mapping[str, Any],
    latents: Sequence[int],
    block_size: int,
    device: torch.device,
) -> Iterator[tuple[int | None, LanguageModel]]:
    """Yields the numbers of latents of a checkpoint's model, each with it: one set of weights."""
    known = _config(checkpoint)
    fixed = {key: value for key, value in changes.items() if key in known}
    if known.get(LONGEST, block_size) < block_size:
        fixed.setdefault(LONGEST, block_size)
    model = build_model(checkpoint, fixed).to(device)
    numbers: Sequence[int | None] = latents if latents and LATENTS in known else [None]
    for number in numbers:
        yield number, model


def _with_latents(model: LanguageModel, number: int | None) -> AbstractContextManager[None]:
    return nullcontext() if number is None else dialled(model, LATENTS, number)


def _check_known(checkpoints: Sequence[Checkpoint], keys: Sequence[str]) -> None:
    for key in keys:
        if not any(key in _config(checkpoint) for checkpoint in checkpoints):
            raise ValueError(f"none of the models has the setting {key}; leave it out")


def _config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    config: Mapping[str, Any] = checkpoint.model_recipe["init_args"].get("config", {})
    return config


def _labels(
    built: Sequence[tuple[Checkpoint, int | None, LanguageModel]], keys: str | None
) -> list[str]:
    """Returns a label for each model: its class and what others of that class differ from it in."""
    recipes = [_recipe(model, number) for _, number, model in built]
    names = short_names([checkpoint.path.resolve() for checkpoint, _, _ in built])
    more = _differences(recipes) if keys is None else []
    if len(more) > MOST_KEYS:
        texts = names
    else:
        texts = label_runs(recipes, names, keys or ",".join([MODEL, *more])).texts()
    return _told_apart(texts, names)


def _recipe(model: LanguageModel, number: int | None) -> Recipe:
    """Returns a model's recipe without what tells nobody how models differ."""
    with _with_latents(model, number):
        recipe: Recipe = model.recipe()
    config = recipe["init_args"]["config"]
    kept = {key: value for key, value in config.items() if key not in UNTOLD}
    return {**recipe, "init_args": {"config": kept}}


def _differences(recipes: Sequence[Recipe]) -> list[str]:
    """Returns the keys in which configs of one class differ."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for recipe in recipes:
        groups.setdefault(recipe["class_path"], []).append(recipe["init_args"]["config"])
    return list(dict.fromkeys(key for group in groups.values() for key in differing(group)))


def _told_apart(texts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns labels of which no two are the same, with the name after those that were."""
    often = Counter(texts)
    labels = [
        text if often[text] == 1 else f"{text} ({name})"
        for text, name in zip(texts, names, strict=True)
    ]
    counts: Counter[str] = Counter()
    for number, text in enumerate(labels):
        counts[text] += 1
        if counts[text] > 1:
            labels[number] = f"{text} #{counts[text]}"
    return labels
