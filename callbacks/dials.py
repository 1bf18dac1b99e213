"""Temporary settings of a model's configuration."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def has_dial(model: nn.Module, name: str) -> bool:
    """Returns whether the model's configuration is a dataclass with a field of that name."""
    config = vars(model).get("config")
    return dataclasses.is_dataclass(config) and name in {
        field.name for field in dataclasses.fields(config)
    }


@contextmanager
def dialled(model: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Overrides one field of the model's configuration within the context.

    Every module that shares the model's configuration object sees the change. It affects settings
    that are read at each call, not settings that the network was built from.

    Args:
        model: A model with its configuration, a frozen dataclass, as ``config``.
        name: Name of the field.
        value: Temporary value of the field.

    Raises:
        ValueError: If there is no such field, or the configuration rejects the value.
    """
    if not has_dial(model, name):
        raise ValueError(
            f"{name}: the configuration of {type(model).__name__} has no such field, so it cannot "
            f"be set to {value}"
        )
    config: Any = vars(model)["config"]
    changed = dataclasses.replace(config, **{name: value})
    holders = [module for module in model.modules() if vars(module).get("config") is config]
    try:
        for holder in holders:
            holder.config = changed
        yield
    finally:
        for holder in holders:
            holder.config = config
