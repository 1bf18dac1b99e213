"""Stepwise internalisation (iCoT): which tokens of the chain are gone when.

After its schedule the text is ``chain.cot_text`` with the chain that is left.
"""

import math
from collections.abc import Sequence


def removed(
    batch: int,
    batches_per_epoch: int,
    per_epoch: float = 8,
    beyond: float = 39,
    pretrain_epochs: int = 0,
) -> float:
    """r of a batch: how many tokens are scheduled for removal; infinity: all of them.

    One more every round(batches_per_epoch / per_epoch) batches, counted from the end of
    ``pretrain_epochs``; from ``beyond`` on all. Counted batch by batch. Where the division comes
    out even, r is floor(per_epoch * epochs since then).

    Args:
        batch: Number of the batch, from 0 through the whole run.
        batches_per_epoch: Batches of an epoch.
        per_epoch: Delta, tokens removed per epoch.
        beyond: From so many on, all are removed.
        pretrain_epochs: Epochs with the whole chain.
    """
    every = max(1, round(batches_per_epoch / per_epoch))
    r = waited = 0
    for _ in range(pretrain_epochs * batches_per_epoch, batch):
        waited += 1
        if waited == every:
            r, waited = r + 1, 0
    return math.inf if r >= beyond else r


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
