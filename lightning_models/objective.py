"""From the terms of a micro-batch to its share of the optimiser step's objective.

Lightning divides what a micro-batch returns by the number of accumulated ones, and DDP averages
gradients over ranks; the shares undo that, so that every term is divided by the normaliser of the
whole optimiser step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_models.outputs import LossOutput, Term


def objective(
    output: LossOutput,
    totals: Mapping[str, float],
    *,
    accumulate: int,
    world_size: int,
    device: torch.device,
) -> Tensor:
    """Returns the scalar whose mean over ranks and micro-batches is the step's objective.

    Args:
        output: terms of one micro-batch.
        totals: ``step_normalisers`` of its batch; empty: every term has its own normaliser.
        accumulate: micro-batches of an optimiser step.
        world_size: number of ranks.
        device: where the terms are.

    Raises:
        ValueError: if a term names a normaliser that the batch does not have.
    """
    total = torch.zeros((), device=device)
    for name, term in output.terms.items():
        share = _share(name, term, totals, accumulate, world_size, device)
        total = total + term.sum * share
    return total


def _share(
    name: str,
    term: Term,
    totals: Mapping[str, float],
    accumulate: int,
    world_size: int,
    device: torch.device,
) -> Tensor | float:
    """Returns the factor on a term's sum; a sum over nothing has no share.

    Micro-batch means weigh equally among those of their step, of which an epoch's last step may
    have fewer.
    """
    if totals and term.over is not None:
        counted = _counted(name, term.over, totals)
        return world_size * accumulate / counted if counted else 0.0
    normaliser = torch.as_tensor(term.normaliser, device=device)
    share = accumulate / totals.get("micro_batches", accumulate) / normaliser
    return torch.where(normaliser > 0, share, 0.0)


def _counted(name: str, over: str | Mapping[str, float], totals: Mapping[str, float]) -> float:
    """Returns the normaliser of the whole step."""
    weights = {over: 1.0} if isinstance(over, str) else over
    for key in weights:
        if key not in totals:
            raise ValueError(
                f"term {name}: the batch has no normaliser {key!r}, only {', '.join(totals)}; the "
                "data must count it over the optimiser step"
            )
    return sum(weight * totals[key] for key, weight in weights.items())
