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
    """A plain decoder. The defaults are GPT-2's; LLaMA style is rms, swiglu, rope, no bias.

    Raises:
        ValueError: If the sizes do not fit together. The message names key, value and cure.
    """

    num_kv_heads: int | None = None
    """G, heads of keys and values, each shared by H / G heads of queries (LLaMA 3, Qwen2.5); must
    divide num_heads. The default, null, is num_heads."""
    qkv_bias: bool | None = None
    """Whether queries, keys and values have biases, in Qwen2.5 without ``bias``. The default, null,
    is ``bias``."""
    head_size: int | None = None
    """C, channels of a head, if they do not add up to dim (Qwen3). The default, null, is dim /
    num_heads."""
    qk_norm: bool = False
    """Whether queries and keys pass through an RMSNorm over the channels of each head (Qwen3)."""
    rope_scaling: tuple[float, float, float, float] | None = None
    """Scaling of low rotary frequencies for contexts longer than in training: factor, number of
    turns below and above which frequencies are low and high, and the training context in tokens
    (LLaMA 3.1: 8, 1, 4, 8192). By default, null, none are scaled."""
    rope_fraction: float = 1.0
    """Share of each head's channels, from the first, with rotary positions (Pythia: 0.25)."""
    parallel_residual: bool = False
    """Whether attention and feed-forward layer of a block read the same input (Pythia)."""

    def __post_init__(self) -> None:
        size = self.head_size
        if isinstance(size, int) and (size < 1 or (self.positions == "rope" and size % 2)):
            raise ValueError(
                f"head_size ({size}) must be at least 1, and even for positions=rope, or null"
            )
        super().__post_init__()
        heads = self.key_value_heads
        if heads < 1 or self.num_heads % heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads}); "
                "null gives every head of queries its own"
            )
        self._check_scaling()
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction ({self.rope_fraction}) must be above 0 and at most 1")
        if self.positions == "rope" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"rope_fraction ({self.rope_fraction}) of a head's {self.head_dim} channels makes "
                f"{self.rotary_dim}, which must be an even number of at least 2"
            )

    def _check_scaling(self) -> None:
        if self.rope_scaling is None:
            return
        values = tuple(self.rope_scaling)
        object.__setattr__(self, "rope_scaling", values)  # files have lists
        if self.positions != "rope":
            raise ValueError(
                f"rope_scaling ({values}) needs positions=rope, not {self.positions}; set it to "
                "null"
            )
        if len(values) != 4 or min(values) <= 0 or values[1] >= values[2]:
            raise ValueError(
                f"rope_scaling ({values}) must be factor, low, high and context, all above 0 and "
                "low below high; LLaMA 3.1 has 8, 1, 4, 8192"
            )

    @property
    def head_dim(self) -> int:
        return super().head_dim if self.head_size is None else self.head_size

    @property
    def rotary_scaling(self) -> tuple[float, ...] | None:
        return self.rope_scaling

    @property
    def norms_queries(self) -> bool:
        return self.qk_norm

    @property
    def key_value_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope_fraction)

    @property
    def projection_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def residual_in_parallel(self) -> bool:
        return self.parallel_residual


class Backbone(nn.Module):
    """Embeddings, L pre-norm blocks and final norm; subclasses define their input."""

    block_class = Block

    def __init__(self, config: DecoderConfig) -> None:
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
            x: Input of the first block (B, T, D).
            positions: Positions (T,) or (B, T), integer or fractional, used with rope only.
            cache: Earlier keys and values of every block.
            key_bias: Additive attention bias of each key (B, N).
            mask: See ``SelfAttention``.
        """
        rope, config = None, self.config
        if self.position is None:  # the tables are the same for all blocks
            rope = rope_tables(
                positions, config.rotary_dim, config.rope_base, config.rotary_scaling
            )
        for index, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[index]  # K and V of this block alone
            x = block(x, rope=rope, cache=layer, key_bias=key_bias, mask=mask)
        return self.norm(x)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the input of the first block (B, T, D)."""
        x = self.embedding(tokens)  # (B, T, D)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.position is not None:
            x = x + self.position(positions)  # (T, D) or (B, T, D); rotary ones enter in attention
        return self.dropout(x)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache with a capacity of ``capacity`` tokens per row."""
        return KVCache(self.config.num_layers, batch, capacity, self.embedding.weight.device)


class TransformerNetwork(Backbone):
    """The plain decoder; the caller applies the output matrix."""

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns the normed states (B, T, D) of ``tokens`` (B, T).

        Rows padded on the right need no mask, because causality hides the padding. With a cache,
        tokens come after each row's entries, and the caller then advances the cache.
        """
        num_new = tokens.shape[1]
        if cache is None:
            positions, mask = torch.arange(num_new, device=tokens.device), None
        else:
            # rows may have different lengths; then each has separate positions and a mask
            positions, mask = cache.positions(num_new), cache.mask(num_new, self.config.window)
        return self.run(self.embed(tokens, positions), positions, cache=cache, mask=mask)
