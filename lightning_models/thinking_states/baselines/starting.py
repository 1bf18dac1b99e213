"""The backbone of a trained model, as the start of another model's training."""

from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor, nn

from lightning_models.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from lightning_models.recipe import resolve_class
from lightning_models.thinking_states.backbone import ReasoningNetwork
from lightning_models.thinking_states.config import ReasoningConfig

_BACKBONE = "network.backbone."
_BY_TOKEN = ("embed_tokens.weight", "wte.weight", "head.weight")  # a row for each token


def load_backbone(
    network: ReasoningNetwork,
    config: ReasoningConfig,
    path: str,
    which: Literal["last", "best"] = "last",
) -> None:
    """Loads the backbone of another model's checkpoint.

    Rows of embedding and head are copied for the tokenizer's ids, and for the tokens that the
    method adds if the checkpoint's method adds the same. Otherwise the latter keep their
    initialisation, or are copied from ``special_rows_from``.

    Args:
        network: Network, changed in place.
        config: Configuration of the network's method.
        path: Path of a checkpoint or a run.
        which: Checkpoint of a run to load, its last or its best.

    Raises:
        CheckpointError: If the checkpoint cannot be read, or its backbone has another shape.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    whole = StateDictOptions(full_state_dict=True)  # gathers sharded parameters
    checkpoint = read_checkpoint(path, which)
    saved: Any = checkpoint.content["state_dict"]
    current: Any = get_model_state_dict(network.backbone, options=whole)
    other = [
        key for key, value in current.items() if not _fits(key, value, saved, config.vocab_size)
    ]
    saved_keys = [key.removeprefix(_BACKBONE) for key in saved if key.startswith(_BACKBONE)]
    other += [key for key in saved_keys if key not in current]  # e.g. layers of a deeper backbone
    if other:
        raise CheckpointError(
            f"start_from ({path}) holds no backbone of this shape: {other[0]} is in one of the "
            "two only, or of another size; train both with one tokenizer and with equal sizes"
        )
    added = _adds_the_same(checkpoint, config)
    with torch.no_grad():
        for key, value in current.items():
            _copy(value, saved[_BACKBONE + key], key.endswith(_BY_TOKEN), config, added)
    set_model_state_dict(network.backbone, current, options=whole)


def _fits(key: str, tensor: Tensor, saved: dict[str, Tensor], rows: int) -> bool:
    saved_tensor = saved.get(_BACKBONE + key)
    if saved_tensor is None:
        return False
    if key.endswith(_BY_TOKEN):
        return saved_tensor.shape[1:] == tensor.shape[1:] and len(saved_tensor) >= rows
    return saved_tensor.shape == tensor.shape


def _adds_the_same(checkpoint: Checkpoint, config: ReasoningConfig) -> bool:
    """Returns whether a checkpoint's method adds the same tokens with the same ids."""
    recipe = checkpoint.model_recipe
    cls = resolve_class(recipe["class_path"], nn.Module)
    config_class = get_type_hints(cls.__init__).get("config")
    saved = recipe["init_args"].get("config", {})
    same = getattr(config_class, "special_tokens", ()) == config.special_tokens
    return same and saved.get("vocab_size") == config.vocab_size


def _copy(
    target: Tensor, source: Tensor, by_token: bool, config: ReasoningConfig, added: bool
) -> None:
    if not by_token:
        target.copy_(source)
        return
    first, count = config.vocab_size, len(config.special_tokens)
    target[:first] = source[:first]
    if added:
        target[first : first + count] = source[first : first + count]
    elif config.special_rows_from is not None:
        target[first : first + count] = target[config.special_rows_from]
