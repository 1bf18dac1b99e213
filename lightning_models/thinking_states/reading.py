"""Reading while thinking: queries chunk by chunk or by speculation (Sec. 3.3), then answers.

The thoughts of many chunks are opened in one batch, which shows which ones are trivial; only the
others are decoded to their end.

Both readers produce the same thoughts, states, keys and values up to rounding. They may differ
where two tokens of a thought are equally likely, which is more common in low precision.
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
    """Thoughts after their first token.

    Attributes:
        first: First tokens (K,) int64, the end of a thought where it is trivial.
        past: T's cache of the chunks.
        real: Mask of the slots of each chunk that hold tokens (K, c) bool.
    """

    first: Tensor
    past: Any
    real: Tensor


class ThoughtTokens(NamedTuple):
    """The tokens of non-trivial thoughts.

    Attributes:
        tokens: Tokens (K, M) int64, filled up with ends.
        sizes: Number of tokens of each thought, its end not counted (K,) int64, at least 1.
    """

    tokens: Tensor
    sizes: Tensor

    def to_lists(self) -> list[list[int]]:
        """Returns the tokens of each thought."""
        rows = zip(self.tokens.tolist(), self.sizes.tolist(), strict=True)
        return [tokens[:size] for tokens, size in rows]


def open_thoughts(network: ThinkingStatesNetwork, h: Tensor, real: Tensor) -> OpenedThoughts:
    """Predicts the first token of each chunk's thought, always the end if the model does not think.

    Args:
        network: The network, with backbone, T and C.
        h: Tapped states of the chunks, aligned at their last token, in slot c - 1 (K, c, D).
        real: Mask of the slots that hold tokens (K, c) bool.
    """
    past = new_cache()
    if not network.config.think:
        end = network.config.special_id("thought_end")
        return OpenedThoughts(torch.full((len(h),), end, device=h.device), past, real)
    positions = torch.arange(h.shape[1], device=h.device)[None]
    tables = network.backbone.rotary(h, positions)
    state = network.thinking.opening(h, tables, causal_mask(real, h.shape[1]), past)
    return OpenedThoughts(_greedy(network, state), past, real)


def finish_thoughts(
    network: ThinkingStatesNetwork, opened: OpenedThoughts, rows: Tensor
) -> ThoughtTokens:
    """Decodes non-trivial thoughts greedily, up to their ends or ``max_thought_tokens``.

    Args:
        network: The network, with backbone, T and C.
        opened: The opened thoughts, whose cache is consumed.
        rows: Indices of the thoughts to decode (K,) int64.
    """
    end, c = network.config.special_id("thought_end"), network.config.chunk_size
    opened.past.batch_select_indices(rows)
    real, token = opened.real[rows], opened.first[rows]
    ended, tokens = torch.zeros_like(token, dtype=torch.bool), [token]
    while len(tokens) < network.config.max_thought_tokens:
        index = c + len(tokens) - 1  # thoughts begin at position c, after the chunk's slots
        position = torch.full((1, 1), index, device=token.device)
        h = network.backbone.enter(network.backbone.embed(token[:, None]), position, index + 1)
        real = F.pad(real, (0, 1), value=True)  # (K, c + n), with h (K, 1, D) as the last key
        tables = network.backbone.rotary(h, position)
        states = network.thinking(h, tables, causal_mask(real, 1), opened.past)
        token = _greedy(network, states[:, -1]).masked_fill(ended, end)  # (K,), ends stay ends
        ended = token == end
        if bool(ended.all()):
            break
        tokens.append(token)
    thoughts = torch.stack(tokens, dim=1)  # (K, M)
    return ThoughtTokens(thoughts, (thoughts != end).sum(dim=1))


def finish_states(
    network: ThinkingStatesNetwork, opened: OpenedThoughts, rows: Tensor
) -> tuple[ThoughtTokens, Tensor]:
    """Decodes thoughts and compresses them to states (K, c, D); see ``finish_thoughts``."""
    thoughts = finish_thoughts(network, opened, rows)
    compressible = ThoughtLayout.of(network.config).for_compression(*thoughts)
    return thoughts, network.compress(compressible, thoughts.sizes + 1)  # the end counts


def _greedy(network: ThinkingStatesNetwork, h: Tensor) -> Tensor:
    """Returns T's most likely tokens (K,) for normed states (K, D)."""
    # the last special token and the padding of the vocabulary never occur in a thought
    matrix = network.thinking_matrix[: network.config.special_id("thought_pad")]
    return most_likely(h, matrix)


