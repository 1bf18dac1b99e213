"""Stepwise internalisation (iCoT): which tokens of the chain are gone when.

After its schedule the text is ``chain.cot_text`` with the chain that is left.
"""

import math
from collections.abc import Sequence


def left_chain(chain: Sequence[int], r: float, offset: int = 0) -> list[int]:
    """The chain without its first r + offset tokens; [] where it is not that long."""
    return list(chain[int(min(len(chain), r + offset)) :])


def left_steps(steps: Sequence[Sequence[int]], stage: int) -> list[list[int]]:
    """Step-level removal: the steps without the first ``stage``."""
    return [list(step) for step in steps[stage:]]


def offset_distribution(smoothing: float = 4.0, size: int = 100) -> list[float]:
    """P(o) = (1 - e^-smoothing) e^(-smoothing o), o = 0, .., size - 1; the rest at the last.

    ``smoothing`` = infinity: o is always 0.
    """
    if math.isinf(smoothing):
        return [1.0] + [0.0] * (size - 1)
    odds = [(1 - math.exp(-smoothing)) * math.exp(-smoothing * o) for o in range(size)]
    odds[-1] += 1 - sum(odds)
    return odds
