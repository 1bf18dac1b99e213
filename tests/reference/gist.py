"""GPT-2 under the gist mask, token by token: each reads a list of places, in float64."""

import math

import torch
from torch.nn import functional as F


def visible(tokens, place, eos):
    """The places that the token at ``place`` may see."""
    start = place  # of its own sentence
    while start > 0 and tokens[start - 1] != eos:
        start -= 1
    ends = [earlier for earlier in range(start) if tokens[earlier] == eos]
    return ends + list(range(start, place + 1))


class LiteralGist:
    """The weights of a float64 network with learned positions, in a loop over tokens."""

    def __init__(self, network, eos):
        self.network, self.eos = network, eos

    def log_probs(self, tokens):
        """Log-probabilities (T, V) after each of ``tokens`` (a list)."""
        net = self.network
        x = torch.stack(
            [net.embedding.weight[t] + net.position.weight[i] for i, t in enumerate(tokens)]
        )
        for block in net.blocks:
            x = x + self.attention(block.attention, block.attention_norm(x), tokens)
            x = x + block.feed_forward(block.feed_forward_norm(x))
        return (net.norm(x) @ net.output_matrix.t()).log_softmax(dim=-1)

    def losses(self, tokens, targets):
        """Negative log-likelihoods (T,) of targets, 0 where there is none."""
        places = torch.arange(len(tokens))
        known = torch.tensor([max(target, 0) for target in targets])
        losses = -self.log_probs(tokens)[places, known]
        return torch.where(torch.tensor(targets) >= 0, losses, 0.0)

    def attention(self, attention, h, tokens):
        heads = attention.num_heads
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in attention.qkv(h).chunk(3, dim=-1))
        rows = []
        for place in range(len(tokens)):
            seen = visible(tokens, place, self.eos)
            parts = []
            for head in range(heads):
                scores = k[seen, head] @ q[place, head] / math.sqrt(q.shape[-1])
                parts.append(F.softmax(scores, dim=0) @ v[seen, head])
            rows.append(torch.cat(parts))
        return attention.out(torch.stack(rows))
