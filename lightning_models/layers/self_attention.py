"""Multi-head self-attention around :func:`lightning_models.layers.attention.attend`."""

from torch import Tensor, nn

from lightning_models.layers.attention import attend
from lightning_models.layers.config import DecoderConfig
from lightning_models.layers.init import OutputProjection
from lightning_models.layers.kv_cache import LayerCache
from lightning_models.layers.rope import Rope, apply_rope


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Returns (B, T, D) as (B, H, T, C)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Returns (B, H, T, C) as (B, T, D)."""
    return x.transpose(1, 2).flatten(-2)


class SelfAttention(nn.Module):
    """Self-attention; queries, keys and values share one matrix (in that order)."""

    def __init__(self, config: DecoderConfig, causal: bool = True) -> None:
        """Builds the projections.

        Args:
            config: shape and style.
            causal: whether a token sees itself and earlier ones only; else it sees all of them,
                without window and without cache.
        """
        super().__init__()
        self.causal = causal
        self.num_heads = config.num_heads
        self.window = config.window
        self.dropout = config.attention_dropout
        self.backend = config.attention_backend
        self.query_scale = 1.0
        """Factor on queries, beside 1/sqrt(C)."""
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.out = OutputProjection(config.dim, config.dim, bias=config.bias)

    def project(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values (B, H, T, C) of ``x`` (B, T, D), rotated by ``rope``."""
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(x).chunk(3, dim=-1))
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        return (q if self.query_scale == 1.0 else q * self.query_scale), k, v

    def forward(
        self,
        x: Tensor,
        *,
        rope: Rope | None = None,
        cache: LayerCache | None = None,
        key_bias: Tensor | None = None,
        mask: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention output (B, T, D).

        Args:
            x: normed input (B, T, D).
            rope: rotation tables of these T positions.
            cache: earlier keys and values; this call appends its own.
            key_bias: (B, N) additive bias per key, N counting cached keys too.
            mask: bool, broadcastable to (B, H, T, N), beside causality; with a cache, what
                ``KVCache.mask`` returned, which stands for causality and window too.
            value_scale: (B, T) factor on the values of these T tokens.
        """
        q, k, v = self.project(x, rope)
        if value_scale is not None:
            v = v * value_scale[:, None, :, None].to(v.dtype)
        # a ragged cache's mask contains causality
        causal = self.causal and (cache is None or mask is None)
        if cache is not None:
            k, v = cache.append(k, v)
        heads = attend(
            q,
            k,
            v,
            causal=causal,
            window=self.window if causal else None,
            key_bias=key_bias,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            # decoding has few queries, masks and any dtype: no case for the training kernels
            backend=self.backend if cache is None else "auto",
        )
        return self.out(join_heads(heads))
