"""Recipes: the plain values that rebuild an object, what they may name, and the way back.

A checkpoint's recipe is data from somebody else. One rule holds whoever reads it: classes are
looked up in this project's packages and in those that the user has named (`import_packages`),
before anything else is imported; every other value must have the type that its parameter declares,
so that no string is ever taken for the name, the YAML or the file of a class.
"""

import dataclasses
import importlib
import inspect
import os
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

BASES = {"model": "lightning_models.LanguageModel", "data": "datamodules.LanguageDataModule"}
"""What the two recipes of a checkpoint rebuild."""
OWN_PACKAGES = ("lightning_models", "datamodules")
PACKAGES_HELP = (
    "Packages to import first, where the model or the data are classes of your own. What a "
    "checkpoint names is looked up in this project and in these; everything else is refused."
)
_STRUCTURED = ("class_path", "{", "\\")
"""Without one of these, text is no YAML or JSON that names a class, escaped or interpolated."""
_trusted: set[str] = set(OWN_PACKAGES)


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


# ---- classes that a recipe may name


def trust(names: Collection[str]) -> None:
    """Lets recipes name these classes, or any class of these modules and packages."""
    _trusted.update(names)


def split_names(text: str) -> list[str]:
    """Returns the names in a list as it is typed, before a command line can be parsed."""
    names = (name.strip("[]'\" ") for name in text.split(","))
    return [name for name in names if name]


def import_packages(names: str | Sequence[str]) -> None:
    """Imports packages of the user's, whose classes recipes may then name.

    Args:
        names: of the packages; text is a list as it is typed.

    Raises:
        ValueError: if one is not installed.
    """
    names = split_names(names) if isinstance(names, str) else names
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, TypeError, ValueError) as error:  # a relative name, for one
            raise ValueError(f"packages: cannot import {name!r} ({error})") from error
    trust(names)


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


def prints_descriptions(argv: Sequence[str]) -> bool:
    """Whether a command line asks for what fields are: for help, or for a config with comments.

    To read the docstrings of fields a parser parses the source of every class, which takes as long
    as all the rest of its work.
    """
    return any(word == "-h" or "help" in word or "comments" in word for word in argv)


def resolve_class(class_path: Any, base: type) -> Any:
    """Returns the class of a path.

    One whose file no longer has it is looked up among what its package exports.

    Args:
        class_path: what a recipe names.
        base: what the class must derive from.

    Raises:
        ValueError: if it is not of this project's packages or of those that the user has named, is
            not found there, or does not derive from ``base``. Nothing has been imported then but
            modules of those packages.
    """
    module_path, _, name = str(class_path).rpartition(".")
    if not any(f"{class_path}.".startswith(f"{trusted}.") for trusted in _trusted):
        raise ValueError(
            f"the class {class_path} is of no package named so far, and importing it could run any "
            f"code. If it is yours, name its package: --packages {module_path or class_path}"
        )
    hidden = any(part.startswith("_") for part in module_path.split("."))
    places = [] if hidden else [_import(module_path), _import(module_path.partition(".")[0])]
    found = next((kind for place in places if (kind := getattr(place, name, None))), None)
    if not isinstance(found, type):
        raise ValueError(
            f"the class {class_path} is not known to this version; it must be exported by "
            f"{', '.join(OWN_PACKAGES)}, or by a package named with --packages"
        )
    if not issubclass(found, base):
        raise ValueError(f"the class {class_path} is not a {base.__name__}, so it is not built")
    return found


def _import(module_path: str) -> Any:
    try:
        return importlib.import_module(module_path)
    except (ModuleNotFoundError, ValueError):  # ValueError: of an empty name
        return None


# ---- recipes of checkpoints


def check_recipe(recipe: Mapping[str, Any], role: Literal["model", "data"]) -> None:
    """Checks a recipe before anything is built, or handed to a parser that would import for it.

    Args:
        recipe: ``class_path`` and ``init_args``.
        role: the entry of ``BASES`` that it rebuilds.

    Raises:
        ValueError: if a class is refused (`resolve_class`), or a value is not of the type that its
            parameter declares; the message names the key.
    """
    package, _, name = BASES[role].rpartition(".")
    try:
        _check_class_paths(recipe, role)
        _check_built(recipe, getattr(importlib.import_module(package), name), role)
    except RecursionError:
        raise ValueError(f"{role} is nested too deeply; no recipe of this project is") from None


def check_arguments(arguments: Any, kind: type, key: str) -> None:
    """Checks plain init arguments of a class that the caller has chosen.

    Raises:
        ValueError: see ``check_recipe``.
    """
    try:
        _check_class_paths(arguments, key)
        if not isinstance(arguments, Mapping):
            raise _refused(key, arguments, "a mapping")
        _check_fields(arguments, _init_hints(kind), key, kind.__name__)
    except RecursionError:
        raise ValueError(f"{key} is nested too deeply; no recipe of this project is") from None


def _check_class_paths(value: Any, key: str) -> None:
    for place, class_path in _class_paths(value, key):
        try:
            resolve_class(class_path, object)
        except ValueError as error:
            raise ValueError(f"{place} is refused: {error}") from error


