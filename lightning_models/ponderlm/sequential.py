"""Sequential inference, slot by slot, with hard stopping (Sec. 3.3).

A step advances each row by one slot. After slot 0 the router determines the token's number of
steps; later slots are not computed and have no keys.
"""

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.ponderlm.network import Pondered, SlotNetwork
from lightning_models.ponderlm.router import Steps


class SlotCache:
    """Keys and values of the executed slots of rows that advance independently.

    Skipped slots have no entries, so rows differ in their number of entries.

    Args:
        kv: Empty KV cache.
        capacity: Maximum number of entries of a row.
        like: An embedding (B, D) with the dtype and device of the states.
        thinking_steps: K.
    """

    def __init__(self, kv: KVCache, capacity: int, reference: Tensor, thinking_steps: int) -> None:
        rows, device = len(reference), reference.device
        self.kv = kv
        self.bias: Tensor | None = None
        """Attention bias (B, capacity) of each entry as a key, or None if all are zero."""
        self._capacity = capacity
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        """Index of each row's current token."""
        self.slot = torch.zeros(rows, dtype=torch.int64, device=device)
        """Index of the next slot within the current token."""
        self.last = torch.full((rows,), thinking_steps, device=device)
        """Last step of the current token, known after slot 0."""
        self.state = torch.zeros_like(reference)
        """Post-norm output of the previous slot."""
        self.read_out = torch.zeros_like(reference)
        """Input of the output layer; with a router, the partial sum over steps so far."""
        self.steps: Steps | None = None
        """Step distribution of the current token, known after slot 0."""

    def add_bias(self, bias: Tensor) -> None:
        """Writes the bias (B, N) of the next N entries of each row."""
        self._write(self.kv.positions(bias.shape[1]), bias)

    def _write(self, positions: Tensor, bias: Tensor) -> None:
        if self.bias is None:
            self.bias = bias.new_zeros(len(bias), self._capacity)
        self.bias.scatter_(1, positions, bias)

    def keep(self, kept: Tensor, bias: Tensor | None) -> None:
        """Removes the entries that are not marked from the N entries just written.

        Args:
            kept: Bool (B, N), true for entries to keep.
            bias: Attention bias (B, N) of all N entries as keys.
        """
        positions = self.kv.positions(kept.shape[1])
        order = self.kv.keep(kept)  # (B, N), kept entries first
        if bias is not None:
            # reordered like the keys, with 0 after the kept entries
            self._write(positions, bias.where(kept, 0.0).gather(1, order))

    def key_bias(self, num_new: int) -> Tensor | None:
        """Returns the bias (B, N) of all entries, including ``num_new`` that follow."""
        return None if self.bias is None else self.bias[:, : self.kv.longest + num_new]

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.kv.select(rows)
        for name in ("token", "slot", "last", "state", "read_out"):
            setattr(self, name, getattr(self, name)[rows])
        if self.bias is not None:
            self.bias = self.bias[rows]
        if self.steps is not None:
            self.steps = Steps(*(part[rows] for part in self.steps))


def new_cache(network: SlotNetwork, rows: int, num_tokens: int) -> SlotCache:
    """Returns an empty cache with room for all slots of ``num_tokens`` tokens per row."""
    config, weight = network.config, network.embedding.weight
    capacity = num_tokens * (config.thinking_steps + 1)
    kv = KVCache(config.num_layers, rows, capacity, weight.device)
    reference = weight.new_zeros(rows, config.dim)
    return SlotCache(kv, capacity, reference, config.thinking_steps)


def advance(
    network: SlotNetwork, cache: SlotCache, tokens: Tensor, active: Tensor | None = None
) -> Tensor:
    """Computes the next slot of each row and returns the mask of completed tokens (B,) bool.

    ``cache.read_out`` holds the input of the output layer for completed tokens.

    Args:
        network: The network in eval mode.
        cache: Cache, updated in place.
        tokens: (B,) int64, current token of each row.
        active: (B,) bool, rows to advance. Defaults to all; the others keep their state.
    """
    first = cache.slot == 0  # (B,), slot 0 reads the embedding, others the previous output
    x = torch.where(first[:, None], network.embed(tokens, tokens), cache.state)  # (B, D)
    h = _slot(network, cache, x.to(cache.state.dtype))  # (B, D)
    if active is None:
        cache.kv.advance(1)
        active = torch.ones_like(first)
    else:
        cache.kv.advance(active.long())  # entries of inactive rows will be overwritten
    _route(network, cache, h, first & active)
    cache.read_out = torch.where(active[:, None], _read_out(cache, h), cache.read_out)
    cache.state = torch.where(active[:, None], h, cache.state)
    ready = active & (cache.slot == cache.last)
    cache.token = cache.token + ready
    cache.slot = torch.where(ready, 0, cache.slot + active)
    return ready


