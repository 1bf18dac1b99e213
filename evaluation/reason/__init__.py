"""Command ``reason``: asks several models the same questions with known answers, and times them."""
