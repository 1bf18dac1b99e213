"""The decoder p(x | z) in pure torch: sliding-window self-attention, and latents in every layer."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_models.latent_thought.config import LatentThoughtConfig
from lightning_models.latent_thought.cross_attention import LatentAttention, latent_positions
from lightning_models.latent_thought.encoders import LatentEncoder, TransportPrior
from lightning_models.layers import (
    FeedForward,
    KVCache,
    LayerCache,
    Rope,
    SelfAttention,
    initialise,
    make_norm,
    rope_tables,
)

Memory = list[tuple[Tensor, Tensor]]
"""Keys and values (B, H, Z of one layer, C) of every layer's latent vectors."""


class Start(NamedTuple):
    """What is known of a batch before its latent vectors are: all that does not depend on z."""

    x: Tensor
    """Residual stream after the first self-attention (B, T, D)."""
    queries: Tensor
    """Queries of the first cross-attention (B, H, T, C)."""
    rope: Rope
    """Rotations of the tokens' positions."""

    def detached(self) -> "Start":
        """Returns the same values without their graph."""
        return Start(self.x.detach(), self.queries.detach(), self.rope)


class LatentBlock(nn.Module):
    """h = x + SelfAttn(norm x); h = h + CrossAttn(norm h, z_l); out = h + FFN(norm h)."""

    def __init__(self, config: LatentThoughtConfig) -> None:
        """Builds the three sub-layers."""
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config)
        self.latent_norm = make_norm(config)
        self.latent_attention = LatentAttention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def before(
        self, x: Tensor, rope: Rope, cache: LayerCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the stream after self-attention and the queries to latent vectors."""
        seen = self.attention(self.attention_norm(x), rope=rope, cache=cache, mask=mask)
        x = x + self.dropout(seen)
        return x, self.latent_attention.queries(self.latent_norm(x), rope)

    def behind(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Returns the stream after cross-attention and feed-forward."""
        x = x + self.dropout(self.latent_attention(queries, keys, values))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class LatentThoughtNetwork(nn.Module):
    """Embedding, L blocks, final norm; the caller applies the output matrix.

    ``begin`` computes what does not depend on z, the call itself the rest: inference by gradient
    calls the latter many times.
    """

    def __init__(self, config: LatentThoughtConfig) -> None:
        """Builds and initialises the network, with prior and encoder where there are any."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(LatentBlock(config) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = (
            None if config.tie_head else nn.Linear(config.dim, config.padded_vocab_size, False)
        )
        self.prior = TransportPrior(config) if config.prior == "transport" else None
        self.encoder = LatentEncoder(config) if config.inference == "amortised" else None
        initialise(self, config)

    @property
    def output_matrix(self) -> Tensor:
        """The matrix (V, D) from normed states to logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def layers(self) -> list[LatentBlock]:
        """The blocks under their own type."""
        return [cast(LatentBlock, block) for block in self.blocks]

    def begin(self, tokens: Tensor, cache: KVCache | None = None) -> Start:
        """Returns all of ``tokens`` (B, T) that does not depend on z.

        With a cache, tokens stand after each row's entries; the caller then advances the cache.
        """
        num_new = tokens.shape[1]
        if cache is None:
            positions, layer, mask = torch.arange(num_new, device=tokens.device), None, None
        else:
            positions, layer = cache.positions(num_new), cache.layers[0]
            mask = cache.mask(num_new, self.config.window)
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_base)
        x = self.dropout(self.embedding(tokens))
        return Start(*self.layers[0].before(x, rope, layer, mask), rope)

    def forward(self, start: Start, z: Tensor) -> Tensor:
        """Returns the normed states (B, T, D) under latent vectors ``z`` (B, Z, D).

        With a learned prior ``z`` are its inputs, z0.
        """
        return self.decode(start, self.remember(z))

    def remember(self, z: Tensor) -> Memory:
        """Returns every layer's keys and values of ``z`` (B, Z, D), for forward or decoding."""
        z = z.to(self.embedding.weight.dtype)  # posteriors are float32, weights may be bfloat16
        if self.prior is not None:
            z = self.prior(z)
        config = self.config
        positions = latent_positions(config, z.device)
        rope = rope_tables(positions, config.head_dim, config.rope_base)
        if config.latents == "layered":
            own = z.unflatten(1, (config.num_layers, -1)).unbind(1)
        else:
            own = (z,) * config.num_layers
        return [
            block.latent_attention.memory(part, rope)
            for block, part in zip(self.layers, own, strict=True)
        ]

    def decode(self, start: Start, memory: Memory, cache: KVCache | None = None) -> Tensor:
        """Returns the normed states (B, T, D) of what ``begin`` began (with the same cache)."""
        x, queries, rope = start
        mask = None if cache is None else cache.mask(x.shape[1], self.config.window)
        for index, (block, latents) in enumerate(zip(self.layers, memory, strict=True)):
            if index:
                layer = None if cache is None else cache.layers[index]
                x, queries = block.before(x, rope, layer, mask)
            x = block.behind(x, queries, *latents)
        return self.norm(x)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache with room for ``capacity`` tokens a row."""
        return KVCache(self.config.num_layers, batch, capacity, self.embedding.weight.device)
