"""The Qwen2 causal language model as its formulas say, in float64, one row at a time.

Weights are a dict by the names in the state dict of ``transformers``' ``Qwen2ForCausalLM``. Without
``lm_head.weight`` the head is the embedding (``tie_word_embeddings``). Every query attends to the
rows up to its own, or the last ``window`` of them, one query at a time: no mask, no cache, no
batch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


class Shape(NamedTuple):
    """What the weights do not tell: see ``shape_of``."""

    layers: int
    heads: int
    kv_heads: int
    theta: float
    eps: float
    window: int | None = None


def shape_of(config: Any, window: int | None = None) -> Shape:
    """The ``Shape`` in a ``Qwen2Config`` of ``transformers``; a query sees ``window`` rows."""
    return Shape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        theta=config.rope_parameters["rope_theta"],
        eps=config.rms_norm_eps,
        window=window,
    )


def leaves(state_dict: Weights) -> dict[str, Tensor]:
    """Float64 copies that take gradients; two names of one tensor stay one tensor (tied heads)."""
    copies: dict[tuple, Tensor] = {}
    named = {}
    for name, value in state_dict.items():
        key = (value.data_ptr(), tuple(value.shape))
        if key not in copies:
            copies[key] = value.detach().double().clone().requires_grad_()
        named[name] = copies[key]
    return named


def embed(weights: Weights, tokens: Sequence[int]) -> Tensor:
    """Embeddings (N, D) of a list of ids; (0, D) of none."""
    table = weights["model.embed_tokens.weight"]
    if not tokens:
        return table[:0]
    return torch.stack([table[token] for token in tokens])


def head_matrix(weights: Weights) -> Tensor:
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def layers(weights: Weights, shape: Shape, x: Tensor, begin: int, stop: int) -> Tensor:
    """Rows (N, D) after layers begin, .., stop - 1 (counted from 0); no final norm.

    Row n has position n.
    """
    for index in range(begin, stop):
        x = decoder_layer(weights, shape, x, f"model.layers.{index}")
    return x


def decoder_layer(weights: Weights, shape: Shape, x: Tensor, name: str, first: int = 0) -> Tensor:
    """One layer on rows (N, D): x + attention(norm x), then x + mlp(norm x).

    Args:
        weights: They have ``{name}.self_attn.q_proj.weight`` and so on.
        shape: Heads, theta, eps.
        x: Inputs (N, D).
        name: The layer.
        first: Position of row 0; the others follow one by one. Scores depend on differences of
            positions alone, so no value of it changes the output beyond rounding.
    """
    normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], shape.eps)
    x = x + attention(weights, shape, normed, f"{name}.self_attn", first)
    normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], shape.eps)
    return x + swiglu(weights, normed, f"{name}.mlp")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight, over the last dimension."""
    return x / ((x * x).mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def linear(weights: Weights, x: Tensor, name: str) -> Tensor:
    """x W^T, and + b where the layer has a bias."""
    product = x @ weights[f"{name}.weight"].T
    return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product


def attention(weights: Weights, shape: Shape, x: Tensor, name: str, first: int) -> Tensor:
    """Causal self-attention (N, D); query head h reads key and value head h // (heads/kv_heads)."""
    q = split(linear(weights, x, f"{name}.q_proj"), shape.heads)  # (N, heads, C)
    k = split(linear(weights, x, f"{name}.k_proj"), shape.kv_heads)
    v = split(linear(weights, x, f"{name}.v_proj"), shape.kv_heads)
    q, k = rotate(q, first, shape.theta), rotate(k, first, shape.theta)
    read = [head // (shape.heads // shape.kv_heads) for head in range(shape.heads)]
    k, v = k[:, read], v[:, read]  # (N, heads, C)
    rows = []
    for n in range(len(x)):
        seen = slice(0 if shape.window is None else max(0, n + 1 - shape.window), n + 1)
        scores = (k[seen] * q[n]).sum(dim=-1) / math.sqrt(q.shape[-1])  # (rows, heads)
        odds = (scores - scores.max(dim=0).values.detach()).exp()
        rows.append(((odds / odds.sum(dim=0))[:, :, None] * v[seen]).sum(dim=0).flatten())
    return linear(weights, torch.stack(rows), f"{name}.o_proj")


def split(x: Tensor, heads: int) -> Tensor:
    """(N, heads * C) -> (N, heads, C)."""
    return x.reshape(len(x), heads, -1)


def rotate(x: Tensor, first: int, theta: float) -> Tensor:
    """Channels (i, i + C/2) of row n of (N, heads, C) turned by (first + n) theta^(-2 i / C)."""
    half = x.shape[-1] // 2
    speeds = [theta ** (-2 * i / x.shape[-1]) for i in range(half)]
    angles = [[[(first + n) * speed for speed in speeds]] for n in range(len(x))]  # (N, 1, C/2)
    turned = torch.tensor(angles, dtype=torch.float64)
    left, right = x[..., :half], x[..., half:]
    cos, sin = turned.cos(), turned.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def swiglu(weights: Weights, x: Tensor, name: str) -> Tensor:
    """W_down (silu(W_gate x) * W_up x)."""
    gate = linear(weights, x, f"{name}.gate_proj")
    value = gate / (1 + (-gate).exp()) * linear(weights, x, f"{name}.up_proj")
    return linear(weights, value, f"{name}.down_proj")


def final_norm(weights: Weights, shape: Shape, x: Tensor) -> Tensor:
    """The norm between the last layer and the head, on rows (N, D)."""
    return rms_norm(x, weights["model.norm.weight"], shape.eps)


def last_states(weights: Weights, shape: Shape, x: Tensor) -> Tensor:
    """Rows (N, D) after all layers and the final norm, of input rows (N, D)."""
    return final_norm(weights, shape, layers(weights, shape, x, 0, shape.layers))


def causal_lm(weights: Weights, shape: Shape, tokens: Sequence[int]) -> Tensor:
    """Logits (N, V) of a list of ids: row n predicts token n + 1."""
    return last_states(weights, shape, embed(weights, tokens)) @ head_matrix(weights).T


def bar(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """The logits (.., V) with those of ``ids`` at -inf: such an id is never predicted."""
    barred = torch.zeros(logits.shape[-1], dtype=torch.bool)
    barred[list(ids)] = True
    return logits.masked_fill(barred, -math.inf)


def log_prob(logits: Tensor, target: int) -> Tensor:
    """log softmax(logits)[target] of one row (V,), in nats."""
    highest = logits.max().item()
    return logits[target] - highest - (logits - highest).exp().sum().log()


def label_log_probs(logits: Tensor, labels: Sequence[int]) -> Tensor:
    """Log-probability of each label that is not -100, in order; ``labels[t]`` belongs to row t."""
    found = [log_prob(row, label) for row, label in zip(logits, labels, strict=True) if label >= 0]
    return torch.stack(found) if found else logits.new_zeros(0)
