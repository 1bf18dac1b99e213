"""Seeded choices that every Python version makes alike."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Random choices from one key.

    Of the standard generator only seeding with a text and `random()` are promised to give the same
    in every version; all else here is made of these two.

    Args:
        key: Any text; the choices are a pure function of it and of the calls so far.
    """

    def __init__(self, key: str) -> None:
        self._random = random.Random(key)

    def below(self, n: int) -> int:
        """Returns an integer in [0, n)."""
        return int(self._random.random() * n)

    def between(self, least: int, most: int) -> int:
        """Returns an integer in [least, most]."""
        return least + self.below(most - least + 1)

    def chance(self, probability: float) -> bool:
        """Returns True with that probability."""
        return self._random.random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """Returns one of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Returns the items in a random order."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in items]
