"""The studies by name."""

import importlib

from studies.study import Study, StudyError

STUDIES = (
    "thoughtbubbles",
    "thought_gestalt",
    "latent_thought",
    "ponderlm",
    "thinking_states",
    "thinking_states_vars",
)
"""Modules of this package, each with a ``STUDY``; those on made-up texts also with a function
``declare`` of the operations of training texts that returns it."""


def find_study(name: str, operations: int | None = None) -> Study:
    """Returns the study of that name.

    Args:
        name: one of ``STUDIES``.
        operations: most operations of a training text, where the study makes its texts up; None:
            as it is declared.

    Raises:
        StudyError: if there is none, or its texts do not consist of so many operations.
    """
    if name not in STUDIES:
        raise StudyError(f"there is no study {name!r}; there are {', '.join(STUDIES)}")
    module = importlib.import_module(f"studies.{name}")
    if operations is not None and not hasattr(module, "declare"):
        raise StudyError(f"operations ({operations}): {name} reads a text; leave them out")
    study: Study = module.STUDY if operations is None else module.declare(operations)
    return study
