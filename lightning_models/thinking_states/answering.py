"""Decoding of answers after queries that have been read.

The answer's first tokens receive the state of the query's last thought. Where chunks of the answer
think, too (``think_in_decode``), or its tokens fill up the query's last chunk (``absolute``), they
are read one by one until all thoughts are complete.
"""

import torch
from torch import Tensor

from lightning_models.thinking_states.backbone import HiddenStates, read
from lightning_models.thinking_states.network import ThinkingStatesNetwork
from lightning_models.thinking_states.reading import ReadQueries, finish_states, open_thoughts
from lightning_models.thinking_states.thoughts import ChunkThought, ThoughtLayout, Trace


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
        self.past.pending = torch.tensor(prefix, dtype=torch.int64, device=self.state.device)
        complete = queries.blocks.thinks[:, -1]
        c = self.layout.grid.chunk_size
        own = queries.blocks.real[:, -1].sum(dim=1)
        self.place = torch.where(complete, 0, own)
        self.thinks = ~complete | self.layout.grid.in_answers
        source = (torch.arange(c, device=own.device) + (c - own)[:, None]).clamp(max=c - 1)
        index = source[..., None].expand_as(queries.tapped)
        self.tapped = queries.tapped.gather(1, index)
        self.last, self._begun = queries.last, False
        self._may_think = bool(self.thinks.any())

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.past.select(rows)
        for name in ("state", "place", "thinks", "tapped", "last"):
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
        state = self.state.gather(1, index)
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
            state[nontrivial] = found.to(state.dtype)
            if self._thoughts is not None:
                own = dict(zip(rows[nontrivial].tolist(), thoughts.listed(), strict=True))
        self.state = self.state.index_copy(0, rows, state)
        self.place = self.place.index_fill(0, rows, 0)
        self.thinks = self.thinks.index_fill(0, rows, self.layout.grid.in_answers)
        if self._thoughts is not None:
            ends = (self.past.lengths - 1).tolist()
            for row in rows.tolist():
                self._thoughts[row].append(ChunkThought(own.get(row, []), ends[row]))
