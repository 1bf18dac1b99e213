"""The plain decoder in pure torch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_models.layers import (
    Block,
    DecoderConfig,
    KVCache,
    initialise,
    make_norm,
    rope_tables,
)
from lightning_models.layers.blocks import embedding_scale


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(DecoderConfig):
    """A plain decoder: the defaults are GPT-2's; LLaMA style is rms, swiglu, rope, no bias."""


class Backbone(nn.Module):
    """Embeddings, L pre-norm blocks, final norm; what they are applied to is the subclass' own."""

    block_class = Block

    def __init__(self, config: DecoderConfig) -> None:
        """Builds and initialises the network."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.dim)
        learned = config.positions == "learned"
        self.position = nn.Embedding(config.block_size, config.dim) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.block_class(config) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = (
            None if config.tie_head else nn.Linear(config.dim, config.padded_vocab_size, False)
        )
        self.embedding_scale = embedding_scale(config)
        initialise(self, config)

    @property
    def output_matrix(self) -> Tensor:
        """The matrix (V, D) from normed states to logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        cache: KVCache | None = None,
        key_bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the normed states (B, T, D) after all blocks and the final norm.

        Args:
            x: input of the first block (B, T, D).
            positions: (T,) or (B, T), integer or fractional; used under rope only.
            cache: earlier keys and values of every block.
            key_bias: (B, N) additive attention bias per key.
            mask: see ``SelfAttention``.
        """
        rope = None
        if self.position is None:
            rope = rope_tables(positions, self.config.head_dim, self.config.rope_base)
        for index, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[index]
            x = block(x, rope=rope, cache=layer, key_bias=key_bias, mask=mask)
        return self.norm(x)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the input of the first block (B, T, D)."""
        x = self.embedding(tokens)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.position is not None:
            x = x + self.position(positions)
        return self.dropout(x)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache with room for ``capacity`` tokens a row."""
        return KVCache(self.config.num_layers, batch, capacity, self.embedding.weight.device)


class TransformerNetwork(Backbone):
    """The plain decoder; the caller applies the output matrix."""

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns the normed states (B, T, D) of ``tokens`` (B, T).

        Rows padded on the right need no mask: causality hides the padding. With a cache, tokens
        stand after each row's entries; the caller then advances the cache.
        """
        num_new = tokens.shape[1]
        if cache is None:
            positions, mask = torch.arange(num_new, device=tokens.device), None
        else:
            positions, mask = cache.positions(num_new), cache.mask(num_new, self.config.window)
        return self.run(self.embed(tokens, positions), positions, cache=cache, mask=mask)
