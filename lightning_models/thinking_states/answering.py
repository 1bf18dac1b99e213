"""Writing answers behind queries that have been read.

The answer's first tokens receive the state of the query's last thought. Where chunks of the answer
think, too (``think_in_decode``), or its tokens fill up the query's last chunk (``absolute``), they
are read one by one until nothing is left to think.
"""

import torch
from torch import Tensor

from lightning_models.thinking_states.backbone import Hidden
from lightning_models.thinking_states.decoding import read
from lightning_models.thinking_states.network import ThinkingStatesNetwork
from lightning_models.thinking_states.reading import ReadQueries
from lightning_models.thinking_states.speaking import finish_thoughts, open_thoughts
from lightning_models.thinking_states.thoughts import ThoughtLayout
from lightning_models.thinking_states.trace import Thought, Trace


class ThinkingCache:
    """What is kept between decode steps.

    Args:
        network: see there.
        queries: used up by this.
        prefix: what is read before any chosen token.
        trace: what later thoughts are added to; None: nobody looks at them.

    Attributes:
        past: Keys and values of all that was read.
        state: S of the chunk that is being written (B, c, D).
        place: Place in it of the next token (B,) int64; from c on nothing is added.
        thinks: Whether it thinks behind its last token (B,) bool.
        tapped: What T reads of its tokens so far (B, c, D).
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
        self.layout, self.trace = ThoughtLayout.of(network.config), trace
        self._thoughts = None if trace is None else list(trace.rows)  # those of the rows left
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

    def decode(self, network: ThinkingStatesNetwork, tokens: Tensor) -> Tensor:
        """Returns the normed states (B, D) that predict the next tokens.

        Args:
            network: see there.
            tokens: (B,) the last ones that were chosen; at first the prefix is read instead.
        """
        begun, self._begun = self._begun, True
        if not begun and not len(self.past.pending):
            return self.last
        return self.advance(network, self.past.next_inputs(tokens))[:, -1]

    @torch.no_grad()
    def advance(
        self, network: ThinkingStatesNetwork, tokens: Tensor, real: Tensor | None = None
    ) -> Tensor:
        """Returns the normed states (B, t, D) of the next tokens.

        Args:
            network: see there.
            tokens: (B, t) int64.
            real: which of them belong to the answer (B, t) bool, those in front; the others are
                read, but not thought about. None: all.
        """
        if not tokens.shape[1]:
            return self.last[:, None][:, :0]
        if not self._may_think:
            return self._read(network, tokens).last
        if real is None:
            real = torch.ones_like(tokens, dtype=torch.bool)
        states = []
        for number in range(tokens.shape[1]):
            hidden = self._read(network, tokens[:, number : number + 1])
            states.append(hidden.last)
            self._listen(network, hidden, real[:, number])
        return torch.cat(states, dim=1)

    def _read(self, network: ThinkingStatesNetwork, tokens: Tensor) -> Hidden:
        place = self.place[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        inside, h = place < self.state.shape[1], network.backbone.embed(tokens)
        index = place.clamp(max=self.state.shape[1] - 1)[..., None].expand_as(h)
        state = self.state.gather(1, index)
        self.place = self.place + tokens.shape[1]
        return read(
            network.backbone,
            self.past,
            h,
            state=state * inside[..., None],
            state_layer=network.input_layer,
            tap_layer=network.output_layer,
        )

    def _listen(self, network: ThinkingStatesNetwork, hidden: Hidden, real: Tensor) -> None:
        """Keeps what T needs of one token (B, 1), and thinks where it completes a chunk."""
        assert hidden.tapped is not None
        c = self.state.shape[1]
        index = (self.place - 1).clamp(max=c - 1)[:, None, None].expand_as(hidden.tapped)
        self.tapped = self.tapped.scatter(1, index, hidden.tapped)
        rows = (self.thinks & real & (self.place == c)).nonzero()[:, 0]
        if len(rows):
            self._think(network, rows)
            self._may_think = bool(self.thinks.any())

    def _think(self, network: ThinkingStatesNetwork, rows: Tensor) -> None:
        """Thinks behind the last tokens of chunks, whose next ones begin."""
        h = self.tapped[rows]
        opened = open_thoughts(network, h, torch.ones_like(h[..., 0], dtype=torch.bool))
        speaks = (opened.first != self.layout.end).nonzero()[:, 0]
        state, own = torch.zeros_like(self.state[rows]), {}
        if len(speaks):
            thoughts = finish_thoughts(network, opened, speaks)
            compressible = self.layout.for_compression(*thoughts)
            state[speaks] = network.compress(compressible, thoughts.sizes + 1).to(state.dtype)
            if self._thoughts is not None:
                own = dict(zip(rows[speaks].tolist(), thoughts.listed(), strict=True))
        self.state = self.state.index_copy(0, rows, state)
        self.place = self.place.index_fill(0, rows, 0)
        self.thinks = self.thinks.index_fill(0, rows, self.layout.grid.in_answers)
        if self._thoughts is not None:
            ends = (self.past.lengths - 1).tolist()
            for row in rows.tolist():
                self._thoughts[row].append(Thought(own.get(row, []), ends[row]))
