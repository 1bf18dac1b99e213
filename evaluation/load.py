"""Checkpoint, model, tokenizer and data that the options of a command name."""

import dataclasses
from typing import Any, Literal, TypeVar

from jsonargparse import ArgumentParser, Namespace

from datamodules import Tokenizer, load_tokenizer
from evaluation.checkpoint.corpus import build_tokenizer, check_meaning
from evaluation.checkpoint.device import pick_device
from evaluation.checkpoint.rebuild import build_model
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, read_checkpoint
from lightning_models.recipe import import_packages

_Config = TypeVar("_Config")
Budget = Literal["fixed", "dynamic"]


def add_tokenizer_argument(parser: ArgumentParser) -> None:
    """Declares ``--tokenizer``, see ``load_own_tokenizer``."""
    parser.add_argument(
        "--tokenizer",
        type=str | None,
        default=None,
        help="Tokenizer name, where the checkpoint names none.",
    )


def add_budget_argument(parser: ArgumentParser, help: str) -> None:
    """Declares ``--budget``, see ``load_model``."""
    parser.add_argument("--budget", type=Budget | None, default=None, help=help)


def chosen(settings: Namespace, kind: type[_Config]) -> _Config:
    """Returns a dataclass with the fields that the command line gives."""
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: settings[field.name] for field in fields})


def load_checkpoint(settings: Namespace) -> Checkpoint:
    """Returns the checkpoint of ``--ckpt`` and ``--which``, with ``--packages`` imported first.

    Raises:
        ValueError: if it cannot be read.
    """
    import_packages(settings.packages)
    return read_checkpoint(settings.ckpt, settings.which)


def load_model(
    settings: Namespace, checkpoint: Checkpoint, *, budget: Budget | None = None
) -> LanguageModel:
    """Returns a checkpoint's model on ``--device``, in eval mode, its config changed by ``--set``.

    Args:
        settings: of the command; ``budget``, where it has that, is one of the config's fields.
        checkpoint: where the model comes from.
        budget: of models that have one, where the command line gives none; None: as trained.

    Raises:
        ValueError: if the model cannot be rebuilt, or a budget is given that has no effect.
    """
    device, typed = pick_device(settings.device), settings.get("budget")
    changes = dict(settings["set"])
    if typed is not None or budget is not None:
        changes = _with_budget(checkpoint, changes, typed, budget)
    model = build_model(checkpoint, changes).to(device)
    if typed is not None and not getattr(model.config, "uses_budget", True):
        raise ValueError(
            f"budget ({typed}) has no effect on the allocation of this model when it is evaluated; "
            "leave --budget out"
        )
    return model


def _with_budget(
    checkpoint: Checkpoint, changes: dict[str, Any], typed: Budget | None, default: Budget | None
) -> dict[str, Any]:
    """Returns the config fields to change, with the budget of models that have one.

    Raises:
        ValueError: if a budget is typed and the model has none, or differs from ``--set``.
    """
    recipe = checkpoint.model_recipe
    if "budget" not in recipe["init_args"].get("config", {}):
        if typed is not None:
            name = recipe["class_path"].rpartition(".")[2]
            raise ValueError(f"budget ({typed}): {name} has no budget to set; leave --budget out")
        return changes
    if typed is not None and changes.get("budget", typed) != typed:
        raise ValueError(
            f"budget ({typed}) and set.budget ({changes['budget']}) are the same field; give one"
        )
    return {"budget": typed or default, **changes}


def load_own_tokenizer(
    settings: Namespace, checkpoint: Checkpoint, model: LanguageModel
) -> Tokenizer:
    """Returns the tokenizer of ``--tokenizer``, or the checkpoint's.

    Raises:
        ValueError: if there is none, or its ids mean other text than in training.
    """
    name = settings.get("tokenizer")
    tokenizer = build_tokenizer(checkpoint) if name is None else load_tokenizer(name)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the tokenizer ({tokenizer.name}) has {tokenizer.vocab_size} entries, the "
            f"checkpoint's model has a vocabulary of {model.config.vocab_size}; use the tokenizer "
            "it was trained with"
        )
    if name is not None:
        check_meaning(tokenizer, checkpoint, "tokenizer")
    return tokenizer
