"""Tokens that read a layer's latent vectors."""

import torch
from torch import Tensor, nn

from lightning_models.latent_thought.config import LatentThoughtConfig
from lightning_models.layers import OutputProjection, Rope, apply_rope, attend
from lightning_models.layers.blocks import join_heads, split_heads


class LatentAttention(nn.Module):
    """Attention from tokens to latent vectors, both with rotary positions (App. A.1).

    NOTE(paper): the public code rotates neighbouring channels (2 i, 2 i + 1), we rotate (i,
    i + C/2); the two differ by a permutation of the rows of the query and key matrices.
    """

    def __init__(self, config: LatentThoughtConfig) -> None:
        """Builds the projections."""
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key_value = nn.Linear(config.dim, 2 * config.dim, bias=config.bias)
        self.out = OutputProjection(config.dim, config.dim, bias=config.bias)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """Returns rotated queries (B, H, T, C) of normed states (B, T, D): free of z."""
        return apply_rope(split_heads(self.query(x), self.num_heads), rope)

    def memory(self, z: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Returns rotated keys and values (B, H, Z, C) of latent vectors (B, Z, D)."""
        k, v = (split_heads(part, self.num_heads) for part in self.key_value(z).chunk(2, dim=-1))
        return apply_rope(k, rope), v

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Returns what the tokens read (B, T, D)."""
        # few keys: no case for the backends that a configuration chooses for self-attention
        dropout = self.dropout if self.training else 0.0
        return self.out(join_heads(attend(queries, keys, values, dropout=dropout)))


def latent_positions(config: LatentThoughtConfig, device: torch.device) -> Tensor:
    """Returns the positions (Z of one layer,) of its latent keys, in tokens, float32."""
    index = torch.arange(config.latents_per_layer, device=device, dtype=torch.float32)
    if config.latent_positions == "spread":
        return index * (config.block_size / config.latents_per_layer)
    if config.latent_positions == "public":
        # NOTE(paper): the public code divides whole numbers; with layered vectors all of a layer's
        # positions lie in the first 1/L of the context, which looks like a slip.
        return index * (config.block_size // config.num_latents)
    return index
