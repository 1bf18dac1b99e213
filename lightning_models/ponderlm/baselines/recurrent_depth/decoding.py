"""Decoding token by token with early exits, and the cache entries of exited tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.output_layer import logits
from lightning_models.ponderlm.baselines.recurrent_depth.exits import ExitRule
from lightning_models.ponderlm.baselines.recurrent_depth.network import RecurrentNetwork


class RecurrentCache(KVCache):
    """Keys and values of cached recurrences, prelude and coda, with the depth of each token."""

    def __init__(self, network: RecurrentNetwork, batch: int, capacity: int) -> None:
        empty = network.new_cache(batch, capacity)
        super().__init__(len(empty.layers), batch, capacity, empty.lengths.device)
        maximum = network.config.thinking_steps + 1
        self.recurrences = torch.full((batch, capacity), maximum, device=empty.lengths.device)
        """Recurrences of each token, int64 (B, capacity), K + 1 in empty entries."""

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.recurrences = self.recurrences[rows]


class Read(NamedTuple):
    """Result of reading one token of each of n rows."""

    states: Tensor
    """Normed states (n, D) that predict."""
    recurrences: Tensor
    """Number of recurrences of each token, int64 (n,)."""
    by_depth: Tensor | None
    """States (n, K+1, D) read out after each recurrence; after the exit, the last state repeats."""
    scores: Tensor | None = None
    """Next-token logits (n, V) of rows that exited early by a rule that reads them, otherwise 0."""


def read_token(
    network: RecurrentNetwork,
    cache: RecurrentCache,
    tokens: Tensor,
    rows: Tensor | None = None,
    every_depth: bool = False,
) -> Read:
    """Reads a token of each row until its exit; exited rows are not computed any further.

    Args:
        network: The network in eval mode.
        cache: Cache, updated in place; the rows that are read advance by one token.
        tokens: int64 (n,).
        rows: Rows of the cache to read, int64 (n,). Defaults to all.
        every_depth: Whether to return ``by_depth``.
    """
    config, shape = network.config, network.config.recurrence
    active = torch.arange(len(tokens), device=tokens.device)  # indices of the n rows still running
    index = active if rows is None else rows
    with cache.only(rows):
        current = entered = network.enter(tokens[:, None], cache)
        s = last = network.first_state(entered)  # (n, 1, D)
    rule, recurrences = ExitRule(shape) if shape.exits_early else None, torch.zeros_like(tokens)
    needs_output, read, steps = every_depth or shape.reads_logits, torch.zeros_like(last), []
    known: Tensor | None = None
    for recurrence in range(config.thinking_steps + 1):
        with cache.only(rows):
            mask = current.mask
            if shape.cache_lookup == "skip":
                mask = _visible(cache, mask, recurrence)
            before, s = s, network.step(s, current._replace(mask=mask), recurrence)
            out = network.read_out(s, current) if needs_output else None
        if out is not None:
            read = read.to(out.dtype).index_copy(0, active, out)  # exited rows keep their last one
            steps.append(read[:, 0])
        ends = recurrence == config.thinking_steps
        if rule is None and not ends:
            continue
        exits = torch.ones_like(active, dtype=torch.bool)
        if rule is not None and not ends:
            exits, scores = _exits(network, rule, before, s, out)
            if scores is not None:
                known = scores.new_zeros(len(tokens), scores.shape[1]) if known is None else known
                known[active[exits]] = scores[exits]
        last = last.to(s.dtype).index_copy(0, active[exits], s[exits])
        recurrences = recurrences.index_fill(0, active[exits], recurrence + 1)
        remaining = (~exits).nonzero()[:, 0]
        if not len(remaining):
            break
        if rule is not None and len(remaining) < len(active):
            # shrink the batch to the remaining rows
            rule.keep(~exits)
            active, s, current = active[remaining], s[remaining], current.rows(remaining)
            rows = index[active]
    rows = None if len(index) == len(cache.lengths) else index
    if not needs_output:
        with cache.only(rows):
            read = network.read_out(last, entered)  # (n, 1, D), all rows at once
    leave_entries(network, cache, index, cache.lengths[index], recurrences)
    cache.advance(1 if rows is None else torch.zeros_like(cache.lengths).index_fill(0, rows, 1))
    steps += steps[-1:] * (config.thinking_steps + 1 - len(steps))
    by_depth = torch.stack(steps, dim=1) if every_depth else None
    return Read(read[:, 0], recurrences, by_depth, known)


def _exits(
    network: RecurrentNetwork, rule: ExitRule, before: Tensor, after: Tensor, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the mask (n,) of exiting rows, and the logits (n, V) if the rule reads them.

    States are (n, 1, D), and so are their read-outs if any.
    """
    scores = gate = None
    if rule.shape.reads_logits:
        assert out is not None
        scores = logits(out[:, 0], network.output_matrix.to(out.dtype))
    if rule.shape.exit == "gate":
        gate = network.exit_logits(after[:, 0])
    real = None if scores is None else scores[:, : network.config.vocab_size]
    return rule(before[:, 0], after[:, 0], real, gate), scores


