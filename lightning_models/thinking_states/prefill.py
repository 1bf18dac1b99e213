"""Reading queries while thinking, chunk by chunk or by speculation.

Both find the same thoughts, states, and keys and values, up to rounding: where two tokens of a
thought are equally likely to the last digits, which narrow number formats make less rare, they may
take different ones.
"""

import torch
from torch import Tensor

from lightning_models.thinking_states.backbone import Hidden
from lightning_models.thinking_states.blocks import in_blocks
from lightning_models.thinking_states.decoding import AnswerCache, read
from lightning_models.thinking_states.network import ThinkingStatesNetwork
from lightning_models.thinking_states.reading import Reader, ReadQueries
from lightning_models.thinking_states.speculation import Speculative
from lightning_models.thinking_states.thoughts import ThoughtLayout


@torch.no_grad()
def read_queries(
    network: ThinkingStatesNetwork, query: Tensor, lengths: Tensor, how: str
) -> ReadQueries:
    """Returns what is left of queries that the model has read, thinking for itself.

    Args:
        network: see there.
        query: right-padded (B, Q) int64.
        lengths: (B,) int64, at least 1.
        how: 'speculative' or 'sequential'.
    """
    blocks = in_blocks(ThoughtLayout.of(network.config).grid, query, lengths)
    reader: type[Reader] = Sequential if how == "sequential" else Speculative
    return reader(network, blocks).read()


class Sequential(Reader):
    """Block by block, with whole passes: the plain reading that speculation must agree with."""

    def read(self) -> ReadQueries:
        """Returns all rows; each block is a round."""
        rows = torch.arange(len(self.states), device=self.states.device)
        past = AnswerCache(len(rows), rows.device)
        for block in range(self.blocks.number):
            hidden = self._pass(past, rows, block)
            assert hidden.tapped is not None
            opened = self.open(hidden.tapped, rows, block, block + 1)
            speaks = self.blocks.thinks[:, block] & (opened.first != self.layout.end)
            which = speaks.nonzero()[:, 0]
            self.speak(opened, which, which, torch.full_like(which, block))
        return self.result(past, hidden.last[:, -1], self.blocks.chunks.tolist())

    def _pass(self, past: AnswerCache, rows: Tensor, block: int) -> Hidden:
        return read(
            self.network.backbone,
            past,
            self.embedded[:, block],
            self.blocks.real[:, block],
            state=self.state_of(rows, block, block + 1),
            state_layer=self.network.input_layer,
            tap_layer=self.network.output_layer,
        )
