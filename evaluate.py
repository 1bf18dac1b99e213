"""Evaluates a checkpoint; ``python evaluate.py --help`` lists the commands.

Imported as ``evaluate``, as by metrics of lm-evaluation-harness when this folder is on the path, it
is the installed package of that name.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def become_installed_package() -> None:
    """Puts the installed package ``evaluate`` in the place of this module.

    Raises:
        ModuleNotFoundError: If none is installed.
    """
    specs = (PathFinder.find_spec(__name__, [entry]) for entry in sys.path)
    # A package with an __init__: other checkouts of this project have a file of the name.
    packages = (spec for spec in specs if spec and spec.origin and spec.submodule_search_locations)
    spec = next(packages, None)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(
            f"{__file__} is a command line, and the package evaluate of Hugging Face is not "
            "installed; install it with pip install evaluate",
            name=__name__,
        )
    sys.modules[__name__] = package = module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "evaluate":
    become_installed_package()

if __name__ == "__main__":
    if sys.stderr.isatty():  # importing PyTorch takes seconds; the next line overwrites this one
        print("loading ...", end="\r", file=sys.stderr, flush=True)
    try:
        from evaluation.cli import main
    except ModuleNotFoundError as error:
        if error.name not in ("jsonargparse", "lightning", "torch"):
            raise
        sys.exit(f"error: {error}. Activate the environment: source .venv/bin/activate")

    sys.exit(main())