def _visible(cache: RecurrentCache, mask: Tensor | None, recurrence: int) -> Tensor:
    """Restricts ``mask`` to keys of tokens that took the recurrence, bool (n, 1, 1, N)."""
    recurrences = cache.recurrences if cache.rows is None else cache.recurrences[cache.rows]
    # the entry of the current token still has the default K + 1, so it is visible to itself
    deep = (recurrences[:, : cache.longest + 1] > recurrence)[:, None, None]
    return deep if mask is None else deep & mask


def leave_entries(
    network: RecurrentNetwork,
    cache: RecurrentCache,
    rows: Tensor,
    positions: Tensor,
    counts: Tensor,
) -> None:
    """Fills the cache slots of N tokens according to ``cache_lookup``.

    Args:
        network: The network.
        cache: Cache with the entries of the recurrences that the tokens took, updated in place.
        rows: Row of each token, int64 (N,).
        positions: Position of each token, int64 (N,).
        counts: Number of recurrences of each token, int64 (N,).
    """
    lookup, slots = network.config.recurrence.cache_lookup, network.slots
    cache.recurrences[rows, positions] = counts
    deepest = min(slots, max(counts.tolist(), default=0))
    for layers in zip(*(network.core_layers(cache, slot) for slot in range(slots)), strict=True):
        if lookup == "latest":
            for slot in range(int(counts.min()), slots):
                # An unwritten slot copies the previous one. In ascending order this propagates the
                # deepest entry to all later slots.
                unwritten = counts <= slot
                tokens = rows[unwritten], positions[unwritten]
                layers[slot].write(*tokens, *layers[slot - 1].read(*tokens))
        elif lookup in ("mean", "first"):
            entries = [layer.read(rows, positions) for layer in layers[:deepest]]
            entry = entries[0]
            if lookup == "mean":
                # (slots, N, 1, 1): equal weights on the slots that the token has written
                share = torch.stack([counts > slot for slot in range(deepest)]).to(entry[0].dtype)
                share = (share / share.sum(dim=0))[..., None, None]
                k, v = (torch.stack(parts) for parts in zip(*entries, strict=True))
                entry = (share * k).sum(dim=0), (share * v).sum(dim=0)
            for layer in layers:
                layer.write(rows, positions, *entry)


def read_text(
    network: RecurrentNetwork,
    tokens: Tensor,
    lengths: Tensor,
    cache: RecurrentCache,
    every_depth: bool = False,
) -> Read:
    """Reads texts (B, T) token by token and returns a ``Read`` with a token dimension after rows.

    Padding after a row's length (B,) is not read and is zero in the result. The cache must be
    empty; see ``read_token`` for the other arguments.
    """
    result: list[Tensor] = []
    if not bool(lengths.any()):
        states = network.embedding.weight.new_zeros(*tokens.shape, network.config.dim)
        depths = states[:, :, None].expand(-1, -1, network.config.thinking_steps + 1, -1)
        return Read(states, torch.zeros_like(tokens), depths if every_depth else None)
    for index in range(max(lengths.tolist(), default=0)):
        rows = (lengths > index).nonzero()[:, 0]  # (n,), rows with a token at this index
        chosen = None if len(rows) == len(tokens) else rows
        read = read_token(network, cache, tokens[rows, index], chosen, every_depth)
        parts = [part for part in read[:3] if part is not None]
        # (B, T, ...) from the first token's (n, ...), zero in padding
        result = result or [part.new_zeros(*tokens.shape, *part.shape[1:]) for part in parts]
        for values, part in zip(result, parts, strict=True):
            values[rows, index] = part
    return Read(result[0], result[1], result[2] if every_depth else None)
