"""Recipes: plain values that rebuild an object, checked before they are used.

A checkpoint's recipe is untrusted data. Its values never pass through a command-line parser: they
are checked against the types that constructors declare, and options from the command line replace
them afterwards (`recipe_options`). Classes are looked up only in this project's packages and in
packages named by the user (`import_packages`).
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import re
import reprlib
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

BASES = {"model": "lightning_models.LanguageModel", "data": "datamodules.LanguageDataModule"}
"""Base classes of the objects that a checkpoint's two recipes rebuild."""
OWN_PACKAGES = ("lightning_models", "datamodules")
PACKAGES_HELP = (
    "Packages to import first, if the model or the data are your classes. Classes named by a "
    "checkpoint are looked up in this project and in these packages; all others are refused."
)
_trusted: set[str] = set(OWN_PACKAGES)
_trusted_classes: set[str] = set()


def as_dataclass(value: Any, cls: Any) -> Any:
    """Converts nested dicts, as checkpoints hold them, to a dataclass; returns others unchanged."""
    if not (isinstance(value, Mapping) and dataclasses.is_dataclass(cls)):
        return value
    hints = get_type_hints(cls)
    build: Any = cls
    return build(**{key: as_dataclass(item, hints.get(key)) for key, item in value.items()})


def yaml_values(value: Any) -> Any:
    """Converts a value to types that YAML and JSON represent."""
    if isinstance(value, Mapping):
        return {str(key): yaml_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [yaml_values(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def public_path(cls: type) -> str:
    """Returns the shortest import path of a class, through a package that re-exports it if any."""
    parts = cls.__module__.split(".")
    packages = (".".join(parts[:end]) for end in range(1, len(parts)))
    exports = (p for p in packages if getattr(sys.modules.get(p), cls.__name__, None) is cls)
    return f"{next(exports, cls.__module__)}.{cls.__name__}"


# ---- classes that a recipe may name


def trust(classes: Iterable[str]) -> None:
    """Allows recipes to name these classes by exactly these dotted paths; ignores short names."""
    _trusted_classes.update(name for name in classes if "." in name)


def split_names(text: str) -> list[str]:
    """Splits a comma-separated list, with or without brackets, into its distinct names."""
    names = (name.strip("[]'\" ") for name in text.split(","))
    return list(dict.fromkeys(name for name in names if name))


def import_packages(names: str | Sequence[str]) -> None:
    """Imports the user's packages, whose classes recipes may then name.

    Args:
        names: Names of the packages, or text with a comma-separated list.

    Raises:
        ValueError: If a package is not installed.
    """
    names = split_names(names) if isinstance(names, str) else names
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, TypeError, ValueError) as error:  # e.g. for a relative name
            raise ValueError(f"packages: cannot import {name!r} ({error})") from error
    _trusted.update(names)


def resolve_class(class_path: Any, base: type) -> Any:
    """Returns the class at a path.

    A class that has moved to another file is looked up in the exports of its top-level package.

    Args:
        class_path: The class path in a recipe.
        base: The required base class.

    Raises:
        ValueError: If the class is not in this project's packages or a package named by the user,
            or does not derive from ``base``. No modules of other packages have been imported.
    """
    path = class_path if isinstance(class_path, str) else ""
    module_path, _, name = path.rpartition(".")
    quoted = shown(class_path)
    if path not in _trusted_classes and not any(f"{path}.".startswith(f"{p}.") for p in _trusted):
        raise ValueError(
            f"the class {quoted} is of no package named so far, and importing it could run any "
            f"code. If it is yours, name its package: --packages {shown(module_path or class_path)}"
        )
    hidden = any(part.startswith("_") for part in module_path.split("."))
    modules = [] if hidden else [_import(module_path), _import(module_path.partition(".")[0])]
    result = next((cls for module in modules if (cls := getattr(module, name, None))), None)
    if not isinstance(result, type):
        raise ValueError(
            f"the class {quoted} is unknown to this version; it must be exported by "
            f"{', '.join(OWN_PACKAGES)}, or by a package named with --packages"
        )
    if not issubclass(result, base):
        raise ValueError(f"the class {quoted} is not a {base.__name__}, so it is not built")
    return result


def _import(module_path: str) -> Any:
    try:
        return importlib.import_module(module_path)
    except (ModuleNotFoundError, ValueError):  # ValueError is raised for an empty name
        return None


# ---- recipes of checkpoints


def complete(recipe: Any, role: Literal["model", "data"]) -> dict[str, Any]:
    """Checks a recipe, and fills in the defaults of its dataclasses' missing fields.

    Args:
        recipe: A mapping of ``class_path`` and ``init_args``.
        role: Key in ``BASES`` of the object that it rebuilds.

    Raises:
        ValueError: If a class is refused (`resolve_class`), or a value does not have the declared
            type of its parameter. The message names the key.
    """
    package, _, name = BASES[role].rpartition(".")
    return _object(recipe, getattr(importlib.import_module(package), name), role)


def build(recipe: Mapping[str, Any], base: type) -> Any:
    """Builds the object of a recipe checked by `complete`.

    Raises:
        ValueError: If the class is refused, or refuses the arguments.
    """
    cls = resolve_class(recipe.get("class_path"), base)
    try:
        return cls(**recipe.get("init_args", {}))
    except TypeError as error:
        raise ValueError(f"cannot build {recipe['class_path']}: {error}") from error


class MisfitError(ValueError):
    """Raised if a class has no such argument, or the value does not have its declared type."""


_quoted = reprlib.Repr()
_quoted.maxstring = 80


def shown(name: Any) -> str:
    """Returns a name from a checkpoint for a message, quoted if it is not a valid name.

    Quoted text is cut, and its control characters are escaped, as they could forge other lines.
    """
    is_name = isinstance(name, str) and name.replace(".", "_").isidentifier()
    return name if is_name else _quoted.repr(name)


def complete_arguments(arguments: Any, cls: type, key: str) -> dict[str, Any]:
    """Checks plain init arguments of a class, or fields of a dataclass, see `complete`.

    Raises:
        MisfitError: If an argument is unknown, or does not have its declared type.
    """
    hints = argument_types(cls)
    if not isinstance(arguments, Mapping):
        raise _refused(key, arguments, "a mapping")
    unknown = [f"{key}.{shown(name)}" for name in arguments if name not in hints]
    if unknown:
        raise MisfitError(f"{cls.__name__} has no option {', '.join(unknown)}")
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    explicit = {
        name: checked_value(value, hints[name], f"{key}.{name}")
        for name, value in arguments.items()
    }
    return {**defaults, **explicit}


def _object(recipe: Any, base: type, key: str) -> dict[str, Any]:
    """Checks the recipe of an object of type ``base``, see `complete`."""
    if not isinstance(recipe, Mapping) or set(recipe) - {"class_path", "init_args"}:
        raise _refused(key, recipe, "a mapping of class_path and init_args")
    cls = resolve_class(recipe.get("class_path"), base)
    arguments = complete_arguments(recipe.get("init_args", {}), cls, f"{key}.init_args")
    return {"class_path": public_path(cls), "init_args": arguments}


def argument_owners(cls: type) -> dict[str, Any]:
    """Returns the ``__init__`` that declares each argument of ``cls(...)``, by argument name.

    With ``**kwargs``, the ``__init__`` of the base classes are searched too. Names that none of
    them declares are not arguments.
    """
    owners: dict[str, Any] = {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for initialise in (vars(b)["__init__"] for b in cls.__mro__ if "__init__" in vars(b)):
        parameters = inspect.signature(initialise).parameters.values()
        names = [p.name for p in parameters if p.kind in kinds and p.name != "self"]
        owners = {**dict.fromkeys(names, initialise), **owners}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return owners


def argument_types(cls: type) -> dict[str, Any]:
    """Returns the declared types of the arguments of ``cls(...)``."""
    owners = argument_owners(cls)
    return {name: _types(owner).get(name, Any) for name, owner in owners.items()}


_types = functools.cache(get_type_hints)
_PLAIN = (str, int, float, bool, types.NoneType, list, tuple, dict)


def checked_value(value: Any, hint: Any, key: str) -> Any:
    """Checks that a plain value has a declared type, see `complete`, and returns it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for choice in arguments:
            with contextlib.suppress(ValueError):
                return checked_value(value, choice, key)
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        hint = arguments[1]
        return {name: checked_value(v, hint, f"{key}.{shown(name)}") for name, v in value.items()}
    elif origin in (list, tuple, Sequence) and isinstance(value, list | tuple):
        hints = [argument for argument in arguments if argument is not Ellipsis]
        items = [
            checked_value(item, hints[min(index, len(hints) - 1)], f"{key}[{index}]")
            for index, item in enumerate(value)
        ]
        return tuple(items) if origin is tuple else items
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return complete_arguments(value, hint, key)
    elif takes_recipe(hint, value):
        return _object(value, hint, key)
    elif hint is Any or (origin is Literal and value in arguments) or _is_of(value, hint):
        return value
    raise _refused(key, value, hint)


def takes_recipe(hint: Any, value: Any) -> bool:
    """Whether a parameter of this type is an object, and the value may be its recipe."""
    builds = isinstance(hint, type) and hint not in _PLAIN and not issubclass(hint, os.PathLike)
    return builds and not dataclasses.is_dataclass(hint) and isinstance(value, Mapping)


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value is a number, text or container of this type, without conversion."""
    if isinstance(value, bool):
        return hint is bool
    if isinstance(hint, type) and issubclass(hint, os.PathLike):
        return isinstance(value, str)
    return hint in _PLAIN and isinstance(value, (float, int) if hint is float else hint)


def _refused(key: str, value: Any, expected: Any) -> MisfitError:
    name = expected.__name__ if isinstance(expected, type) else str(expected)
    return MisfitError(f"{key} ({reprlib.repr(value)}) must be {name}")


# ---- programs in messages

SCRIPTS = {"evaluate.py": "latent-evaluate", "train.py": "latent-train"}
"""Names of the installed scripts by file."""


def as_started(text: str) -> str:
    """Adapts command lines in a text to how this program was called, by file or by script name."""
    if Path(sys.argv[0]).name in SCRIPTS.values():
        for file, script in SCRIPTS.items():
            text = re.sub(rf"(?<![\w/])(python )?{re.escape(file)}", script, text)
    return text
