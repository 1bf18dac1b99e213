"""Thinking States on Vars."""

from studies.state_tracking import OPERATIONS, state_tracking
from studies.study import Study


def declare(operations: int = OPERATIONS) -> Study:
    """Returns the study with training texts of up to so many operations."""
    return state_tracking("thinking_states_vars", "vars", "bpe:280", 4, operations)


STUDY = declare()
