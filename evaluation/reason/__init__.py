"""Command ``reason``: the same questions, with known right answers, for any models, and timed."""
