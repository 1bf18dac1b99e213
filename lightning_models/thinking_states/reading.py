"""What all ways of reading queries share: states, thoughts, and what is left of it in the end."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_models.thinking_states.blocks import Blocks
from lightning_models.thinking_states.decoding import AnswerCache
from lightning_models.thinking_states.network import ThinkingStatesNetwork
from lightning_models.thinking_states.speaking import (
    Opened,
    ThoughtTokens,
    finish_thoughts,
    open_thoughts,
)
from lightning_models.thinking_states.thoughts import ThoughtLayout
from lightning_models.thinking_states.trace import Thought


class Spoken(NamedTuple):
    """Thoughts with tokens that came together: of these rows and blocks (K,) int64."""

    rows: Tensor
    blocks: Tensor
    thoughts: ThoughtTokens


@dataclass
class ReadQueries:
    """Queries that have been read.

    Attributes:
        past: Keys and values, queries aligned at their ends.
        state: S of the chunk that the next token belongs to (B, c, D).
        tapped: What T reads of the last chunk's tokens, the last one at c - 1 (B, c, D).
        last: Normed states of the last tokens (B, D).
        rounds: Passes of the backbone over (parts of) each query.
        blocks: The queries.
        spoken: All thoughts with tokens.
    """

    past: AnswerCache
    state: Tensor
    tapped: Tensor
    last: Tensor
    rounds: list[int]
    blocks: Blocks
    spoken: list[Spoken]

    def thoughts(self) -> list[list[Thought]]:
        """Returns the thoughts of each row's chunks."""
        found: dict[tuple[int, int], list[int]] = {}
        for rows, blocks, thoughts in self.spoken:
            keys = zip(rows.tolist(), blocks.tolist(), strict=True)
            found |= dict(zip(keys, thoughts.listed(), strict=True))
        ends, thinks = self.blocks.last.tolist(), self.blocks.thinks.tolist()
        return [
            [
                Thought(found.get((row, block), []), end)
                for block, end in enumerate(own)
                if thinks[row][block]
            ]
            for row, own in enumerate(ends)
        ]


class Reader(ABC):
    """What both ways of reading share.

    Args:
        network: see there.
        blocks: of all rows.

    Attributes:
        states: S of each block, and of the answer's first chunk (B, N + 1, c, D).
        tapped: What T reads of all tokens (B, N, c, D), as far as they were read.
    """

    def __init__(self, network: ThinkingStatesNetwork, blocks: Blocks) -> None:
        self.network, self.blocks, self.layout = network, blocks, ThoughtLayout.of(network.config)
        self.embedded = network.backbone.embed(blocks.tokens)
        rows, number, c, dim = self.embedded.shape
        self.states = self.embedded.new_zeros(rows, number + 1, c, dim)
        self.tapped = torch.zeros_like(self.embedded)
        self.spoken: list[Spoken] = []

    @abstractmethod
    def read(self) -> ReadQueries:
        """Returns all rows."""

    def state_of(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """Returns S of the tokens of some rows' blocks (B, n * c, D)."""
        number, c, dim = self.states.shape[1:]
        block = rows[:, None] * number + torch.arange(start, stop, device=rows.device)
        index = block[..., None] * c + self.blocks.place[rows, start:stop]
        return self.states.view(-1, dim)[index.flatten(1)]

    def open(self, tapped: Tensor, rows: Tensor, start: int, stop: int) -> Opened:
        """Returns the first tokens of the thoughts of blocks, one row's behind the other's.

        Args:
            tapped: what T reads of them (B, n * c, D).
            rows: int64 (B,).
            start: the first block.
            stop: one behind the last.
        """
        self.tapped[rows, start:stop] = tapped.view(len(rows), stop - start, *self.tapped.shape[2:])
        real = self.blocks.real[rows, start:stop].flatten(0, 1)
        return open_thoughts(self.network, tapped.view(*real.shape, -1), real)

    def speak(self, opened: Opened, which: Tensor, rows: Tensor, blocks: Tensor) -> None:
        """Finishes thoughts, and hands their states to the next blocks.

        Args:
            opened: see there.
            which: of the opened ones (K,) int64, none of them trivial.
            rows: and their rows (K,).
            blocks: and blocks (K,).
        """
        if not len(which):
            return
        thoughts = finish_thoughts(self.network, opened, which)
        compressible = self.layout.for_compression(*thoughts)
        state = self.network.compress(compressible, thoughts.sizes + 1)
        self.states[rows, blocks + 1] = state.to(self.states.dtype)
        self.spoken.append(Spoken(rows, blocks, thoughts))

    def result(self, past: AnswerCache, last: Tensor, rounds: list[int]) -> ReadQueries:
        """Returns what was read, from the normed states of the last tokens (B, D)."""
        complete = self.blocks.thinks[:, -1, None, None]
        state = torch.where(complete, self.states[:, -1], self.states[:, -2])
        tapped = self.tapped[:, -1]
        return ReadQueries(past, state, tapped, last, rounds, self.blocks, self.spoken)
