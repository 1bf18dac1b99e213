"""The FLOPs of a model, and what one pass through its network spends them on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_models import LanguageModel

PARTS = ("output", "self_attention", "cross_attention", "feed_forward")
"""What most models have; those of a method's own follow."""


@dataclass(frozen=True)
class Compute:
    """FLOPs of one model, all per token."""

    context: int
    """Tokens of a sequence."""
    parameters: int
    """Trainable numbers."""
    parts: Mapping[str, float]
    """One pass through the network, by what it is spent on; parts that it has not are missing."""
    forward: float
    """Scoring a sequence: as many passes as the method needs."""
    training: float
    """A training step."""
    published: float | None = None
    """A training step as the method's paper counts it; None where that is no other count."""

    @property
    def one_pass(self) -> float:
        """One pass through the network."""
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        """Returns the share of a part in one pass, 0 to 1."""
        return self.parts.get(part, 0.0) / self.one_pass


def count_compute(model: LanguageModel, context: int | None = None) -> Compute:
    """Returns the FLOPs of a model.

    Args:
        model: needs no weights.
        context: tokens of a sequence; None: those of the windows it was trained on.

    Raises:
        ValueError: if the model does not say what its FLOPs are spent on, or reads no windows and
            ``context`` is not given.
    """
    if context is None and model.reads != "windows":
        raise ValueError(
            f"context: {type(model).__name__} reads {model.reads}, of any length; give --context N"
        )
    context = model.config.block_size if context is None else context
    return Compute(
        context=context,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        parts=model.flops_by_part(context),
        forward=model.flops_per_token(context),
        training=model.flops_per_token(context, training=True),
        published=model.published_flops_per_token(context),
    )


def part_names(counts: Sequence[Compute]) -> list[str]:
    """Returns the parts that any of the models has, the common ones first."""
    found = dict.fromkeys(part for count in counts for part in count.parts)
    return [*(part for part in PARTS if part in found), *(p for p in found if p not in PARTS)]
