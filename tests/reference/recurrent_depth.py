"""Recurrent depth (Huginn, arXiv 2502.05171; Ouro, arXiv 2510.25741) as its equations say, float64.

One row at a time, a list of token ids. Weights are a dict by their names in the network's state
dict; the numbers are a ``RecurrentDepthConfig``'s. A block sees earlier tokens through a dict
of position to (key, value): nothing is laid out in tensors of several tokens there.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference import ponderlm as decoder

# ---- blocks


def attention(weights, config, x, positions, seen, name):
    """Attends from tokens x (N, D) at ``positions``; ``seen``, by position, gets their (k, v)."""
    q, k, v = (x @ weights[f"{name}.qkv.weight"].T).chunk(3, dim=-1)
    channels = config.dim // config.num_heads
    parts = [slice(h * channels, (h + 1) * channels) for h in range(config.num_heads)]

    def turned(rows):
        heads = [decoder.rotate(rows[:, part], positions, config.rope_base) for part in parts]
        return torch.cat(heads, dim=-1)

    q, k = turned(q), turned(k)
    for row, position in enumerate(positions):
        seen[position] = k[row], v[row]
    outputs = []
    for row, position in enumerate(positions):
        visible = [seen[other] for other in sorted(seen) if other <= position]
        keys, values = (torch.stack(each) for each in zip(*visible, strict=True))
        heads = []
        for part in parts:
            scores = keys[:, part] @ q[row, part] / math.sqrt(channels)
            odds = (scores - scores.max().item()).exp()
            heads.append(odds / odds.sum() @ values[:, part])
        outputs.append(torch.cat(heads))
    return torch.stack(outputs) @ weights[f"{name}.out.weight"].T


def block(weights, config, x, positions, seen, name):
    """Pre-norm; Huginn: x <- n2(x + f(n1 x)); Ouro: x <- x + n2(f(n1 x))."""

    def norm(x, part):
        return decoder.norm(weights, config, x, f"{name}.{part}")

    def added(x, out, part):
        if config.norms == "pre":
            return x + out
        return norm(x + out, part) if config.norms == "huginn" else x + norm(out, part)

    normed = norm(x, "attention_norm")
    out = attention(weights, config, normed, positions, seen, f"{name}.attention")
    x = added(x, out, "attention_post_norm")
    out = decoder.swiglu(weights, norm(x, "feed_forward_norm"), f"{name}.feed_forward")
    return added(x, out, "feed_forward_post_norm")


def prelude(weights, config, tokens, positions, seen):
    """e = P(x); ``seen`` has a dict a block."""
    x = torch.stack([decoder.embed(weights, config, token) for token in tokens])
    for layer in range(config.prelude_layers):
        x = block(weights, config, x, positions, seen[layer], f"prelude.blocks.{layer}")
    return x


def core(weights, config, s, e, positions, seen):
    """s_i from s_(i-1); ``seen`` has a dict a block, of this recurrence."""
    if config.injection == "concat":
        s = torch.cat((s, e), dim=-1) @ weights["adapter.weight"].T
    elif config.injection == "add":
        s = s + e
    for layer in range(config.num_layers):
        s = block(weights, config, s, positions, seen[layer], f"blocks.{layer}")
    return decoder.norm(weights, config, s, "norm") if config.norms == "ouro" else s


def coda(weights, config, s, positions, seen):
    """Returns what the output matrix reads."""
    h = decoder.norm(weights, config, s, "norm") if config.norms == "huginn" else s
    for layer in range(config.coda_layers):
        h = block(weights, config, h, positions, seen[layer], f"coda.blocks.{layer}")
    if config.norms == "ouro" and config.coda_layers == 0:
        return h
    return decoder.norm(weights, config, h, "norm")


def fresh(layers):
    return [{} for _ in range(layers)]


def first_state(config, e, noise):
    if config.state == "embedding":
        return e
    return torch.zeros_like(e) if config.state == "zero" else config.state_std * noise.double()


# ---- a whole row at once


class Row(NamedTuple):
    """States s_0 to s_r, each (T, D), and what is read out of s_1 to s_r."""

    states: list[Tensor]
    read: list[Tensor]


def run(weights, config, tokens, recurrences, *, noise=None, trained=None):
    """r recurrences of a row; gradients flow through the last ``trained`` of them."""
    positions = list(range(len(tokens)))
    e = prelude(weights, config, tokens, positions, fresh(config.prelude_layers))
    states = [first_state(config, e, noise)]
    for number in range(1, recurrences + 1):
        s = core(weights, config, states[-1], e, positions, fresh(config.num_layers))
        cut = trained is not None and number <= recurrences - trained
        states.append(s.detach() if cut else s)
    read = [coda(weights, config, s, positions, fresh(config.coda_layers)) for s in states[1:]]
    return Row(states, read)


def losses(weights, h, targets):
    """-log p of each target (T,), 0 without one."""
    each = [
        decoder.cross_entropy(weights, state, target) if target >= 0 else state.sum() * 0
        for state, target in zip(h, targets, strict=True)
    ]
    return torch.stack(each)


# ---- the gate (Ouro, Sec. 3)


def exit_probability(weights, config, s):
    """lambda of a state (D,), by its normed value."""
    h = s if config.norms == "ouro" else decoder.norm(weights, config, s, "norm")
    return 1 / (1 + (-(weights["gate.weight"][0] @ h + weights["gate.bias"][0])).exp())


def exit_distribution(lambdas):
    """p_1..p_T: lambda_t S_(t-1), and S_(T-1) for the last."""
    p, survival = [], torch.ones((), dtype=torch.float64)
    for value in lambdas[:-1]:
        p.append(value * survival)
        survival = survival * (1 - value)
    return [*p, survival]


class GateLoss(NamedTuple):
    """Sums over targets: sum_t p_t L_t, H(p), stage II's loss."""

    expected: Tensor
    entropy: Tensor
    gain: Tensor


