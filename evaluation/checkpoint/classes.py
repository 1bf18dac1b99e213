"""From the class path in a recipe to a class, without letting a checkpoint import anything.

A recipe names classes by their public path (``lightning_models.TransformerLM``), so a checkpoint
outlives the file that the class is in. Paths are looked up in our own packages and in modules that
the user has already imported, and only subclasses of the expected base are returned.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_models.checkpoint import CheckpointError

PACKAGES = ("lightning_models", "datamodules")
"""Packages that a checkpoint may have imported."""


def import_packages(names: Sequence[str]) -> None:
    """Imports packages of the user's, so that classes of a checkpoint are found there.

    Raises:
        ValueError: if one is not installed.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(f"packages: cannot import {name} ({error})") from error


def resolve_class(class_path: str, base: type) -> Any:
    """Returns the class of that path.

    A path into a file of ours that has moved is looked up among what its package exports.

    Raises:
        CheckpointError: if there is no such class where we look, or it does not derive from
            ``base``.
    """
    module_path, _, name = class_path.rpartition(".")
    package = module_path.partition(".")[0]
    if package in PACKAGES:
        places = [_import_own(module_path), _import_own(package)]
    else:
        places = [sys.modules.get(module_path)]
    found = next((vars(place)[name] for place in places if place and name in vars(place)), None)
    if found is None:
        raise CheckpointError(
            f"class {class_path} is not known: it must be exported by {' or '.join(PACKAGES)}, or "
            "by a package named with --packages"
        )
    if not (isinstance(found, type) and issubclass(found, base)):
        raise CheckpointError(f"{class_path} is not a {base.__name__}, so it is not built")
    return found


def refuse_foreign_classes(value: Any) -> None:
    """Refuses nested arguments that name a class which `resolve_class` does not find.

    The parser would import its module: a corpus within a recipe as well as the data themselves.

    Raises:
        CheckpointError: if there is one.
    """
    if isinstance(value, Mapping):
        if "class_path" in value:
            resolve_class(str(value["class_path"]), object)
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            refuse_foreign_classes(item)


def _import_own(module_path: str) -> Any:
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError:
        return None
