"""A plain decoder whose one stack of blocks is applied several times to a text."""

import torch
from torch import Tensor

from lightning_models.layers import KVCache, Rope, rope_tables
from lightning_models.ponderlm.config import PonderingConfig
from lightning_models.transformer.network import TransformerNetwork


class RepeatedNetwork(TransformerNetwork):
    """The plain decoder's weights, applied up to K + 1 times; says in which order each time."""

    config: PonderingConfig

    def places(self, num_new: int, cache: KVCache | None) -> tuple[Tensor, Tensor | None]:
        """Returns positions (T,) or (B, T) of ``num_new`` tokens, and what they see of a cache."""
        if cache is None:
            return torch.arange(num_new, device=self.embedding.weight.device), None
        return cache.positions(num_new), cache.mask(num_new)

    def rope(self, positions: Tensor) -> Rope:
        """Returns the rotation tables of ``positions`` (T,) or (B, T)."""
        return rope_tables(positions, self.config.head_dim, self.config.rope_base)

    def apply_blocks(
        self,
        x: Tensor,
        rope: Rope,
        *,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        number: int = 0,
    ) -> Tensor:
        """Returns the residual stream (B, T, D) behind all blocks, before any norm.

        Args:
            x: the stream in front of them (B, T, D).
            rope: rotation tables of its positions.
            cache: keys and values of earlier tokens.
            mask: what ``cache.mask`` returned.
            number: which application this is; each has layers of its own in the cache.
        """
        first = number * len(self.blocks)
        for index, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[first + index]
            x = block(x, rope=rope, cache=layer, mask=mask)
        return x

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache of K + 1 times L layers, with room for ``capacity`` tokens."""
        layers = (self.config.thinking_steps + 1) * self.config.num_layers
        return KVCache(layers, batch, capacity, self.embedding.weight.device)
