"""A non-adaptive control with as much computation: every token copied n times."""

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
        ValueError: If a value is out of range.
    """

    dials: ClassVar[Mapping[str, str]] = {"copies": "n"}

    positions: Literal["rope"] = "rope"
    """Rotary only, since copies have fractional positions."""
    copies: int = 3
    """n, the number of copies of every token (3 and 5 in the paper)."""
    # NOTE(paper): the paper does not give the positions of copies; ours are the positions of forks
    copy_positions: Literal["fractional", "shared"] = "fractional"
    """Positions of the copies of token k: fractional is k + 1/n, k + 2/n, ..., k + 1, as for forks;
    shared is k + 1 for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copies < 1:
            raise ValueError(f"copies ({self.copies}) must be at least 1")
        if self.window is not None:
            raise ValueError(
                f"window ({self.window}) must be null: a window would count copies, not tokens"
            )


class CopyNetwork(TransformerNetwork):
    """Repeats the embedded tokens, runs the plain decoder and returns the right-most copies."""

    config: CopyConfig

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns the normed states (B, T, D) of the right-most copies of ``tokens`` (B, T).

        The caller then advances the cache, if any, by ``copies`` entries per token.
        """
        copies, num_new = self.config.copies, tokens.shape[1] * self.config.copies
        if cache is None:
            index, mask = torch.arange(num_new, device=tokens.device), None
        else:
            index, mask = cache.positions(num_new), cache.mask(num_new)
        # embed ignores its positions here, which are rotary
        x = self.embed(tokens, tokens).repeat_interleave(copies, dim=1)  # (B, n T, D)
        h = self.run(x, self.copy_positions(index), cache=cache, mask=mask)
        # the right-most copy sees all copies of its token, and predicts: (B, n T, D) -> (B, T, D)
        return h[:, copies - 1 :: copies]

    def copy_positions(self, index: Tensor) -> Tensor:
        """Returns the rotary positions of the copies at ``index`` of the sequence of n T copies.

        They are one less than documented in the config, since only differences matter and a single
        copy then equals the plain decoder.
        """
        copies = self.config.copies
        if self.config.copy_positions == "shared":
            return index // copies
        return (index + 1).to(score_dtype()) / copies - 1


class CopyLM(TransformerLM):
    """Copy-n: a non-adaptive control of Thoughtbubbles with at least as many FLOPs.

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
        """Number of copies of a token."""
        return self.config.copies

    def build_network(self) -> CopyNetwork:
        return CopyNetwork(self.config)

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the FLOPs per token by part, for ``context`` tokens of n copies each."""
        copies = self.config.copies
        parts = super().flops_by_part(copies * context)
        return {name: flops * (1 if name == "output" else copies) for name, flops in parts.items()}

    def passes_per_token(self, context: int) -> float:
        """Returns n, the number of copies of a token; see ``LanguageModel``."""
        return float(self.config.copies)
