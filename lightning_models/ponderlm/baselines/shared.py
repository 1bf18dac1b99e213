"""Base classes of the baselines of PonderLM-3."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_models.layers import KVCache, Rope, rope_tables, wants
from lightning_models.outputs import Scores
from lightning_models.ponderlm.config import PonderingConfig
from lightning_models.ponderlm.module import step_scores
from lightning_models.transformer import TransformerLM
from lightning_models.transformer.network import TransformerNetwork


def positions_and_mask(
    num_new: int, cache: KVCache | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Returns positions (T,) or (B, T) of ``num_new`` entries and their attention mask, if any."""
    if cache is None:
        return torch.arange(num_new, device=device), None  # causality needs no mask
    return cache.positions(num_new), cache.mask(num_new)


class RepeatedNetwork(TransformerNetwork):
    """One stack of blocks, applied up to K + 1 times, with separate cache layers each time."""

    config: PonderingConfig

    def rope(self, positions: Tensor) -> Rope:
        """Returns the rotation tables of ``positions`` (T,) or (B, T)."""
        config = self.config
        return rope_tables(positions, config.rotary_dim, config.rope_base, config.rotary_scaling)

    def apply_blocks(
        self,
        x: Tensor,
        rope: Rope,
        *,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        application: int = 0,
        blocks: Iterable[nn.Module] | None = None,
        first: int | None = None,
    ) -> Tensor:
        """Returns the residual stream (B, T, D) after all blocks, before any norm.

        Args:
            x: Input of the first block (B, T, D).
            rope: Rotation tables of its positions.
            cache: Keys and values of earlier tokens.
            mask: Mask from ``cache.mask``.
            application: Index of this application, which has separate layers in the cache.
            blocks: Blocks to apply. Defaults to the repeated stack.
            first: First layer of the blocks in the cache. Defaults to L times ``application``.
        """
        # applications share weights, but not keys and values: each has L layers of the cache
        first = application * len(self.blocks) if first is None else first
        for index, block in enumerate(self.blocks if blocks is None else blocks):
            layer = None if cache is None else cache.layers[first + index]
            x = block(x, rope=rope, cache=layer, mask=mask)
        return x

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        layers = (self.config.thinking_steps + 1) * self.config.num_layers
        return KVCache(layers, batch, capacity, self.embedding.weight.device)


# ---- LightningModules


class DepthLM(TransformerLM):
    """A decoder whose tokens take K additional steps, unless a method overrides ``read``."""

    shards_blocks = False
    config: PonderingConfig

    def read(self, batch: dict[str, Any], every_depth: bool) -> tuple[Tensor, Tensor]:
        """Returns the normed states of a batch for scoring and its executed steps (B, T) int64.

        The states are (B, T, D), or (B, T, K+1, D) after each number of steps with ``every_depth``,
        the last of which predict.
        """
        states = self.states(batch, every_depth)
        return states, torch.full_like(batch["tokens"], self.config.thinking_steps)

    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns log-probabilities of a window batch's targets.

        Records the statistics of ``step_scores``.
        """
        every_depth = wants("depth_losses")
        states, executed = self.read(batch, every_depth)
        h = states[..., -1, :] if every_depth else states  # (B, T, D)
        return step_scores(self, h, lambda: states, batch["targets"], executed)

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of generating a token, averaged over a text of ``context`` tokens.

        Args:
            context: Number of tokens of the text.
            steps: Mean number of additional steps of a token. Defaults to K.
        """
        steps = self.config.thinking_steps if steps is None else steps
        return sum(self.flops_of_steps(context, steps).values())

    def flops_by_part(self, context: int) -> dict[str, float]:
        return self.flops_of_steps(context, self.config.thinking_steps)

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part if tokens take ``steps`` additional steps.

        By default every step is another application of the blocks to the whole text.
        """
        parts = self.plain_flops(context)
        return {
            name: flops * (1 if name == "output" else 1 + steps) for name, flops in parts.items()
        }

    def plain_flops(self, context: int) -> dict[str, float]:
        """Returns the FLOPs per token by part of a plain decoder of this size."""
        return super().flops_by_part(context)
