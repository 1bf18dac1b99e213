"""Models and questions for ``evaluate.py reason``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from callbacks.dials import dialled
from evaluation.load import build_data, build_model, known_changes
from evaluation.reason.controls import Control
from evaluation.runs import make_labels, path_names
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Recipe
from lightning_models.recipe import resolve_class

LATENTS = "eval_latents"
"""Field of a config: how many latent thoughts a model has at inference; null: as in training."""
CONTROL = "replace_latents"
"""Key of results: what a model's latents are replaced by."""

# ---- questions


def build_questions(checkpoints: Sequence[Checkpoint], recipe: Recipe | None) -> Any:
    """Returns a data module that has questions, not yet prepared.

    Without a recipe it is the first checkpoint's, whose tokenizer all data take.

    Raises:
        ValueError: If it cannot be built, has no questions, or has rows that a model does not read.
    """
    data = build_data(checkpoints[0], recipe)
    kind = type(data).__name__
    if not hasattr(data, "is_right"):
        raise ValueError(
            f"data ({kind}) has no questions with one right answer; name such data with --data, "
            "e.g. --data datamodules.Kinship"
        )
    for checkpoint in checkpoints:
        model = resolve_class(checkpoint.model_recipe["class_path"], LanguageModel)
        if model.reads != data.rows:
            raise ValueError(
                f"ckpt ({checkpoint.path}): {model.__name__} reads {model.reads}, and the "
                f"questions ({kind}) are {data.rows}; leave it out, or name others with --data"
            )
    return data


# ---- models: checkpoints, Coconut's at several numbers of latents


@dataclass(frozen=True)
class Contestant:
    """A model that is asked.

    Attributes:
        label: Stands for it in tables; no other has the same.
        checkpoint: Where it comes from.
        model: On its device, in eval mode; contestants of one checkpoint share it, so it is asked
            within ``ready``.
        latents: Number of latent thoughts, if one was asked for.
        control: What its latents are replaced by, if they are.
    """

    label: str
    checkpoint: Checkpoint
    model: LanguageModel
    latents: int | None = None
    control: Control | None = None

    @contextmanager
    def ready(self) -> Iterator[LanguageModel]:
        """Inside, the model that is returned has this contestant's number of latent thoughts."""
        dial: Any = nullcontext()
        if self.latents is not None:
            dial = dialled(self.model, LATENTS, self.latents)
        with dial:
            yield self.model

    @property
    def is_chain_of_thought(self) -> bool:
        """Whether it writes all steps before its answer, so that others are compared with it.

        Models of a curriculum do so for a while, too.
        """
        return bool(getattr(self.model, "writes_chain", False)) and not hasattr(
            self.model, "stages"
        )


def build_contestants(
    named: Sequence[tuple[str | None, Checkpoint]],
    *,
    changes: Mapping[str, Any],
    latents: Sequence[int],
    label: str | None,
    device: torch.device,
    block_size: int = 1,
    controls: Sequence[Control] = (),
) -> list[Contestant]:
    """Returns the models of checkpoints, one for each number of latents where a model has them.

    Each is followed by one for each of ``controls``, whose latents are replaced. ``block_size`` is
    the length of the longest reasoning row; a chain of thought may take what a query leaves of it,
    so configs with a smaller one are changed.

    Raises:
        ValueError: If no config has a field, one refuses a value, or a model that feeds no latents
            back, at one of the numbers of latents, is to replace them.
    """
    checkpoints = [checkpoint for _, checkpoint in named]
    fields = known_changes(checkpoints, changes)
    dialled_too = known_changes(checkpoints, {LATENTS: None} if latents else {})
    models = []
    for checkpoint, changed in zip(checkpoints, fields, strict=True):
        config = checkpoint.model_recipe["init_args"].get("config", {})
        if config.get("block_size", block_size) < block_size:
            changed.setdefault("block_size", block_size)
        models.append(build_model(checkpoint, changed).to(device))
    names, recipes = [name for name, _ in named], [model.recipe() for model in models]
    labels = make_labels(path_names(checkpoints), names, recipes, label)
    contestants: list[Contestant] = []
    # one set of weights for all numbers of latents
    for text, checkpoint, model, dial in zip(labels, checkpoints, models, dialled_too, strict=True):
        for count in dict.fromkeys(latents) if dial else [None]:
            name = text if count is None else f"{text}, {LATENTS} {count}"
            contestants.append(Contestant(name, checkpoint, model, count))
            if controls:
                _check_feeds_back(contestants[-1], controls)
            contestants += [
                Contestant(f"{name}, {CONTROL} {control}", checkpoint, model, count, control)
                for control in dict.fromkeys(controls)
            ]
    return contestants


def _check_feeds_back(one: Contestant, controls: Sequence[Control]) -> None:
    """Raises ValueError if no latent is fed back that controls could replace."""
    with one.ready() as model:
        pause = getattr(model.network, "pause_latent", lambda: None)()
        latents = getattr(model, "latents", None)
        if pause is not None and latents != 0:
            return
        at, cure = "", ""
        if pause is not None:
            at, cure = f" with {LATENTS} 0", ", or set --latents to 1 or more"
        elif not getattr(model.config, "think", True):
            at, cure = " with think false", ", or leave out --set.think"
        raise ValueError(
            f"{CONTROL} ({', '.join(controls)}): {type(model).__name__} ({one.checkpoint.path}) "
            f"feeds no latents back{at}; leave it out of --ckpt{cure}"
        )
