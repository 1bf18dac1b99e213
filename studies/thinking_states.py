"""Thinking States on Parity."""

from studies.state_tracking import state_tracking

STUDY = state_tracking("thinking_states", "parity", "bpe:308", chunk_size=4)
