"""The output layer with all logits at once, one target at a time."""

import torch


def log_probs(h, weight, targets):
    """The log p(target) of each position in float64, 0 where the target is -100."""
    logits = h.double().reshape(-1, h.shape[-1]) @ weight.double().t()
    out = []
    for row, target in zip(logits, targets.reshape(-1).tolist(), strict=True):
        if target == -100:
            out.append(row.sum() * 0)
        else:
            out.append(row[target] - row.exp().sum().log())
    return torch.stack(out).view(targets.shape)


def cross_entropy(h, weight, targets, weights=None):
    """The sum of -log p(target), each times its weight, in float64."""
    losses = -log_probs(h, weight, targets)
    return (losses if weights is None else losses * weights.double()).sum()
