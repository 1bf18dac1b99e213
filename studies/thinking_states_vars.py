"""Thinking States on Vars."""

from studies.state_tracking import state_tracking

STUDY = state_tracking("thinking_states_vars", "vars", "bpe:280", chunk_size=4)
