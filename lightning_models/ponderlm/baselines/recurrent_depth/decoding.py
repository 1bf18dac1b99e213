"""Reading token by token: each for the recurrences it needs, and what it leaves in the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.output_layer import logits
from lightning_models.ponderlm.baselines.recurrent_depth.exits import ExitRule
from lightning_models.ponderlm.baselines.recurrent_depth.network import RecurrentNetwork


class RecurrentCache(KVCache):
    """Keys and values of every cached recurrence, prelude and coda; and how deep tokens went."""

    def __init__(self, network: RecurrentNetwork, batch: int, capacity: int) -> None:
        empty = network.new_cache(batch, capacity)
        super().__init__(len(empty.layers), batch, capacity, empty.lengths.device)
        most = network.config.thinking_steps + 1
        self.recurrences = torch.full((batch, capacity), most, device=empty.lengths.device)
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
    going = torch.arange(len(tokens), device=tokens.device)  # of the n rows
    index = going if rows is None else rows
    with cache.only(rows):
        now = entered = network.enter(tokens[:, None], cache)
        s = last = network.first_state(entered)  # (n, 1, D)
    rule, taken = ExitRule(shape) if shape.exits_early else None, torch.zeros_like(tokens)
    each, read, steps = every_depth or shape.reads_logits, torch.zeros_like(last), []
    for number in range(config.thinking_steps + 1):
        with cache.only(rows):
            seen = _visible(cache, now.mask, number) if shape.cache_lookup == "skip" else now.mask
            before, s = s, network.step(s, now._replace(mask=seen), number)
            out = network.read_out(s, now) if each else None
        if out is not None:
            read = read.to(out.dtype).index_copy(0, going, out)
            steps.append(read[:, 0])
        ends = number == config.thinking_steps
        if rule is None and not ends:
            continue
        leaves = torch.ones_like(going, dtype=torch.bool)
        if rule is not None and not ends:
            leaves = _leaving(network, rule, before, s, out)
        last = last.to(s.dtype).index_copy(0, going[leaves], s[leaves])
        taken = taken.index_fill(0, going[leaves], number + 1)
        staying = (~leaves).nonzero()[:, 0]
        if not len(staying):
            break
        if rule is not None and len(staying) < len(going):
            rule.keep(~leaves)
            going, s, now = going[staying], s[staying], now.rows(staying)
            rows = index[going]
    rows = None if len(index) == len(cache.lengths) else index
    if not each:
        with cache.only(rows):
            read = network.read_out(last, entered)
    leave_entries(network, cache, index, cache.lengths[index], taken)
    cache.advance(1 if rows is None else torch.zeros_like(cache.lengths).index_fill(0, rows, 1))
    steps += steps[-1:] * (config.thinking_steps + 1 - len(steps))
    return Read(read[:, 0], taken, torch.stack(steps, dim=1) if every_depth else None)


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
    network: RecurrentNetwork, cache: RecurrentCache, rows: Tensor, positions: Tensor, taken: Tensor
) -> None:
    """Fills the slots of tokens as ``cache_lookup`` says.

    The cache holds the entries of the recurrences, ``taken``, that each token took; rows, positions
    and ``taken`` are int64 (N,).
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

    Tokens after a row's length (B,) are not read, and zero in the result. Other arguments are those
    of ``read_token``, with an empty cache.
    """
    whole: list[Tensor] = []
    if not bool(lengths.any()):
        states = network.embedding.weight.new_zeros(*tokens.shape, network.config.dim)
        depths = states[:, :, None].expand(-1, -1, network.config.thinking_steps + 1, -1)
        return Read(states, torch.zeros_like(tokens), depths if every_depth else None)
    for place in range(max(lengths.tolist(), default=0)):
        rows = (lengths > place).nonzero()[:, 0]
        chosen = None if len(rows) == len(tokens) else rows
        done = read_token(network, cache, tokens[rows, place], chosen, every_depth)
        parts = [part for part in done if part is not None]
        whole = whole or [part.new_zeros(*tokens.shape, *part.shape[1:]) for part in parts]
        for values, part in zip(whole, parts, strict=True):
            values[rows, place] = part
    return Read(whole[0], whole[1], whole[2] if every_depth else None)
