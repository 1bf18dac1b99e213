"""Reading queries by speculation (Sec. 3.3, App. A.2).

All thoughts to come are supposed to be trivial, all chunks are read at once, and what was read is
kept up to the first chunk whose thought is not. NOTE(paper): algorithm 1 tests all states again in
every round, those that it has injected among them, and mixes indices of chunks that receive a state
with those that produce it. Here a round begins behind the chunk that has thought. It takes as many
rounds as there are thoughts with tokens, and one more unless the last chunk has one; the paper says
one more always.

Only the layers between L_in and L_out are read again in every round: those below know nothing of
states, and what those above compute is not needed before the answer.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from lightning_models.thinking_states.backbone import causal_mask, new_cache
from lightning_models.thinking_states.blocks import Blocks
from lightning_models.thinking_states.decoding import AnswerCache
from lightning_models.thinking_states.network import ThinkingStatesNetwork
from lightning_models.thinking_states.reading import Reader, ReadQueries


class Speculative(Reader):
    """By speculation; rows that are through leave the batch, and nothing of them is computed again.

    All others begin a round where the first of them has to. What the others have read from there on
    is read again, with the states that are known by then.
    """

    def __init__(self, network: ThinkingStatesNetwork, blocks: Blocks) -> None:
        super().__init__(network, blocks)
        self.positions, self.real = blocks.positions, blocks.real.flatten(1)
        self.below = new_cache()
        own, all_rows = (0, network.input_layer), torch.arange(len(self.real))
        self.all_rows = all_rows.to(self.real.device)
        self.lower = self._layers(self.embedded.flatten(1, 2), self.all_rows, own, self.below)

    def read(self) -> ReadQueries:
        """Returns all rows."""
        network, above = self.network, new_cache()
        first, last = network.input_layer, network.output_layer
        between, rounds = self._between(self.all_rows)
        own = (last, network.backbone.num_layers)
        h = self._layers(self.tapped.flatten(1, 2), self.all_rows, own, above)
        past = AnswerCache(len(self.real), self.real.device)
        layers = (self.below.layers[:first], between.layers[first:last], above.layers[last:])
        past.past.layers = [layer for part in layers for layer in part]
        past.real, past.lengths = self.real, self.real.sum(dim=1)
        return self.result(past, network.backbone.model.norm(h[:, -1]), rounds)

    def _between(self, rows: Tensor) -> tuple[Any, list[int]]:
        """Returns the cache of the layers that depend on states, and the rounds of each row."""
        past, parts = new_cache(), []
        begin = self.blocks.number - self.blocks.chunks  # of each row: its first block not sure
        rounds = [0] * len(rows)
        while len(rows):
            found = self._round(past, rows, begin)
            for row in rows.tolist():
                rounds[row] += 1
            done = found >= self.blocks.number - 1
            through, left = done.nonzero()[:, 0], (~done).nonzero()[:, 0]
            if len(through):
                parts.append((rows[through], _rows_of(past, through, len(left) == 0)))
                past = _rows_of(past, left, len(left) == 0)
            rows, begin = rows[left], found[left] + 1
        return _joined(parts), rounds

    def _round(self, past: Any, rows: Tensor, begin: Tensor) -> Tensor:
        """Reads from the first block on that is not sure, and thinks the first thought.

        Args:
            past: of these rows; kept up to that block, and extended to the end.
            rows: int64 (B,).
            begin: of each row, the first block that is not sure (B,).

        Returns:
            the block of each row that has thought (B,), N where none has.
        """
        start, stop = int(begin.min()), self.blocks.number
        c, network = self.layout.grid.chunk_size, self.network
        if past.get_seq_length(network.input_layer):
            past.crop((start - stop) * c)
        h = self.lower[rows, start * c :] + self.state_of(rows, start, stop)
        h = self._layers(h, rows, (network.input_layer, network.output_layer), past)
        opened = self.open(h, rows, start, stop)
        number = torch.arange(start, stop, device=rows.device)
        first = opened.first.view(len(rows), -1)
        speaks = self.blocks.thinks[rows, start:] & (first != self.layout.end)
        found = torch.where(speaks & (number >= begin[:, None]), number, stop).amin(dim=1)
        own = (found < stop).nonzero()[:, 0]
        which = own * len(number) + found[own] - start
        self.speak(opened, which, rows[own], found[own])
        return found

    def _layers(self, h: Tensor, rows: Tensor, layers: tuple[int, int], cache: Any) -> Tensor:
        """Returns the hidden states of rows' last tokens (B, t, D) behind some of the layers."""
        width = h.shape[1]
        mask = causal_mask(self.real[rows], width)
        positions = self.positions[rows, -width:]
        return self.network.through(h, layers, positions, mask, cache)


def _rows_of(cache: Any, rows: Tensor, all_or_none: bool) -> Any:
    """Returns a transformers cache with some rows of another one; that itself where it can be."""
    if all_or_none:
        return cache
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    part.batch_select_indices(rows)
    return part


def _joined(parts: list[tuple[Tensor, Any]]) -> Any:
    """Returns a transformers cache of all rows in their order."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.cat([rows for rows, _ in parts]).argsort()
    whole = parts[0][1]
    for number, layer in enumerate(whole.layers):
        if layer.is_initialized:
            own = [cache.layers[number] for _, cache in parts]
            layer.keys = torch.cat([one.keys for one in own])[order]
            layer.values = torch.cat([one.values for one in own])[order]
    return whole
