"""From an object back to the class path and the plain arguments that rebuild it, and forth."""

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any


def parameters(cls: type) -> set[str]:
    """Returns the names that ``cls(...)`` takes, following ``**kwargs`` to the base classes."""
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        names.update(
            p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        )
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names - {"self"}


def plain(value: Any) -> Any:
    """Returns `value` as what YAML and JSON know."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def absolute(paths: Any) -> Any:
    """Returns a path or glob, or a list of them, independent of the working folder; None stays."""
    if isinstance(paths, list):
        return [absolute(path) for path in paths]
    return None if paths is None else os.path.abspath(os.path.expanduser(paths))


def public_path(cls: type) -> str:
    """Returns the shortest import path of a class: that of the package which re-exports it."""
    parts = cls.__module__.split(".")
    for i in range(1, len(parts)):
        package = ".".join(parts[:i])
        if getattr(sys.modules.get(package), cls.__name__, None) is cls:
            return f"{package}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def build(recipe: Mapping[str, Any], kind: type, key: str) -> Any:
    """Returns the object of ``{"class_path": ..., "init_args": ...}``.

    A recipe may come out of a checkpoint, which must not import any module that lies around: the
    class is of this package, or of a module that is imported already.

    Args:
        recipe: Class path and plain arguments.
        kind: Class that it must be of.
        key: What it is for, for messages.

    Raises:
        ValueError: There is no such class, it is of another kind, or it takes other arguments.
    """
    path = str(recipe.get("class_path"))
    module, _, name = path.rpartition(".")
    try:
        own = module.partition(".")[0] == __name__.partition(".")[0]
        place = importlib.import_module(module) if own else sys.modules.get(module)
    except ImportError:
        place = None
    found = getattr(place, name, None)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(
            f"{key}.class_path={path!r} is no {kind.__name__} of datamodules, or of a module that "
            "is imported already. If it is your own, import its module first."
        )
    try:
        return found(**recipe.get("init_args", {}))
    except TypeError as error:
        raise ValueError(f"{key}: cannot build {path}: {error}") from error
