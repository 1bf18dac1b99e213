"""Scaled dot-product attention with a per-key bias: one function, four kernels.

All attention of the project goes through :func:`attend`. Its ``key_bias`` is an additive,
differentiable bias per key, which is encoded in channels appended to queries and keys, so that
plain causal kernels can compute attention attenuated by learned scores.
"""

import functools
import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.layers.recording import record, wants

Backend = Literal["auto", "math", "sdpa", "flex", "flash_attn"]
FLEX_CHANNELS = 16
"""Minimum number of channels of a head that FlexAttention supports on a GPU."""


class _Rules(NamedTuple):
    """Arguments of every kernel except q, k and v."""

    causal: bool
    window: int | None
    mask: Tensor | None
    dropout: float
    scale: float


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    key_bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Returns softmax(q k^T / sqrt(C) + key_bias) v, shape (B, H, T, C).

    The output of a query without visible keys is zero. With fewer queries than keys, the last query
    is aligned with the last key (the position of a query is N - T + its index). Each of G heads of
    keys is read by H / G neighbouring heads of queries. Records ``attention``: ``weights``
    (B, H, T, N) before dropout.

    Args:
        q: Queries (B, H, T, C).
        k: Keys (B, G, N, C), where G divides H.
        v: Values (B, G, N, C).
        causal: Whether a query sees only keys at its position and before.
        window: With ``causal``, the number of latest keys that a query sees, including its own.
        key_bias: Finite bias (B, N), added to the scores of each key for all heads and queries.
        mask: Bool, broadcastable to (B, H, T, N), true for visible keys.
        dropout: Probability of dropping an attention weight.
        backend: Kernel. ``auto`` is sdpa, or for windows on a GPU flash_attn or flex if they
            support the arguments.

    Raises:
        ValueError: If the chosen backend does not support the arguments; the message names one
            that does.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend ({backend}) is not one of {', '.join(get_args(Backend))}")
    if window is not None and not causal:
        raise ValueError(f"window ({window}) needs causal=True")
    if window is not None and window >= k.shape[2]:
        window = None
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]  # leading dimensions of 1, up to four
    q, k, v = (_autocast(x) for x in (q, k, v))
    if backend == "auto":
        backend = _choose(q, window, mask, dropout)
    if k.shape[2] == 0 or wants("attention"):
        backend = "math"  # no keys: zeros, with zero gradients for q, k and v
    if backend in ("math", "flex"):  # the other kernels share heads themselves
        k, v = (_for_each_query_head(x, q.shape[1]) for x in (k, v))
    channels = q.shape[-1]
    rules = _Rules(causal, window, mask, dropout, 1 / math.sqrt(channels))
    if backend == "math":
        return _math(q, k, v, rules, key_bias)
    if key_bias is not None and backend == "sdpa" and _is_single(q, key_bias):
        return _sdpa(q, k, v, rules, key_bias)
    if key_bias is not None:
        q, k, v = append_bias_channels(q, k, v, key_bias)
    kernel = {"sdpa": _sdpa, "flex": _flex, "flash_attn": _flash}[backend]
    return kernel(q, k, v, rules)[..., :channels]


