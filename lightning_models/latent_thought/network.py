"""The decoder p(x | z) in plain PyTorch, the learned prior, the encoder and their FLOPs."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_models.flops import (
    TRAINING_FACTOR,
    attention_flops,
    head_flops,
    linear_flops,
    training_flops,
)
from lightning_models.latent_thought.config import LatentThoughtConfig
from lightning_models.layers import (
    Block,
    FeedForward,
    KVCache,
    LayerCache,
    OutputProjection,
    Rope,
    SelfAttention,
    apply_rope,
    attend,
    initialise,
    make_norm,
    rope_tables,
)
from lightning_models.layers.blocks import join_heads, split_heads

# ---- cross-attention to latent vectors


class LatentAttention(nn.Module):
    """Attention from tokens to latent vectors, both with rotary positions (App. A.1).

    NOTE(paper): the public code rotates neighbouring channels (2 i, 2 i + 1), we rotate (i,
    i + C/2); the two differ by a permutation of the rows of the query and key matrices.
    """

    def __init__(self, config: LatentThoughtConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key_value = nn.Linear(config.dim, 2 * config.dim, bias=config.bias)
        self.out = OutputProjection(config.dim, config.dim, bias=config.bias)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """Returns rotated queries (B, H, T, C) of normed states (B, T, D)."""
        return apply_rope(split_heads(self.query(x), self.num_heads), rope)

    def memory(self, z: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Returns rotated keys and values (B, H, Z, C) of latent vectors (B, Z, D)."""
        k, v = (split_heads(part, self.num_heads) for part in self.key_value(z).chunk(2, dim=-1))
        return apply_rope(k, rope), v

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Returns the attention output (B, T, D)."""
        # (B, H, T, C) to (B, H, Z of the layer, C), without a mask: every token reads every vector.
        # The backend of self-attention is not used, as there are few keys.
        dropout = self.dropout if self.training else 0.0
        return self.out(join_heads(attend(queries, keys, values, dropout=dropout)))


def latent_positions(config: LatentThoughtConfig, device: torch.device) -> Tensor:
    """Returns the positions (Z of a layer,) of a layer's latent keys, in tokens, float32."""
    index = torch.arange(config.latents_per_layer, device=device, dtype=torch.float32)
    if config.latent_positions == "spread":
        return index * (config.block_size / config.latents_per_layer)
    if config.latent_positions == "public":
        # NOTE(paper): the public code divides by the number of all vectors. If they are layered,
        # the positions of a layer are in the first 1/L of the context, apparently by mistake.
        return index * (config.block_size // config.num_latents)
    return index


# ---- the learned prior and the encoder of the VAE baseline, with full attention


class TransportPrior(nn.Module):
    """z = f(z0), a transformer encoder over the latent vectors of a sequence (section 2.1).

    It is initialised near the identity, since its residual branches start small.
    """

    def __init__(self, config: LatentThoughtConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config, causal=False) for _ in range(config.prior_layers))

    def forward(self, z: Tensor) -> Tensor:
        """Maps normal vectors (B, Z, D) to latent vectors (B, Z, D)."""
        positions = torch.arange(
            z.shape[1], device=z.device
        )  # (Z,), over the vectors of all layers
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_base)
        for block in self.blocks:
            z = block(z, rope=rope)  # (B, Z, D), each vector attends to all Z
        return z


