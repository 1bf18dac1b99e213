"""Attention one query at a time, one key at a time."""

import math

import torch


def sees(query, key, num_queries, num_keys, causal, window):
    """Whether a query may look at a key: the last query stands at the last key."""
    position = num_keys - num_queries + query
    if causal and key > position:
        return False
    return window is None or key > position - window


def attend_by_loops(q, k, v, *, causal=False, window=None, key_bias=None, mask=None):
    """Softmax(q k / sqrt(C) + key_bias) v in float64; zeros for a query that sees nothing."""
    q, k, v = q.double(), k.double(), v.double()
    (B, H, T, C), N = q.shape, k.shape[2]
    if mask is not None:
        mask = mask.expand(B, H, T, N)
    rows = [
        attend_one(b, h, t, q, k, v, key_bias, mask, causal, window)
        for b in range(B)
        for h in range(H)
        for t in range(T)
    ]
    return torch.stack(rows).view(B, H, T, C)


def attend_one(b, h, t, q, k, v, key_bias, mask, causal, window):
    """The output (C,) of one query of one head of one row."""
    scores, values = [], []
    for n in range(k.shape[2]):
        allowed = sees(t, n, q.shape[2], k.shape[2], causal, window)
        if not allowed or (mask is not None and not mask[b, h, t, n]):
            continue
        score = (q[b, h, t] * k[b, h, n]).sum() / math.sqrt(q.shape[-1])
        scores.append(score if key_bias is None else score + key_bias[b, n].double())
        values.append(v[b, h, n])
    if not scores:
        return torch.zeros_like(q[b, h, t])
    highest = max(score.item() for score in scores)
    weights = [(score - highest).exp() for score in scores]
    total = sum(weights)
    return sum(weight / total * value for weight, value in zip(weights, values, strict=True))