def gate_loss(weights, config, tokens, targets, recurrences):
    row = run(weights, config, tokens, recurrences)
    by_depth = [losses(weights, h, targets) for h in row.read]
    total = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
    for place, target in enumerate(targets):
        if target < 0:
            continue
        lambdas = [exit_probability(weights, config, s[place]) for s in row.states[1:]]
        p, own = exit_distribution(lambdas), [each[place] for each in by_depth]
        total[0] = total[0] + sum(a * b for a, b in zip(p, own, strict=True))
        total[1] = total[1] - sum(a * a.log() for a in p)
        for t in range(recurrences - 1):
            gain = max(0.0, own[t].item() - own[t + 1].item())
            stay = 1 / (1 + math.exp(-50 * (gain - 0.005)))
            each = -stay * (1 - lambdas[t]).log() - (1 - stay) * lambdas[t].log()
            total[2] = total[2] + each / recurrences
    return GateLoss(*total)


# ---- decoding token by token


class Decoded(NamedTuple):
    """Normed states (T, D) that predict, and the recurrences of each token."""

    read: Tensor
    taken: list[int]


def offered(config, entries, number):
    """The (k, v) that a token with ``entries`` of recurrences 1, 2, .. offers at ``number``."""
    how = config.cache_lookup
    if how == "skip":
        return entries[number - 1] if len(entries) >= number else None
    if how in ("first", "last"):
        return entries[0 if how == "first" else -1]
    if how == "mean":
        return tuple(sum(parts) / len(entries) for parts in zip(*entries, strict=True))
    if config.cache_slots is None:
        return entries[min(number, len(entries)) - 1]
    slot = (number - 1) % config.cache_slots
    own = [entry for index, entry in enumerate(entries) if index % config.cache_slots == slot]
    return own[-1] if own else entries[-1]


def decode(weights, config, tokens, most, *, noise=None):
    """Every token takes recurrences until its rule fires, or ``most``."""
    before = fresh(config.prelude_layers)
    after = fresh(config.coda_layers)
    entries = [[] for _ in range(config.num_layers)]  # by block, token and recurrence
    read, taken = [], []
    for place, token in enumerate(tokens):
        e = prelude(weights, config, [token], [place], before)
        s = first_state(config, e, None if noise is None else noise[place : place + 1])
        rule, own = Rule(weights, config), [[] for _ in entries]
        for number in range(1, most + 1):
            seen = []
            for layer in entries:
                kept = {j: offered(config, layer[j], number) for j in range(place)}
                seen.append({j: entry for j, entry in kept.items() if entry is not None})
            last, s = s, core(weights, config, s, e, [place], seen)
            for layer, block_seen in zip(own, seen, strict=True):
                layer.append(block_seen[place])
            h = coda(weights, config, s, [place], after)
            if rule.fires(last[0], s[0], h[0]):
                break
        for layer, mine in zip(entries, own, strict=True):
            layer.append(mine)
        read.append(h[0])
        taken.append(number)
    return Decoded(torch.stack(read), taken)


class Rule:
    """Huginn's criteria and Ouro's threshold, for one token."""

    def __init__(self, weights, config):
        self.weights, self.config = weights, config
        self.last, self.stable, self.survival = None, 0, 1.0

    def fires(self, before, after, h):
        config, q = self.config, self.config.exit_threshold
        if config.exit == "none":
            return False
        if config.exit == "latent":
            return ((after - before).norm() / after.norm()).item() < q
        if config.exit == "gate":
            self.survival *= 1 - exit_probability(self.weights, config, after).item()
            return 1 - self.survival >= q
        scores = decoder.logits(self.weights, h)[: config.vocab_size]
        odds = scores.exp() / scores.exp().sum()
        if config.exit == "argmax":
            best = odds.argmax().item()
            self.stable = self.stable + 1 if best == self.last else 0
            self.last = best
            return self.stable >= q
        if config.exit == "entropy":
            now, last = -(odds * odds.log()).sum().item(), self.last
            self.last = now
            return abs(now - (100.0 if last is None else last)) < q
        last = torch.full_like(odds, 1 / len(odds)) if self.last is None else self.last
        self.last = odds
        return (last * (last / odds).log()).sum().item() < q
