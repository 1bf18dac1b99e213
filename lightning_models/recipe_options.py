"""Command-line options that replace values of recipes, which pass through no parser themselves."""

import contextlib
import copy
import dataclasses
import importlib
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

from lightning_models.recipe import (
    argument_types,
    as_started,
    checked_value,
    public_path,
    resolve_class,
    takes_recipe,
)

# ---- parsers


def import_public_classes(*packages: str) -> None:
    """Imports every module that defines a public name of these packages.

    The packages import them lazily, but a parser knows the short names of imported classes only.
    """
    for package in map(importlib.import_module, packages):
        for name in package.__all__:
            getattr(package, name)


class ExactOptions:
    """Mixin of a parser that accepts no abbreviated options.

    jsonargparse's parsers for the arguments of a class accept none either, because they have the
    same type and are created without ``allow_abbrev``.
    """

    def __init__(self, *args: Any, allow_abbrev: bool = False, **kwargs: Any) -> None:
        init: Any = super().__init__
        init(*args, allow_abbrev=allow_abbrev, **kwargs)

    def format_help(self) -> str:
        """Returns the help, with programs named as this one was called."""
        parser: Any = super()
        return as_started(parser.format_help())

    def arguments_of(self, cls: type) -> set[str]:
        """Returns the names of a class's arguments that can be set by options."""
        parser: Any = type(self)()
        return {name.split(".")[1] for name in parser.add_class_arguments(cls, "of")}


def prints_descriptions(argv: Sequence[str]) -> bool:
    """Whether a command line prints descriptions of fields, in help or in a commented config.

    To read the docstrings of fields, a parser parses the source of every class, which doubles its
    time.
    """
    return any(arg == "-h" or "help" in arg or "comments" in arg for arg in argv)


# ---- options over recipes


def class_options(recipe: Mapping[str, Any], key: str) -> list[str]:
    """Returns the options that name a checked recipe's classes, the only part a parser sees."""
    arguments = recipe.get("init_args", {})
    cls = resolve_class(recipe["class_path"], object)
    options = [f"--{key}={public_path(cls)}"]
    for name, hint in argument_types(cls).items():
        if takes_recipe(hint, arguments.get(name)):
            options += class_options(arguments[name], f"{key}.{name}")
    return options


def parse_over(
    parser: Any, recipes: Mapping[str, Mapping[str, Any]], argv: Sequence[str], verb: str = ""
) -> Any:
    """Parses options over checked recipes, and returns the Namespace for `lay_over`.

    The parser sees the recipes' classes, and a marker instead of each saved value that ``--key+=``
    or ``--key.name=`` can add to.

    Args:
        parser: An `ExactOptions`.
        recipes: Recipes by the key of their options.
        argv: Arguments of the command line, with the verb if there is one.
        verb: Name of the verb. By default there is none.
    """
    options = [option for key, r in recipes.items() for option in class_options(r, key)]
    typed = parser.parse_args([verb, *options] if verb else options, defaults=False)
    root = f"{verb}." if verb else ""
    marks = [mark for key, r in recipes.items() for mark in _marks(r, object, f"{root}{key}")]
    for key, mark in marks:
        typed[key] = copy.copy(mark)
    typed = parser.parse_args(argv, namespace=typed, defaults=False)
    for key, mark in marks:
        if key in typed and typed[key] == mark:
            typed.pop(key)
    return typed


_SAVED = f"saved-{uuid.uuid4().hex}"
"""Marker of a saved value, which no file or text equals."""


def _marks(value: Any, hint: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields keys and markers of values that may be lists, and free mappings."""
    if isinstance(value, Mapping) and dataclasses.is_dataclass(hint) and isinstance(hint, type):
        for name, declared in argument_types(hint).items():
            yield from _marks(value.get(name), declared, f"{key}.{name}")
    elif takes_recipe(hint, value):
        cls, arguments = resolve_class(value["class_path"], hint), value.get("init_args", {})
        for name, declared in argument_types(cls).items():
            yield from _marks(arguments.get(name), declared, f"{key}.init_args.{name}")
    else:
        for choice in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
            origin, inner = get_origin(choice), get_args(choice)
            if origin is list and inner[0] is str and value:
                yield key, [_SAVED] if isinstance(value, list) else _SAVED
            elif origin is list and isinstance(value, list) and inner[0] in (int, float):
                yield key, value  # numbers need no marker: they name no class or file
            elif origin is dict and isinstance(value, Mapping) and value:
                scalars = (v for v in value.values() if isinstance(v, int | float))
                yield key, {_SAVED: next(scalars, _SAVED)}


def _added(value: Any, saved: Any) -> Any:
    """Replaces the marker in a typed value by the saved value."""
    if isinstance(value, list) and _SAVED in value[:1]:
        existing = saved if isinstance(saved, list | tuple) else [] if saved is None else [saved]
        return [*existing, *value[1:]]
    if isinstance(value, Mapping) and _SAVED in value:
        return {**(saved or {}), **{name: v for name, v in value.items() if name != _SAVED}}
    return value


def lay_over(
    recipe: Mapping[str, Any], typed: Iterable[tuple[str, Any]], parser: Any
) -> dict[str, Any]:
    """Returns a recipe with typed values; a new class keeps the saved arguments that it accepts.

    Args:
        recipe: The saved recipe, which is not changed.
        typed: Dotted keys such as ``init_args.corpus.class_path``, and plain values. The class of
            an object comes before its arguments.
        parser: An `ExactOptions`, which knows the options of other classes.
    """
    result = copy.deepcopy(dict(recipe))
    for key, value in typed:
        *parents, last = key.split(".")
        if last == "__path__":  # the parser's note of the file that was typed
            continue
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        if last == "class_path" and value != node.get("class_path"):
            cls, arguments = resolve_class(value, object), node.get("init_args", {})
            names = parser.arguments_of(cls)
            node["init_args"] = _fitting({n: v for n, v in arguments.items() if n in names}, cls)
        node[last] = _added(value, node.get(last))
    return result


def _fitting(arguments: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Returns the arguments that a class accepts, with fields of dataclasses checked one by one."""
    hints, result = argument_types(cls), {}
    for name in [name for name in arguments if name in hints]:
        value, hint = arguments[name], hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
            result[name] = _fitting(value, hint)
            continue
        with contextlib.suppress(ValueError):
            checked_value(value, hint, name)
            result[name] = value
    return result
