"""The network of Thinking States: backbone, thinking block and compression block.

Training forces the gold thoughts, so that all chunks are computed at once (Sec. 3.2, eq. 5).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_models.thinking_states.backbone import Backbone, Hidden
from lightning_models.thinking_states.config import ThinkingStatesConfig
from lightning_models.thinking_states.thinking import CompressionBlock, ThinkingBlock, run_layer
from lightning_models.thinking_states.training_rows import ForcedRows, Speech, States


class Forced(NamedTuple):
    """What a training step's rows are predicted from.

    Attributes:
        answers: Normed states at ``ForcedRows.answers`` (B, P, D).
        thoughts: Normed states of T at ``ForcedRows.thoughts`` (B, P', D).
    """

    answers: Tensor
    thoughts: Tensor


class ThinkingStatesNetwork(nn.Module):
    """Backbone M, thinking block T and compression block C.

    Args:
        config: sizes, or the trained backbone, whose weights T and C begin with.
    """

    sharded = False

    def __init__(self, config: ThinkingStatesConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.input_layer, self.output_layer = config.layers(self.backbone.num_layers)
        self.thinking = ThinkingBlock(self.backbone, config.tie_thinking_head)
        self.compression = CompressionBlock(self.backbone, config.chunk_size)

    @property
    def blocks(self) -> nn.ModuleList:
        """The backbone's layers."""
        layers: nn.ModuleList = self.backbone.model.layers
        return layers

    @property
    def output_matrix(self) -> Tensor:
        """The backbone's unembedding (V, D)."""
        return self.backbone.output_matrix

    @property
    def thinking_matrix(self) -> Tensor:
        """T's unembedding (V, D)."""
        head = self.thinking.head
        return self.output_matrix if head is None else head.weight

    def forward(self, rows: ForcedRows) -> Forced:
        """Returns the states that predict answers and thoughts, from gold thoughts."""
        h = self.backbone.embed(rows.tokens)
        positions = torch.arange(h.shape[1], device=h.device).expand(len(h), -1)
        hidden = self.read(h, positions, state=self._injected(rows.states, h))
        assert hidden.tapped is not None
        thoughts = self._speak(hidden.tapped, rows.speech)
        return Forced(_at(hidden.last, rows.answers.where), _at(thoughts, rows.thoughts.where))

    def read(self, h: Tensor, positions: Tensor, state: Tensor) -> Hidden:
        """Returns the hidden states of embedded tokens; see `Backbone.forward`."""
        taps = {"state_layer": self.input_layer, "tap_layer": self.output_layer}
        hidden: Hidden = self.backbone(h, positions, state=state, **taps)
        return hidden

    def through(
        self, h: Tensor, layers: tuple[int, int], positions: Tensor, mask: Tensor, cache: Any
    ) -> Tensor:
        """Returns the hidden states behind some of the backbone's layers.

        Args:
            h: hidden states in front of them (B, T, D).
            layers: the first one, and one behind the last.
            positions: (B, T) int64.
            mask: see `Backbone.forward`.
            cache: of transformers, extended in place for these layers.
        """
        tables = self.backbone.rotary(h, positions)
        for layer in self.blocks[layers[0] : layers[1]]:
            h = run_layer(layer, h, tables, mask, cache)
        return h

    def compress(self, thoughts: Tensor, lengths: Tensor) -> Tensor:
        """Returns the states (K, c, D) of thoughts with tokens (eq. 4).

        NOTE(paper): a thought that is only its end has the state 0, which C would not give. Only
        so does speculation, which tests for that (App. A.2), find what sequential reading finds.

        Args:
            thoughts: tokens, end and padding (K, N) int64, N at least c.
            lengths: of thoughts, the end included (K,) int64.
        """
        h = self.backbone.embed(thoughts)
        positions = torch.arange(h.shape[1], device=h.device)[None]
        states: Tensor = self.compression(h, self.backbone.rotary(h, positions), lengths)
        return states

    def _injected(self, states: States, h: Tensor) -> Tensor:
        """Returns S of every token (B, T, D)."""
        vectors = self.compress(states.thoughts, states.lengths).flatten(0, 1)
        rows, width, dim = h.shape
        injected = vectors.new_zeros(rows * width + 1, dim)
        return injected.index_copy(0, states.where, vectors)[:-1].view(rows, width, dim)

    def _speak(self, tapped: Tensor, speech: Speech) -> Tensor:
        """Returns T's states of the row's first W tokens and of thought tokens (B, W + M, D)."""
        width = speech.positions.shape[1] - speech.tokens.shape[1]
        spoken = self.backbone.embed(speech.tokens)
        h = torch.cat((tapped[:, :width], spoken.to(tapped.dtype)), dim=1)
        tables = self.backbone.rotary(h, speech.positions)
        states: Tensor = self.thinking(h, tables, speech.mask)
        return states


def _at(h: Tensor, where: Tensor) -> Tensor:
    """Returns the states (B, P, D) at positions (B, P) of flattened rows (B, T, D)."""
    return h.flatten(0, 1)[where]
