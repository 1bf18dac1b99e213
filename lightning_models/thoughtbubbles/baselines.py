"""The control that computes as much without choosing: every token copied n times."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.optim import OptimizerConfig
from lightning_models.thoughtbubbles.forking import score_dtype
from lightning_models.transformer import TransformerLM
from lightning_models.transformer.network import TransformerConfig, TransformerNetwork


@dataclass(frozen=True, kw_only=True)
class CopyConfig(TransformerConfig):
    """A plain decoder that reads every token n times.

    Raises:
        ValueError: If a value is out of its range.
    """

    dials: ClassVar[Mapping[str, str]] = {"copies": "n"}

    positions: Literal["rope"] = "rope"
    """Rotary only: copies stand at fractional positions."""
    copies: int = 3
    """n, streams of every token (the paper has 3 and 5)."""
    # NOTE(paper): it does not say where copies stand; ours stand as forks do
    copy_positions: Literal["fractional", "shared"] = "fractional"
    """Copies of token k at k + 1/n, k + 2/n, ..., k + 1, as forks stand, or all at k + 1."""

    def __post_init__(self) -> None:
        """Checks the number of copies besides what every decoder checks."""
        super().__post_init__()
        if self.copies < 1:
            raise ValueError(f"copies ({self.copies}) must be at least 1")
        if self.window is not None:
            raise ValueError(
                f"window ({self.window}) must be null: a window would count copies, not tokens"
            )


class CopyNetwork(TransformerNetwork):
    """Repeats the embedded tokens, runs the plain decoder, and reads the right-most copies."""

    config: CopyConfig

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns the normed states (B, T, D) of the right-most copies of ``tokens`` (B, T).

        With a cache, the caller then advances it by ``copies`` a token.
        """
        copies, num_new = self.config.copies, tokens.shape[1] * self.config.copies
        if cache is None:
            place, mask = torch.arange(num_new, device=tokens.device), None
        else:
            place, mask = cache.positions(num_new), cache.mask(num_new)
        x = self.embed(tokens, tokens).repeat_interleave(copies, dim=1)
        h = self.run(x, self.copy_positions(place), cache=cache, mask=mask)
        return h[:, copies - 1 :: copies]

    def copy_positions(self, place: Tensor) -> Tensor:
        """Returns rotary positions of copies at ``place`` in the widened sequence.

        One less than the configuration says: only differences count, and one copy is then the
        plain decoder.
        """
        copies = self.config.copies
        if self.config.copy_positions == "shared":
            return place // copies
        return (place + 1).to(score_dtype()) / copies - 1


class CopyLM(TransformerLM):
    """Copy-n: a non-adaptive control of Thoughtbubbles with as many or more FLOPs.

    Args:
        config: Shape of the network and number of copies.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    config: CopyConfig
    network: CopyNetwork

    def __init__(
        self,
        config: CopyConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def slots_per_token(self) -> int:
        """Copies of a token."""
        return self.config.copies

    def build_network(self) -> CopyNetwork:
        return CopyNetwork(self.config)

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the FLOPs per token of ``context`` tokens, n copies each, by part."""
        copies = self.config.copies
        parts = super().flops_by_part(copies * context)
        return {name: flops * (1 if name == "output" else copies) for name, flops in parts.items()}

    def passes_per_token(self, context: int) -> float:
        """Returns n, the streams of a token; see ``LanguageModel``."""
        return float(self.config.copies)
