"""Sequential inference: slot by slot, with hard stopping (Sec. 3.3).

A step advances each row by one slot. After slot 0 the router sets the number of steps the token
takes; the slots beyond are never computed, and leave no keys.
"""

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.ponderlm.network import Pondered, SlotNetwork
from lightning_models.ponderlm.router import Steps


class SlotCache:
    """Keys and values of executed slots, of rows that advance slot by slot.

    Each row is at its own token and step. Skipped slots leave no entries, so rows hold different
    numbers of them.

    Args:
        kv: Empty.
        capacity: Entries of a row at most.
        like: An embedding (B, D), whose dtype and device the states have.
        thinking_steps: K.
    """

    def __init__(self, kv: KVCache, capacity: int, like: Tensor, thinking_steps: int) -> None:
        rows, device = len(like), like.device
        self.kv = kv
        self.bias: Tensor | None = None
        """Attention bias of each entry as a key (B, capacity); None while none has any."""
        self._capacity = capacity
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        """Index of the token each row is at."""
        self.slot = torch.zeros(rows, dtype=torch.int64, device=device)
        """Slot that comes next."""
        self.last = torch.full((rows,), thinking_steps, device=device)
        """The token's last step, known after slot 0."""
        self.state = torch.zeros_like(like)
        """Post-norm output of the slot before."""
        self.read_out = torch.zeros_like(like)
        """What the output matrix will be applied to: of PonderLM-3, the sum so far."""
        self.steps: Steps | None = None
        """The token's step distribution, known after slot 0."""

    def add_bias(self, bias: Tensor) -> None:
        """Writes the bias (B, N) of the next N entries of each row."""
        self._write(self.kv.positions(bias.shape[1]), bias)

    def _write(self, places: Tensor, bias: Tensor) -> None:
        if self.bias is None:
            self.bias = bias.new_zeros(len(bias), self._capacity)
        self.bias.scatter_(1, places, bias)

    def keep(self, kept: Tensor, bias: Tensor | None) -> None:
        """Keeps those of the N entries just written that are marked.

        Args:
            kept: Bool (B, N).
            bias: Of all N as keys (B, N).
        """
        places = self.kv.positions(kept.shape[1])
        order = self.kv.keep(kept)
        if bias is not None:
            self._write(places, bias.where(kept, 0.0).gather(1, order))  # 0 after the kept ones

    def key_bias(self, num_new: int) -> Tensor | None:
        """Returns the bias (B, N) of all entries, with those to be written."""
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
    """Returns an empty cache with room for all slots of ``num_tokens`` tokens a row."""
    config, weight = network.config, network.embedding.weight
    capacity = num_tokens * (config.thinking_steps + 1)
    kv = KVCache(config.num_layers, rows, capacity, weight.device)
    like = weight.new_zeros(rows, config.dim)
    return SlotCache(kv, capacity, like, config.thinking_steps)


def advance(
    network: SlotNetwork, cache: SlotCache, tokens: Tensor, active: Tensor | None = None
) -> Tensor:
    """Computes the next slot of each row, and returns which tokens are through (B,) bool.

    Of those, ``cache.read_out`` is what the output matrix is applied to.

    Args:
        network: In eval mode.
        cache: Changed in place.
        tokens: (B,) int64, the token that each row is at.
        active: (B,) bool, rows to advance; None: all. The others stay as they are.
    """
    first = cache.slot == 0
    x = torch.where(first[:, None], network.embed(tokens, tokens), cache.state)  # (B, D)
    h = _slot(network, cache, x.to(cache.state.dtype))  # (B, D)
    if active is None:
        cache.kv.advance(1)
        active = torch.ones_like(first)
    else:
        cache.kv.advance(active.long())
    fresh = first & active
    _route(network, cache, h, fresh)
    cache.read_out = torch.where(active[:, None], _read_out(cache, h), cache.read_out)
    cache.state = torch.where(active[:, None], h, cache.state)
    ready = active & (cache.slot == cache.last)
    cache.token = cache.token + ready
    cache.slot = torch.where(ready, 0, cache.slot + active)
    return ready


def _slot(network: SlotNetwork, cache: SlotCache, x: Tensor) -> Tensor:
    """Returns the output (B, D) of the slot that each row is at, for its input (B, D)."""
    if cache.steps is not None:  # the bias of slot 0 is 0, whatever the token before has left
        cache.add_bias(network.slot_bias(cache.steps).gather(1, cache.slot[:, None]))  # (B, 1)
    h: Tensor = network.run(
        x[:, None],
        network.slot_positions(cache.token, cache.slot)[:, None],
        cache=cache.kv,
        key_bias=cache.key_bias(1),
        mask=cache.kv.mask(1),
    )
    return h[:, 0].to(cache.state.dtype)


