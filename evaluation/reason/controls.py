"""Controls: what a model answers where its latents are replaced before they are fed back.

=====  =============================================================================================
zero   zeros; in Thinking States nothing is added to the tokens, as if nothing were thought
noise  normal noise of each vector's norm, by the seed, the question and the latent's number in it
swap   the latent of the same number of the next question of the split, after the last the first;
       numbers begin again where it has fewer, and latents are zero where it has none
pause  the method's fixed latent without a thought, ``pause_latent`` of its network
=====  =============================================================================================
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_models.runtime import seeded_generator
from lightning_models.thinking_states.backbone import ReplaceLatents

Control = Literal["zero", "noise", "swap", "pause"]
LatentsByRow = Mapping[int, Mapping[int, Tensor]]
"""Latents by the row of a batch and their number within it."""


@contextmanager
def replacing(model: Any, replace: ReplaceLatents) -> Iterator[None]:
    """Inside, ``replace`` returns what the model feeds back in place of its latents."""
    model.network.replace_latents = replace
    try:
        yield
    finally:
        model.network.replace_latents = None


def latents_of(model: Any, write: Callable[[], object]) -> LatentsByRow:
    """Returns the latents that a model feeds back while ``write`` decodes a batch."""
    seen: dict[int, dict[int, Tensor]] = defaultdict(dict)

    def keep(latents: Tensor, rows: Tensor, numbers: Tensor) -> Tensor:
        for latent, row, number in zip(latents, rows.tolist(), numbers.tolist(), strict=True):
            seen[row][number] = latent  # the last one, where a method refines them
        return latents

    with replacing(model, keep):
        write()
    return seen


def replacement(
    control: Control,
    model: Any,
    questions: Sequence[int],
    seed: int,
    others: Callable[[], LatentsByRow],
) -> ReplaceLatents:
    """Returns the function that replaces the latents of a batch.

    Args:
        control: The control, see the table of this module.
        model: The model, whose network feeds latents back.
        questions: The number of the question in each row.
        seed: Seed of the noise.
        others: Computes the latents of the question that each row is swapped with.
    """
    if control == "zero":
        return lambda latents, rows, numbers: torch.zeros_like(latents)
    if control == "pause":
        with torch.no_grad():
            pause = model.network.pause_latent()
        return lambda latents, rows, numbers: pause.to(latents).expand_as(latents)
    theirs = others() if control == "swap" else {}

    def swapped(latent: Tensor, row: int, number: int) -> Tensor:
        latents = theirs.get(row)
        return latents[number % len(latents)] if latents else torch.zeros_like(latent)

    def noise(latent: Tensor, row: int, number: int) -> Tensor:
        generator = seeded_generator(seed, questions[row], number)
        drawn = torch.randn(latent.shape, generator=generator, dtype=torch.float64)
        drawn = (drawn / drawn.norm(dim=-1, keepdim=True)).to(latent)  # of norm 1
        return drawn * latent.norm(dim=-1, keepdim=True)

    one = swapped if control == "swap" else noise

    def replace(latents: Tensor, rows: Tensor, numbers: Tensor) -> Tensor:
        each = zip(latents, rows.tolist(), numbers.tolist(), strict=True)
        return torch.stack([one(*latent) for latent in each])  # (K, ..., D)

    return replace
