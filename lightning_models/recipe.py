"""From objects to plain values that rebuild them, and back."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, get_type_hints


def as_dataclass(value: Any, kind: Any) -> Any:
    """Returns plain dicts, as checkpoints hold them, as the dataclass they were, fields too."""
    if not (isinstance(value, Mapping) and dataclasses.is_dataclass(kind)):
        return value
    hints = get_type_hints(kind)
    build: Any = kind
    return build(**{key: as_dataclass(item, hints.get(key)) for key, item in value.items()})


def plain(value: Any) -> Any:
    """Returns a configuration dataclass as a dict, dataclasses within it too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return value


def public_path(kind: type) -> str:
    """Returns ``package.Name`` if the package re-exports the class, else its full path."""
    package = kind.__module__.partition(".")[0]
    public = getattr(sys.modules.get(package), kind.__name__, None) is kind
    return f"{package if public else kind.__module__}.{kind.__name__}"
