"""Thought Gestalt as the paper writes it: 67 slots a sentence, memory projected at every step.

One stream at a time, one sentence at a time, every slot computed, padding masked.
"""

import itertools
import math

import torch
from torch.nn import functional as F


def sinusoids(size, dim):
    table = torch.zeros(size, dim, dtype=torch.float64)
    for m in range(1, size + 1):
        for c in range(dim):
            angle = m / 10000 ** ((c - c % 2) / dim)
            table[m - 1, c] = math.cos(angle) if c % 2 else math.sin(angle)
    return table


class Literal:
    """A network's weights in the literal computation."""

    def __init__(self, network):
        self.network, self.config = network, network.config

    def losses(self, tokens, lengths, is_last):
        """Every target's negative log-likelihood, by (stream, sentence, slot)."""
        found = {}
        for row in range(len(tokens)):
            vectors, previous = [], None
            for t in range(tokens.shape[1]):
                if lengths[row, t] == 0:
                    break
                used = tokens[row, t, : lengths[row, t]].tolist()
                slots, mask = self.tensorize(used, bool(is_last[row, t]))
                states, vector = self.sentence(slots, mask, vectors, previous)
                logits = states @ self.network.output_matrix.t()
                real = [slot for slot in range(len(slots)) if mask[slot]]
                for here, following in itertools.pairwise(real):
                    loss = F.cross_entropy(logits[here][None], torch.tensor([slots[following]]))
                    found[row, t, real.index(here)] = loss
                if self.config.memory != "none":
                    written = vector.detach() if self.config.memory == "detached" else vector
                    previous = written
                    vectors = [*vectors, written][-self.config.memory_size :]
        return found

    def tensorize(self, used, last):
        """[BOS, w_1 .. w_n, PAD .., EOD or PAD, EOS] and which slots are no padding."""
        size = self.config.block_size
        head, tail = (used[:-2], used[-2:]) if last else (used[:-1], used[-1:])
        slots = [*head, *[0] * (size - len(used)), *tail]
        mask = [True] * len(head) + [False] * (size - len(used)) + [True] * len(tail)
        return slots, mask

    def sentence(self, slots, mask, vectors, previous):
        net, config = self.network, self.config
        x = net.embedding.weight[slots] + net.position.weight
        if config.context_seeding and previous is not None:
            x = torch.cat((previous[None], x[1:]))
        before = 0
        if config.memory == "in_context" and vectors:
            before = len(vectors)
            prefix = torch.stack(vectors) + sinusoids(before, config.dim)
            x, mask = torch.cat((prefix, x)), [True] * before + mask
        vector = None
        for index, block in enumerate(net.blocks):
            x = self.block(block, x, mask, vectors, index + 1)
            if index + 1 == config.sentence_layer and net.sentence_head is not None:
                vector = net.sentence_head.layers(x[-1])
        return net.norm(x[before:]), vector

    def block(self, block, x, mask, vectors, layer):
        config = self.config
        reads = config.memory in ("differentiable", "detached") and (
            config.layer_type != "alternate" or layer % 2 == 0
        )
        looks = config.layer_type != "alternate" or not reads
        start = x
        if looks:
            x = x + self.self_attention(block.attention, block.attention_norm(x), mask)
        if reads and vectors:
            if config.layer_type == "parallel":
                h = block.attention_norm(start)
            else:
                h = block.memory_norm(x)
            x = x + self.cross_attention(block.memory_attention, h, torch.stack(vectors))
        return x + block.feed_forward(block.feed_forward_norm(x))

    def self_attention(self, attention, h, mask):
        q, k, v = attention.qkv(h).chunk(3, dim=-1)
        slots = torch.arange(len(h))
        seen = (slots[None] <= slots[:, None]) & torch.tensor(mask)[None]
        seen |= torch.eye(len(h), dtype=torch.bool)  # padding looks at itself; nobody reads it
        return attention.out(self.heads(q, k, v, seen))

    def cross_attention(self, attention, h, memory):
        keys = attention.key(memory + sinusoids(len(memory), self.config.dim))
        read = self.heads(attention.query(h), keys, attention.value(memory), None)
        return attention.gate[0] * attention.out(read)

    def heads(self, q, k, v, seen):
        out, width = [], self.config.dim // self.config.num_heads
        for head in range(self.config.num_heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].t() / math.sqrt(width)
            if seen is not None:
                scores = scores.masked_fill(~seen, -math.inf)
            out.append(scores.softmax(dim=-1) @ v[:, part])
        return torch.cat(out, dim=-1)
