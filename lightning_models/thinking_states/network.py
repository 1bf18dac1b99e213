"""The network of Thinking States: backbone, thinking block T and compression block C (App. A.1).

Training forces the gold thoughts, so all chunks are computed at once (Sec. 3.2, eq. 5).
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_models.flops import TRAINING_FACTOR
from lightning_models.thinking_states.backbone import (
    Backbone,
    HiddenStates,
    ReasoningNetwork,
    Tables,
    backbone_flops,
    head_flops,
    layer_flops,
    run_layer,
)
from lightning_models.thinking_states.config import ThinkingStatesConfig
from lightning_models.thinking_states.thoughts import (
    CompressionInputs,
    ForcedRows,
    ThinkingInputs,
    ThoughtLayout,
)


class ThinkingBlock(nn.Module):
    """T: reads the hidden states of a chunk and the tokens of its thought so far.

    The layer, final norm and unembedding are initialised from the backbone's last ones and trained
    separately; the embedding is shared with the backbone. The first token of a thought is predicted
    after the chunk's last token, without a start token. Before training, T therefore predicts the
    same token after a row's first chunk as the backbone does.

    NOTE(paper): it mentions neither the norm, without which the unembedding would read states that
    it was not trained on, nor positions, which here count the chunk's tokens up to c - 1, then the
    thought's. Learned positions are added to the thought's tokens only: the chunk's hidden states
    already contain their positions in the row.

    Args:
        backbone: The backbone, with its weights, whose last layer, norm and head are copied.
        tied: Whether the unembedding is the backbone's.
    """

    def __init__(self, backbone: Backbone, tied: bool) -> None:
        super().__init__()
        self.family = backbone.family
        self.layer = backbone.copy_of_layer(backbone.num_layers - 1)
        self.norm = copy.deepcopy(backbone.norm)
        self.head = None if tied else _copy_of_head(backbone.output_matrix)

    def forward(
        self, h: Tensor, tables: Tables, mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Returns the normed states (K, n, D) that the unembedding reads.

        Args:
            h: Hidden states and embeddings (K, n, D).
            tables: Cosines and sines of their positions.
            mask: Keys that each query may see, see `Backbone.forward`.
            cache: One-layer cache of ``transformers``, extended in place.
        """
        states: Tensor = self.norm(run_layer(self.layer, h, tables, mask, cache))
        return states

    def opening(self, h: Tensor, tables: Tables, mask: Tensor, cache: Any) -> Tensor:
        """Returns the normed state of the last token alone (K, D); see ``forward``."""
        # The other tokens are only attended to, so the feed-forward layer, most of the work, runs
        # on one of c tokens. Chunks are opened far more often than they think.
        layer: Any = self.layer
        attention = getattr(layer, self.family.attention)
        before, between = (getattr(layer, name) for name in self.family.norms)
        attended, _ = attention(
            before(h), position_embeddings=tables, attention_mask=mask, past_key_values=cache
        )  # (K, c, D)
        last = (h + attended)[:, -1]  # (K, D)
        states: Tensor = self.norm(last + layer.mlp(between(last)))
        return states


class CompressionBlock(nn.Module):
    """C: compresses a thought to a state of c vectors.

    C is a causal layer, initialised from the backbone's first one. The padding of a thought of less
    than c tokens is read like any token, so that C may learn to summarise there (App. A.1).

    Args:
        backbone: The backbone, with its weights, whose first layer is copied.
        chunk_size: Number of tokens per chunk, c.
    """

    def __init__(self, backbone: Backbone, chunk_size: int) -> None:
        super().__init__()
        self.layer = backbone.copy_of_layer(0)
        self.chunk_size = chunk_size

    def forward(self, h: Tensor, tables: Tables, lengths: Tensor) -> Tensor:
        """Returns the outputs of each thought's last c tokens as its state (K, c, D).

        Args:
            h: Embeddings of thoughts, their ends and padding (K, N, D), N at least c.
            tables: Cosines and sines of the positions from 0 on.
            lengths: Number of tokens of each thought, including its end (K,) int64. Thoughts of
                less than c tokens are padded to c.
        """
        out = run_layer(self.layer, h, tables)  # (K, N, D)
        offset = torch.arange(self.chunk_size, device=h.device)
        index = (lengths - self.chunk_size).clamp(min=0)[:, None] + offset  # (K, c)
        return out.gather(1, index[..., None].expand(-1, -1, out.shape[-1]))


