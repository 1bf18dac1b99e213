"""Teacher forcing, without weights: gold thoughts, the rows of a training step, and traces.

Thoughts enter a training step twice. Those with tokens are a batch for C, whose states are added to
the next chunks' tokens; and all of them are read by T, packed: one sequence a row holds what the
backbone computed of the row's tokens and, after it, the tokens of all its thoughts, and each chunk
sees only its own. So the cost of T is that of the tokens, however many chunks there are.

Traces are recorded (``layers.recording``) as ``record("thoughts", trace=Trace)``, the model's own
thoughts of a scored or answered batch, and ``record("gold_thoughts", trace=Trace)``, those that the
batch's steps make, of a scored one. Both have the rows of the batch in its order, and the same
chunks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.output_layer import IGNORE_INDEX
from lightning_models.runtime import on_device
from lightning_models.thinking_states.config import ThinkingStatesConfig
from lightning_models.thinking_states.rows import NOWHERE, Grid, pack, within


class ChunkThought(NamedTuple):
    """Thought after one chunk.

    Attributes:
        tokens: Ids without the end; empty: a trivial thought, whose state is zero. Steps of one
            chunk are separated by the id of ``step``, which no tokenizer knows. A
            thought of ``max_thought_tokens`` tokens may have been cut.
        end: Index of the chunk's last token in the row: of the query, or from its length on of the
            answer's prefix and the answer.
    """

    tokens: list[int]
    end: int


@dataclass
class Trace:
    """The thoughts of a batch.

    Thoughts during the answer (``think_in_decode``, and the query's last chunk where the answer
    fills it up) are added to the same object as they come.
    """

    rows: list[list[ChunkThought]]
    """The chunks of each row that have thought, in their order; trivial thoughts too."""
    rounds: list[int] = field(default_factory=list)
    """Passes of the backbone over each row's query, or over a part of it; empty for gold."""

    @property
    def nontrivial(self) -> list[int]:
        """Returns how many thoughts of each row have tokens."""
        return [sum(1 for thought in row if thought.tokens) for row in self.rows]

    def at(self, row: int) -> dict[int, list[int]]:
        """Returns the tokens of a row's non-trivial thoughts by ``ChunkThought.end``."""
        return {thought.end: thought.tokens for thought in self.rows[row] if thought.tokens}


# ---- gold thoughts


