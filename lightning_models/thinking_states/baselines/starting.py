"""A backbone from the checkpoint of another model on the same data."""

from typing import Any

import torch
from torch import Tensor

from lightning_models.checkpoint import CheckpointError, read_checkpoint
from lightning_models.thinking_states.baselines.text import TextNetwork
from lightning_models.thinking_states.config import ReasoningConfig

_BACKBONE = "network.backbone."
_BY_TOKEN = ("embed_tokens.weight", "head.weight")  # matrices with a row for each token


def load_backbone(network: TextNetwork, config: ReasoningConfig, path: str) -> None:
    """Copies a checkpoint's backbone into the network's.

    Rows of embedding and head are copied as far as the tokenizer goes; those of the tokens that the
    method adds stay as they are, or begin with a copy of ``special_rows_from``.

    Args:
        network: changed in place.
        config: of the network's method.
        path: of a checkpoint, or of a run.

    Raises:
        CheckpointError: if it cannot be read, or its backbone is of another shape.
        ValueError: if parameters are sharded.
    """
    if network.sharded:
        raise ValueError(
            f"start_from ({path}) cannot be loaded into sharded parameters; set "
            "trainer.strategy=ddp"
        )
    saved: Any = read_checkpoint(path).content["state_dict"]
    own = network.backbone.state_dict()
    strange = [key for key, value in own.items() if not _fits(key, value, saved, config.vocab_size)]
    theirs = [key.removeprefix(_BACKBONE) for key in saved if key.startswith(_BACKBONE)]
    strange += [key for key in theirs if key not in own]  # e.g. of a deeper backbone
    if strange:
        raise CheckpointError(
            f"start_from ({path}) holds no backbone of this shape: {strange[0]} is in one of the "
            "two only, or of another size; train both with one tokenizer and with equal sizes"
        )
    with torch.no_grad():
        for key, value in own.items():
            _copy(value, saved[_BACKBONE + key], key.endswith(_BY_TOKEN), config)


def _fits(key: str, own: Tensor, saved: dict[str, Tensor], rows: int) -> bool:
    theirs = saved.get(_BACKBONE + key)
    if theirs is None:
        return False
    if key.endswith(_BY_TOKEN):
        return theirs.shape[1:] == own.shape[1:] and len(theirs) >= rows
    return theirs.shape == own.shape


def _copy(own: Tensor, theirs: Tensor, by_token: bool, config: ReasoningConfig) -> None:
    if not by_token:
        own.copy_(theirs)
        return
    first, count = config.vocab_size, len(config.special_tokens)
    own[:first] = theirs[:first]
    if config.special_rows_from is not None:
        own[first : first + count] = own[config.special_rows_from]
