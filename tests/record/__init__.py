"""The record of what the project does: `python -m tests.record`, while the code is rebuilt."""