def _copy_of_head(matrix: Tensor) -> nn.Linear:
    head = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(matrix.detach().clone())
    return head


class ForcedStates(NamedTuple):
    """Normed states that predict a training step's targets.

    Attributes:
        answers: States of the backbone at ``ForcedRows.answers`` (B, P, D).
        thoughts: States of T at ``ForcedRows.thoughts`` (B, P', D).
    """

    answers: Tensor
    thoughts: Tensor


class ThinkingStatesNetwork(ReasoningNetwork):
    """Backbone M, thinking block T and compression block C.

    Args:
        config: Configuration with the sizes, or the trained backbone that T and C are copied from.
    """

    def __init__(self, config: ThinkingStatesConfig) -> None:
        super().__init__(config)
        self.config = config
        self.input_layer, self.output_layer = config.layers(self.backbone.num_layers)
        self.thinking = ThinkingBlock(self.backbone, config.tie_thinking_head)
        self.compression = CompressionBlock(self.backbone, config.chunk_size)

    @property
    def taps(self) -> dict[str, Any]:
        """Arguments of `Backbone.forward` that set the layers of states and T's inputs."""
        return {"state_layer": self.input_layer, "tap_layer": self.output_layer}

    @property
    def thinking_matrix(self) -> Tensor:
        """T's unembedding (V, D)."""
        head = self.thinking.head
        return self.output_matrix if head is None else head.weight

    def forward(self, rows: ForcedRows) -> ForcedStates:
        """Returns the states that predict answers and thoughts, with gold thoughts forced."""
        h = self.backbone.embed(rows.tokens)  # (B, T, D)
        positions = torch.arange(h.shape[1], device=h.device).expand(len(h), -1)  # (B, T)
        hidden = self.read(h, positions, state=self._injected(rows.states, h))
        assert hidden.tapped is not None
        thoughts = self._think(hidden.tapped, rows.thinking)  # (B, W + M, D)
        return ForcedStates(
            _at(hidden.last, rows.answers.where), _at(thoughts, rows.thoughts.where)
        )

    def read(self, h: Tensor, positions: Tensor, state: Tensor) -> HiddenStates:
        """Returns the hidden states of embedded tokens; see `Backbone.forward`."""
        hidden: HiddenStates = self.backbone(h, positions, state=state, **self.taps)
        return hidden

    def run_layers(
        self, h: Tensor, layers: tuple[int, int], positions: Tensor, mask: Tensor, cache: Any
    ) -> Tensor:
        """Returns the hidden states (B, T, D) after a range of the backbone's layers.

        Args:
            h: Hidden states before these layers (B, T, D).
            layers: Indices of the first layer and the layer after the last.
            positions: Positions (B, T) int64.
            mask: Keys that each query may see, see `Backbone.forward`.
            cache: Cache of ``transformers``, extended in place for these layers.
        """
        tables = self.backbone.rotary(h, positions)
        for layer in self.blocks[layers[0] : layers[1]]:
            h = run_layer(layer, h, tables, mask, cache)
        return h

    def compress(self, thoughts: Tensor, lengths: Tensor) -> Tensor:
        """Returns the states (K, c, D) of non-trivial thoughts (eq. 4).

        NOTE(paper): a trivial thought, only its end, has the state 0, which C would not return.
        Speculation tests for it (App. A.2), and agrees with sequential reading only then.

        Args:
            thoughts: Tokens of thoughts, their ends and padding (K, N) int64, N at least c.
            lengths: Number of tokens of each thought, including its end (K,) int64.
        """
        positions = torch.arange(thoughts.shape[1], device=thoughts.device)[None]
        h = self.backbone.enter(self.backbone.embed(thoughts), positions)  # (K, N, D)
        states: Tensor = self.compression(h, self.backbone.rotary(h, positions), lengths)
        return states

    def pause_latent(self) -> Tensor | None:
        # C's output for a thought without tokens (c, D), which is never fed back otherwise
        if not self.config.think:
            return None
        layout = ThoughtLayout.of(self.config)
        size = torch.zeros(1, dtype=torch.int64, device=self.output_matrix.device)
        return self.compress(layout.for_compression(size.new_zeros(1, 0), size), size + 1)[0]

    def _injected(self, states: CompressionInputs, h: Tensor) -> Tensor:
        """Returns S of every token (B, T, D), 0 for tokens after a trivial thought."""
        vectors = self.compress(states.thoughts, states.lengths).flatten(0, 1)  # (K c, D)
        rows, width, dim = h.shape
        # vectors without a token, e.g. of a short chunk, go to a last row that is cut off again
        injected = vectors.new_zeros(rows * width + 1, dim)
        return injected.index_copy(0, states.where, vectors)[:-1].view(rows, width, dim)

    def _think(self, tapped: Tensor, inputs: ThinkingInputs) -> Tensor:
        """Returns T's states of the packed row: W tokens, then M thought tokens (B, W + M, D)."""
        width = inputs.positions.shape[1] - inputs.tokens.shape[1]  # W
        longest = self.config.chunk_size + inputs.tokens.shape[1]  # bounds the positions
        thoughts = self.backbone.enter(
            self.backbone.embed(inputs.tokens), inputs.positions[:, width:], longest
        )  # (B, M, D)
        h = torch.cat((tapped[:, :width], thoughts.to(tapped.dtype)), dim=1)  # (B, W + M, D)
        tables = self.backbone.rotary(h, inputs.positions)
        states: Tensor = self.thinking(h, tables, inputs.mask)
        return states