@torch.no_grad()
def most_likely(h: Tensor, matrix: Tensor) -> Tensor:
    """Returns the argmax over the vocabulary of ``h matrix^T`` for states (K, D), int64 (K,)."""
    dtype = product_dtype(h)
    states, matrix = h.to(dtype), matrix.to(dtype)
    out = torch.empty(len(h), dtype=torch.int64, device=h.device)
    for rows in row_chunks(len(h), h.device):
        out[rows] = logits(states[rows], matrix).argmax(dim=-1)
    return out


# ---- queries


class DecodedThoughts(NamedTuple):
    """Non-trivial thoughts decoded in one call, with their rows and blocks (K,) int64."""

    rows: Tensor
    blocks: Tensor
    thoughts: ThoughtTokens


@dataclass
class ReadQueries:
    """State after queries have been read.

    Attributes:
        past: Keys and values, queries aligned at their ends.
        state: S of the chunk that the next token belongs to (B, c, D).
        tapped: Inputs of T for the last chunk, aligned at its last token (B, c, D).
        last: Normed states of the last tokens (B, D).
        rounds: Number of backbone passes over each query or a part of it.
        blocks: The queries.
        decoded: All non-trivial thoughts.
        num_thoughts: Number of non-trivial thoughts of each row (B,) int64.
    """

    past: AnswerCache
    state: Tensor
    tapped: Tensor
    last: Tensor
    rounds: list[int]
    blocks: QueryBlocks
    decoded: list[DecodedThoughts]
    num_thoughts: Tensor

    def thoughts(self) -> list[list[ChunkThought]]:
        """Returns the thoughts of each row's chunks."""
        tokens: dict[tuple[int, int], list[int]] = {}
        for rows, blocks, thoughts in self.decoded:
            keys = zip(rows.tolist(), blocks.tolist(), strict=True)
            tokens |= dict(zip(keys, thoughts.to_lists(), strict=True))
        ends, thinks = self.blocks.last.tolist(), self.blocks.thinks.tolist()
        return [
            [
                ChunkThought(tokens.get((row, block), []), end)
                for block, end in enumerate(ends_of_row)
                if thinks[row][block]
            ]
            for row, ends_of_row in enumerate(ends)
        ]


@torch.no_grad()
def read_queries(
    network: ThinkingStatesNetwork, query: Tensor, lengths: Tensor, how: str
) -> ReadQueries:
    """Reads queries with the model's own thoughts, and returns the state after them.

    Args:
        network: The network, with backbone, T and C.
        query: Queries (B, Q) int64, padded on the right.
        lengths: Number of tokens of each query (B,) int64, at least 1.
        how: The reader, 'speculative' or 'sequential'.
    """
    blocks = in_blocks(ThoughtLayout.of(network.config).grid, query, lengths)
    reader: type[QueryReader] = SequentialReader if how == "sequential" else SpeculativeReader
    return reader(network, blocks).read()


