"""The thinking block T and the compression block C (eq. 3 and 4, App. A.1)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_models.thinking_states.backbone import Backbone

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of positions (B, T, C)."""


class ThinkingBlock(nn.Module):
    """T: reads the hidden states of a chunk and the tokens of its thought so far.

    One layer, final norm and unembedding begin as copies of the backbone's last ones and learn by
    themselves; the embedding is the backbone's. The first token of a thought is predicted behind
    the chunk's last token; no token begins a thought. Before training it so predicts of a row's
    first chunk what the backbone predicts.

    NOTE(paper): it does not mention the norm, without which the unembedding would read what it has
    never seen; nor positions, which count the chunk's tokens up to c - 1, then the thought's.

    Args:
        backbone: of which the copies are made; its weights must be there.
        tied: whether the unembedding is the backbone's own.
    """

    def __init__(self, backbone: Backbone, tied: bool) -> None:
        super().__init__()
        self.layer = backbone.copy_of_layer(backbone.num_layers - 1)
        self.norm = copy.deepcopy(backbone.model.norm)
        self.head = None if tied else _copy_of_head(backbone.output_matrix)

    def forward(
        self, h: Tensor, tables: Tables, mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Returns normed states (K, n, D), which the unembedding reads.

        Args:
            h: hidden states and embeddings (K, n, D).
            tables: of their positions.
            mask: see `Backbone.forward`.
            cache: a transformers cache of one layer, extended in place.
        """
        states: Tensor = self.norm(run_layer(self.layer, h, tables, mask, cache))
        return states

    def opening(self, h: Tensor, tables: Tables, mask: Tensor, cache: Any) -> Tensor:
        """Returns the normed state of the last token only (K, D); see ``forward``.

        All others are there to be attended to, which needs no feed-forward layer: most of the work,
        and chunks are opened far more often than they think.
        """
        layer: Any = self.layer
        attended, _ = layer.self_attn(
            layer.input_layernorm(h),
            position_embeddings=tables,
            attention_mask=mask,
            past_key_values=cache,
        )
        last = (h + attended)[:, -1]
        states: Tensor = self.norm(last + layer.mlp(layer.post_attention_layernorm(last)))
        return states


class CompressionBlock(nn.Module):
    """C: makes a state of c vectors from a thought.

    A causal layer that begins as a copy of the backbone's first one. Padding behind a thought of
    less than c tokens is read like any token, so that C may learn to summarise there (App. A.1).

    Args:
        backbone: of which the copy is made; its weights must be there.
        chunk_size: c.
    """

    def __init__(self, backbone: Backbone, chunk_size: int) -> None:
        super().__init__()
        self.layer = backbone.copy_of_layer(0)
        self.chunk_size = chunk_size

    def forward(self, h: Tensor, tables: Tables, lengths: Tensor) -> Tensor:
        """Returns the states (K, c, D): the outputs of a thought's last c tokens.

        Args:
            h: embeddings of thoughts, their ends and padding (K, N, D), N at least c.
            tables: of the positions from 0 on.
            lengths: of thoughts, the end included (K,) int64; padding counts up to c.
        """
        out = run_layer(self.layer, h, tables)
        place = torch.arange(self.chunk_size, device=h.device)
        index = (lengths - self.chunk_size).clamp(min=0)[:, None] + place
        return out.gather(1, index[..., None].expand(-1, -1, out.shape[-1]))


def _copy_of_head(matrix: Tensor) -> nn.Linear:
    head = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(matrix.detach().clone())
    return head


def run_layer(
    layer: nn.Module, h: Tensor, tables: Tables, mask: Tensor | None = None, cache: Any = None
) -> Tensor:
    """Returns the output (B, T, D) of a decoder layer; without a mask it is causal.

    Args:
        layer: of transformers.
        h: its input (B, T, D).
        tables: of the positions.
        mask: see `Backbone.forward`.
        cache: of transformers, extended in place.
    """
    out: Tensor = layer(
        h,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=cache is not None,
        position_embeddings=tables,
    )
    return out
