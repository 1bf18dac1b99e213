"""The model's own thoughts: greedy decoding with T.

A thought is opened for many chunks at once, which tells whether it is trivial; only those that are
not are finished (the short cut of speculative reading).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.output_layer import logits, product_dtype, row_chunks
from lightning_models.thinking_states.backbone import causal_mask, new_cache
from lightning_models.thinking_states.network import ThinkingStatesNetwork


class Opened(NamedTuple):
    """Thoughts of which the first token is known.

    Attributes:
        first: (K,) int64; the end of a thought where it is trivial.
        past: T's cache of the chunks.
        real: Which of a chunk's c places hold tokens (K, c) bool.
    """

    first: Tensor
    past: Any
    real: Tensor


class ThoughtTokens(NamedTuple):
    """The tokens of thoughts that have any.

    Attributes:
        tokens: (K, M) int64, ends behind them.
        sizes: Tokens of each, without the end (K,) int64, at least 1.
    """

    tokens: Tensor
    sizes: Tensor

    def listed(self) -> list[list[int]]:
        """Returns the tokens of each thought."""
        rows = zip(self.tokens.tolist(), self.sizes.tolist(), strict=True)
        return [tokens[:size] for tokens, size in rows]


def open_thoughts(network: ThinkingStatesNetwork, h: Tensor, real: Tensor) -> Opened:
    """Returns the first tokens of the thoughts of chunks; ends, where the model does not think.

    Args:
        network: see there.
        h: what the backbone computed of their tokens, the last one at place c - 1 (K, c, D).
        real: which places hold tokens (K, c) bool.
    """
    past = new_cache()
    if not network.config.think:
        ends = network.config.special_id("thought_end")
        return Opened(torch.full((len(h),), ends, device=h.device), past, real)
    positions = torch.arange(h.shape[1], device=h.device)[None]
    tables = network.backbone.rotary(h, positions)
    state = network.thinking.opening(h, tables, causal_mask(real, h.shape[1]), past)
    return Opened(_greedy(network, state), past, real)


def finish_thoughts(network: ThinkingStatesNetwork, opened: Opened, rows: Tensor) -> ThoughtTokens:
    """Returns the whole thoughts of some of the chunks, none of them trivial.

    Args:
        network: see there.
        opened: used up by this.
        rows: int64 (K,), which of them.
    """
    end, c = network.config.special_id("thought_end"), network.config.chunk_size
    opened.past.batch_select_indices(rows)
    real, token = opened.real[rows], opened.first[rows]
    ended, tokens = torch.zeros_like(token, dtype=torch.bool), [token]
    while len(tokens) < network.config.max_thought_tokens:
        h = network.backbone.embed(token[:, None])
        real = F.pad(real, (0, 1), value=True)
        position = torch.full((1, 1), c + len(tokens) - 1, device=h.device)
        tables = network.backbone.rotary(h, position)
        states = network.thinking(h, tables, causal_mask(real, 1), opened.past)
        token = _greedy(network, states[:, -1]).masked_fill(ended, end)
        ended = token == end
        if bool(ended.all()):
            break
        tokens.append(token)
    thoughts = torch.stack(tokens, dim=1)
    return ThoughtTokens(thoughts, (thoughts != end).sum(dim=1))


def _greedy(network: ThinkingStatesNetwork, h: Tensor) -> Tensor:
    """Returns T's most likely tokens (K,) behind normed states (K, D).

    The ids from the padding's on are no tokens of a thought.
    """
    matrix = network.thinking_matrix[: network.config.special_id("thought_pad")]
    return most_likely(h, matrix)


@torch.no_grad()
def most_likely(h: Tensor, matrix: Tensor) -> Tensor:
    """Returns the ids of the highest logits ``h matrix^T`` of states (K, D), int64 (K,)."""
    dtype = product_dtype(h)
    states, matrix = h.to(dtype), matrix.to(dtype)
    out = torch.empty(len(h), dtype=torch.int64, device=h.device)
    for rows in row_chunks(len(h), h.device):
        out[rows] = logits(states[rows], matrix).argmax(dim=-1)
    return out
