"""The model from a checkpoint's recipe and weights."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

import torch

from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, CheckpointError
from lightning_models.recipe import resolve_class


def build_model(checkpoint: Checkpoint, changes: Mapping[str, Any] | None = None) -> LanguageModel:
    """Returns the checkpoint's model with its weights, on the CPU, in eval mode, not compiled.

    The global random state is left as it is.

    Args:
        checkpoint: where recipe and weights come from.
        changes: fields of the method's config to set to other values than in training.

    Raises:
        CheckpointError: if recipe or weights do not fit this version's classes.
    """
    model = _without_network(checkpoint, changes)
    with torch.random.fork_rng(devices=[]):
        model.configure_model()
    _load_weights(model, checkpoint, changes)
    return model.eval()


def build_outline(
    checkpoint: Checkpoint, changes: Mapping[str, Any] | None = None
) -> LanguageModel:
    """Returns the checkpoint's model on the meta device: shapes without numbers, in no time.

    Args:
        checkpoint: where the recipe comes from.
        changes: fields of the method's config to set to other values, of shapes too.

    Raises:
        CheckpointError: if the recipe does not fit this version's classes.
    """
    model = _without_network(checkpoint, changes)
    with torch.device("meta"):
        model.configure_model()
    return model.eval()


def _without_network(checkpoint: Checkpoint, changes: Mapping[str, Any] | None) -> LanguageModel:
    recipe = checkpoint.model_recipe
    kind = resolve_class(recipe["class_path"], LanguageModel)
    arguments = dict(recipe["init_args"])
    if "compile" in arguments:
        arguments["compile"] = False
    if changes:
        arguments["config"] = {**arguments.get("config", {}), **changes}
    unknown = _unknown_names(kind, arguments)
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path}: {kind.__name__} has no option {', '.join(unknown)}; the "
            "checkpoint comes from another version of it, or the option is misspelt"
        )
    try:
        model: LanguageModel = kind(**arguments)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: cannot rebuild {kind.__name__}: {error}"
        ) from error
    return model


def changed_fields(checkpoint: Checkpoint, model: LanguageModel) -> dict[str, Any]:
    """Returns the config fields of a rebuilt model that are not as in training."""
    trained = checkpoint.model_recipe["init_args"].get("config", {})
    now = model.recipe()["init_args"]["config"]
    return {key: value for key, value in now.items() if key in trained and value != trained[key]}


def _unknown_names(kind: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Returns init arguments and fields of their dataclasses that this version does not have."""
    hints = get_type_hints(kind.__init__)
    unknown = sorted(set(arguments) - set(inspect.signature(kind).parameters))
    for name, value in arguments.items():
        if isinstance(value, Mapping) and dataclasses.is_dataclass(hints.get(name)):
            fields = {field.name for field in dataclasses.fields(hints[name])}
            unknown += [f"{name}.{key}" for key in sorted(set(value) - fields)]
    return unknown


def _load_weights(
    model: LanguageModel, checkpoint: Checkpoint, changes: Mapping[str, Any] | None
) -> None:
    saved, own = checkpoint.content["state_dict"], model.state_dict()
    differences = {
        "missing": [key for key in own if key not in saved],
        "unexpected": [key for key in saved if key not in own],
        "of another shape": [
            f"{key} {tuple(saved[key].shape)} instead of {tuple(own[key].shape)}"
            for key in own
            if key in saved and saved[key].shape != own[key].shape
        ],
    }
    parts = [f"{what}: {_first(keys)}" for what, keys in differences.items() if keys]
    if parts:
        given = ", ".join(f"{key}={value}" for key, value in (changes or {}).items())
        asked = f"with {given}, which changes their shapes" if given else "as saved"
        raise CheckpointError(
            f"{checkpoint.path}: the weights do not fit {type(model).__name__} {asked}; "
            f"{'; '.join(parts)}"
        )
    model.load_state_dict(saved)


def _first(keys: list[str], count: int = 3) -> str:
    rest = f" and {len(keys) - count} more" if len(keys) > count else ""
    return ", ".join(keys[:count]) + rest