class LatentEncoder(nn.Module):
    """q(z|x) in one pass: a learned query for each latent vector is prepended to the tokens.

    NOTE(paper): the paper only says "a 12-layer encoder with full attention"; the queries are ours.
    The encoder reads the decoder's embeddings, which agrees with the 114M parameters of Table 4
    (76M and 12 layers).
    """

    def __init__(self, config: LatentThoughtConfig) -> None:
        super().__init__()
        self.config = config
        self.queries = nn.Embedding(config.num_latents, config.dim)
        layers = range(config.encoder_layers)
        self.blocks = nn.ModuleList(Block(config, causal=False) for _ in layers)
        self.norm = make_norm(config)
        self.out = nn.Linear(config.dim, 2 * config.dim, bias=config.bias)

    def forward(self, x: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log-variance (B, Z, D) of q.

        Args:
            x: Embeddings of the tokens (B, T, D).
            known: (B, T) bool, true for tokens that may be read.
        """
        queries = self.queries.weight.expand(len(x), -1, -1)  # (B, Z, D)
        count = queries.shape[1]
        # (Z + T,): queries have positions 0 to Z - 1, tokens 0 to T - 1
        query_positions = torch.arange(count, device=x.device)
        positions = torch.cat((query_positions, torch.arange(x.shape[1], device=x.device)))
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_base)
        # (B, 1, 1, Z + T): queries and known tokens are visible to all
        mask = torch.cat((known.new_ones(len(x), count), known), dim=1)[:, None, None]
        h = torch.cat((queries, x), dim=1)  # (B, Z + T, D)
        for block in self.blocks:
            h = block(h, rope=rope, mask=mask)
        out = self.out(self.norm(h[:, :count]))  # (B, Z, 2 D)
        mean, log_variance = out.to(torch.promote_types(out.dtype, torch.float32)).chunk(2, dim=-1)
        return mean, log_variance


# ---- the decoder


Memory = list[tuple[Tensor, Tensor]]
"""Keys and values (B, H, Z of the layer, C) of the latent vectors of every layer."""


class Start(NamedTuple):
    """The part of the forward pass that does not depend on z."""

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
        attended = self.attention(self.attention_norm(x), rope=rope, cache=cache, mask=mask)
        x = x + self.dropout(attended)  # (B, T, D)
        return x, self.latent_attention.queries(self.latent_norm(x), rope)

    def forward(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor],
        rope: Rope,
        queries: Tensor | None = None,
        cache: LayerCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the stream (B, T, D) after all three sub-layers.

        Args:
            x: The stream (B, T, D).
            memory: Keys and values of this layer's latent vectors (B, H, Z of the layer, C).
            rope: Rotations of the tokens' positions.
            queries: Queries (B, H, T, C) that ``before`` returned together with ``x``, if it was
                called already.
            cache: Cache of self-attention.
            mask: Mask of self-attention.
        """
        if queries is None:
            x, queries = self.before(x, rope, cache, mask)
        keys, values = memory
        x = x + self.dropout(self.latent_attention(queries, keys, values))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class LatentThoughtNetwork(nn.Module):
    """Embedding, L blocks and final norm; the caller applies the output matrix.

    ``begin`` computes the part that does not depend on z, and ``forward`` the rest, which inference
    by gradient runs many times.
    """

    def __init__(self, config: LatentThoughtConfig) -> None:
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
        for block in self.layers:
            # NOTE(paper): the initialisation of this projection is not given. Initialised like the
            # others it would add z ~ N(0, I) to every layer as noise larger than the embeddings,
            # which the decoder would first learn to suppress. At 0 the model starts as the plain
            # decoder.
            nn.init.zeros_(block.latent_attention.out.weight)

    @property
    def output_matrix(self) -> Tensor:
        """The output matrix (V, D)."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def layers(self) -> list[LatentBlock]:
        """The blocks, with their type."""
        return [cast(LatentBlock, block) for block in self.blocks]

    def begin(self, tokens: Tensor, cache: KVCache | None = None) -> Start:
        """Returns the part of the forward pass of ``tokens`` (B, T) that does not depend on z.

        With a cache, tokens follow each row's entries, and the caller then advances the cache.
        """
        num_new = tokens.shape[1]
        if cache is None:
            positions, layer, mask = torch.arange(num_new, device=tokens.device), None, None
        else:
            positions, layer = cache.positions(num_new), cache.layers[0]
            mask = cache.mask(num_new, self.config.window)
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_base)
        x = self.dropout(self.embedding(tokens))  # (B, T) -> (B, T, D)
        return Start(*self.layers[0].before(x, rope, layer, mask), rope)

    def forward(self, start: Start, z: Tensor) -> Tensor:
        """Returns the normed states (B, T, D) under latent vectors ``z`` (B, Z, D).

        With a learned prior, ``z`` is its input z0.
        """
        return self.decode(start, self.remember(z))

    def remember(self, z: Tensor) -> Memory:
        """Returns every layer's keys and values of latent vectors ``z`` (B, Z, D)."""
        z = z.to(self.embedding.weight.dtype)  # posteriors are float32, weights may be bfloat16
        if self.prior is not None:
            z = self.prior(z)
        config = self.config
        positions = latent_positions(config, z.device)  # (Z of a layer,), the same in each layer
        rope = rope_tables(positions, config.head_dim, config.rope_base)
        if config.latents == "layered":
            by_layer = z.unflatten(1, (config.num_layers, -1)).unbind(1)  # L times (B, Z / L, D)
        else:
            by_layer = (z,) * config.num_layers  # L times (B, Z, D)
        # (B, Z of the layer, D) -> keys and values (B, H, Z of the layer, C)
        return [
            block.latent_attention.memory(part, rope)
            for block, part in zip(self.layers, by_layer, strict=True)
        ]

    def decode(self, start: Start, memory: Memory, cache: KVCache | None = None) -> Tensor:
        """Returns the normed states (B, T, D) after ``begin``, called with the same cache."""
        x, queries, rope = start  # (B, T, D), (B, H, T, C)
        mask = None if cache is None else cache.mask(x.shape[1], self.config.window)
        for index, (block, latents) in enumerate(zip(self.layers, memory, strict=True)):
            layer = None if cache is None else cache.layers[index]
            # ``start`` already includes the first block's self-attention
            x = block(x, latents, rope, queries=None if index else queries, cache=layer, mask=mask)
        return self.norm(x)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache with room for ``capacity`` tokens per row."""
        return KVCache(self.config.num_layers, batch, capacity, self.embedding.weight.device)


# ---- FLOPs per token, ours and the paper's count


def pass_by_part(network: LatentThoughtNetwork, context: int) -> dict[str, float]:
    """Returns the FLOPs per token of one forward pass over ``context`` tokens, by part."""
    config, blocks = network.config, network.layers
    latents = config.latents_per_layer
    attention = attention_flops(config, context)
    reading = 4.0 * config.dim * latents * config.num_layers
    for block in blocks:
        attention += linear_flops(block.attention)
        read = block.latent_attention
        reading += linear_flops(read.query) + linear_flops(read.out)
        reading += linear_flops(read.key_value) * latents / context
    parts = {
        "output": head_flops(config),
        "self_attention": attention,
        "cross_attention": reading,
        "feed_forward": sum((linear_flops(block.feed_forward) for block in blocks), 0.0),
    }
    if network.prior is not None:
        vectors = config.num_latents
        per_vector = linear_flops(network.prior) + _full(config.dim, vectors, config.prior_layers)
        parts["prior"] = per_vector * vectors / context
    return parts


def before_latents(network: LatentThoughtNetwork, context: int) -> float:
    """Returns the FLOPs per token of ``begin``, which runs once per batch."""
    first = network.layers[0]
    flops = linear_flops(first.attention) + linear_flops(first.latent_attention.query)
    return flops + attention_flops(network.config, context) / network.config.num_layers


def inference_flops(network: LatentThoughtNetwork, context: int, training: bool = False) -> float:
    """Returns the FLOPs per token of inferring q, T_fast forward passes and backward passes to z.

    A backward pass to z costs as much as a forward pass. The gradients of weights, which would cost
    as much again, are computed only if the decoder is trained on the trajectory.
    """
    config = network.config
    if config.inference == "amortised":
        assert network.encoder is not None
        tokens = context + config.num_latents
        per_token = linear_flops(network.encoder.blocks)
        per_token += _full(config.dim, tokens, config.encoder_layers)
        return per_token * tokens / context
    parts = pass_by_part(network, context)
    total = sum(parts.values())
    if training and config.slow_gradient == "trajectory":
        return config.inner_steps * training_flops(total, total - parts["output"], config)
    return config.inner_steps * 2.0 * (total - before_latents(network, context))


def published_training_flops(network: LatentThoughtNetwork, context: int) -> float:
    """Returns the paper's training FLOPs per token, T_fast + 1 forward and backward passes.

    Every query counts all tokens as keys, regardless of window and causality (N H in section 2.4).
    This reproduces the 4.07, 5.52 and 32.2 GFLOPs of Table 1.
    """
    config = network.config
    total = sum(pass_by_part(network, context).values())
    total += _full(config.dim, context, config.num_layers) - attention_flops(config, context)
    steps = 0 if config.inference == "amortised" else config.inner_steps
    return (steps + 1) * TRAINING_FACTOR * total


def _full(dim: int, tokens: int, layers: int) -> float:
    """Returns the FLOPs per token of full attention over ``tokens`` tokens."""
    return 4.0 * dim * tokens * layers
