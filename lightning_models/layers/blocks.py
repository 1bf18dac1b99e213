"""Pre-norm transformer blocks: norms, initial weights, rotary positions, attention, reductions."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.layers.attention import attend
from lightning_models.layers.config import DecoderConfig
from lightning_models.layers.kv_cache import LayerCache


def make_norm(config: DecoderConfig) -> nn.Module:
    """Returns the norm the config asks for, over the last axis of (..., D)."""
    if config.norm == "rms":
        return nn.RMSNorm(config.dim, eps=config.norm_eps)
    return nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)


# ---- initial weights


class OutputProjection(nn.Linear):
    """A linear layer that writes into the residual stream, and therefore starts smaller."""


def initialise(module: nn.Module, config: DecoderConfig) -> None:
    """Initialises all linear layers and embeddings in ``module`` in place.

    ``gpt2`` draws N(0, init_std); ``ponderlm`` draws a normal of variance 2 / (5 D) cut at three
    standard deviations. Projections into the residual stream are divided by sqrt(2 L). Biases
    start at zero.
    """
    ponder = config.init == "ponderlm"
    std = math.sqrt(2 / (5 * config.dim)) if ponder else config.init_std
    for layer in module.modules():
        # the meta device holds no values, and torch draws them there in slow Python
        if not isinstance(layer, nn.Linear | nn.Embedding) or layer.weight.is_meta:
            continue
        writes = isinstance(layer, OutputProjection)
        scale = 1 / math.sqrt(2 * config.residual_depth) if writes else 1.0
        if ponder:
            cut = 3 * std * scale
            nn.init.trunc_normal_(layer.weight, std=std * scale, a=-cut, b=cut)
        else:
            nn.init.normal_(layer.weight, std=std * scale)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


def embedding_scale(config: DecoderConfig) -> float:
    """Returns the factor on token embeddings that gives them unit variance under ``ponderlm``.

    sqrt(2.5 D) is the inverse of that initialisation's standard deviation, so that embeddings
    match the RMS-normed states which the pondering models feed back; 1 for ``gpt2``.
    """
    return math.sqrt(2.5 * config.dim) if config.init == "ponderlm" else 1.0


# ---- rotary position embeddings (arXiv 2104.09864), at whole and fractional positions


class Rope(NamedTuple):
    """Tables for one set of positions, float32: ``cos`` and ``sin``, each (B or 1, 1, T, R)."""

    cos: Tensor
    sin: Tensor


def rope_tables(
    positions: Tensor,
    rotary_dim: int,
    base: float = 10000.0,
    scaling: Sequence[float] | None = None,
) -> Rope:
    """Returns the rotation tables for ``positions``.

    Args:
        positions: Position of each token in tokens (T,) or (B, T), integer or float.
        rotary_dim: R, the even number of rotated channels of a head.
        base: Base of the frequencies; the longest wavelength is about ``2 pi base`` tokens.
        scaling: The numbers of ``stretched``. Defaults to none.
    """
    pairs = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = base ** -(pairs / rotary_dim)  # (R/2,), radians a token
    if scaling is not None:
        frequencies = stretched(frequencies, *scaling)
    angles = positions.to(torch.float32)[..., None] * frequencies  # (B?, T, R/2)
    angles = torch.cat((angles, angles), dim=-1)
    if angles.dim() == 2:
        angles = angles[None]
    angles = angles[:, None]  # (B or 1, 1, T, R)
    return Rope(angles.cos(), angles.sin())


def stretched(
    frequencies: Tensor, factor: float, low: float, high: float, context: float
) -> Tensor:
    """Scales rotary frequencies for contexts longer than in training, as in LLaMA 3.1.

    A frequency with less than ``low`` turns within the training context is divided by the factor,
    one with more than ``high`` turns is unchanged, and in between the two are interpolated.

    Args:
        frequencies: Radians per token (R/2,).
        factor: Ratio of the new to the training context (8 in LLaMA 3.1).
        low: Number of turns below which a frequency is divided by the whole factor (1).
        high: Number of turns above which it is unchanged (4).
        context: Number of tokens of the training context (8192).
    """
    turns = context * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # (R/2,), share of the unchanged frequency
    return frequencies * (kept + (1 - kept) / factor)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Returns ``x`` (B, H, T, C) with channel pairs (i, i + R/2) rotated by their angle.

    Channels from R on are unchanged.
    """
    width = rope.cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :width], rope), x[..., width:]), dim=-1)
    first, second = x.chunk(2, dim=-1)  # (B, H, T, R/2) each
    turned = torch.cat((-second, first), dim=-1)
    return (x * rope.cos + turned * rope.sin).to(x.dtype)