class QueryReader(ABC):
    """Base of both readers: holds states and thoughts while queries are read.

    Args:
        network: The network, with backbone, T and C.
        blocks: The queries of all rows.

    Attributes:
        states: S of each block, and the answer's first chunk (B, N + 1, c, D).
        tapped: Inputs of T for all tokens read so far (B, N, c, D).
    """

    def __init__(self, network: ThinkingStatesNetwork, blocks: QueryBlocks) -> None:
        self.network, self.blocks, self.layout = network, blocks, ThoughtLayout.of(network.config)
        self.embedded = network.backbone.embed(blocks.tokens)
        rows, num_blocks, c, dim = self.embedded.shape
        self.states = self.embedded.new_zeros(rows, num_blocks + 1, c, dim)
        self.tapped = torch.zeros_like(self.embedded)
        self.decoded: list[DecodedThoughts] = []
        self.num_thoughts = torch.zeros_like(blocks.chunks)  # (B,), non-trivial ones so far

    @abstractmethod
    def read(self) -> ReadQueries:
        """Reads the queries of all rows."""

    def state_of(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """Returns S of the tokens in blocks ``start`` to ``stop`` of some rows (B, n * c, D)."""
        num_states, c, dim = self.states.shape[1:]
        block = rows[:, None] * num_states + torch.arange(start, stop, device=rows.device)  # (B, n)
        # a short chunk is aligned at its block's end, but may take S from the state's first vectors
        index = block[..., None] * c + self.blocks.offset[rows, start:stop]  # (B, n, c)
        return self.states.view(-1, dim)[index.flatten(1)]

    def open(self, tapped: Tensor, rows: Tensor, start: int, stop: int) -> OpenedThoughts:
        """Opens the thoughts of blocks ``start`` to ``stop``, in row-major order (B * n).

        Args:
            tapped: Inputs of T for the tokens of these blocks (B, n * c, D).
            rows: Indices of the rows (B,) int64.
            start: Index of the first block.
            stop: Index after the last block.
        """
        self.tapped[rows, start:stop] = tapped.view(len(rows), stop - start, *self.tapped.shape[2:])
        real = self.blocks.real[rows, start:stop].flatten(0, 1)  # (B n, c)
        return open_thoughts(self.network, tapped.view(*real.shape, -1), real)

    def finish(self, opened: OpenedThoughts, indices: Tensor, rows: Tensor, blocks: Tensor) -> None:
        """Finishes thoughts, and sets the states of the blocks after them.

        Args:
            opened: The opened thoughts, whose cache is consumed.
            indices: Indices of the non-trivial thoughts among them (K,) int64.
            rows: The row of each (K,) int64.
            blocks: The block of each (K,) int64.
        """
        if not len(indices):
            return
        thoughts, state = finish_states(self.network, opened, indices)
        state = self.network.feed_back(state, self.num_thoughts[rows], rows)  # (K, c, D)
        self.num_thoughts[rows] += 1  # rows are distinct, so no increment is lost
        self.states[rows, blocks + 1] = state.to(self.states.dtype)
        self.decoded.append(DecodedThoughts(rows, blocks, thoughts))

    def result(self, past: AnswerCache, last: Tensor, rounds: list[int]) -> ReadQueries:
        """Builds the result; ``last`` holds the normed states of the last tokens (B, D)."""
        complete = self.blocks.thinks[:, -1, None, None]
        # an incomplete last chunk continues in the answer, and keeps the state it was read with
        state = torch.where(complete, self.states[:, -1], self.states[:, -2])  # (B, c, D)
        tapped = self.tapped[:, -1]
        return ReadQueries(
            past, state, tapped, last, rounds, self.blocks, self.decoded, self.num_thoughts
        )


class SequentialReader(QueryReader):
    """Reads block by block through all layers: the plain reader that speculation must agree with.

    Each block is a round.
    """

    def read(self) -> ReadQueries:
        network, rows = self.network, torch.arange(len(self.states), device=self.states.device)
        past = AnswerCache(len(rows), rows.device)
        for block in range(self.blocks.num_blocks):
            state = self.state_of(rows, block, block + 1)
            h, real = self.embedded[:, block], self.blocks.real[:, block]  # (B, c, D), (B, c)
            hidden = read(network.backbone, past, h, real, state=state, **network.taps)
            assert hidden.tapped is not None
            opened = self.open(hidden.tapped, rows, block, block + 1)
            nontrivial = self.blocks.thinks[:, block] & (opened.first != self.layout.end)  # (B,)
            rows_to_think = nontrivial.nonzero()[:, 0]
            self.finish(opened, rows_to_think, rows_to_think, torch.full_like(rows_to_think, block))
        return self.result(past, hidden.last[:, -1], self.blocks.chunks.tolist())


# ---- speculation


class SpeculativeReader(QueryReader):
    """Reads by speculation (Sec. 3.3, App. A.2).

    Each round assumes that all remaining thoughts are trivial, reads all chunks at once, and keeps
    the result up to the first chunk whose thought is not. NOTE(paper): algorithm 1 tests all states
    again in every round, even those already injected, and mixes indices of chunks that receive a
    state with indices of chunks that produce it. Here a round begins after the chunk that has
    thought. It takes one round per non-trivial thought, and one more unless the last chunk has one;
    the paper always adds one.

    Only the layers from L_in to L_out are computed again in every round: the layers below do not
    depend on states, and the outputs of the layers above are not needed before the answer.

    Finished rows leave the batch and are not computed again. All others begin a round at the
    earliest block that any of them needs, with the states known by then.
    """

    def __init__(self, network: ThinkingStatesNetwork, blocks: QueryBlocks) -> None:
        super().__init__(network, blocks)
        self.positions, self.real = blocks.positions, blocks.real.flatten(1)
        self.below = new_cache()
        lower = 0, network.input_layer
        self.all_rows = torch.arange(len(self.real), device=self.real.device)
        h = network.backbone.enter(self.embedded.flatten(1, 2), self.positions)  # (B, N c, D)
        self.lower = self._layers(h, self.all_rows, lower, self.below)  # computed once

    def read(self) -> ReadQueries:
        network, above = self.network, new_cache()
        first, last = network.input_layer, network.output_layer
        between, rounds = self._between(self.all_rows)
        upper = (last, network.backbone.num_layers)
        h = self._layers(self.tapped.flatten(1, 2), self.all_rows, upper, above)  # (B, N c, D)
        past = AnswerCache(len(self.real), self.real.device)
        # each cache has keys and values of its own range of layers; the answer needs all of them
        layers = (self.below.layers[:first], between.layers[first:last], above.layers[last:])
        past.past.layers = [layer for part in layers for layer in part]
        past.real, past.lengths = self.real, self.real.sum(dim=1)
        return self.result(past, network.backbone.norm(h[:, -1]), rounds)

    def _between(self, rows: Tensor) -> tuple[Any, list[int]]:
        """Returns the cache of the layers that depend on states, and the rounds of each row."""
        past, parts = new_cache(), []
        begin = self.blocks.num_blocks - self.blocks.chunks  # (B,), first uncertain blocks
        rounds = [0] * len(rows)
        while len(rows):
            thought = self._round(past, rows, begin)  # (B,), blocks
            for row in rows.tolist():
                rounds[row] += 1
            # a thought after the last block only changes the answer: no block is read again
            done = thought >= self.blocks.num_blocks - 1
            finished, left = done.nonzero()[:, 0], (~done).nonzero()[:, 0]
            if len(finished):
                parts.append((rows[finished], _rows_of(past, finished, len(left) == 0)))
                past = _rows_of(past, left, len(left) == 0)
            rows, begin = rows[left], thought[left] + 1
        return _joined(parts), rounds

    def _round(self, past: Any, rows: Tensor, begin: Tensor) -> Tensor:
        """Reads from the first uncertain block on, and decodes the first non-trivial thought.

        Args:
            past: Cache of these rows, cut at that block and extended to the end.
            rows: Indices of the rows (B,) int64.
            begin: The first uncertain block of each row (B,) int64.

        Returns:
            The block of each row that has thought (B,) int64, or N if none has.
        """
        start, stop = int(begin.min()), self.blocks.num_blocks
        c, network = self.layout.grid.chunk_size, self.network
        if past.get_seq_length(network.input_layer):
            past.crop((start - stop) * c)  # negative: that many tokens are cut off the end
        h = self.lower[rows, start * c :] + self.state_of(rows, start, stop)  # (B, n c, D)
        h = self._layers(h, rows, (network.input_layer, network.output_layer), past)
        opened = self.open(h, rows, start, stop)
        block = torch.arange(start, stop, device=rows.device)  # (n,)
        first = opened.first.view(len(rows), -1)  # (B, n)
        nontrivial = self.blocks.thinks[rows, start:] & (first != self.layout.end)
        # blocks before a row's begin are read only because another row needs them
        thought = torch.where(nontrivial & (block >= begin[:, None]), block, stop).amin(dim=1)
        thinking = (thought < stop).nonzero()[:, 0]  # (K,)
        indices = thinking * len(block) + thought[thinking] - start  # among the B n opened thoughts
        self.finish(opened, indices, rows[thinking], thought[thinking])
        return thought

    def _layers(self, h: Tensor, rows: Tensor, layers: tuple[int, int], cache: Any) -> Tensor:
        """Runs a range of layers on the last t tokens of rows (B, t, D)."""
        width = h.shape[1]
        # the tokens before them are in the cache: N c keys for the last t queries
        mask = causal_mask(self.real[rows], width, self.network.backbone.window)
        positions = self.positions[rows, -width:]
        return self.network.run_layers(h, layers, positions, mask, cache)


def _rows_of(cache: Any, rows: Tensor, all_or_none: bool) -> Any:
    """Returns a transformers cache with some rows of another one, or the same cache if all."""
    if all_or_none:
        return cache
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    part.batch_select_indices(rows)
    return part


def _joined(parts: list[tuple[Tensor, Any]]) -> Any:
    """Returns a transformers cache of all rows in their order, from caches of some rows each."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.cat([rows for rows, _ in parts]).argsort()  # inverse of the order of leaving
    first = parts[0][1]
    for index, layer in enumerate(first.layers):
        if layer.is_initialized:
            layers = [cache.layers[index] for _, cache in parts]
            layer.keys = torch.cat([part.keys for part in layers])[order]
            layer.values = torch.cat([part.values for part in layers])[order]
    return first


# ---- decoding of answers after queries that have been read
#
# The answer's first tokens receive the state of the query's last thought. If chunks of the answer
# also think (``think_in_decode``), or its tokens fill up the query's last chunk (``absolute``),
# tokens are read one by one until all thoughts are complete.


class ThinkingCache:
    """State between the decode steps of answers.

    Args:
        network: The network, with backbone, T and C.
        queries: The queries as they were read, whose cache is taken over.
        prefix: Tokens that are read before any chosen token.
        trace: Trace that thoughts during the answer are added to. By default none is kept.

    Attributes:
        past: Keys and values of query and answer so far.
        state: S of the current chunk (B, c, D).
        offset: Offset of the next token in that chunk (B,) int64; from c on nothing is added.
        thinks: Whether that chunk thinks after its last token (B,) bool.
        tapped: Inputs of T for its tokens so far (B, c, D).
        last: Normed state of the query's last token (B, D).
        rows: Index of the query of each remaining row (B,) int64.
        num_thoughts: Number of non-trivial thoughts of each row so far (B,) int64.
        trace: The trace, or None.
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
        filled = queries.blocks.real[:, -1].sum(dim=1)  # (B,), tokens of the last chunk
        self.offset = torch.where(complete, 0, filled)
        self.thinks = ~complete | self.layout.grid.in_answers
        # blocks are aligned at their ends; here the chunk begins in slot 0, and grows
        source = (torch.arange(c, device=filled.device) + (c - filled)[:, None]).clamp(max=c - 1)
        index = source[..., None].expand_as(queries.tapped)  # (B, c, D)
        self.tapped = queries.tapped.gather(1, index)
        self.last, self._begun = queries.last, False
        self.num_thoughts = queries.num_thoughts
        self.rows = torch.arange(len(filled), device=filled.device)
        self._may_think = bool(self.thinks.any())

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.past.select(rows)
        for name in ("state", "offset", "thinks", "tapped", "last", "rows", "num_thoughts"):
            setattr(self, name, getattr(self, name)[rows])
        if self._thoughts is not None:
            self._thoughts = [self._thoughts[row] for row in rows.tolist()]

    def decode(self, tokens: Tensor) -> Tensor:
        """Returns the normed states (B, D) that predict the next tokens.

        Args:
            tokens: The latest chosen tokens (B,) int64. The first call reads the prefix instead.
        """
        begun, self._begun = self._begun, True
        if not begun and not len(self.past.pending):
            return self.last
        return self.advance(self.past.next_inputs(tokens))[:, -1]

    @torch.no_grad()
    def advance(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        """Reads the next tokens, and returns their normed states (B, t, D).

        Args:
            tokens: Next tokens (B, t) int64.
            real: Mask of the tokens that belong to the answer, a prefix of each row (B, t) bool.
                The others are read, but complete no chunk. By default all belong to it.
        """
        if not tokens.shape[1]:
            return self.last[:, None][:, :0]
        if not self._may_think:
            return self._read(tokens).last
        if real is None:
            real = torch.ones_like(tokens, dtype=torch.bool)
        states = []
        for column in range(tokens.shape[1]):
            hidden = self._read(tokens[:, column : column + 1])
            states.append(hidden.last)  # (B, 1, D)
            self._tap(hidden, real[:, column])
        return torch.cat(states, dim=1)

    def _read(self, tokens: Tensor) -> HiddenStates:
        c, h = self.state.shape[1], self.network.backbone.embed(tokens)
        offset = self.offset[:, None] + torch.arange(tokens.shape[1], device=h.device)  # (B, t)
        index = offset.clamp(max=c - 1)[..., None].expand_as(h)
        state = self.state.gather(1, index) * (offset < c)[..., None]  # (B, t, D), 0 from c on
        self.offset = self.offset + tokens.shape[1]
        network = self.network
        return read(network.backbone, self.past, h, state=state, **network.taps)

    def _tap(self, hidden: HiddenStates, real: Tensor) -> None:
        """Keeps T's inputs for one token (B, 1, D), and thinks in rows whose chunk it completes."""
        assert hidden.tapped is not None
        c = self.state.shape[1]
        # rows beyond their last chunk overwrite slot c - 1, which is not read any more
        index = (self.offset - 1).clamp(max=c - 1)[:, None, None].expand_as(hidden.tapped)
        self.tapped = self.tapped.scatter(1, index, hidden.tapped)
        rows = (self.thinks & real & (self.offset == c)).nonzero()[:, 0]
        if len(rows):
            self._think(rows)
            self._may_think = bool(self.thinks.any())

    def _think(self, rows: Tensor) -> None:
        """Thinks in rows (K,) that have completed a chunk, and begins their next chunk."""
        h = self.tapped[rows]  # (K, c, D)
        opened = open_thoughts(self.network, h, torch.ones_like(h[..., 0], dtype=torch.bool))
        nontrivial = (opened.first != self.layout.end).nonzero()[:, 0]
        state, tokens = torch.zeros_like(self.state[rows]), {}  # a trivial thought's state is 0
        if len(nontrivial):
            thoughts, latents = finish_states(self.network, opened, nontrivial)
            which = rows[nontrivial]
            latents = self.network.feed_back(latents, self.num_thoughts[which], self.rows[which])
            self.num_thoughts[which] += 1
            state[nontrivial] = latents.to(state.dtype)
            if self._thoughts is not None:
                tokens = dict(zip(which.tolist(), thoughts.to_lists(), strict=True))
        self.state = self.state.index_copy(0, rows, state)
        self.offset = self.offset.index_fill(0, rows, 0)
        self.thinks = self.thinks.index_fill(0, rows, self.layout.grid.in_answers)
        if self._thoughts is not None:
            ends = (self.past.lengths - 1).tolist()
            for row in rows.tolist():
                self._thoughts[row].append(ChunkThought(tokens.get(row, []), ends[row]))
