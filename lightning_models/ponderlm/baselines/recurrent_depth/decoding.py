"""Reading token by token: each for the recurrences it needs, and what it leaves in the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.output_layer import logits
from lightning_models.ponderlm.baselines.recurrent_depth.exits import ExitRule
from lightning_models.ponderlm.baselines.recurrent_depth.network import RecurrentNetwork


class RecurrentCache(KVCache):
    """Keys and values of every cached recurrence, prelude and coda; and how deep tokens went.

    Args:
        network: Says how many layers there are.
        batch: Number of rows.
        capacity: Tokens of a row at most.
    """

    def __init__(self, network: RecurrentNetwork, batch: int, capacity: int) -> None:
        empty = network.new_cache(batch, capacity)
        super().__init__(len(empty.layers), batch, capacity, empty.lengths.device)
        self.most = network.config.thinking_steps + 1
        self.recurrences = torch.full((batch, capacity), self.most, device=empty.lengths.device)
        """Recurrences of each token, int64 (B, capacity); the most where none is."""

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.recurrences = self.recurrences[rows]


class Read(NamedTuple):
    """One token of each of n rows."""

    states: Tensor
    """Normed states that predict (n, D)."""
    recurrences: Tensor
    """How many the token took, int64 (n,)."""
    by_depth: Tensor | None
    """States (n, K+1, D) read out after each recurrence, among tokens as deep as they went; after
    the exit, the last ones."""


def read_token(
    network: RecurrentNetwork,
    cache: RecurrentCache,
    tokens: Tensor,
    rows: Tensor | None = None,
    every_depth: bool = False,
) -> Read:
    """Reads a token of each row until its exit; rows that have exited cost nothing more.

    Args:
        network: In eval mode.
        cache: Changed in place; the rows that are read advance by one token.
        tokens: int64 (n,).
        rows: Rows of the cache that are read, int64 (n,); by default all.
        every_depth: Whether to return ``by_depth``.
    """
    config, shape = network.config, network.config.recurrence
    index = torch.arange(len(tokens), device=tokens.device) if rows is None else rows
    going, chosen = torch.arange(len(tokens), device=tokens.device), rows
    with cache.only(rows):
        entered = network.enter(tokens[:, None], cache)
        states = network.first_state(entered)  # (n, 1, D)
    rule = ExitRule(shape) if shape.exits_early else None
    each = every_depth or shape.reads_logits
    last, taken, s, now = states, torch.zeros_like(tokens), states, entered
    read, steps = torch.zeros_like(states), []
    for number in range(config.thinking_steps + 1):
        with cache.only(chosen):
            seen = _visible(cache, now.mask, number) if shape.cache_lookup == "skip" else now.mask
            before, s = s, network.step(s, now._replace(mask=seen), number)
            out = network.read_out(s, now) if each else None
        if out is not None:
            read = read.to(out.dtype).index_copy(0, going, out)
            steps.append(read[:, 0])
        ends = number == config.thinking_steps
        leaves = None if rule is None or ends else _leaving(network, rule, before, s, out)
        if ends or (leaves is not None and bool(leaves.any())):
            gone = going if leaves is None or ends else going[leaves]
            end = s if leaves is None or ends else s[leaves]
            last, taken = last.to(s.dtype).index_copy(0, gone, end), taken.clone()
            taken[gone] = number + 1
            if ends or leaves is None or bool(leaves.all()):
                break
            assert rule is not None
            rule.keep(~leaves)
            staying = (~leaves).nonzero()[:, 0]
            going, s, now = going[staying], s[staying], now.rows(staying)
            chosen = index[going]
    if not each:
        with cache.only(rows):
            read = network.read_out(last, entered)
    leave_entries(network, cache, index, cache.lengths[index], taken)
    cache.advance(1 if rows is None else torch.zeros_like(cache.lengths).index_fill(0, rows, 1))
    steps += steps[-1:] * (config.thinking_steps + 1 - len(steps))
    by_depth = torch.stack(steps, dim=1) if every_depth else None
    return Read(read[:, 0], taken, by_depth)


def _leaving(
    network: RecurrentNetwork, rule: ExitRule, before: Tensor, after: Tensor, out: Tensor | None
) -> Tensor:
    """Returns which rows exit, bool (n,), for states (n, 1, D) and, where read, their read-outs."""
    scores = gate = None
    if rule.shape.reads_logits:
        assert out is not None
        matrix = network.output_matrix[: network.config.vocab_size]
        scores = logits(out[:, 0], matrix.to(out.dtype))
    if rule.shape.exit == "gate":
        gate = network.exit_logits(after[:, 0])
    return rule(before[:, 0], after[:, 0], scores, gate)


def _visible(cache: RecurrentCache, mask: Tensor | None, number: int) -> Tensor:
    """Returns which keys took recurrence ``number`` too, bool (n, 1, 1, N), and ``mask`` allows."""
    recurrences = cache.recurrences if cache.rows is None else cache.recurrences[cache.rows]
    deep = (recurrences[:, : cache.longest + 1] > number)[:, None, None]
    return deep if mask is None else deep & mask


def leave_entries(
    network: RecurrentNetwork,
    cache: RecurrentCache,
    rows: Tensor,
    positions: Tensor,
    taken: Tensor,
) -> None:
    """Fills the slots of tokens as ``cache_lookup`` says.

    Args:
        network: Says how.
        cache: Holds the entries of the recurrences that the tokens took.
        rows: int64 (N,), of each token.
        positions: int64 (N,).
        taken: Recurrences, int64 (N,).
    """
    lookup, slots = network.config.recurrence.cache_lookup, network.slots
    cache.recurrences[rows, positions] = taken
    deepest = min(slots, max(taken.tolist(), default=0))
    for layers in zip(*(network.core_layers(cache, slot) for slot in range(slots)), strict=True):
        if lookup == "latest":
            for slot in range(int(taken.min()), slots):
                late = taken <= slot  # in order: what a slot lacks, the one before it has
                where = rows[late], positions[late]
                layers[slot].write(*where, *layers[slot - 1].read(*where))
        elif lookup in ("mean", "first"):
            entries = [layer.read(rows, positions) for layer in layers[:deepest]]
            mine = entries[0]
            if lookup == "mean":
                # (slots, N, 1, 1): slots that the token has written
                share = torch.stack([taken > slot for slot in range(deepest)]).to(mine[0].dtype)
                share = (share / share.sum(dim=0))[..., None, None]
                k, v = (torch.stack(parts) for parts in zip(*entries, strict=True))
                mine = (share * k).sum(dim=0), (share * v).sum(dim=0)
            for layer in layers:
                layer.write(rows, positions, *mine)


def read_text(
    network: RecurrentNetwork,
    tokens: Tensor,
    lengths: Tensor,
    cache: RecurrentCache,
    every_depth: bool = False,
) -> Read:
    """Reads texts (B, T) token by token: ``Read`` with a dimension of tokens after the rows.

    Args:
        network: In eval mode.
        cache: Empty; the tokens are added.
        tokens: int64, padded on the right.
        lengths: int64 (B,); what stands after them is not read, and zero in the result.
        every_depth: See ``read_token``.
    """
    shape = (*tokens.shape, network.config.dim)
    states, by_depth = network.embedding.weight.new_zeros(shape), None
    recurrences = torch.zeros_like(tokens)
    most = max(lengths.tolist(), default=0)
    for place in range(most):
        rows = (lengths > place).nonzero()[:, 0]
        chosen = None if len(rows) == len(tokens) else rows
        done = read_token(network, cache, tokens[rows, place], chosen, every_depth)
        states = states.to(done.states.dtype)
        states[rows, place], recurrences[rows, place] = done.states, done.recurrences
        if done.by_depth is not None:
            if by_depth is None:
                sizes = (*tokens.shape, *done.by_depth.shape[1:])
                by_depth = done.by_depth.new_zeros(sizes)
            by_depth[rows, place] = done.by_depth
    return Read(states, recurrences, by_depth)
