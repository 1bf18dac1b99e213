"""The working memory of sentence vectors and the cross-attention that reads it."""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_models.layers import DecoderConfig, OutputProjection, attend, record, wants
from lightning_models.layers.blocks import join_heads, split_heads
from lightning_models.thought_gestalt.packing import Packing


def slot_positions(size: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Returns sinusoidal positions (M, D) of memory slots 1 (the oldest) to M.

    Channel 2 i is sin(m / 10000^(2 i / D)), channel 2 i + 1 the cosine (Vaswani et al. 2017).
    """
    slot = torch.arange(1, size + 1, device=device, dtype=torch.float32)[:, None]  # (M, 1)
    rate = torch.exp(
        torch.arange(0, dim, 2, device=device, dtype=torch.float32) * (-math.log(10000.0) / dim)
    )
    table = torch.zeros(size, dim, device=device)
    table[:, 0::2] = (slot * rate).sin()
    table[:, 1::2] = (slot * rate).cos()[:, : dim // 2]  # one fewer than sines if D is odd
    return table


class MemoryAttention(nn.Module):
    """Cross-attention of tokens to sentence vectors, scaled by a scalar gate g_mem.

    A sentence vector is projected once, when it is written. Since (s + P) W_K = s W_K + P W_K, the
    second term, which depends on the slot alone, can be added when the vector is read. W_K has no
    bias, which would add the same constant to all scores of a query.

    Records ``memory_attention``: ``layer`` (int, 1-based), ``gate`` (g_mem, a scalar) and
    ``weights`` (P, M_t), the attention weights of a step's packed slots over the sentences in
    memory, oldest first, averaged over heads, before dropout; float32 or better.
    """

    def __init__(self, config: DecoderConfig, gate: float, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout
        self.backend = config.attention_backend
        self.query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.out = OutputProjection(config.dim, config.dim, bias=config.bias)
        self.gate = nn.Parameter(torch.full((1,), float(gate)))  # (1,): FSDP2 takes no 0-d tensors

    def project(self, sentences: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values (A, D) of sentence vectors (A, D), without positions."""
        return self.key(sentences), self.value(sentences)

    def project_positions(self, positions: Tensor) -> Tensor:
        """Returns P W_K (M, D) of slot positions (M, D)."""
        return nn.functional.linear(positions.to(self.key.weight.dtype), self.key.weight)

    def forward(
        self,
        x: Tensor,
        packing: Packing,
        keys: Tensor,
        values: Tensor,
        written: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention output (P, D) of the slots over memory, times g_mem.

        Args:
            x: Normed slots (P, D).
            packing: Packing of the slots.
            keys: Keys (A, M, D), including positions.
            values: Values (A, M, D).
            written: Bool (A, M), true for memory slots that hold a vector. The output is zero in
                rows without any, and nothing is recorded. Defaults to all slots.
        """
        grid = packing.to_grid(self.query(x))  # (P, D) -> (A, U, D)
        # (A, H, U, C) and twice (A, H, M, C)
        q, k, v = (split_heads(part, self.num_heads) for part in (grid, keys, values))
        if wants("memory_attention") and written is None:
            weights = packing.from_grid(_mean_weights(q, k))
            record("memory_attention", layer=self.layer, gate=self.gate[0], weights=weights)
        dropout = self.dropout if self.training else 0.0
        mask = None if written is None else written[:, None, None]  # (A, 1, 1, M)
        backend = self.backend if mask is None else "auto"
        heads = attend(q, k, v, mask=mask, dropout=dropout, backend=backend)
        read = self.gate[0] * self.out(packing.from_grid(join_heads(heads)))
        if written is None:
            return read
        # With all keys masked the output is meaningless, so rows with an empty memory read zero.
        empty = ~written.any(dim=1)[packing.cell // packing.width]  # (A,) -> (P,)
        return read.masked_fill(empty[:, None], 0.0)


def _mean_weights(q: Tensor, k: Tensor) -> Tensor:
    """Returns attention weights (A, U, M), averaged over heads, for q (A, H, U, C), k (A, H, M, C).

    Computed in float32 or better.
    """
    acc_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        scores = (
            q.to(acc_dtype) @ k.to(acc_dtype).transpose(-1, -2) / math.sqrt(q.shape[-1])
        )  # (A, H, U, M)
    return scores.softmax(dim=-1).mean(dim=1)


class SentenceMemory:
    """Differentiable first-in, first-out memory of the latest M sentence vectors of each stream.

    All streams of a batch begin together and are sorted by length. Streams with a t-th sentence
    have therefore written the same number of vectors, and streams that end are the last rows.

    Args:
        readers: The layers that read, each with a separate projection of every sentence.
        size: M, the number of sentences to keep.
        positions: Sinusoidal positions (M, D) of slots 1 to M.
    """

    def __init__(self, readers: Sequence[MemoryAttention], size: int, positions: Tensor) -> None:
        self._readers = readers
        self._size = size
        self._position_keys = [reader.project_positions(positions) for reader in readers]
        self._entries: list[list[tuple[Tensor, Tensor]]] = [[] for _ in readers]
        self.latest: Tensor | None = None
        """The last sentence vector written, (A, D)."""
        self.vectors: list[Tensor] = []
        """The latest M vectors (A, D) each, oldest first."""

    def write(self, sentences: Tensor) -> None:
        """Appends the vectors (A, D) of a sentence step and projects them for every reader."""
        self.latest = sentences
        self.vectors = [*self.vectors, sentences][-self._size :]
        for reader, entries in zip(self._readers, self._entries, strict=True):
            entries.append(reader.project(sentences))
            del entries[: -self._size]

    def select(self, streams: Tensor) -> None:
        """Selects the rows ``streams`` (A,), int64 indices, which may repeat."""
        if self.latest is not None:
            self.latest = self.latest[streams]
        self.vectors = [vector[streams] for vector in self.vectors]
        self._entries = [
            [(key[streams], value[streams]) for key, value in entries] for entries in self._entries
        ]

    def view(self) -> "SentenceMemory":
        """Returns a snapshot of the memory, for recomputation in the backward pass."""
        copied = copy.copy(self)
        copied._entries = [list(entries) for entries in self._entries]
        return copied

    def read(self, reader: int, rows: int) -> tuple[Tensor, Tensor] | None:
        """Returns keys and values (A, M_t, D) of the first ``rows`` streams, or None if empty."""
        entries = self._entries[reader]
        if not entries:
            return None
        # rows of streams that have ended since are cut off
        keys = torch.stack([key[:rows] for key, _ in entries], dim=1)  # (A, M_t, D)
        values = torch.stack([value[:rows] for _, value in entries], dim=1)
        return keys + self._position_keys[reader][: len(entries)].to(keys.dtype), values
