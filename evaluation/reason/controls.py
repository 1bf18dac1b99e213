"""Controls that replace the latents of a model before they are fed back.

=====  =============================================================================================
zero   zeros; in Thinking States nothing is added to the tokens, as without thoughts
noise  normal noise with each vector's norm, seeded by the seed, the question and the latent's index
swap   the latent with the same index of the next question of the split, cyclically; indices wrap
       around if that question has fewer latents, and latents are zero if it has none
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
"""Latents by the row of a batch and their index within it."""


@contextmanager
def replacing(model: Any, replace: ReplaceLatents) -> Iterator[None]:
    """Replaces the latents that the model feeds back by ``replace`` within the context."""
    model.network.replace_latents = replace
    try:
        yield
    finally:
        model.network.replace_latents = None


def latents_of(model: Any, write: Callable[[], object]) -> LatentsByRow:
    """Records the latents that a model feeds back while ``write`` decodes a batch."""
    seen: dict[int, dict[int, Tensor]] = defaultdict(dict)

    def record(latents: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
        for latent, row, idx in zip(latents, rows.tolist(), indices.tolist(), strict=True):
            seen[row][idx] = latent  # the last one if a method refines them
        return latents

    with replacing(model, record):
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
        questions: The ``sequence_id`` of the question in each row.
        seed: Seed of the noise.
        others: Computes the latents of the question that each row is swapped with.
    """
    if control == "zero":
        return lambda latents, rows, indices: torch.zeros_like(latents)
    if control == "pause":
        with torch.no_grad():
            pause = model.network.pause_latent()
        return lambda latents, rows, indices: pause.to(latents).expand_as(latents)
    other_latents = others() if control == "swap" else {}

    def swapped(latent: Tensor, row: int, idx: int) -> Tensor:
        latents = other_latents.get(row)
        return latents[idx % len(latents)] if latents else torch.zeros_like(latent)

    def noise(latent: Tensor, row: int, idx: int) -> Tensor:
        generator = seeded_generator(seed, questions[row], idx)
        drawn = torch.randn(latent.shape, generator=generator, dtype=torch.float64)
        drawn = (drawn / drawn.norm(dim=-1, keepdim=True)).to(latent)  # unit norm
        return drawn * latent.norm(dim=-1, keepdim=True)

    replace_latent = swapped if control == "swap" else noise

    def replace(latents: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
        slots = zip(latents, rows.tolist(), indices.tolist(), strict=True)
        return torch.stack([replace_latent(*latent) for latent in slots])  # (K, ..., D)

    return replace
