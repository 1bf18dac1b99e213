"""Reading while thinking: queries chunk by chunk or by speculation (Sec. 3.3), then answers.

Thoughts of many chunks are opened at once, which shows whether they are trivial; only the others
are finished.

Both ways of reading find the same thoughts, states, and keys and values, up to rounding: where two
tokens of a thought are equally likely to the last digits, which narrow number formats make less
rare, they may take different ones.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.output_layer import logits, product_dtype, row_chunks
from lightning_models.runtime import on_device
from lightning_models.thinking_states.backbone import (
    AnswerCache,
    HiddenStates,
    causal_mask,
    new_cache,
    read,
)
from lightning_models.thinking_states.network import ThinkingStatesNetwork
from lightning_models.thinking_states.rows import QueryBlocks, in_blocks
from lightning_models.thinking_states.thoughts import ChunkThought, ThoughtLayout, Trace

# ---- thoughts


class OpenedThoughts(NamedTuple):
    """Thoughts of which the first token is known.

    Attributes:
        first: (K,) int64; the end of a thought where it is trivial.
        past: T's cache of the chunks.
        real: Which of a chunk's c places hold tokens (K, c) bool.
    """

    first: Tensor
    past: Any
    real: Tensor


class ThoughtTokens(NamedTuple):
    """The tokens of thoughts that have any.

    Attributes:
        tokens: (K, M) int64, ends after them.
        sizes: Tokens of each, without the end (K,) int64, at least 1.
    """

    tokens: Tensor
    sizes: Tensor

    def listed(self) -> list[list[int]]:
        """Returns the tokens of each thought."""
        rows = zip(self.tokens.tolist(), self.sizes.tolist(), strict=True)
        return [tokens[:size] for tokens, size in rows]


def open_thoughts(network: ThinkingStatesNetwork, h: Tensor, real: Tensor) -> OpenedThoughts:
    """Returns the first tokens of the thoughts of chunks; ends, where the model does not think.

    Args:
        network: backbone, T and C.
        h: tapped states of their tokens, the last one at place c - 1 (K, c, D).
        real: which places hold tokens (K, c) bool.
    """
    past = new_cache()
    if not network.config.think:
        ends = network.config.special_id("thought_end")
        return OpenedThoughts(torch.full((len(h),), ends, device=h.device), past, real)
    positions = torch.arange(h.shape[1], device=h.device)[None]
    tables = network.backbone.rotary(h, positions)
    state = network.thinking.opening(h, tables, causal_mask(real, h.shape[1]), past)
    return OpenedThoughts(_greedy(network, state), past, real)


def finish_thoughts(
    network: ThinkingStatesNetwork, opened: OpenedThoughts, rows: Tensor
) -> ThoughtTokens:
    """Returns the whole thoughts of some of the chunks, none of them trivial.

    Args:
        network: backbone, T and C.
        opened: not usable afterwards.
        rows: int64 (K,), which of them.
    """
    end, c = network.config.special_id("thought_end"), network.config.chunk_size
    opened.past.batch_select_indices(rows)
    real, token = opened.real[rows], opened.first[rows]
    ended, tokens = torch.zeros_like(token, dtype=torch.bool), [token]
    while len(tokens) < network.config.max_thought_tokens:
        place = c + len(tokens) - 1
        position = torch.full((1, 1), place, device=token.device)
        h = network.backbone.enter(network.backbone.embed(token[:, None]), position, place + 1)
        real = F.pad(real, (0, 1), value=True)  # h: (K, 1, D)
        tables = network.backbone.rotary(h, position)
        states = network.thinking(h, tables, causal_mask(real, 1), opened.past)
        token = _greedy(network, states[:, -1]).masked_fill(ended, end)  # (K,)
        ended = token == end
        if bool(ended.all()):
            break
        tokens.append(token)
    thoughts = torch.stack(tokens, dim=1)  # (K, M)
    return ThoughtTokens(thoughts, (thoughts != end).sum(dim=1))


def finish_states(
    network: ThinkingStatesNetwork, opened: OpenedThoughts, rows: Tensor
) -> tuple[ThoughtTokens, Tensor]:
    """Returns whole thoughts and their states (K, c, D); see ``finish_thoughts``."""
    thoughts = finish_thoughts(network, opened, rows)
    compressible = ThoughtLayout.of(network.config).for_compression(*thoughts)
    return thoughts, network.compress(compressible, thoughts.sizes + 1)


def _greedy(network: ThinkingStatesNetwork, h: Tensor) -> Tensor:
    """Returns T's most likely tokens (K,) for normed states (K, D).

    The ids from the padding's on are no tokens of a thought.
    """
    matrix = network.thinking_matrix[: network.config.special_id("thought_pad")]
    return most_likely(h, matrix)


@torch.no_grad()
def most_likely(h: Tensor, matrix: Tensor) -> Tensor:
    """Returns the ids of the highest logits ``h matrix^T`` of states (K, D), int64 (K,)."""
    dtype = product_dtype(h)
    states, matrix = h.to(dtype), matrix.to(dtype)
    out = torch.empty(len(h), dtype=torch.int64, device=h.device)
    for rows in row_chunks(len(h), h.device):
        out[rows] = logits(states[rows], matrix).argmax(dim=-1)
    return out


# ---- queries


class DecodedThoughts(NamedTuple):
    """Non-trivial thoughts decoded in one call, of these rows and blocks (K,) int64."""

    rows: Tensor
    blocks: Tensor
    thoughts: ThoughtTokens


@dataclass
class ReadQueries:
    """State after queries have been read.

    Attributes:
        past: Keys and values, queries aligned at their ends.
        state: S of the chunk that the next token belongs to (B, c, D).
        tapped: Inputs of T for the last chunk's tokens, the last one at c - 1 (B, c, D).
        last: Normed states of the last tokens (B, D).
        rounds: Passes of the backbone over (parts of) each query.
        blocks: The queries.
        decoded: All thoughts with tokens.
        spoken: How many of them each row has (B,) int64.
    """

    past: AnswerCache
    state: Tensor
    tapped: Tensor
    last: Tensor
    rounds: list[int]
    blocks: QueryBlocks
    decoded: list[DecodedThoughts]
    spoken: Tensor

    def thoughts(self) -> list[list[ChunkThought]]:
        """Returns the thoughts of each row's chunks."""
        found: dict[tuple[int, int], list[int]] = {}
        for rows, blocks, thoughts in self.decoded:
            keys = zip(rows.tolist(), blocks.tolist(), strict=True)
            found |= dict(zip(keys, thoughts.listed(), strict=True))
        ends, thinks = self.blocks.last.tolist(), self.blocks.thinks.tolist()
        return [
            [
                ChunkThought(found.get((row, block), []), end)
                for block, end in enumerate(own)
                if thinks[row][block]
            ]
            for row, own in enumerate(ends)
        ]