def append_bias_channels(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v widened so that q k^T / sqrt(C) includes ``key_bias`` (B, N).

    Queries get ones, keys sqrt(C) * bias. In half precision two channels hold the rounded bias and
    its remainder, which reduces the relative error from 2^-8 to 2^-16. The width is padded to a
    multiple of 8 for flash kernels, including values, since values narrower than keys are three
    times slower on CPU.
    """
    channels = q.shape[-1]
    bias = math.sqrt(channels) * key_bias.to(torch.float32)  # (B, N), undoes the later 1/sqrt(C)
    parts = [bias.to(k.dtype)]
    if k.dtype in (torch.bfloat16, torch.float16):
        parts.append((bias - parts[0].to(torch.float32)).to(k.dtype))
    elif k.dtype == torch.float64:
        parts = [math.sqrt(channels) * key_bias.to(torch.float64)]
    fill = -(channels + len(parts)) % 8
    # (B, H, N, 1 or 2)
    columns = torch.stack(parts, dim=-1)[:, None].expand(-1, k.shape[1], -1, -1)
    k = torch.cat((k, F.pad(columns, (0, fill))), dim=-1)
    ones = q.new_ones(1, 1, 1, len(parts)).expand(*q.shape[:3], -1)
    q = torch.cat((q, F.pad(ones, (0, fill))), dim=-1)
    return q, k, F.pad(v, (0, len(parts) + fill))


def _autocast(x: Tensor) -> Tensor:
    """Casts ``x`` to the dtype of autocast, so that the kernel can be chosen by dtype."""
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _for_each_query_head(x: Tensor, num_heads: int) -> Tensor:
    """Repeats keys or values (B, G, N, C) to (B, H, N, C), each head H / G times."""
    if x.shape[1] == num_heads:
        return x
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _choose(q: Tensor, window: int | None, mask: Tensor | None, dropout: float) -> Backend:
    if window is None or not _on_gpu(q):
        return "sdpa"
    half = q.dtype in (torch.bfloat16, torch.float16)
    if half and mask is None and _has_flash():
        return "flash_attn"
    # A single query on a cache would need a new block mask for each length of the cache.
    suits_flex = q.shape[-1] >= FLEX_CHANNELS and q.shape[2] > 1
    return "flex" if suits_flex and not dropout else "sdpa"


def _allowed(q: Tensor, k: Tensor, rules: _Rules) -> Tensor | None:
    """Returns the combined mask of causality, window and mask, or None if all keys are visible."""
    num_queries, num_keys, window = q.shape[2], k.shape[2], rules.window
    if not rules.causal or (num_queries == 1 and window is None):
        return rules.mask
    query = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]  # (T, 1)
    key = torch.arange(num_keys, device=q.device)  # (N,)
    visible = key <= query if window is None else (key <= query) & (key > query - window)
    return visible if rules.mask is None else visible & rules.mask


def _math(q: Tensor, k: Tensor, v: Tensor, rules: _Rules, key_bias: Tensor | None) -> Tensor:
    """Reference implementation with explicit scores and softmax in float32 or better."""
    acc_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        scores = q.to(acc_dtype) @ k.to(acc_dtype).transpose(-1, -2) * rules.scale  # (B, H, T, N)
    if key_bias is not None:
        scores = scores + key_bias[:, None, None, :].to(acc_dtype)
    allowed = _allowed(q, k, rules)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
        # a softmax over no keys is nan; the output of such queries is zero
        empty = ~allowed.any(dim=-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    else:
        weights = scores.softmax(dim=-1)
    record("attention", weights=weights)
    return F.dropout(weights, rules.dropout).to(v.dtype) @ v


def _is_single(q: Tensor, key_bias: Tensor) -> bool:
    """Whether one query a row reads cached keys, where a mask is cheaper than copying the cache."""
    graph = torch.is_grad_enabled() and key_bias.requires_grad
    return q.shape[2] == 1 and q.dtype in (torch.float32, torch.float64) and not graph


def _sdpa(q: Tensor, k: Tensor, v: Tensor, rules: _Rules, key_bias: Tensor | None = None) -> Tensor:
    square = q.shape[2] == k.shape[2]
    plain = rules.causal and square and rules.window is None and rules.mask is None
    mask = None if plain else _allowed(q, k, rules)
    if key_bias is not None:
        bias = key_bias[:, None, None].to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
        plain = False  # a single query sees all keys that the mask leaves
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=plain,
        dropout_p=rules.dropout,
        scale=rules.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _flex(q: Tensor, k: Tensor, v: Tensor, rules: _Rules) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if rules.dropout:
        raise ValueError(
            f"backend flex has no dropout ({rules.dropout}); set attention_dropout=0 or sdpa"
        )
    if not _on_gpu(q) and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("backend flex has no backward pass on CPU; use sdpa or math there")
    if _on_gpu(q) and q.shape[-1] < FLEX_CHANNELS:
        raise ValueError(
            f"backend flex needs heads of {FLEX_CHANNELS} channels on a GPU, not {q.shape[-1]}; "
            "use sdpa, or fewer heads"
        )
    compiling = torch.compiler.is_compiling()
    shape = q.shape[2], k.shape[2], rules.causal, rules.window, q.device
    if rules.mask is not None:
        block_mask = _block_mask(*shape, rules.mask.expand(-1, -1, q.shape[2], k.shape[2]))
    elif compiling:
        block_mask = _block_mask(*shape)
    else:
        with torch.inference_mode(False):  # a later training step may reuse the cached mask
            block_mask = _cached_block_mask(*shape)
    # A compiled network includes the kernel; a nested torch.compile would break its graph.
    kernel = _compiled_flex() if _on_gpu(q) and not compiling else flex_attention
    return kernel(q, k, v, block_mask=block_mask, scale=rules.scale)


def _block_mask(
    num_queries: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    device: torch.device,
    mask: Tensor | None = None,
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    offset = num_keys - num_queries

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Returns whether query i sees key j (bool scalar) in row b and head h."""
        visible = j <= i + offset if causal else j >= 0
        if window is not None:
            visible = visible & (j > i + offset - window)
        if mask is not None:
            visible = visible & mask[b % mask.shape[0], h % mask.shape[1], i, j]
        return visible

    rows = None if mask is None else mask.shape[0]
    heads = None if mask is None else mask.shape[1]
    return create_block_mask(allowed, rows, heads, num_queries, num_keys, device=str(device))


_cached_block_mask = functools.lru_cache(maxsize=32)(_block_mask)


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@torch.compiler.assume_constant_result  # a failing import would break the graph
def _has_flash() -> bool:
    return _found_flash()


@functools.lru_cache(maxsize=1)
def _found_flash() -> bool:
    return _flash_function() is not None


def _flash_function() -> Any:
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    return flash_attn_func


def _flash(q: Tensor, k: Tensor, v: Tensor, rules: _Rules) -> Tensor:
    function = _flash_function()
    if function is None:
        raise ValueError("backend flash_attn needs the package flash-attn; install it or use sdpa")
    if rules.mask is not None:
        raise ValueError("backend flash_attn takes no mask; use sdpa or flex")
    if not _on_gpu(q) or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"backend flash_attn needs half precision on a GPU, not {q.dtype} on {q.device}; "
            "use --trainer.precision bf16-mixed or backend sdpa"
        )
    # flash_attn has tokens before heads: (B, T, H, C)
    out = function(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dropout_p=rules.dropout,
        softmax_scale=rules.scale,
        causal=rules.causal,
        window_size=(-1, -1) if rules.window is None else (rules.window - 1, 0),
    )
    return out.transpose(1, 2)