def _class_paths(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields all class paths within nested values, with their keys."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            yield f"{key}.class_path", value["class_path"]
        for name, item in value.items():
            yield from _class_paths(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _class_paths(item, f"{key}[{index}]")


def _check_built(recipe: Any, base: type, key: str) -> None:
    """Checks the recipe of an object of type ``base``."""
    if not isinstance(recipe, Mapping) or set(recipe) - {"class_path", "init_args"}:
        raise _refused(key, recipe, "a mapping of class_path and init_args")
    kind = resolve_class(recipe.get("class_path"), base)
    check_arguments(recipe.get("init_args", {}), kind, f"{key}.init_args")


def _check_fields(
    values: Mapping[str, Any], hints: Mapping[str, Any], key: str, owner: str
) -> None:
    """Checks named values; a parser would split a name at its dots, and reach what is below."""
    unknown = [f"{key}.{name}" for name in values if name not in hints]
    if unknown:
        raise ValueError(
            f"{owner} has no option {', '.join(unknown)}; the checkpoint is of another version of "
            "it, or the option is misspelt"
        )
    for name, value in values.items():
        _check_value(value, hints[name], f"{key}.{name}")


def _check_items(values: Any, hint: Any, key: str) -> None:
    """Checks the values of a mapping whose names are free, but for dots in them."""
    if not isinstance(values, Mapping) or not all(_is_plain_key(name) for name in values):
        raise _refused(key, values, "a mapping with plain names")
    for name, value in values.items():
        _check_value(value, hint, f"{key}.{name}")


def _is_plain_key(name: Any) -> bool:
    return isinstance(name, int) or (isinstance(name, str) and name != "" and "." not in name)


def _init_hints(kind: type) -> dict[str, Any]:
    """Returns the types of what ``kind(...)`` takes, following ``**kwargs`` to the base classes.

    Names that no ``__init__`` declares are none of its options, whatever takes ``**kwargs``.
    """
    hints: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        initialise = vars(base)["__init__"]
        declared = get_type_hints(initialise)
        parameters = inspect.signature(initialise).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [p.name for p in parameters if p.kind in kinds and p.name != "self"]
        hints = {**{name: declared.get(name, Any) for name in named}, **hints}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return hints


def _check_value(value: Any, hint: Any, key: str) -> None:
    """Checks that a plain value has a declared type; nothing is converted."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, str) and not all(map(_reads_text, choices)):
        raise _refused(key, value, hint)  # a parser could take it for the name of a class
    if isinstance(value, str) and any(choice in (Any, list, tuple, dict) for choice in choices):
        _check_free(value, key)  # a parser tries to read text as each of the choices
    reasons = []
    for choice in choices:
        try:
            _check_choice(value, choice, key)
        except ValueError as error:
            reasons.append(error)
        else:
            return
    raise reasons[0] if len(reasons) == 1 else _refused(key, value, hint)


def _reads_text(hint: Any) -> bool:
    """Whether a parser that is given text for this type imports nothing."""
    plain_types = (str, int, float, bool, types.NoneType, Any, list, tuple, dict)
    containers = (Literal, dict, list, tuple, Mapping, Sequence)
    is_path = isinstance(hint, type) and issubclass(hint, os.PathLike)
    return hint in plain_types or get_origin(hint) in containers or is_path


def _check_choice(value: Any, hint: Any, key: str) -> None:
    """Checks a value against a type that is no union."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (Any, list, tuple, dict):
        _check_free(value, key)
    elif origin is Literal:
        if value not in arguments:
            raise _refused(key, value, hint)
    elif origin in (dict, Mapping):
        _check_items(value, arguments[1], key)
    elif origin in (list, tuple, Sequence):
        if not isinstance(value, list | tuple):
            raise _refused(key, value, hint)
        kinds = [argument for argument in arguments if argument is not Ellipsis]
        for index, item in enumerate(value):
            _check_value(item, kinds[min(index, len(kinds) - 1)], f"{key}[{index}]")
    else:
        _check_type(value, hint, key)


def _check_type(value: Any, hint: Any, key: str) -> None:
    """Checks a value against a class: a number, text, a dataclass, or an object with a recipe."""
    accepted = {float: (float, int), os.PathLike: (str,)}.get(hint, (hint,))
    if hint in (str, int, float, bool, types.NoneType):
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            raise _refused(key, value, hint)
    elif dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _refused(key, value, hint)
        fields = {field.name for field in dataclasses.fields(hint)}
        hints = {name: kind for name, kind in get_type_hints(hint).items() if name in fields}
        _check_fields(value, hints, key, key.rpartition(".")[2])
    elif isinstance(hint, type) and issubclass(hint, os.PathLike):
        if not isinstance(value, str):
            raise _refused(key, value, hint)
    elif isinstance(hint, type):
        _check_built(value, hint, key)
    else:
        raise _refused(key, value, hint)


def _check_free(value: Any, key: str) -> None:
    """Checks a value of a parameter without a type, which a parser tries to read as anything."""
    if isinstance(value, Mapping):
        _check_items(value, Any, key)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_free(item, f"{key}[{index}]")
    elif isinstance(value, str) and any(sign in value for sign in _STRUCTURED):
        raise _refused(key, value, "plain text")


def _refused(key: str, value: Any, expected: Any) -> ValueError:
    name = expected.__name__ if isinstance(expected, type) else str(expected)
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    return ValueError(f"{key} ({shown}) must be {name}; was it written by another version?")
