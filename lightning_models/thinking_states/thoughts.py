"""Teacher forcing, without weights: gold thoughts, the rows of a training step, and traces.

Thoughts enter a training step twice. C reads a batch of all non-trivial ones, whose states are
added to the tokens of the next chunks. T reads all of them in a packed layout, one sequence per
row: first the hidden states of the row's W tokens, then the M tokens of all its thoughts. The
mask keeps chunks apart, so the cost of T depends on the number of tokens alone, not of chunks:

    column     0  ..  W - 1                   W  ..  W + M - 1
    input      backbone states of the row     embeddings of thought tokens, chunk by chunk
    owner      chunk that the token is in     chunk that the thought belongs to
    position   c - 1 at the chunk's end       c, c + 1, ... in the thought
    predicts   last token of a chunk: the     next token, and last the end
               first token of its thought

Traces are recorded (``layers.recording``) as ``record("thoughts", trace=Trace)``, the model's own
thoughts in a scored or answered batch, and ``record("gold_thoughts", trace=Trace)``, the thoughts
made of the batch's steps, in a scored one. Both have the batch's rows in order, and equal chunks.
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
    """The thought after one chunk.

    Attributes:
        tokens: Token ids without the end. A trivial thought has none, and its state is zero. Steps
            of one chunk are separated by the id of ``step``, which no tokenizer has. A thought of
            ``max_thought_tokens`` tokens may have been cut.
        end: Index of the chunk's last token in the row, which is the query, the answer prefix and
            the answer.
    """

    tokens: list[int]
    end: int


@dataclass
class Trace:
    """The thoughts of a batch.

    Thoughts during the answer (``think_in_decode``, or a last chunk of the query that the answer
    fills up) are added to the same object as they come.
    """

    rows: list[list[ChunkThought]]
    """Thoughts of each row in the order of chunks, including trivial ones."""
    rounds: list[int] = field(default_factory=list)
    """Number of backbone passes over each row's query or a part of it; empty for gold thoughts."""

    @property
    def nontrivial(self) -> list[int]:
        """Number of non-trivial thoughts of each row."""
        return [sum(1 for thought in row if thought.tokens) for row in self.rows]

    def at(self, row: int) -> dict[int, list[int]]:
        """Returns the tokens of a row's non-trivial thoughts by ``ChunkThought.end``."""
        return {thought.end: thought.tokens for thought in self.rows[row] if thought.tokens}


# ---- gold thoughts


