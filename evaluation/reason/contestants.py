"""Models and questions of ``evaluate.py reason``."""

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
"""Field of a config: number of latent thoughts at inference, or null for the number in training."""
CONTROL = "replace_latents"
"""Key of results: control that replaces a model's latents."""

# ---- questions


def build_questions(checkpoints: Sequence[Checkpoint], recipe: Recipe | None) -> Any:
    """Builds a data module of questions, not yet prepared.

    Defaults to the data of the first checkpoint. Any data use its tokenizer.

    Raises:
        ValueError: If they cannot be built, have no questions, or have rows that a model cannot
            read.
    """
    data = build_data(checkpoints[0], recipe)
    name = type(data).__name__
    if not hasattr(data, "is_right"):
        raise ValueError(
            f"data ({name}) has no questions with one correct answer; name such data with --data, "
            "e.g. --data datamodules.Kinship"
        )
    for checkpoint in checkpoints:
        model = resolve_class(checkpoint.model_recipe["class_path"], LanguageModel)
        if model.reads != data.rows:
            raise ValueError(
                f"ckpt ({checkpoint.path}): {model.__name__} reads {model.reads}, and the "
                f"questions ({name}) are {data.rows}; leave it out, or name others with --data"
            )
    return data


# ---- models: checkpoints, with latent thoughts at several numbers of them


@dataclass(frozen=True)
class Contestant:
    """A model to ask.

    Attributes:
        label: Unique name in tables.
        checkpoint: The checkpoint that it was loaded from.
        model: The model on its device, in eval mode; contestants of one checkpoint share it, so it
            must be used within ``ready``.
        latents: Number of latent thoughts to set, if any.
        control: Control that replaces its latents, if any.
    """

    label: str
    checkpoint: Checkpoint
    model: LanguageModel
    latents: int | None = None
    control: Control | None = None

    @contextmanager
    def ready(self) -> Iterator[LanguageModel]:
        """Sets this contestant's number of latent thoughts within the context; yields the model."""
        dial: Any = nullcontext()
        if self.latents is not None:
            dial = dialled(self.model, LATENTS, self.latents)
        with dial:
            yield self.model

    @property
    def is_chain_of_thought(self) -> bool:
        """Whether it writes all steps before its answer, and so is a baseline of speed-ups.

        Models with a curriculum, which write steps in early stages, are not.
        """
        return bool(getattr(self.model, "writes_chain", False)) and not hasattr(
            self.model, "stages"
        )


def build_contestants(
    named_checkpoints: Sequence[tuple[str | None, Checkpoint]],
    *,
    changes: Mapping[str, Any],
    latents: Sequence[int],
    label: str | None,
    device: torch.device,
    block_size: int = 1,
    controls: Sequence[Control] = (),
) -> list[Contestant]:
    """Builds the models of checkpoints, one for each number of latents and each control.

    Args:
        named_checkpoints: Checkpoints and their names, if any.
        changes: Fields of configs to set in every model that has them.
        latents: Numbers of latent thoughts to set in models that have them.
        label: Keys of the config that name the models, see ``runs.make_labels``.
        device: Device of the models.
        block_size: Length of the longest reasoning row. Configs with a smaller ``block_size`` get
            this one, so that a chain of thought can use the whole row.
        controls: Controls; for each, a model whose latents are replaced follows the plain one.

    Raises:
        ValueError: If no config has a field, a value is invalid, or latents are to be replaced in
            a model that feeds none back.
    """
    checkpoints = [checkpoint for _, checkpoint in named_checkpoints]
    fields = known_changes(checkpoints, changes)
    dialled_too = known_changes(checkpoints, {LATENTS: None} if latents else {})
    models = []
    for checkpoint, changed in zip(checkpoints, fields, strict=True):
        config = checkpoint.model_recipe["init_args"].get("config", {})
        if config.get("block_size", block_size) < block_size:
            changed.setdefault("block_size", block_size)
        models.append(build_model(checkpoint, changed).to(device))
    names, recipes = [name for name, _ in named_checkpoints], [model.recipe() for model in models]
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


def _check_feeds_back(contestant: Contestant, controls: Sequence[Control]) -> None:
    """Raises a ValueError if the model feeds no latents back that controls could replace."""
    with contestant.ready() as model:
        pause = getattr(model.network, "pause_latent", lambda: None)()
        latents = getattr(model, "latents", None)
        if pause is not None and latents != 0:
            return
        condition, cure = "", ""
        if pause is not None:
            condition, cure = f" with {LATENTS} 0", ", or set --latents to 1 or more"
        elif not getattr(model.config, "think", True):
            condition, cure = " with think false", ", or leave out --set.think"
        raise ValueError(
            f"{CONTROL} ({', '.join(controls)}): {type(model).__name__} "
            f"({contestant.checkpoint.path}) feeds no latents back{condition}; "
            f"leave it out of --ckpt{cure}"
        )
