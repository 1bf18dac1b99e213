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
"""Modules of this package, each with a ``STUDY``."""


def find_study(name: str) -> Study:
    """Returns the study of that name.

    Raises:
        StudyError: if there is none.
    """
    if name not in STUDIES:
        raise StudyError(f"there is no study {name!r}; there are {', '.join(STUDIES)}")
    study: Study = importlib.import_module(f"studies.{name}").STUDY
    return study