class GoldThoughts(NamedTuple):
    """The thoughts made of a batch's steps, concatenated for each row, without ends.

    Attributes:
        tokens: Tokens (B, M) int64, 0 after a row's end.
        chunk: The chunk of each token (B, M) int64, non-decreasing, NOWHERE after a row's end.
    """

    tokens: Tensor
    chunk: Tensor

    @property
    def valid(self) -> Tensor:
        """Mask of the columns that hold a token (B, M) bool."""
        return self.chunk < NOWHERE

    @property
    def first(self) -> Tensor:
        """Mask of the first token of each thought (B, M) bool."""
        return self.valid & (self.chunk != F.pad(self.chunk, (1, 0), value=-1)[:, :-1])

    @property
    def final(self) -> Tensor:
        """Mask of the last token of each thought (B, M) bool."""
        return self.valid & (self.chunk != F.pad(self.chunk, (0, 1), value=NOWHERE)[:, 1:])

    def of(self, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the columns at which the thoughts of chunks (B, N) start, and their sizes.

        Returns:
            Columns (B, N) int64, and numbers of tokens (B, N) int64, 0 for trivial thoughts.
        """
        # the tokens of a chunk are contiguous in the sorted row, so two binary searches bound them
        sorted_chunks, chunks = self.chunk.contiguous(), chunks.contiguous()
        start = torch.searchsorted(sorted_chunks, chunks)
        return start, torch.searchsorted(sorted_chunks, chunks, right=True) - start


def gold_thoughts(
    batch: dict[str, Tensor], grid: Grid, row_lengths: Tensor, separator: int
) -> GoldThoughts:
    """Makes thoughts of a batch's steps (Sec. 3.4, "Token-to-Chunk Alignment").

    A chunk's thought holds the steps of its tokens in their order. Steps of chunks that are never
    completed (``absolute``) are left out.

    Args:
        batch: Batch with ``query_lengths``, ``steps``, ``step_lengths`` and ``step_places``.
        grid: The grid of chunks.
        row_lengths: Number of tokens of each row, including its answer (B,) int64.
        separator: Id between two steps of one chunk.
    """
    steps, queries = batch["steps"], batch["query_lengths"][:, None]
    chunk = grid.chunk(batch["step_places"], queries)  # (B, R)
    used = grid.thinks(chunk, queries, row_lengths[:, None])
    used = used & (batch["step_lengths"] > 0) & (batch["step_places"] >= 0)  # (B, R)
    chunk = torch.where(used, chunk, -1)
    joined = used & (chunk == _highest_before(chunk))  # (B, R), in the chunk of an earlier step
    tokens = F.pad(steps, (1, 0), value=separator)  # (B, R, 1 + Z)
    valid = within(batch["step_lengths"], steps.shape[2]) & used[..., None]  # (B, R, Z)
    # only steps joined to an earlier one keep the separator in their first column
    packed = pack(tokens.flatten(1), torch.cat((joined[..., None], valid), dim=2).flatten(1))
    owner = chunk[..., None].expand_as(tokens).flatten(1).gather(1, packed.source)  # (B, M)
    return GoldThoughts(packed.values, torch.where(packed.valid, owner, NOWHERE))


def _highest_before(values: Tensor) -> Tensor:
    """Returns the exclusive running maximum of values (B, R), none below -1, beginning with -1."""
    return F.pad(values, (1, 0), value=-1).cummax(dim=1).values[:, :-1]


# ---- rows of a training step


class AnswerTargets(NamedTuple):
    """Targets of the backbone: answers and, with ``lm_on_query``, queries.

    Attributes:
        where: Index of each prediction in flattened rows (B, P) int64.
        tokens: The token predicted there (B, P) int64, or -100 to predict none.
    """

    where: Tensor
    tokens: Tensor


class ThoughtTargets(NamedTuple):
    """Targets of T.

    Attributes:
        where: Index of each prediction in flattened rows of ``ThinkingInputs`` (B, P) int64.
        tokens: The token or end predicted there (B, P) int64, or -100 to predict none.
        sizes: Number of predictions in the same thought, including its end (B, P) int64; 1 for a
            trivial thought.
    """

    where: Tensor
    tokens: Tensor
    sizes: Tensor

    @property
    def valid(self) -> Tensor:
        """Mask of all predictions (B, P) bool."""
        return self.tokens != IGNORE_INDEX

    @property
    def trivial(self) -> Tensor:
        """Mask of the predicted ends of trivial thoughts (B, P) bool."""
        return self.valid & (self.sizes == 1)

    @property
    def nontrivial(self) -> Tensor:
        """Mask of the predicted tokens and ends of non-trivial thoughts (B, P) bool."""
        return self.valid & (self.sizes > 1)


class ThinkingInputs(NamedTuple):
    """Inputs of T, in addition to the backbone's states of the row's first W tokens.

    Attributes:
        tokens: Tokens of all thoughts of each row, without ends (B, M) int64.
        positions: Positions in both parts (B, W + M) int64; the last token of a chunk has c - 1.
        owner: The chunk of each token or its thought (B, W + M) int64.
    """

    tokens: Tensor
    positions: Tensor
    owner: Tensor

    @property
    def mask(self) -> Tensor:
        """Causal mask (B, 1, W + M, W + M) bool within each chunk and its thought."""
        column = torch.arange(self.owner.shape[1], device=self.owner.device)
        mask = self.owner[:, :, None] == self.owner[:, None, :]  # (B, W + M, W + M)
        return (mask & (column <= column[:, None]))[:, None]  # one mask for all heads


class CompressionInputs(NamedTuple):
    """Inputs of C: the thoughts to compress, and the tokens that their states are added to.

    Attributes:
        thoughts: Tokens, end and padding of at least one thought (K, N) int64, N >= c.
        lengths: Number of tokens of each thought, including its end (K,) int64.
        where: Index in flattened rows of the token that each vector is added to (K * c,) int64, or
            B * T for a vector that is added to none.
    """

    thoughts: Tensor
    lengths: Tensor
    where: Tensor


class ForcedRows(NamedTuple):
    """The rows of a training step: query, prefix and answer, without its EOS.

    Attributes:
        tokens: Tokens (B, T) int64, 0 after a row's end.
        answers: Targets of the backbone on these tokens.
        states: Thoughts whose states are injected.
        thinking: Inputs of T.
        thoughts: Targets of T.
    """

    tokens: Tensor
    answers: AnswerTargets
    states: CompressionInputs
    thinking: ThinkingInputs
    thoughts: ThoughtTargets


@dataclass(frozen=True)
class ThoughtLayout:
    """Builds the rows of a training step from a batch; called, counts the batch's normalisers."""

    grid: Grid
    """Grid of chunks."""
    prefix: tuple[int, ...]
    """Tokens that begin every answer."""
    end: int
    """Id of the end of a thought."""
    separator: int
    """Id between two steps of one chunk."""
    padding: int
    """Id that fills up a thought of less than c tokens."""
    lm_on_query: bool = False
    """Whether the query's tokens are also predicted."""

    @classmethod
    def of(cls, config: ThinkingStatesConfig) -> "ThoughtLayout":
        """Returns the layout of a configuration."""
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

        They are ``targets``, ``queries``, ``thought_tokens`` (including ends), and
        ``trivial_thoughts``, whose ends are among ``thought_tokens``.
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
        """Returns the number of tokens of each row (B,) int64."""
        answers = (batch["targets"] >= 0).sum(dim=1)  # (B,), the EOS counted, which is not read
        return batch["query_lengths"] + len(self.prefix) + (answers - 1).clamp(min=0)

    def gold(self, batch: dict[str, Tensor]) -> GoldThoughts:
        """Returns the thoughts of the batch's steps."""
        return gold_thoughts(batch, self.grid, self.row_lengths(batch), self.separator)

    def rows(self, batch: dict[str, Tensor]) -> ForcedRows:
        """Builds the rows of a training step, with two syncs for sizes on an accelerator."""
        gold = self.gold(batch)
        return ForcedRows(
            self._tokens(batch),
            self._answers(batch),
            self._states(batch, gold),
            self._thinking(batch, gold),
            self._thought_targets(batch, gold),
        )

    # ---- inputs and targets of the backbone

    def _width(self, batch: dict[str, Tensor]) -> int:
        return batch["query"].shape[1] + len(self.prefix) + max(0, batch["targets"].shape[1] - 1)

    def answer_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the prefix and the answer without its last token (B, P + A - 1)."""
        answers = batch["targets"][:, :-1].clamp(min=0)  # -100 in padding becomes a valid id
        prefix = on_device(self.prefix, answers.device, torch.int64)
        return torch.cat((prefix.expand(len(answers), -1), answers), dim=1)

    def _tokens(self, batch: dict[str, Tensor]) -> Tensor:
        query = batch["query"]
        parts = torch.cat((query, self.answer_tokens(batch)), dim=1)  # (B, Q + P + A - 1)
        token = torch.arange(self._width(batch), device=query.device)
        lengths = batch["query_lengths"][:, None]
        # answers begin at column Q of parts, and at each row's own query length in the row
        source = torch.where(token < lengths, token, token - lengths + query.shape[1])  # (B, T)
        tokens = parts.gather(1, source.clamp(max=parts.shape[1] - 1))
        return tokens.masked_fill(token >= self.row_lengths(batch)[:, None], 0)

    def _answers(self, batch: dict[str, Tensor]) -> AnswerTargets:
        """Returns the targets of answers without prefix and, with ``lm_on_query``, of queries."""
        tokens, lengths = batch["targets"], batch["query_lengths"][:, None]
        start = torch.arange(len(tokens), device=tokens.device)[:, None] * self._width(batch)
        column = torch.arange(tokens.shape[1], device=tokens.device)
        index = lengths + len(self.prefix) - 1 + column  # (B, A), predicted one token earlier
        if self.lm_on_query:
            query = batch["query"][:, 1:]
            column = torch.arange(query.shape[1], device=tokens.device)
            tokens = torch.cat((tokens, query.masked_fill(column + 1 >= lengths, IGNORE_INDEX)), 1)
            index = torch.cat((index, column.expand_as(query)), dim=1)  # (B, A + Q - 1)
        index = index.masked_fill(tokens == IGNORE_INDEX, 0)
        return AnswerTargets(start + index, tokens)

    # ---- inputs and targets of T

    def _thinking_width(self, batch: dict[str, Tensor]) -> int:
        """Returns W; T reads the tokens of answers only if they can complete a chunk."""
        whole_row = self.grid.in_answers or self.grid.mode == "absolute"
        return self._width(batch) if whole_row else batch["query"].shape[1]

    def _chunks(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the chunks (B, n) that fit this batch's widths, and which of them think."""
        c, query = self.grid.chunk_size, batch["query"].shape[1]
        # enough for any row: chunks of the widest query, then of the answers, each rounded up
        num_chunks = -(-query // c) + -(-(self._thinking_width(batch) - query) // c)
        lengths = batch["query_lengths"][:, None]
        chunk = torch.arange(num_chunks, device=lengths.device).expand(len(lengths), -1)
        return chunk, self.grid.thinks(chunk, lengths, self.row_lengths(batch)[:, None])

    def _thinking(self, batch: dict[str, Tensor], gold: GoldThoughts) -> ThinkingInputs:
        device, lengths = gold.tokens.device, batch["query_lengths"][:, None]
        token = torch.arange(self._thinking_width(batch), device=device).expand(len(lengths), -1)
        chunk, rows = self.grid.chunk(token, lengths), self.row_lengths(batch)[:, None]
        thinks = self.grid.thinks(chunk, lengths, rows)
        # positions are aligned at a chunk's last token, c - 1, and go on with its thought from c
        before = self.grid.chunk_size - 1 - self.grid.last(chunk, lengths) + token  # (B, W), < c
        start, _ = gold.of(gold.chunk)  # (B, M)
        order = torch.arange(gold.tokens.shape[1], device=device) - start  # (B, M), in the thought
        positions = torch.cat((before.clamp(min=0), self.grid.chunk_size + order), dim=1)
        owner = torch.cat((torch.where(thinks, chunk, NOWHERE), gold.chunk), dim=1)  # (B, W + M)
        return ThinkingInputs(gold.tokens, positions, owner)

    def _thought_targets(self, batch: dict[str, Tensor], gold: GoldThoughts) -> ThoughtTargets:
        """Returns T's targets after the last token of each chunk, and after thought tokens."""
        lengths, device = batch["query_lengths"][:, None], gold.tokens.device
        chunk, thinks = self._chunks(batch)  # (B, n)
        start, sizes = gold.of(chunk)
        padded = F.pad(gold.tokens, (0, 1))  # start is M for the trivial thoughts after all others
        opening = torch.where(sizes > 0, padded.gather(1, start), self.end)  # (B, n), first tokens
        following = padded[:, 1:].masked_fill(gold.final, self.end)  # (B, M), next token or end
        tokens = torch.cat(
            (
                opening.masked_fill(~thinks, IGNORE_INDEX),
                following.masked_fill(~gold.valid, IGNORE_INDEX),
            ),
            dim=1,
        )  # (B, n + M)
        _, token_sizes = gold.of(gold.chunk)  # (B, M), of the thought that a token is in
        width = self._thinking_width(batch)
        column = width + torch.arange(gold.tokens.shape[1], device=device).expand_as(gold.tokens)
        index = torch.cat((self.grid.last(chunk, lengths), column), dim=1)  # (B, n + M)
        index = index.masked_fill(tokens == IGNORE_INDEX, 0)
        row = torch.arange(len(lengths), device=device)[:, None] * (width + gold.tokens.shape[1])
        return ThoughtTargets(row + index, tokens, torch.cat((sizes, token_sizes), dim=1) + 1)

    # ---- inputs of C, and receivers of its states

    def _states(self, batch: dict[str, Tensor], gold: GoldThoughts) -> CompressionInputs:
        """Returns the non-trivial thoughts, or in a batch without any, one that is added nowhere.

        C then takes part in every backward pass, which distributed training relies on.
        """
        device, lengths = gold.tokens.device, batch["query_lengths"]
        _, sizes = gold.of(gold.chunk)
        # all rows are flattened to (B M), plus one empty entry that a batch without thoughts takes
        sizes = F.pad(sizes.masked_fill(~gold.valid, 0).flatten(), (0, 1))
        count, longest = torch.stack((gold.first.sum(), sizes.max())).tolist()  # one sync for both
        where = F.pad(~gold.first.flatten(), (0, 1), value=True).to(torch.uint8)
        where = where.argsort(stable=True)[: max(1, count)]  # (K,), first tokens of thoughts
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
            tokens: Tokens of thoughts (K, M) int64.
            sizes: Number of tokens of each thought, its end not counted (K,) int64.
        """
        column = torch.arange(max(tokens.shape[1] + 1, self.grid.chunk_size), device=tokens.device)
        padded = F.pad(tokens, (0, len(column) - tokens.shape[1]))
        filling = torch.where(column == sizes[:, None], self.end, self.padding)
        return torch.where(column < sizes[:, None], padded, filling)  # (K, N)

    def _receivers(self, chunk: Tensor, lengths: Tensor, row_lengths: Tensor) -> Tensor:
        """Returns the index of the token at each offset of chunks (K, c), or -1 if it has none."""
        offset = torch.arange(self.grid.chunk_size, device=chunk.device)
        chunk, lengths = chunk[:, None], lengths[:, None]
        token = self.grid.token(chunk, offset, lengths)  # (K, c)
        in_row = (token >= 0) & (token < row_lengths[:, None])
        # a short chunk lacks offsets, whose index is a token of a neighbour
        return torch.where(in_row & (self.grid.chunk(token, lengths) == chunk), token, -1)

    # ---- traces

    def gold_trace(self, batch: dict[str, Tensor]) -> Trace:
        """Returns the thoughts of the batch's steps."""
        gold, lengths = self.gold(batch), batch["query_lengths"][:, None]
        chunk, thinks = self._chunks(batch)
        columns = (*gold.of(chunk), self.grid.last(chunk, lengths), thinks)
        table = torch.stack([column.long() for column in columns], dim=2).tolist()
        return Trace(
            [
                [ChunkThought(tokens[at : at + size], end) for at, size, end, think in row if think]
                for tokens, row in zip(gold.tokens.tolist(), table, strict=True)
            ]
        )