class GoldThoughts(NamedTuple):
    """The thoughts that a batch's steps make: all of a row one after the other, without ends.

    Attributes:
        tokens: (B, M) int64, 0 after a row's end.
        chunk: The chunk of each token (B, M) int64, never decreasing; NOWHERE after a row's end.
    """

    tokens: Tensor
    chunk: Tensor

    @property
    def valid(self) -> Tensor:
        """Whether there is a token (B, M) bool."""
        return self.chunk < NOWHERE

    @property
    def first(self) -> Tensor:
        """Whether a token begins a thought (B, M) bool."""
        return self.valid & (self.chunk != F.pad(self.chunk, (1, 0), value=-1)[:, :-1])

    @property
    def final(self) -> Tensor:
        """Whether a token is the last one of its thought (B, M) bool."""
        return self.valid & (self.chunk != F.pad(self.chunk, (0, 1), value=NOWHERE)[:, 1:])

    def of(self, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns starts in their rows, and numbers of tokens, of the thoughts of chunks (B, N).

        Returns:
            int64 (B, N) both; 0 tokens: the thought is trivial.
        """
        own, chunks = self.chunk.contiguous(), chunks.contiguous()
        start = torch.searchsorted(own, chunks)
        return start, torch.searchsorted(own, chunks, right=True) - start


def gold_thoughts(
    batch: dict[str, Tensor], grid: Grid, row_lengths: Tensor, separator: int
) -> GoldThoughts:
    """Returns the thoughts of a batch's steps (Sec. 3.4, "Token-to-Chunk Alignment").

    A chunk's thought holds the steps of its tokens in their order. Steps of chunks that never come
    to their ends (``absolute``) are left out.

    Args:
        batch: with ``query_lengths``, ``steps``, ``step_lengths`` and ``step_places``.
        grid: its chunks.
        row_lengths: tokens of each row, the answer's included (B,).
        separator: id between two steps of one chunk.
    """
    steps, queries = batch["steps"], batch["query_lengths"][:, None]
    chunk = grid.chunk(batch["step_places"], queries)  # (B, R)
    there = grid.thinks(chunk, queries, row_lengths[:, None])
    there = there & (batch["step_lengths"] > 0) & (batch["step_places"] >= 0)
    chunk = torch.where(there, chunk, -1)
    joined = there & (chunk == _highest_before(chunk))  # (B, R), in the chunk of a step before
    tokens = F.pad(steps, (1, 0), value=separator)  # (B, R, 1 + Z)
    valid = within(batch["step_lengths"], steps.shape[2]) & there[..., None]  # (B, R, Z)
    packed = pack(tokens.flatten(1), torch.cat((joined[..., None], valid), dim=2).flatten(1))
    own = chunk[..., None].expand_as(tokens).flatten(1).gather(1, packed.places)  # (B, M)
    return GoldThoughts(packed.values, torch.where(packed.valid, own, NOWHERE))


def _highest_before(values: Tensor) -> Tensor:
    """Returns the maximum of -1 and all values (B, R) before each, which are not below -1."""
    return F.pad(values, (1, 0), value=-1).cummax(dim=1).values[:, :-1]


# ---- rows of a training step


class AnswerTargets(NamedTuple):
    """Targets of the backbone: answers and, with ``lm_on_query``, queries.

    Attributes:
        where: The position of each prediction in flattened rows (B, P) int64.
        tokens: What is predicted there (B, P) int64; -100: nothing.
    """

    where: Tensor
    tokens: Tensor


class ThoughtTargets(NamedTuple):
    """Targets of T.

    Attributes:
        where: See ``AnswerTargets``; rows are those of ``ThinkingInputs`` (B, P).
        tokens: (B, P) int64, the ends of thoughts among them.
        sizes: Predictions in the thought that each one belongs to, its end included (B, P) int64;
            1: the thought is trivial.
    """

    where: Tensor
    tokens: Tensor
    sizes: Tensor

    @property
    def valid(self) -> Tensor:
        """Whether anything is predicted (B, P) bool."""
        return self.tokens != IGNORE_INDEX

    @property
    def trivial(self) -> Tensor:
        """Whether the end of a trivial thought is predicted (B, P) bool."""
        return self.valid & (self.sizes == 1)

    @property
    def nontrivial(self) -> Tensor:
        """Whether a token of a thought with tokens, or its end, is predicted (B, P) bool."""
        return self.valid & (self.sizes > 1)


class ThinkingInputs(NamedTuple):
    """Inputs of T, in addition to the backbone's states of the row's first W tokens.

    Attributes:
        tokens: Of all thoughts of each row, without ends (B, M) int64.
        positions: Of both parts (B, W + M) int64; the last token of a chunk has c - 1.
        owner: The chunk that a token belongs to or thinks for (B, W + M) int64.
    """

    tokens: Tensor
    positions: Tensor
    owner: Tensor

    @property
    def mask(self) -> Tensor:
        """(B, 1, W + M, W + M) bool: tokens see their own chunk and thought, up to themselves."""
        place = torch.arange(self.owner.shape[1], device=self.owner.device)
        mask = self.owner[:, :, None] == self.owner[:, None, :]  # (B, n, n)
        return (mask & (place <= place[:, None]))[:, None]


class CompressionInputs(NamedTuple):
    """Inputs of C: the thoughts it compresses, and the tokens their states are added to.

    Attributes:
        thoughts: Their tokens, end and padding (K, N) int64, N >= c; at least one.
        lengths: Their tokens, end included (K,) int64.
        where: The token of flattened rows that each vector is added to (K * c,) int64; the number
            of all tokens: to none.
    """

    thoughts: Tensor
    lengths: Tensor
    where: Tensor


class ForcedRows(NamedTuple):
    """The rows of a training step: query, prefix and answer, without the EOS after it.

    Attributes:
        tokens: (B, T) int64, 0 after a row's end.
        answers: Targets of the backbone; rows are those of ``tokens``.
        states: Thoughts whose states are injected.
        speech: Inputs of T.
        thoughts: Targets of T.
    """

    tokens: Tensor
    answers: AnswerTargets
    states: CompressionInputs
    speech: ThinkingInputs
    thoughts: ThoughtTargets


@dataclass(frozen=True)
class ThoughtLayout:
    """Rows of a training step from a batch; called, it counts the normalisers of a batch."""

    grid: Grid
    """Its chunks."""
    prefix: tuple[int, ...]
    """Tokens that begin every answer."""
    end: int
    """Id of the end of a thought."""
    separator: int
    """Id between two steps of one chunk."""
    padding: int
    """Id after a thought of less than c tokens."""
    lm_on_query: bool = False
    """Whether the query's tokens are predicted, too."""

    @classmethod
    def of(cls, config: ThinkingStatesConfig) -> "ThoughtLayout":
        """Returns the layout that a configuration describes."""
        return cls(
            Grid(config.chunk_size, config.grid, config.think_in_decode),
            tuple(config.answer_prefix),
            end=config.special_id("thought_end"),
            separator=config.special_id("step"),
            padding=config.special_id("thought_pad"),
            lm_on_query=config.lm_on_query,
        )

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """Returns the normalisers of a batch.

        They are ``targets``, ``queries``, ``thought_tokens`` (ends included), and those of them
        that are the ends of trivial thoughts, ``trivial_thoughts``.
        """
        thoughts = self._thought_targets(batch, self.gold(batch))
        targets = self._answers(batch).tokens != IGNORE_INDEX
        return {
            "targets": float(targets.sum()),
            "queries": float(len(batch["query"])),
            "thought_tokens": float(thoughts.valid.sum()),
            "trivial_thoughts": float(thoughts.trivial.sum()),
        }

    def row_lengths(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the tokens of each row (B,)."""
        answers = (batch["targets"] >= 0).sum(dim=1)
        return batch["query_lengths"] + len(self.prefix) + (answers - 1).clamp(min=0)

    def gold(self, batch: dict[str, Tensor]) -> GoldThoughts:
        """Returns the thoughts of the batch's steps."""
        return gold_thoughts(batch, self.grid, self.row_lengths(batch), self.separator)

    def rows(self, batch: dict[str, Tensor]) -> ForcedRows:
        """Returns the rows of a training step; on an accelerator it waits twice, for sizes."""
        gold = self.gold(batch)
        return ForcedRows(
            self._tokens(batch),
            self._answers(batch),
            self._states(batch, gold),
            self._speech(batch, gold),
            self._thought_targets(batch, gold),
        )

    # ---- inputs and targets of the backbone

    def _width(self, batch: dict[str, Tensor]) -> int:
        return batch["query"].shape[1] + len(self.prefix) + max(0, batch["targets"].shape[1] - 1)

    def answer_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the prefix and the answer without its last token (B, P + A - 1)."""
        answers = batch["targets"][:, :-1].clamp(min=0)
        prefix = on_device(self.prefix, answers.device, torch.int64)
        return torch.cat((prefix.expand(len(answers), -1), answers), dim=1)

    def _tokens(self, batch: dict[str, Tensor]) -> Tensor:
        query = batch["query"]
        parts = torch.cat((query, self.answer_tokens(batch)), dim=1)
        token = torch.arange(self._width(batch), device=query.device)
        lengths = batch["query_lengths"][:, None]
        source = torch.where(token < lengths, token, token - lengths + query.shape[1])  # (B, T)
        tokens = parts.gather(1, source.clamp(max=parts.shape[1] - 1))
        return tokens.masked_fill(token >= self.row_lengths(batch)[:, None], 0)

    def _answers(self, batch: dict[str, Tensor]) -> AnswerTargets:
        """Returns the targets of answers without prefix, and with ``lm_on_query`` of queries."""
        tokens, lengths = batch["targets"], batch["query_lengths"][:, None]
        row = torch.arange(len(tokens), device=tokens.device)[:, None] * self._width(batch)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        index = lengths + len(self.prefix) - 1 + place  # (B, A): predicted one token earlier
        if self.lm_on_query:
            query = batch["query"][:, 1:]
            place = torch.arange(query.shape[1], device=tokens.device)
            tokens = torch.cat((tokens, query.masked_fill(place + 1 >= lengths, IGNORE_INDEX)), 1)
            index = torch.cat((index, place.expand_as(query)), dim=1)
        index = index.masked_fill(tokens == IGNORE_INDEX, 0)
        return AnswerTargets(row + index, tokens)

    # ---- inputs and targets of T

    def _thinking_width(self, batch: dict[str, Tensor]) -> int:
        """Returns W: T needs the tokens of answers only where they can complete a chunk."""
        wide = self.grid.in_answers or self.grid.kind == "absolute"
        return self._width(batch) if wide else batch["query"].shape[1]

    def _chunks(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the chunks (B, n) that rows of this batch's widths may have, and which think."""
        c, query = self.grid.chunk_size, batch["query"].shape[1]
        number = -(-query // c) + -(-(self._thinking_width(batch) - query) // c)
        lengths = batch["query_lengths"][:, None]
        chunk = torch.arange(number, device=lengths.device).expand(len(lengths), -1)
        return chunk, self.grid.thinks(chunk, lengths, self.row_lengths(batch)[:, None])

    def _speech(self, batch: dict[str, Tensor], gold: GoldThoughts) -> ThinkingInputs:
        device, lengths = gold.tokens.device, batch["query_lengths"][:, None]
        token = torch.arange(self._thinking_width(batch), device=device).expand(len(lengths), -1)
        chunk, rows = self.grid.chunk(token, lengths), self.row_lengths(batch)[:, None]
        thinks = self.grid.thinks(chunk, lengths, rows)
        before = self.grid.chunk_size - 1 - self.grid.last(chunk, lengths) + token  # (B, W), < c
        start, _ = gold.of(gold.chunk)  # (B, M)
        order = torch.arange(gold.tokens.shape[1], device=device) - start  # within the thought
        positions = torch.cat((before.clamp(min=0), self.grid.chunk_size + order), dim=1)
        owner = torch.cat((torch.where(thinks, chunk, NOWHERE), gold.chunk), dim=1)  # (B, W + M)
        return ThinkingInputs(gold.tokens, positions, owner)

    def _thought_targets(self, batch: dict[str, Tensor], gold: GoldThoughts) -> ThoughtTargets:
        """Returns T's targets after the last token of chunks, and after thought tokens."""
        lengths, device = batch["query_lengths"][:, None], gold.tokens.device
        chunk, thinks = self._chunks(batch)  # (B, chunks)
        start, begun = gold.of(chunk)
        padded = F.pad(gold.tokens, (0, 1))
        opening = torch.where(begun > 0, padded.gather(1, start), self.end)  # first tokens
        following = padded[:, 1:].masked_fill(gold.final, self.end)  # (B, M)
        tokens = torch.cat(
            (
                opening.masked_fill(~thinks, IGNORE_INDEX),
                following.masked_fill(~gold.valid, IGNORE_INDEX),
            ),
            dim=1,
        )
        _, own = gold.of(gold.chunk)
        width = self._thinking_width(batch)
        spoken = width + torch.arange(gold.tokens.shape[1], device=device).expand_as(gold.tokens)
        index = torch.cat((self.grid.last(chunk, lengths), spoken), dim=1)  # (B, chunks + M)
        index = index.masked_fill(tokens == IGNORE_INDEX, 0)
        row = torch.arange(len(lengths), device=device)[:, None] * (width + gold.tokens.shape[1])
        return ThoughtTargets(row + index, tokens, torch.cat((begun, own), dim=1) + 1)

    # ---- inputs of C, and receivers of its states

    def _states(self, batch: dict[str, Tensor], gold: GoldThoughts) -> CompressionInputs:
        """Returns the thoughts with tokens; a batch without any has one that goes nowhere.

        So C takes part in every backward pass, which distributed training relies on.
        """
        device, lengths = gold.tokens.device, batch["query_lengths"]
        _, sizes = gold.of(gold.chunk)
        sizes = F.pad(sizes.masked_fill(~gold.valid, 0).flatten(), (0, 1))
        count, longest = torch.stack((gold.first.sum(), sizes.max())).tolist()
        where = F.pad(~gold.first.flatten(), (0, 1), value=True).to(torch.uint8)
        where = where.argsort(stable=True)[: max(1, count)]  # first tokens of thoughts (K,)
        tokens = F.pad(gold.tokens.flatten(), (0, longest + 1))
        tokens = tokens[where[:, None] + torch.arange(longest, device=device)]  # (K, longest)
        thoughts = self.for_compression(tokens, sizes[where])
        row = where // max(1, gold.tokens.shape[1])
        chunk = F.pad(gold.chunk.flatten(), (0, 1), value=NOWHERE)[where]
        index = self._receivers(chunk + 1, lengths[row], self.row_lengths(batch)[row])  # (K, c)
        width = self._width(batch)
        index = torch.where(index >= 0, row[:, None] * width + index, len(lengths) * width)
        return CompressionInputs(thoughts, sizes[where] + 1, index.flatten())

    def for_compression(self, tokens: Tensor, sizes: Tensor) -> Tensor:
        """Returns the inputs of C for thoughts: their tokens, end and padding (K, N), N >= c.

        Args:
            tokens: (K, M) int64.
            sizes: how many of them belong to each thought (K,) int64.
        """
        place = torch.arange(max(tokens.shape[1] + 1, self.grid.chunk_size), device=tokens.device)
        padded = F.pad(tokens, (0, len(place) - tokens.shape[1]))
        filling = torch.where(place == sizes[:, None], self.end, self.padding)
        return torch.where(place < sizes[:, None], padded, filling)  # (K, N)

    def _receivers(self, chunk: Tensor, lengths: Tensor, row_lengths: Tensor) -> Tensor:
        """Returns the index of the token at each place of chunks (K, c), -1 where there is none."""
        place = torch.arange(self.grid.chunk_size, device=chunk.device)
        chunk, lengths = chunk[:, None], lengths[:, None]
        token = self.grid.token(chunk, place, lengths)
        there = (token >= 0) & (token < row_lengths[:, None])
        return torch.where(there & (self.grid.chunk(token, lengths) == chunk), token, -1)

    # ---- traces

    def gold_trace(self, batch: dict[str, Tensor]) -> Trace:
        """Returns the thoughts of the batch's steps."""
        gold, lengths = self.gold(batch), batch["query_lengths"][:, None]
        chunk, thinks = self._chunks(batch)
        columns = (*gold.of(chunk), self.grid.last(chunk, lengths), thinks)
        table = torch.stack([column.long() for column in columns], dim=2).tolist()
        return Trace(
            [
                [ChunkThought(tokens[at : at + size], end) for at, size, end, there in row if there]
                for tokens, row in zip(gold.tokens.tolist(), table, strict=True)
            ]
        )
