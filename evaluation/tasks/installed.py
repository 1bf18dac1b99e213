"""``import evaluate`` finds the installed package, although our script has its name.

``python evaluate.py`` puts the project's folder first on ``sys.path``; metrics of the harness
import the package ``evaluate`` by name.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[2]
NAME = "evaluate"


class _Elsewhere(MetaPathFinder):
    """Finds one module everywhere but in the project's folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns where the package is; None for all other modules."""
        if fullname != NAME:
            return None
        places = [entry for entry in sys.path if Path(entry or ".").resolve() != PROJECT]
        return PathFinder.find_spec(fullname, places)


@contextlib.contextmanager
def installed_evaluate() -> Iterator[None]:
    """Inside, ``import evaluate`` is the package; afterwards all is as it was."""
    finder, own = _Elsewhere(), sys.modules.get(NAME)
    shadows = own is not None and _is_ours(own)
    if shadows:
        del sys.modules[NAME]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if shadows and own is not None:
            sys.modules[NAME] = own


def _is_ours(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == PROJECT / f"{NAME}.py"
