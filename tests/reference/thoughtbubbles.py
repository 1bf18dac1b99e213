"""Thoughtbubbles (arXiv 2510.00219) with lists of streams, one stream at a time.

A token is a list of streams, left to right, its original last; every number is a float64.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

LOWEST_LOG_SIGMOID = -20.0


@dataclass
class Stream:
    """One residual stream: its state (D,) and the logarithm of its cumulative score."""

    x: Tensor
    log_p: Tensor
    original: bool


@dataclass
class Candidate:
    """One of the 2 N actions of a fork layer: to fork, or to keep, one stream of one token."""

    token: int
    parent: Stream
    forks: bool
    log_p: Tensor

    @property
    def rank_score(self):
        """Eq. 4: keeping an original counts as the best there is."""
        if self.parent.original and not self.forks:
            return math.inf
        return self.log_p.item()


class Thoughtbubbles:
    """The forward pass of one row, from a network's weights.

    ``weights`` are float64 leaves by their name in the state dict; ``layers`` keeps, of the latest
    row, the streams after each fork layer, and ``borders`` the kappa-th score where one exists.
    """

    def __init__(self, state_dict, config, *, allocation="global_topk", thresholds=()):
        self.weights = {
            name: value.detach().double().clone().requires_grad_(value.is_floating_point())
            for name, value in state_dict.items()
            if value.is_floating_point()
        }
        self.config, self.allocation, self.thresholds = config, allocation, thresholds
        self.layers, self.borders = [], []

    # ---- the row

    def log_probs(self, tokens):
        embedding = self.weights["embedding.weight"]
        one = torch.zeros((), dtype=torch.float64)
        row = [[Stream(embedding[token], one, original=True)] for token in tokens]
        self.layers, self.borders = [], []
        for layer in range(self.config.num_layers):
            if layer in self.config.fork_layers:
                row = self.fork(row, sorted(self.config.fork_layers).index(layer))
                self.layers.append(row)
            row = self.block(row, layer)
        return torch.stack([self.output(streams) for streams in row])

    def output(self, streams):
        """Eq. 11, or the residuals weighted by P, decoded once."""
        if self.config.output_average == "residual_norm":
            total = sum(s.log_p.exp() for s in streams)
            return self.decode(sum(s.log_p.exp() * s.x for s in streams) / total).log()
        total = sum(s.log_p.exp() for s in streams)
        return (sum(s.log_p.exp() * self.decode(s.x) for s in streams) / total).log()

    def decode(self, x):
        """softmax(Dec(x)), the final norm included."""
        matrix = self.weights.get("head.weight", self.weights["embedding.weight"])
        return softmax(matrix @ self.norm(x, "norm"))

    # ---- forking (section 2.3)

    def fork(self, row, ordinal):
        """Eqs. 1 to 6: the row after the fork layer of this number."""
        candidates = [
            candidate
            for token, streams in enumerate(row)
            for stream in streams
            for candidate in self.candidates(token, stream, ordinal)
        ]
        chosen = self.survivors(candidates, len(row), ordinal)
        fresh = [[] for _ in row]
        for candidate in candidates:  # a fork comes in front of its parent
            if id(candidate) not in chosen:
                continue
            parent, x = candidate.parent, candidate.parent.x
            if candidate.forks:
                x = x + self.weights[f"forks.{ordinal}.fork_embedding"]
            original = parent.original and not candidate.forks
            fresh[candidate.token].append(Stream(x, candidate.log_p, original))
        return fresh

    def candidates(self, token, stream, ordinal):
        """Eqs. 1 to 3 in log space."""
        normed = self.norm(stream.x, f"forks.{ordinal}.norm")
        logits = self.weights[f"forks.{ordinal}.score.weight"] @ normed
        out = []
        for forks, logit in ((True, logits[0]), (False, logits[1])):
            log_sigmoid = -torch.log1p(torch.exp(-logit))
            log_sigmoid = torch.clamp(log_sigmoid, min=LOWEST_LOG_SIGMOID)
            out.append(Candidate(token, stream, forks, stream.log_p + log_sigmoid))
        return out

    def survivors(self, candidates, num_tokens, ordinal):
        """The ids of the candidates that stay."""
        if self.allocation == "threshold":
            threshold = self.thresholds[ordinal]
            return {id(c) for c in candidates if c.rank_score > threshold}
        if self.allocation == "window_topk":
            return {id(c) for c in candidates if self.passes_window(c, candidates)}
        kappa = min(self.kappa(num_tokens), len(candidates))
        best = sorted(candidates, key=lambda c: -c.rank_score)
        competing = kappa < len(candidates)
        self.borders.append(best[kappa - 1].rank_score if competing else -math.inf)
        return {id(c) for c in best[:kappa]}

    def passes_window(self, candidate, candidates):
        """Rank among the candidates of tokens i - w + 1 .. i at most ceil(r w)."""
        window = self.config.allocation_window
        rivals = [c for c in candidates if candidate.token - window < c.token <= candidate.token]
        rank = 1 + sum(rival.rank_score > candidate.rank_score for rival in rivals)
        return rank <= math.ceil(self.ratio() * window)

    def ratio(self):
        """Streams per token, r = kappa / L, without rounding."""
        kappa = str(self.config.kappa)
        if kappa.endswith("L"):
            return Fraction(kappa[:-1])
        return Fraction(kappa) / self.config.block_size

    def kappa(self, num_tokens):
        """The budget of a row (appendix E.1); originals always fit."""
        length = num_tokens if self.config.budget == "dynamic" else self.config.block_size
        return max(num_tokens, math.ceil(self.ratio() * length))

    # ---- blocks (section 2.4)

    def block(self, row, layer):
        """Eqs. 9 and 10."""
        name = f"blocks.{layer}"
        streams = [stream for token in row for stream in token]
        normed = [self.norm(s.x, f"{name}.attention_norm") for s in streams]
        writes = self.attention(normed, [s.log_p for s in streams], positions(row), name)
        out = []
        for stream, write in zip(streams, writes, strict=True):
            p = stream.log_p.exp()
            x = stream.x + p * write
            x = x + p * self.feed_forward(self.norm(x, f"{name}.feed_forward_norm"), name)
            out.append(Stream(x, stream.log_p, stream.original))
        behind = iter(out)
        return [[next(behind) for _ in token] for token in row]

    def attention(self, normed, log_p, places, name):
        """Eq. 8 with the scale of its bias as the config says."""
        heads = self.config.num_heads
        width = self.config.dim // heads
        qkv = [self.linear(x, f"{name}.attention.qkv").chunk(3) for x in normed]
        out = [[] for _ in normed]
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            q = [self.rotate(one[0][part], at) for one, at in zip(qkv, places, strict=True)]
            k = [self.rotate(one[1][part], at) for one, at in zip(qkv, places, strict=True)]
            v = [one[2][part] * p.exp() for one, p in zip(qkv, log_p, strict=True)]
            keys, values, biases = torch.stack(k), torch.stack(v), self.bias() * torch.stack(log_p)
            for query in range(len(normed)):
                seen = slice(query + 1)
                scores = keys[seen] @ q[query] / math.sqrt(width) + biases[seen]
                out[query].append(softmax(scores) @ values[seen])
        return [self.linear(torch.cat(parts), f"{name}.attention.out") for parts in out]

    def bias(self):
        """What log P is multiplied with inside the softmax."""
        width = self.config.dim // self.config.num_heads
        return {
            "inv_sqrt_dhead": width**-0.5,
            "one": 1.0,
            "inv_sqrt_dmodel": self.config.dim**-0.5,
        }[self.config.bias_scale]

    def rotate(self, x, place):
        """Eq. 13: each pair (i, i + C/2) turned by its own angle."""
        half = len(x) // 2
        angles = [float(place) * self.config.rope_base ** (-2 * i / len(x)) for i in range(half)]
        cos = torch.tensor([math.cos(angle) for angle in angles], dtype=torch.float64)
        sin = torch.tensor([math.sin(angle) for angle in angles], dtype=torch.float64)
        left, right = x[:half], x[half:]
        return torch.cat((left * cos - right * sin, left * sin + right * cos))

    def feed_forward(self, x, name):
        """The MLP with the exact GELU."""
        hidden = self.linear(x, f"{name}.feed_forward.up")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        return self.linear(hidden, f"{name}.feed_forward.down")

    def linear(self, x, name):
        """W x + b."""
        return self.weights[f"{name}.weight"] @ x + self.weights[f"{name}.bias"]

    def norm(self, x, name):
        centred = x - x.mean()
        scaled = centred / (centred.square().mean() + self.config.norm_eps).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


class CopyN(Thoughtbubbles):
    """The copy-n baseline: each embedded token n times from the start, the right-most is read."""

    def log_probs(self, tokens):
        """The log-probabilities of every next token (T, V)."""
        embedding = self.weights["embedding.weight"]
        one = torch.zeros((), dtype=torch.float64)
        last = self.config.copies - 1
        row = [
            [Stream(embedding[token], one, copy == last) for copy in range(last + 1)]
            for token in tokens
        ]
        for layer in range(self.config.num_layers):
            row = self.block(row, layer)
        return torch.stack([self.decode(streams[-1].x).log() for streams in row])

    def rotate(self, x, place):
        """Copies stand at fractional positions, or all at their token's."""
        shared = self.config.copy_positions == "shared"
        return super().rotate(x, math.ceil(place) if shared else place)

    def bias(self):
        """Copies have no scores."""
        return 0.0


def positions(row):
    """k - p/c of every stream, exactly, with k from 1 and c streams of the token."""
    return [
        k - Fraction(p, len(streams))
        for k, streams in enumerate(row, start=1)
        for p in range(len(streams) - 1, -1, -1)
    ]


def softmax(scores):
    odds = (scores - scores.max().item()).exp()
    return odds / odds.sum()
