"""Options of a command line that are typed over recipes, whose values no parser sees."""

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

    They import it on first use otherwise; a parser knows the short names, and can list the names,
    of classes that have been imported only.
    """
    for package in map(importlib.import_module, packages):
        for name in package.__all__:
            getattr(package, name)


class ExactOptions:
    """Mixed into a parser, so that it takes no prefix for an option.

    The parsers that jsonargparse makes for the arguments of a class take none either: they are of
    the same type and get no ``allow_abbrev``.
    """

    def __init__(self, *args: Any, allow_abbrev: bool = False, **kwargs: Any) -> None:
        of_parser: Any = super().__init__
        of_parser(*args, allow_abbrev=allow_abbrev, **kwargs)

    def format_help(self) -> str:
        """Returns the help, in which programs are called as this one was."""
        of_parser: Any = super()
        return as_started(of_parser.format_help())

    def arguments_of(self, kind: type) -> set[str]:
        """Returns the names of the arguments that options can give to a class."""
        parser: Any = type(self)()
        return {name.split(".")[1] for name in parser.add_class_arguments(kind, "of")}


def prints_descriptions(argv: Sequence[str]) -> bool:
    """Whether a command line asks for what fields are: for help, or for a config with comments.

    To read the docstrings of fields a parser parses the source of every class, which takes as long
    as all the rest of its work.
    """
    return any(word == "-h" or "help" in word or "comments" in word for word in argv)


# ---- recipes under what is typed


def class_options(recipe: Mapping[str, Any], key: str) -> list[str]:
    """Returns the options that name a checked recipe's classes, which alone a parser sees of it."""
    arguments = recipe.get("init_args", {})
    kind = resolve_class(recipe["class_path"], object)
    options = [f"--{key}={public_path(kind)}"]
    for name, hint in argument_types(kind).items():
        if takes_recipe(hint, arguments.get(name)):
            options += class_options(arguments[name], f"{key}.{name}")
    return options


def parse_over(
    parser: Any, recipes: Mapping[str, Mapping[str, Any]], words: Sequence[str], verb: str = ""
) -> Any:
    """Returns the Namespace of what is typed over checked recipes, for `lay_over`.

    The parser sees the classes of the recipes, and a mark instead of saved text that ``--key+=``
    or ``--key.name=`` adds to.

    Args:
        parser: An `ExactOptions`.
        recipes: By the key of their options.
        words: What is typed, with the verb if there is one.
        verb: Its name, or nothing.
    """
    options = [option for key, r in recipes.items() for option in class_options(r, key)]
    typed = parser.parse_args([verb, *options] if verb else options, defaults=False)
    root = f"{verb}." if verb else ""
    marks = [mark for key, r in recipes.items() for mark in _marks(r, object, f"{root}{key}")]
    for key, mark in marks:
        typed[key] = copy.copy(mark)
    typed = parser.parse_args(words, namespace=typed, defaults=False)
    for key, mark in marks:
        if key in typed and typed[key] == mark:
            typed.pop(key)
    return typed


_SAVED = f"saved-{uuid.uuid4().hex}"
"""Stands for a saved value; no file or text has this name."""


def _marks(value: Any, hint: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields the marks that stand for lists, what may be one, and free mappings, by key."""
    if isinstance(value, Mapping) and dataclasses.is_dataclass(hint) and isinstance(hint, type):
        for name, declared in argument_types(hint).items():
            yield from _marks(value.get(name), declared, f"{key}.{name}")
    elif takes_recipe(hint, value):
        kind, arguments = resolve_class(value["class_path"], hint), value.get("init_args", {})
        for name, declared in argument_types(kind).items():
            yield from _marks(arguments.get(name), declared, f"{key}.init_args.{name}")
    else:
        for choice in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
            origin, inner = get_origin(choice), get_args(choice)
            if origin is list and inner[0] is str and value:
                yield key, [_SAVED] if isinstance(value, list) else _SAVED
            elif origin is list and isinstance(value, list) and inner[0] in (int, float):
                yield key, value  # numbers name nothing
            elif origin is dict and isinstance(value, Mapping) and value:
                scalars = (v for v in value.values() if isinstance(v, int | float))
                yield key, {_SAVED: next(scalars, _SAVED)}


def _added(value: Any, saved: Any) -> Any:
    """Returns a typed value with the saved one in the place of its mark."""
    if isinstance(value, list) and _SAVED in value[:1]:
        before = saved if isinstance(saved, list | tuple) else [] if saved is None else [saved]
        return [*before, *value[1:]]
    if isinstance(value, Mapping) and _SAVED in value:
        return {**(saved or {}), **{name: v for name, v in value.items() if name != _SAVED}}
    return value


def lay_over(
    recipe: Mapping[str, Any], typed: Iterable[tuple[str, Any]], parser: Any
) -> dict[str, Any]:
    """Returns a recipe with other values; another class keeps the arguments that it takes, too.

    Args:
        recipe: Not changed.
        typed: Dotted keys such as ``init_args.corpus.class_path``, and plain values; the class of
            an object comes before its arguments.
        parser: An `ExactOptions`, which knows what options another class takes.
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
            kind, arguments = resolve_class(value, object), node.get("init_args", {})
            names = parser.arguments_of(kind)
            node["init_args"] = _fitting({n: v for n, v in arguments.items() if n in names}, kind)
        node[last] = _added(value, node.get(last))
    return result


def _fitting(arguments: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Returns the arguments that another class takes; each field of a dataclass is one of them."""
    hints, result = argument_types(kind), {}
    for name in [name for name in arguments if name in hints]:
        value, hint = arguments[name], hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
            result[name] = _fitting(value, hint)
            continue
        with contextlib.suppress(ValueError):
            checked_value(value, hint, name)
            result[name] = value
    return result
