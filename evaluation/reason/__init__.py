"""Command ``reason``: asks any models the same questions with known answers, and times them."""