def _slot(network: SlotNetwork, cache: SlotCache, x: Tensor) -> Tensor:
    """Returns the output (B, D) of each row's next slot for its input (B, D)."""
    if cache.steps is not None:
        # ``steps`` is the previous token's at slot 0, but the bias of slot 0 is always 0
        cache.add_bias(network.slot_bias(cache.steps).gather(1, cache.slot[:, None]))  # (B, 1)
    h: Tensor = network.run(
        x[:, None],
        network.slot_positions(cache.token, cache.slot)[:, None],
        cache=cache.kv,
        key_bias=cache.key_bias(1),
        mask=cache.kv.mask(1),
    )
    return h[:, 0].to(cache.state.dtype)


def _route(network: SlotNetwork, cache: SlotCache, h: Tensor, first: Tensor) -> None:
    """Sets the step distribution of the rows in ``first`` (B,), which have just computed slot 0."""
    steps = network.route(h)
    if steps is None:
        return
    before = steps if cache.steps is None else cache.steps
    cache.steps = Steps(
        *(
            torch.where(first if new.dim() == 1 else first[:, None], new, old)
            for new, old in zip(steps, before, strict=True)
        )
    )
    cache.last = cache.steps.executed


def _read_out(cache: SlotCache, h: Tensor) -> Tensor:
    """Returns the partial sum of s_k h_k of the token, or the latest state without a router."""
    if cache.steps is None:
        return h
    share = cache.steps.log_steps.gather(1, cache.slot[:, None]).exp().to(h.dtype)  # (B, 1), s_k
    before = torch.where((cache.slot == 0)[:, None], 0.0, cache.read_out)
    return before + share * h


def read_prompt(
    network: SlotNetwork, cache: SlotCache, prompts: Tensor, lengths: Tensor, prefill: str
) -> None:
    """Reads right-padded prompts (B, P) up to ``lengths`` (B,) into an empty cache.

    Args:
        network: The network in eval mode.
        cache: Cache from ``new_cache``.
        prompts: int64 (B, P).
        lengths: int64 (B,), number of tokens to read, which may be 0.
        prefill: 'sequential', or 'jacobi' to read all tokens in parallel with ``eval_iterations``.
    """
    if prefill == "sequential":
        while bool((active := cache.token < lengths).any()):
            index = cache.token.clamp(max=prompts.shape[1] - 1)[:, None]  # (B, 1)
            advance(network, cache, prompts.gather(1, index)[:, 0], active)
    else:
        _read_in_parallel(network, cache, prompts, lengths)


def _read_in_parallel(
    network: SlotNetwork, cache: SlotCache, prompts: Tensor, lengths: Tensor
) -> None:
    pondered = network(prompts, network.config.eval_iterations, cache.kv)
    slots = torch.arange(pondered.states.shape[2], device=prompts.device)
    tokens = torch.arange(prompts.shape[1], device=prompts.device)
    # (B, P, K+1): executed slots of real tokens, flattened below to the order of the cache
    kept = (slots <= pondered.executed[..., None]) & (tokens < lengths[:, None])[..., None]
    steps = pondered.steps
    bias = None if steps is None else network.slot_bias(steps).flatten(1)  # (B, P (K+1))
    cache.keep(kept.flatten(1), bias)
    cache.token = lengths.clone()


def read_text(
    network: SlotNetwork, tokens: Tensor, lengths: Tensor, cache: SlotCache | None = None
) -> Pondered:
    """Returns the output of ``network(tokens)`` at the fixed point, computed slot by slot.

    States of skipped slots and padding are zero.

    Args:
        network: The network in eval mode.
        tokens: int64 (B, T), padded on the right.
        lengths: int64 (B,), number of tokens of each row.
        cache: Cache of earlier tokens with room for these, which are appended. Defaults to an empty
            one.
    """
    rows, num_tokens = tokens.shape
    num_slots = network.config.thinking_steps + 1
    cache = new_cache(network, rows, num_tokens) if cache is None else cache
    first = cache.token  # (B,), index of the first of these tokens in the text
    reference = cache.state
    states = reference.new_zeros(rows, num_tokens, num_slots, reference.shape[1])
    read_out = reference.new_zeros(rows, num_tokens, reference.shape[1])
    steps: list[Tensor] | None = None
    executed = tokens.new_zeros(tokens.shape)
    row = torch.arange(rows, device=tokens.device)
    # Each round computes one slot per active row, and rows may be at different tokens and slots.
    while bool((active := cache.token - first < lengths).any()):
        token, slot = (cache.token - first).clamp(max=num_tokens - 1), cache.slot
        ready = advance(network, cache, tokens[row, token], active)
        states[row[active], token[active], slot[active]] = cache.state[active]
        # ready rows have finished their token, at its last executed slot
        read_out[row[ready], token[ready]] = cache.read_out[ready]
        executed[row[ready], token[ready]] = slot[ready]
        if cache.steps is not None:
            steps = steps or [x.new_zeros(rows, num_tokens, *x.shape[1:]) for x in cache.steps]
            for total, current in zip(steps, cache.steps, strict=True):
                total[row[ready], token[ready]] = current[ready]
    return Pondered(states, None if steps is None else Steps(*steps), read_out, executed)