def _route(network: SlotNetwork, cache: SlotCache, h: Tensor, fresh: Tensor) -> None:
    """Sets the step distribution of the rows that have just computed slot 0."""
    steps = network.route(h)
    if steps is None:
        return
    before = steps if cache.steps is None else cache.steps
    cache.steps = Steps(
        *(
            torch.where(fresh if new.dim() == 1 else fresh[:, None], new, old)
            for new, old in zip(steps, before, strict=True)
        )
    )
    cache.last = cache.steps.executed


def _read_out(cache: SlotCache, h: Tensor) -> Tensor:
    """Returns the sum of the token's states so far; without a router, the latest state."""
    if cache.steps is None:
        return h
    share = cache.steps.log_steps.gather(1, cache.slot[:, None]).exp().to(h.dtype)  # s_k (B, 1)
    before = torch.where((cache.slot == 0)[:, None], 0.0, cache.read_out)
    return before + share * h


def read_prompt(
    network: SlotNetwork, cache: SlotCache, prompts: Tensor, lengths: Tensor, how: str
) -> None:
    """Reads right-padded prompts (B, P) up to ``lengths`` (B,) into an empty cache.

    Args:
        network: In eval mode.
        cache: As ``new_cache`` makes it.
        prompts: int64.
        lengths: int64, tokens to read, at least 0.
        how: 'sequential', or 'jacobi': all tokens at once by ``eval_iterations``.
    """
    if how == "sequential":
        while bool((active := cache.token < lengths).any()):
            place = cache.token.clamp(max=prompts.shape[1] - 1)[:, None]
            advance(network, cache, prompts.gather(1, place)[:, 0], active)
    else:
        _read_in_parallel(network, cache, prompts, lengths)


def _read_in_parallel(
    network: SlotNetwork, cache: SlotCache, prompts: Tensor, lengths: Tensor
) -> None:
    pondered = network(prompts, network.config.eval_iterations, cache.kv)
    slots = torch.arange(pondered.states.shape[2], device=prompts.device)
    places = torch.arange(prompts.shape[1], device=prompts.device)
    kept = (slots <= pondered.executed[..., None]) & (places < lengths[:, None])[..., None]
    # (B, T, K+1), flattened to the order of the cache's entries
    steps = pondered.steps
    bias = None if steps is None else network.slot_bias(steps).flatten(1)  # (B, P (K+1))
    cache.keep(kept.flatten(1), bias)
    cache.token = lengths.clone()


def read_text(
    network: SlotNetwork, tokens: Tensor, lengths: Tensor, cache: SlotCache | None = None
) -> Pondered:
    """Returns what ``network(tokens)`` does at the fixed point, slot by slot.

    States of slots that are skipped, and of tokens after a row's length, are zero.

    Args:
        network: In eval mode.
        tokens: (B, T), padded on the right.
        lengths: int64 (B,).
        cache: Earlier tokens, with room for these, which are added; None: there are none.
    """
    rows, num_tokens = tokens.shape
    num_slots = network.config.thinking_steps + 1
    cache = new_cache(network, rows, num_tokens) if cache is None else cache
    first = cache.token  # (B,), its index in the whole text
    like = cache.state
    states = like.new_zeros(rows, num_tokens, num_slots, like.shape[1])
    read_out = like.new_zeros(rows, num_tokens, like.shape[1])
    steps: list[Tensor] | None = None
    executed = tokens.new_zeros(tokens.shape)
    row = torch.arange(rows, device=tokens.device)
    while bool((active := cache.token - first < lengths).any()):
        token, slot = (cache.token - first).clamp(max=num_tokens - 1), cache.slot
        ready = advance(network, cache, tokens[row, token], active)
        states[row[active], token[active], slot[active]] = cache.state[active]
        read_out[row[ready], token[ready]] = cache.read_out[ready]
        executed[row[ready], token[ready]] = slot[ready]
        if cache.steps is not None:
            steps = steps or [x.new_zeros(rows, num_tokens, *x.shape[1:]) for x in cache.steps]
            for whole, now in zip(steps, cache.steps, strict=True):
                whole[row[ready], token[ready]] = now[ready]
    return Pondered(states, None if steps is None else Steps(*steps), read_out, executed)
