"""From a batch to the rows of a training step: everything about them but weights.

Thoughts enter twice. Those with tokens are a batch for C, whose states are added to the next
chunks' tokens; and all of them are read by T, packed: one sequence a row holds what the backbone
computed of the row's tokens and, behind it, the tokens of all its thoughts, and each chunk sees
only its own. So the cost of T is that of the tokens, however many chunks there are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.output_layer import IGNORE_INDEX
from lightning_models.thinking_states.chunks import NOWHERE, Gold, Grid, gold_thoughts
from lightning_models.thinking_states.config import ThinkingStatesConfig
from lightning_models.thinking_states.trace import Thought, Trace
from lightning_models.thinking_states.training_rows import (
    ForcedRows,
    Speech,
    States,
    Targets,
    ThoughtTargets,
)


@dataclass(frozen=True)
class ThoughtLayout:
    """How batches become rows; called, it counts the normalisers of a batch."""

    grid: Grid
    """Its chunks."""
    prefix: tuple[int, ...]
    """Tokens that begin every answer."""
    end: int
    """Id of the end of a thought."""
    separator: int
    """Id between two steps of one chunk."""
    padding: int
    """Id behind a thought of less than c tokens."""
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

    def gold(self, batch: dict[str, Tensor]) -> Gold:
        """Returns the thoughts of the batch's steps."""
        return gold_thoughts(batch, self.grid, self.row_lengths(batch), self.separator)

    def rows(self, batch: dict[str, Tensor]) -> ForcedRows:
        """Returns the rows of a training step; the device is asked twice for sizes."""
        gold = self.gold(batch)
        return ForcedRows(
            self._tokens(batch),
            self._answers(batch),
            self._states(batch, gold),
            self._speech(batch, gold),
            self._thought_targets(batch, gold),
        )

    # ---- what the backbone reads and predicts

    def _width(self, batch: dict[str, Tensor]) -> int:
        return batch["query"].shape[1] + len(self.prefix) + max(0, batch["targets"].shape[1] - 1)

    def answer_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the prefix and the answer without its last token (B, P + A - 1)."""
        answers = batch["targets"][:, :-1].clamp(min=0)
        prefix = torch.tensor(self.prefix, dtype=torch.int64, device=answers.device)
        return torch.cat((prefix.expand(len(answers), -1), answers), dim=1)

    def _tokens(self, batch: dict[str, Tensor]) -> Tensor:
        query = batch["query"]
        parts = torch.cat((query, self.answer_tokens(batch)), dim=1)
        token = torch.arange(self._width(batch), device=query.device)
        lengths = batch["query_lengths"][:, None]
        source = torch.where(token < lengths, token, token - lengths + query.shape[1])
        tokens = parts.gather(1, source.clamp(max=parts.shape[1] - 1))
        return tokens.masked_fill(token >= self.row_lengths(batch)[:, None], 0)

    def _answers(self, batch: dict[str, Tensor]) -> Targets:
        """Returns the answers' targets, which the prefix is not, and those of queries if asked."""
        tokens, lengths = batch["targets"], batch["query_lengths"][:, None]
        row = torch.arange(len(tokens), device=tokens.device)[:, None] * self._width(batch)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        index = lengths + len(self.prefix) - 1 + place
        if self.lm_on_query:
            query = batch["query"][:, 1:]
            place = torch.arange(query.shape[1], device=tokens.device)
            tokens = torch.cat((tokens, query.masked_fill(place + 1 >= lengths, IGNORE_INDEX)), 1)
            index = torch.cat((index, place.expand_as(query)), dim=1)
        index = index.masked_fill(tokens == IGNORE_INDEX, 0)
        return Targets(row + index, tokens)

    # ---- what T reads and predicts

    def _heard(self, batch: dict[str, Tensor]) -> int:
        """Returns W: T needs the tokens of answers only where they can complete a chunk."""
        wide = self.grid.in_answers or self.grid.kind == "absolute"
        return self._width(batch) if wide else batch["query"].shape[1]

    def _most_chunks(self, batch: dict[str, Tensor]) -> int:
        """Returns how many chunks a row of this batch's widths may have, those that think."""
        c, query = self.grid.chunk_size, batch["query"].shape[1]
        return -(-query // c) + -(-(self._heard(batch) - query) // c)

    def _speech(self, batch: dict[str, Tensor], gold: Gold) -> Speech:
        device, lengths = gold.tokens.device, batch["query_lengths"][:, None]
        token = torch.arange(self._heard(batch), device=device).expand(len(lengths), -1)
        chunk, rows = self.grid.chunk(token, lengths), self.row_lengths(batch)[:, None]
        thinks = self.grid.thinks(chunk, lengths, rows)
        before = self.grid.chunk_size - 1 - self.grid.last(chunk, lengths) + token
        start, _ = gold.of(gold.chunk)
        order = torch.arange(gold.tokens.shape[1], device=device) - start
        positions = torch.cat((before.clamp(min=0), self.grid.chunk_size + order), dim=1)
        owner = torch.cat((torch.where(thinks, chunk, NOWHERE), gold.chunk), dim=1)
        place = torch.arange(owner.shape[1], device=device)
        mask = (owner[:, :, None] == owner[:, None, :]) & (place <= place[:, None])
        return Speech(gold.tokens, positions, mask[:, None])

    def _thought_targets(self, batch: dict[str, Tensor], gold: Gold) -> ThoughtTargets:
        """Returns what is predicted behind the last token of chunks, and behind thought tokens."""
        lengths, device = batch["query_lengths"][:, None], gold.tokens.device
        chunk = torch.arange(self._most_chunks(batch), device=device).expand(len(lengths), -1)
        thinks = self.grid.thinks(chunk, lengths, self.row_lengths(batch)[:, None])
        start, begun = gold.of(chunk)
        padded = F.pad(gold.tokens, (0, 1))
        opening = torch.where(begun > 0, padded.gather(1, start), self.end)
        following = padded[:, 1:].masked_fill(gold.final, self.end)
        tokens = torch.cat(
            (
                opening.masked_fill(~thinks, IGNORE_INDEX),
                following.masked_fill(~gold.valid, IGNORE_INDEX),
            ),
            dim=1,
        )
        _, own = gold.of(gold.chunk)
        width = self._heard(batch)
        spoken = width + torch.arange(gold.tokens.shape[1], device=device).expand_as(gold.tokens)
        index = torch.cat((self.grid.last(chunk, lengths), spoken), dim=1)
        index = index.masked_fill(tokens == IGNORE_INDEX, 0)
        row = torch.arange(len(lengths), device=device)[:, None] * (width + gold.tokens.shape[1])
        return ThoughtTargets(row + index, tokens, torch.cat((begun, own), dim=1) + 1)

    # ---- what C reads, and where its states go

    def _states(self, batch: dict[str, Tensor], gold: Gold) -> States:
        """Returns the thoughts with tokens; a batch without any has one that goes nowhere.

        So C takes part in every backward pass, which distributed training relies on.
        """
        device, lengths = gold.tokens.device, batch["query_lengths"]
        _, sizes = gold.of(gold.chunk)
        sizes = F.pad(sizes.masked_fill(~gold.valid, 0).flatten(), (0, 1))
        count, longest = torch.stack((gold.first.sum(), sizes.max())).tolist()
        where = F.pad(~gold.first.flatten(), (0, 1), value=True).to(torch.uint8)
        where = where.argsort(stable=True)[: max(1, count)]
        tokens = F.pad(gold.tokens.flatten(), (0, longest + 1))
        tokens = tokens[where[:, None] + torch.arange(longest, device=device)]
        thoughts = self.for_compression(tokens, sizes[where])
        row = where // max(1, gold.tokens.shape[1])
        chunk = F.pad(gold.chunk.flatten(), (0, 1), value=NOWHERE)[where]
        index = self._receivers(chunk + 1, lengths[row], self.row_lengths(batch)[row])
        width = self._width(batch)
        index = torch.where(index >= 0, row[:, None] * width + index, len(lengths) * width)
        return States(thoughts, sizes[where] + 1, index.flatten())

    def for_compression(self, tokens: Tensor, sizes: Tensor) -> Tensor:
        """Returns what C reads of thoughts: their tokens, end and padding (K, N), N >= c.

        Args:
            tokens: (K, M) int64.
            sizes: how many of them belong to each thought (K,) int64.
        """
        place = torch.arange(max(tokens.shape[1] + 1, self.grid.chunk_size), device=tokens.device)
        padded = F.pad(tokens, (0, len(place) - tokens.shape[1]))
        behind = torch.where(place == sizes[:, None], self.end, self.padding)
        return torch.where(place < sizes[:, None], padded, behind)

    def _receivers(self, chunk: Tensor, lengths: Tensor, row_lengths: Tensor) -> Tensor:
        """Returns the index of the token at each place of chunks (K, c), -1 where there is none."""
        place = torch.arange(self.grid.chunk_size, device=chunk.device)
        chunk, lengths = chunk[:, None], lengths[:, None]
        token = self.grid.token(chunk, place, lengths)
        there = (token >= 0) & (token < row_lengths[:, None])
        return torch.where(there & (self.grid.chunk(token, lengths) == chunk), token, -1)

    # ---- what is shown

    def gold_trace(self, batch: dict[str, Tensor]) -> Trace:
        """Returns the thoughts of the batch's steps."""
        gold, lengths = self.gold(batch), batch["query_lengths"][:, None]
        chunk = torch.arange(self._most_chunks(batch), device=gold.tokens.device)
        chunk = chunk.expand(len(lengths), -1)
        thinks = self.grid.thinks(chunk, lengths, self.row_lengths(batch)[:, None])
        columns = (*gold.of(chunk), self.grid.last(chunk, lengths), thinks)
        table = torch.stack([column.long() for column in columns], dim=2).tolist()
        return Trace(
            [
                [Thought(tokens[at : at + size], end) for at, size, end, there in row if there]
                for tokens, row in zip(gold.tokens.tolist(), table, strict=True)
            ]
        )
