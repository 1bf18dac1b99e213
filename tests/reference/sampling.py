"""The distribution a token is sampled from, by sorting."""

import math


def distribution(logits, temperature=1.0, top_k=None, top_p=None):
    """The probability of each id, a list of floats: temperature first, then top-k, then top-p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[:top_k]
    odds = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in kept}
    total = sum(odds.values())
    if top_p is not None:
        nucleus, mass = [], 0.0
        for i in kept:
            nucleus.append(i)
            mass += odds[i] / total
            if mass >= top_p:
                break
        odds = {i: odds[i] for i in nucleus}
        total = sum(odds.values())
    return [odds.get(i, 0.0) / total for i in range(len(logits))]