@torch.no_grad()
def read_queries(
    network: ThinkingStatesNetwork, query: Tensor, lengths: Tensor, how: str
) -> ReadQueries:
    """Returns the state after queries that the model has read with its own thoughts.

    Args:
        network: backbone, T and C.
        query: right-padded (B, Q) int64.
        lengths: (B,) int64, at least 1.
        how: 'speculative' or 'sequential'.
    """
    blocks = in_blocks(ThoughtLayout.of(network.config).grid, query, lengths)
    reader: type[QueryReader] = SequentialReader if how == "sequential" else SpeculativeReader
    return reader(network, blocks).read()


class QueryReader(ABC):
    """States, thoughts and result of reading queries, either way.

    Args:
        network: backbone, T and C.
        blocks: of all rows.

    Attributes:
        states: S of each block, and of the answer's first chunk (B, N + 1, c, D).
        tapped: Inputs of T for all tokens (B, N, c, D), as far as they were read.
    """

    def __init__(self, network: ThinkingStatesNetwork, blocks: QueryBlocks) -> None:
        self.network, self.blocks, self.layout = network, blocks, ThoughtLayout.of(network.config)
        self.embedded = network.backbone.embed(blocks.tokens)
        rows, number, c, dim = self.embedded.shape
        self.states = self.embedded.new_zeros(rows, number + 1, c, dim)
        self.tapped = torch.zeros_like(self.embedded)
        self.decoded: list[DecodedThoughts] = []
        self.spoken = torch.zeros_like(blocks.chunks)  # (B,), thoughts with tokens so far

    @abstractmethod
    def read(self) -> ReadQueries:
        """Returns all rows."""

    def state_of(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """Returns S of the tokens of some rows' blocks (B, n * c, D)."""
        number, c, dim = self.states.shape[1:]
        block = rows[:, None] * number + torch.arange(start, stop, device=rows.device)  # (B, n)
        index = block[..., None] * c + self.blocks.place[rows, start:stop]  # (B, n, c)
        return self.states.view(-1, dim)[index.flatten(1)]

    def open(self, tapped: Tensor, rows: Tensor, start: int, stop: int) -> OpenedThoughts:
        """Returns the first tokens of the thoughts of blocks, one row's after the other's.

        Args:
            tapped: inputs of T for them (B, n * c, D).
            rows: int64 (B,).
            start: the first block.
            stop: one after the last.
        """
        self.tapped[rows, start:stop] = tapped.view(len(rows), stop - start, *self.tapped.shape[2:])
        real = self.blocks.real[rows, start:stop].flatten(0, 1)  # (B n, c)
        return open_thoughts(self.network, tapped.view(*real.shape, -1), real)

    def finish(self, opened: OpenedThoughts, which: Tensor, rows: Tensor, blocks: Tensor) -> None:
        """Finishes thoughts, and sets the states of the next blocks.

        Args:
            opened: not usable afterwards.
            which: of the opened ones (K,) int64, none of them trivial.
            rows: and their rows (K,).
            blocks: and blocks (K,).
        """
        if not len(which):
            return
        thoughts, state = finish_states(self.network, opened, which)
        state = self.network.feed_back(state, self.spoken[rows], rows)  # (K, c, D)
        self.spoken[rows] += 1  # a row thinks once a call
        self.states[rows, blocks + 1] = state.to(self.states.dtype)
        self.decoded.append(DecodedThoughts(rows, blocks, thoughts))

    def result(self, past: AnswerCache, last: Tensor, rounds: list[int]) -> ReadQueries:
        """Returns what was read, from the normed states of the last tokens (B, D)."""
        complete = self.blocks.thinks[:, -1, None, None]
        # a query's last chunk that does not think goes on in the answer, with its own state
        state = torch.where(complete, self.states[:, -1], self.states[:, -2])
        tapped = self.tapped[:, -1]
        return ReadQueries(
            past, state, tapped, last, rounds, self.blocks, self.decoded, self.spoken
        )


class SequentialReader(QueryReader):
    """Block by block, with whole passes: the plain reading that speculation must agree with."""

    def read(self) -> ReadQueries:
        # Returns all rows; each block is a round.
        network, rows = self.network, torch.arange(len(self.states), device=self.states.device)
        past = AnswerCache(len(rows), rows.device)
        for block in range(self.blocks.number):
            state = self.state_of(rows, block, block + 1)
            h, real = self.embedded[:, block], self.blocks.real[:, block]  # (B, c, D), (B, c)
            hidden = read(network.backbone, past, h, real, state=state, **network.taps)
            assert hidden.tapped is not None
            opened = self.open(hidden.tapped, rows, block, block + 1)
            nontrivial = self.blocks.thinks[:, block] & (opened.first != self.layout.end)  # (B,)
            which = nontrivial.nonzero()[:, 0]
            self.finish(opened, which, which, torch.full_like(which, block))
        return self.result(past, hidden.last[:, -1], self.blocks.chunks.tolist())


# ---- speculation


class SpeculativeReader(QueryReader):
    """Reads by speculation (Sec. 3.3, App. A.2).

    All thoughts to come are supposed to be trivial, all chunks are read at once, and the result is
    kept up to the first chunk whose thought is not. NOTE(paper): algorithm 1 tests all states again
    in every round, those that it has injected among them, and mixes indices of chunks that receive
    a state with those that produce it. Here a round begins after the chunk that has thought. It
    takes as many rounds as there are thoughts with tokens, and one more unless the last chunk has
    one; the paper says one more always.

    Only the layers between L_in and L_out are read again in every round: those below do not depend
    on states, and the outputs of those above are not needed before the answer.

    Finished rows leave the batch, and nothing of them is computed again. All others begin a round
    at the earliest block that any of them needs; from there on they are read again, with the states
    that are known by then.
    """

    def __init__(self, network: ThinkingStatesNetwork, blocks: QueryBlocks) -> None:
        super().__init__(network, blocks)
        self.positions, self.real = blocks.positions, blocks.real.flatten(1)
        self.below = new_cache()
        own = 0, network.input_layer
        self.all_rows = torch.arange(len(self.real), device=self.real.device)
        h = network.backbone.enter(self.embedded.flatten(1, 2), self.positions)  # (B, N c, D)
        self.lower = self._layers(h, self.all_rows, own, self.below)

    def read(self) -> ReadQueries:
        network, above = self.network, new_cache()
        first, last = network.input_layer, network.output_layer
        between, rounds = self._between(self.all_rows)
        own = (last, network.backbone.num_layers)
        h = self._layers(self.tapped.flatten(1, 2), self.all_rows, own, above)
        past = AnswerCache(len(self.real), self.real.device)
        layers = (self.below.layers[:first], between.layers[first:last], above.layers[last:])
        past.past.layers = [layer for part in layers for layer in part]
        past.real, past.lengths = self.real, self.real.sum(dim=1)
        return self.result(past, network.backbone.norm(h[:, -1]), rounds)

    def _between(self, rows: Tensor) -> tuple[Any, list[int]]:
        """Returns the cache of the layers that depend on states, and the rounds of each row."""
        past, parts = new_cache(), []
        begin = self.blocks.number - self.blocks.chunks  # first uncertain block of each row (B,)
        rounds = [0] * len(rows)
        while len(rows):
            found = self._round(past, rows, begin)
            for row in rows.tolist():
                rounds[row] += 1
            done = found >= self.blocks.number - 1
            finished, left = done.nonzero()[:, 0], (~done).nonzero()[:, 0]
            if len(finished):
                parts.append((rows[finished], _rows_of(past, finished, len(left) == 0)))
                past = _rows_of(past, left, len(left) == 0)
            rows, begin = rows[left], found[left] + 1
        return _joined(parts), rounds

    def _round(self, past: Any, rows: Tensor, begin: Tensor) -> Tensor:
        """Reads from the first uncertain block on, and decodes the first non-trivial thought.

        Args:
            past: of these rows; kept up to that block, and extended to the end.
            rows: int64 (B,).
            begin: of each row, the first uncertain block (B,).

        Returns:
            the block of each row that has thought (B,), N where none has.
        """
        start, stop = int(begin.min()), self.blocks.number
        c, network = self.layout.grid.chunk_size, self.network
        if past.get_seq_length(network.input_layer):
            past.crop((start - stop) * c)
        h = self.lower[rows, start * c :] + self.state_of(rows, start, stop)  # (B, n c, D)
        h = self._layers(h, rows, (network.input_layer, network.output_layer), past)
        opened = self.open(h, rows, start, stop)
        number = torch.arange(start, stop, device=rows.device)
        first = opened.first.view(len(rows), -1)  # (B, n)
        nontrivial = self.blocks.thinks[rows, start:] & (first != self.layout.end)
        found = torch.where(nontrivial & (number >= begin[:, None]), number, stop).amin(dim=1)
        own = (found < stop).nonzero()[:, 0]
        which = own * len(number) + found[own] - start  # among the B n opened thoughts
        self.finish(opened, which, rows[own], found[own])
        return found

    def _layers(self, h: Tensor, rows: Tensor, layers: tuple[int, int], cache: Any) -> Tensor:
        """Returns the hidden states of rows' last tokens (B, t, D) after some of the layers."""
        width = h.shape[1]
        # the tokens before them are in the cache: N keys for the last t of N queries
        mask = causal_mask(self.real[rows], width, self.network.backbone.window)
        positions = self.positions[rows, -width:]
        return self.network.run_layers(h, layers, positions, mask, cache)


def _rows_of(cache: Any, rows: Tensor, all_or_none: bool) -> Any:
    """Returns a transformers cache of some rows of another one, or that one itself."""
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


# ---- decoding of answers after queries that have been read
#
# The answer's first tokens receive the state of the query's last thought. Where chunks of the
# answer think, too (``think_in_decode``), or its tokens fill up the query's last chunk
# (``absolute``), they are read one by one until all thoughts are complete.


class ThinkingCache:
    """State between the decode steps of answers.

    Args:
        network: backbone, T and C.
        queries: not usable afterwards.
        prefix: tokens that are read before any chosen token.
        trace: receives later thoughts; None: they are not recorded.

    Attributes:
        past: Keys and values of all that was read.
        state: S of the chunk that is being written (B, c, D).
        place: Place in it of the next token (B,) int64; from c on nothing is added.
        thinks: Whether that chunk thinks after its last token (B,) bool.
        tapped: Inputs of T for its tokens so far (B, c, D).
        last: Normed state of the query's last token (B, D).
        rows: The query of each remaining row (B,) int64.
        spoken: Thoughts with tokens of each row so far (B,) int64.
        trace: As given.
    """

    def __init__(
        self,
        network: ThinkingStatesNetwork,
        queries: ReadQueries,
        prefix: tuple[int, ...] = (),
        trace: Trace | None = None,
    ) -> None:
        self.network, self.trace = network, trace
        self.layout = ThoughtLayout.of(network.config)
        self._thoughts = None if trace is None else list(trace.rows)  # of the remaining rows
        self.past, self.state = queries.past, queries.state
        self.past.pending = on_device(prefix, self.state.device, torch.int64)
        complete = queries.blocks.thinks[:, -1]
        c = self.layout.grid.chunk_size
        own = queries.blocks.real[:, -1].sum(dim=1)
        self.place = torch.where(complete, 0, own)
        self.thinks = ~complete | self.layout.grid.in_answers
        source = (torch.arange(c, device=own.device) + (c - own)[:, None]).clamp(max=c - 1)
        index = source[..., None].expand_as(queries.tapped)
        self.tapped = queries.tapped.gather(1, index)
        self.last, self._begun = queries.last, False
        self.spoken, self.rows = queries.spoken, torch.arange(len(own), device=own.device)
        self._may_think = bool(self.thinks.any())

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.past.select(rows)
        for name in ("state", "place", "thinks", "tapped", "last", "rows", "spoken"):
            setattr(self, name, getattr(self, name)[rows])
        if self._thoughts is not None:
            self._thoughts = [self._thoughts[row] for row in rows.tolist()]

    def decode(self, tokens: Tensor) -> Tensor:
        """Returns the normed states (B, D) that predict the next tokens.

        Args:
            tokens: (B,) the latest chosen ones; the first call reads the prefix instead.
        """
        begun, self._begun = self._begun, True
        if not begun and not len(self.past.pending):
            return self.last
        return self.advance(self.past.next_inputs(tokens))[:, -1]

    @torch.no_grad()
    def advance(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        """Returns the normed states (B, t, D) of the next tokens.

        Args:
            tokens: (B, t) int64.
            real: which of them belong to the answer (B, t) bool, the first ones; the others are
                read, but complete no chunk. None: all.
        """
        if not tokens.shape[1]:
            return self.last[:, None][:, :0]
        if not self._may_think:
            return self._read(tokens).last
        if real is None:
            real = torch.ones_like(tokens, dtype=torch.bool)
        states = []
        for number in range(tokens.shape[1]):
            hidden = self._read(tokens[:, number : number + 1])
            states.append(hidden.last)
            self._tap(hidden, real[:, number])
        return torch.cat(states, dim=1)

    def _read(self, tokens: Tensor) -> HiddenStates:
        place = self.place[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # (B, t)
        inside, h = place < self.state.shape[1], self.network.backbone.embed(tokens)
        index = place.clamp(max=self.state.shape[1] - 1)[..., None].expand_as(h)
        state = self.state.gather(1, index)  # (B, t, D), of no meaning from place c on
        self.place = self.place + tokens.shape[1]
        state = state * inside[..., None]  # (B, t, D)
        network = self.network
        return read(network.backbone, self.past, h, state=state, **network.taps)

    def _tap(self, hidden: HiddenStates, real: Tensor) -> None:
        """Keeps T's inputs for one token (B, 1), and thinks where it completes a chunk."""
        assert hidden.tapped is not None
        c = self.state.shape[1]
        index = (self.place - 1).clamp(max=c - 1)[:, None, None].expand_as(hidden.tapped)
        self.tapped = self.tapped.scatter(1, index, hidden.tapped)
        rows = (self.thinks & real & (self.place == c)).nonzero()[:, 0]
        if len(rows):
            self._think(rows)
            self._may_think = bool(self.thinks.any())

    def _think(self, rows: Tensor) -> None:
        """Thinks after the last tokens of chunks, whose next ones begin."""
        h = self.tapped[rows]
        opened = open_thoughts(self.network, h, torch.ones_like(h[..., 0], dtype=torch.bool))
        nontrivial = (opened.first != self.layout.end).nonzero()[:, 0]
        state, own = torch.zeros_like(self.state[rows]), {}
        if len(nontrivial):
            thoughts, found = finish_states(self.network, opened, nontrivial)
            which = rows[nontrivial]
            found = self.network.feed_back(found, self.spoken[which], self.rows[which])
            self.spoken[which] += 1
            state[nontrivial] = found.to(state.dtype)
            if self._thoughts is not None:
                own = dict(zip(which.tolist(), thoughts.listed(), strict=True))
        self.state = self.state.index_copy(0, rows, state)
        self.place = self.place.index_fill(0, rows, 0)
        self.thinks = self.thinks.index_fill(0, rows, self.layout.grid.in_answers)
        if self._thoughts is not None:
            ends = (self.past.lengths - 1).tolist()
            for row in rows.tolist():
                self._thoughts[row].append(ChunkThought(own.get(row, []), ends[row]))
