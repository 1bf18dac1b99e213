"""The decoder p(x | z) in pure torch, the learned prior, the encoder, and their FLOPs."""

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

# ---- tokens that read a layer's latent vectors


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
        """Returns rotated queries (B, H, T, C) of normed states (B, T, D): free of z."""
        return apply_rope(split_heads(self.query(x), self.num_heads), rope)

    def memory(self, z: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Returns rotated keys and values (B, H, Z, C) of latent vectors (B, Z, D)."""
        k, v = (split_heads(part, self.num_heads) for part in self.key_value(z).chunk(2, dim=-1))
        return apply_rope(k, rope), v

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Returns what the tokens read (B, T, D)."""
        # (B, H, T, C) against (B, H, Z of the layer, C): no mask, every token reads every vector.
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


# ---- full attention, of the learned prior and of the VAE baseline


class TransportPrior(nn.Module):
    """z = f(z0): a transformer encoder over a sequence's latent vectors (section 2.1).

    Starts near the identity: its layers add little to what they are given at first.
    """

    def __init__(self, config: LatentThoughtConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config, causal=False) for _ in range(config.prior_layers))

    def forward(self, z: Tensor) -> Tensor:
        """Returns the latent vectors (B, Z, D) that normal ones (B, Z, D) are carried to."""
        positions = torch.arange(z.shape[1], device=z.device)  # (Z,), of all layers in one row
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_base)
        for block in self.blocks:
            z = block(z, rope=rope)  # (B, Z, D), each vector attends to all Z
        return z


class LatentEncoder(nn.Module):
    """q(z|x) in one pass: learned queries, one for each latent vector, before the tokens.

    NOTE(paper): only "a 12-layer encoder with full attention" is known; how it makes latent vectors
    of the tokens is ours. It reads the decoder's embeddings, which agrees with the 114M parameters
    of Table 4 (76M and 12 layers).
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
            known: (B, T) bool, which of them may be read.
        """
        queries = self.queries.weight.expand(len(x), -1, -1)  # (B, Z, D)
        count = queries.shape[1]
        places = torch.arange(x.shape[1], device=x.device)  # (T,)
        # queries at 0 to Z - 1, tokens at 0 to T - 1: (Z + T,)
        positions = torch.cat((torch.arange(count, device=x.device), places))
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_base)
        # all read all queries and the known tokens: (B, 1, 1, Z + T)
        seen = torch.cat((known.new_ones(len(x), count), known), dim=1)[:, None, None]
        h = torch.cat((queries, x), dim=1)  # (B, Z + T, D)
        for block in self.blocks:
            h = block(h, rope=rope, mask=seen)
        out = self.out(self.norm(h[:, :count]))  # (B, Z, 2 D)
        mean, log_variance = out.to(torch.promote_types(out.dtype, torch.float32)).chunk(2, dim=-1)
        return mean, log_variance


# ---- the decoder


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
        x = x + self.dropout(seen)  # (B, T, D)
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
            queries: (B, H, T, C), where ``x`` is what ``before`` returns with them.
            cache: Of self-attention.
            mask: Of self-attention.
        """
        if queries is None:
            x, queries = self.before(x, rope, cache, mask)
        keys, values = memory
        x = x + self.dropout(self.latent_attention(queries, keys, values))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class LatentThoughtNetwork(nn.Module):
    """Embedding, L blocks, final norm; the caller applies the output matrix.

    ``begin`` computes what does not depend on z, the call itself the rest: inference by gradient
    calls the latter many times.
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
            # NOTE(paper): how this projection starts is not said. Drawn like the others it writes
            # z ~ N(0, I) into every layer as noise above the embeddings, which the decoder must
            # first learn to suppress; at 0 the model starts as the plain decoder.
            nn.init.zeros_(block.latent_attention.out.weight)

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
        x = self.dropout(self.embedding(tokens))  # (B, T) -> (B, T, D)
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
        positions = latent_positions(config, z.device)  # (Z of one layer,), the same in each
        rope = rope_tables(positions, config.head_dim, config.rope_base)
        if config.latents == "layered":
            own = z.unflatten(1, (config.num_layers, -1)).unbind(1)  # L times (B, Z / L, D)
        else:
            own = (z,) * config.num_layers  # L times (B, Z, D)
        # (B, Z of the layer, D) -> keys and values (B, H, Z of the layer, C)
        return [
            block.latent_attention.memory(part, rope)
            for block, part in zip(self.layers, own, strict=True)
        ]

    def decode(self, start: Start, memory: Memory, cache: KVCache | None = None) -> Tensor:
        """Returns the normed states (B, T, D) of what ``begin`` began (with the same cache)."""
        x, queries, rope = start  # (B, T, D), (B, H, T, C)
        mask = None if cache is None else cache.mask(x.shape[1], self.config.window)
        for index, (block, latents) in enumerate(zip(self.layers, memory, strict=True)):
            layer = None if cache is None else cache.layers[index]
            # the first block's self-attention is in ``start``: it does not depend on z
            known = None if index else queries
            x = block(x, latents, rope, queries=known, cache=layer, mask=mask)
        return self.norm(x)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache with room for ``capacity`` tokens a row."""
        return KVCache(self.config.num_layers, batch, capacity, self.embedding.weight.device)


# ---- FLOPs per token, ours and as the paper counts


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
    """Returns the part of a pass that does not depend on z: it is computed once per batch."""
    first = network.layers[0]
    flops = linear_flops(first.attention) + linear_flops(first.latent_attention.query)
    return flops + attention_flops(network.config, context) / network.config.num_layers


def inference_flops(network: LatentThoughtNetwork, context: int, training: bool = False) -> float:
    """Returns the FLOPs per token of finding q: forward and backward to z alone, T_fast times.

    The backward to z costs as much as a forward; that to weights, which would cost as much again,
    is computed only in training, and where the decoder learns from the trajectory.
    """
    config = network.config
    if config.inference == "amortised":
        assert network.encoder is not None
        tokens = context + config.num_latents
        per_token = linear_flops(network.encoder.blocks)
        per_token += _full(config.dim, tokens, config.encoder_layers)
        return per_token * tokens / context
    parts = pass_by_part(network, context)
    whole = sum(parts.values())
    if training and config.slow_gradient == "trajectory":
        return config.inner_steps * training_flops(whole, whole - parts["output"], config)
    return config.inner_steps * 2.0 * (whole - before_latents(network, context))


def published_training_flops(network: LatentThoughtNetwork, context: int) -> float:
    """Returns training FLOPs per token as the paper counts: (T_fast + 1) forwards and backwards.

    Queries count as many keys as there are tokens, whatever window and causality hide from them
    (the N H of section 2.4): so counted, Table 1's 4.07, 5.52 and 32.2 GFLOPs come out.
    """
    config = network.config
    whole = sum(pass_by_part(network, context).values())
    whole += _full(config.dim, context, config.num_layers) - attention_flops(config, context)
    steps = 0 if config.inference == "amortised" else config.inner_steps
    return (steps + 1) * TRAINING_FACTOR * whole


def _full(dim: int, tokens: int, layers: int) -> float:
    """Returns the FLOPs per token of full attention over that many tokens."""
    return 4.0 * dim * tokens * layers