# ---- multi-head self-attention


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Returns (B, T, D) as (B, H, T, C)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Returns (B, H, T, C) as (B, T, D)."""
    return x.transpose(1, 2).flatten(-2)


class SelfAttention(nn.Module):
    """Self-attention; queries, keys and values share one matrix (in that order).

    With fewer heads of keys and values it is grouped-query attention (arXiv 2305.13245).

    Args:
        config: Shape and style.
        causal: Whether a token sees only itself and earlier tokens. Otherwise it sees all tokens,
            without window and cache.
    """

    def __init__(self, config: DecoderConfig, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.num_heads = config.num_heads
        self.window = config.window
        self.dropout = config.attention_dropout
        self.backend = config.attention_backend
        self.query_scale = 1.0
        """Factor on queries, in addition to 1/sqrt(C)."""
        width = config.num_heads * config.head_dim  # D, unless ``head_size`` is set
        shared = config.key_value_heads * config.head_dim
        self.widths = (width, shared, shared)
        """Rows of queries, keys and values in their matrix."""
        self.qkv = nn.Linear(config.dim, sum(self.widths), bias=config.projection_bias)
        self.out = OutputProjection(width, config.dim, bias=config.bias)
        self.q_norm = self.k_norm = None
        if config.norms_queries:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def project(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries (B, H, T, C), keys and values (B, G, T, C) of ``x`` (B, T, D).

        Queries and keys are normed, if configured, and rotated by ``rope``.
        """
        head_dim = self.widths[0] // self.num_heads
        parts = self.qkv(x).split(self.widths, dim=-1)
        q, k, v = (split_heads(part, part.shape[-1] // head_dim) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
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
            x: Normed input (B, T, D).
            rope: Rotation tables of these T positions.
            cache: Earlier keys and values, to which this call appends.
            key_bias: Additive bias of each key (B, N), including cached keys.
            mask: Bool, broadcastable to (B, H, T, N), in addition to causality. With a cache, the
                result of ``KVCache.mask``, which includes causality and window.
            value_scale: Factor on the values of these T tokens (B, T).
        """
        q, k, v = self.project(x, rope)
        if value_scale is not None:
            v = v * value_scale[:, None, :, None].to(v.dtype)  # (B, 1, T, 1) over heads, channels
        # a ragged cache's mask contains causality
        causal = self.causal and (cache is None or mask is None)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, G, N, C), the cached ones first
        heads = attend(
            q,
            k,
            v,
            causal=causal,
            window=self.window if causal else None,
            key_bias=key_bias,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            # training kernels do not suit decoding, with few queries, masks and any dtype
            backend=self.backend if cache is None else "auto",
        )
        return self.out(join_heads(heads))  # (B, H, T, C) -> (B, T, D)


# ---- feed-forward layers


class FeedForward(nn.Module):
    """GELU (GPT-2) or SwiGLU (arXiv 2002.05202) layer from (..., D) to (..., D).

    For swiglu the gate and the value share one matrix: its first half is the gate.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        width = config.hidden_dim * (2 if config.activation == "swiglu" else 1)
        self.up = nn.Linear(config.dim, width, bias=config.bias)
        self.down = OutputProjection(config.hidden_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output, same shape as ``x`` (..., D)."""
        hidden = self.up(x)  # (..., F), or (..., 2 F) with gate and value next to each other
        if self.activation == "swiglu":
            gate, value = hidden.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down(F.gelu(hidden, approximate=approximate))


# ---- the block


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); in parallel both read the same x."""

    def __init__(self, config: DecoderConfig, causal: bool = True) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config, causal)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.parallel = config.residual_in_parallel

    def forward(
        self,
        x: Tensor,
        *,
        rope: Rope | None = None,
        cache: LayerCache | None = None,
        key_bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the residual stream (B, T, D) after this block; arguments as SelfAttention's."""
        attended = self.attention(
            self.attention_norm(x), rope=rope, cache=cache, key_bias=key_bias, mask=mask
        )
        between = self.add(x, self.dropout(attended), "attention")
        read = x if self.parallel else between
        out = self.feed_forward(self.feed_forward_norm(read))
        return self.add(between, self.dropout(out), "feed_forward")

    def add(self, x: Tensor, out: Tensor, layer: str) -> Tensor:
        """Returns the residual stream with the output of ``attention`` or ``feed_forward``."""
        return x + out


# ---- reductions over groups of entries of the last axis


def segment_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns the sums (..., count) of the ``values`` (..., N) that share an ``index`` (..., N)."""
    return values.new_zeros(*values.shape[:-1], count).scatter_add(-1, index, values)


def segment_max(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns the maxima (..., count) of the float ``values`` of each group; -inf without any."""
    scatter = _import_torch_scatter() if _scatters(values) else None
    if scatter is not None:
        highest: Tensor = scatter.scatter_max(values, index, dim=-1, dim_size=count)[0]
        members = segment_sum(torch.ones_like(values), index, count)
        return highest.masked_fill(members == 0, -math.inf)
    empty = values.new_full((*values.shape[:-1], count), -math.inf)
    return empty.scatter_reduce(-1, index, values, "amax")


def segment_logsumexp(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns log(sum(exp(values))) (..., count) of each group; -inf without any.

    Args:
        values: Finite float (..., N).
        index: int64 (..., N), the group of each entry, in [0, count).
        count: Number of groups.
    """
    highest = segment_max(values.detach(), index, count)
    # every entry minus the maximum of its group: no exponential overflows
    shifted = (values - highest.gather(-1, index)).exp()
    return highest + segment_sum(shifted, index, count).log()


def _scatters(x: Tensor) -> bool:
    """Whether to use torch-scatter's maximum; on a CPU torch's is 4 to 7 times faster."""
    return x.is_cuda and not torch.compiler.is_compiling()


@functools.lru_cache(maxsize=1)
def _import_torch_scatter() -> Any:
    try:
        import torch_scatter
    except (ImportError, OSError):  # OSError: built for another torch
        return None
    return torch_scatter