def _at(h: Tensor, indices: Tensor) -> Tensor:
    """Returns the states (B, P, D) at positions (B, P) of flattened rows (B, T, D)."""
    return h.flatten(0, 1)[indices]


# ---- FLOPs


def thought_flops(network: ThinkingStatesNetwork, tokens: float) -> float:
    """Returns the FLOPs of ``tokens`` thought tokens: T's layer and logits, and C's layer.

    A token sees on average the chunk and half of a thought of c tokens in T, and half of it in C.
    """
    c, backbone = network.config.chunk_size, network.backbone
    attention = layer_flops(backbone, 1.5 * c) + layer_flops(backbone, c / 2)
    return tokens * (attention + head_flops(backbone))


def chunk_flops(network: ThinkingStatesNetwork) -> float:
    """Returns the FLOPs of T for one token of a chunk that thinks."""
    return layer_flops(network.backbone, (network.config.chunk_size + 1) / 2)


def reading_flops(network: ThinkingStatesNetwork, context: int, training: bool = False) -> float:
    """Returns the FLOPs per token of a row of ``context`` tokens that is read and thought about.

    Every chunk is assumed to have a thought as long as the chunk, including its end. The backbone
    is counted once, as in training and in sequential reading; speculation reads the rest of the
    query once for each non-trivial thought. A model that does not think at inference only reads.
    """
    if not (training or network.config.think):
        return backbone_flops(network.backbone, context, training)
    thoughts = chunk_flops(network) + thought_flops(network, 1.0)
    factor = TRAINING_FACTOR if training else 1.0
    return backbone_flops(network.backbone, context, training) + factor * thoughts


def answering_flops(network: ThinkingStatesNetwork, context: int, tokens: float | None) -> float:
    """Returns the FLOPs of a token of the answer in a context of ``context`` tokens.

    Args:
        network: The network whose sizes count.
        context: Number of tokens in the context.
        tokens: Mean number of thought tokens for each token of the answer. Defaults to one if
            ``think_in_decode`` is set, else to none.
    """
    backbone, thinks = network.backbone, network.config.think_in_decode and network.config.think
    keys = min(backbone.window or context, context)
    flops = backbone.num_layers * layer_flops(backbone, keys) + head_flops(backbone)
    if thinks:
        flops += chunk_flops(network)
    return flops + thought_flops(network, float(thinks) if tokens is None else tokens)
