"""The rival of ``sentences``: Thought Gestalt with 67 padded slots, memory projected at every step.

What the paper describes, batched over the streams that still have a sentence, with fused attention:
padding is computed and masked, each cross-attention projects all of memory again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.layers.blocks import join_heads, split_heads
from lightning_models.thought_gestalt.memory import MemoryAttention
from lightning_models.thought_gestalt.network import GestaltBlock, ThoughtGestaltNetwork

IGNORE = -100


class Padded(NamedTuple):
    """A batch as sentence tensors; streams with more sentences come first."""

    tokens: Tensor
    """int64 (B, S, 67): BOS, words, padding, EOD or padding, EOS."""
    labels: Tensor
    """int64 (B, S, 67), -100 at padding and at EOS."""
    real: Tensor
    """Bool (B, S, 67)."""
    active: list[int]
    """Streams that have a t-th sentence, for every t."""


def tensorize(batch: dict[str, Any], slots: int) -> Padded:
    """Returns the sentence tensors of a batch as ``datamodules.Sentences`` makes them."""
    order = (batch["lengths"] > 0).sum(dim=1).argsort(descending=True, stable=True)
    compact, lengths = batch["tokens"][order], batch["lengths"][order]
    tail = 1 + batch["is_last"][order].long()  # EOS, or EOD and EOS
    tokens = torch.zeros(*lengths.shape, slots, dtype=torch.int64, device=compact.device)
    labels, real = torch.full_like(tokens, IGNORE), torch.zeros_like(tokens, dtype=torch.bool)
    for row, t in (lengths > 0).nonzero().tolist():
        used, ends = int(lengths[row, t]), int(tail[row, t])
        places = [*range(used - ends), *range(slots - ends, slots)]
        tokens[row, t, places] = compact[row, t, :used]
        labels[row, t, places[:-1]] = compact[row, t, 1:used]
        real[row, t, places] = True
    return Padded(tokens, labels, real, (lengths > 0).sum(dim=0).tolist())


class LiteralGestalt:
    """A network's weights in the literal computation (``alternate`` layers)."""

    def __init__(self, network: ThoughtGestaltNetwork) -> None:
        """Shares the weights of ``network``."""
        self.network = network

    def loss(self, batch: Padded) -> Tensor:
        """Returns the summed cross-entropy of all targets, in nats."""
        network, memory = self.network, list[Tensor]()
        total = torch.zeros((), device=batch.tokens.device)
        for t, rows in enumerate(batch.active):
            tokens, real = batch.tokens[:rows, t], batch.real[:rows, t]
            x = network.embedding(tokens) + network.position.weight
            memory = [vector[:rows] for vector in memory][-network.config.memory_size :]
            if memory:
                x = torch.cat((memory[-1][:, None], x[:, 1:]), dim=1)
            x, vector = self._blocks(x, _visible(real), memory)
            logits = network.norm(x) @ network.output_matrix.t()
            labels = batch.labels[:rows, t].flatten()
            losses = F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum")
            total = total + losses
            memory.append(vector)
        return total

    def _blocks(self, x: Tensor, visible: Tensor, memory: list[Tensor]) -> tuple[Tensor, Tensor]:
        vectors = torch.stack(memory, dim=1) if memory else None
        sentence = x
        for number, block in enumerate(self.network.blocks, start=1):
            assert isinstance(block, GestaltBlock)
            x = self._block(block, x, visible, vectors)
            if number == self.network.config.sentence_layer:
                assert self.network.sentence_head is not None
                sentence = self.network.sentence_head.layers(x[:, -1])
        return x, sentence

    def _block(
        self, block: GestaltBlock, x: Tensor, visible: Tensor, vectors: Tensor | None
    ) -> Tensor:
        if block.attention is not None and block.attention_norm is not None:
            attention, heads = block.attention, block.attention.num_heads
            parts = attention.qkv(block.attention_norm(x)).chunk(3, dim=-1)
            q, k, v = (split_heads(part, heads) for part in parts)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            x = x + attention.out(join_heads(out))
        if block.memory_attention is not None and vectors is not None:
            assert block.memory_norm is not None
            x = x + self._read(block.memory_attention, block.memory_norm(x), vectors)
        return x + block.feed_forward(block.feed_forward_norm(x))

    def _read(self, attention: MemoryAttention, x: Tensor, vectors: Tensor) -> Tensor:
        positions = self.network.slots[: vectors.shape[1]].to(vectors.dtype)
        projected = (
            attention.query(x),
            attention.key(vectors + positions),
            attention.value(vectors),
        )
        q, k, v = (split_heads(part, attention.num_heads) for part in projected)
        out = F.scaled_dot_product_attention(q, k, v)
        return attention.gate * attention.out(join_heads(out))


def _visible(real: Tensor) -> Tensor:
    """Returns who sees whom, bool (A, 1, 67, 67): causal, no padding, but padding sees itself."""
    slots = torch.arange(real.shape[1], device=real.device)
    causal = slots[None] <= slots[:, None]
    itself = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
    return ((causal & real[:, None]) | itself)[:, None]
