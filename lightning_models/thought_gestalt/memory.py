"""The working memory: sentence vectors, written and read, and the attention that reads them."""

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

    Channel 2 i has sin(m / 10000^(2 i / D)), channel 2 i + 1 the cosine (Vaswani et al. 2017).
    """
    place = torch.arange(1, size + 1, device=device, dtype=torch.float32)[:, None]  # (M, 1)
    rate = torch.exp(
        torch.arange(0, dim, 2, device=device, dtype=torch.float32) * (-math.log(10000.0) / dim)
    )
    table = torch.zeros(size, dim, device=device)
    table[:, 0::2] = (place * rate).sin()
    table[:, 1::2] = (place * rate).cos()[:, : dim // 2]
    return table


class MemoryAttention(nn.Module):
    """Cross-attention of tokens to sentence vectors, scaled by a scalar gate g_mem.

    A sentence vector is projected once, when it is written: (s + P) W_K = s W_K + P W_K, and the
    second summand, which depends on the slot only, is added when it is read. W_K has no bias: it
    would add the same to all scores of a query.

    Records ``memory_attention``: ``layer`` (int, 1-based), ``gate`` (g_mem, a scalar) and
    ``weights`` (P, M_t): how a sentence step's packed slots weigh the sentences in memory, oldest
    first, mean over heads, before dropout; float32 or better.
    """

    def __init__(self, config: DecoderConfig, gate: float, layer: int) -> None:
        """Builds the projections of layer ``layer``; ``gate`` is the initial value of g_mem."""
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
        """Returns key and value (A, D) of sentence vectors (A, D), positions left out."""
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
        """Returns g_mem times what the slots (P, D) read from memory.

        Args:
            x: Normed slots (P, D).
            packing: Where they stand.
            keys: (A, M, D), positions included.
            values: (A, M, D).
            written: Bool (A, M), of which slots of memory there are any; None: all. Rows without
                any add nothing. With it, nothing is recorded.
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
        # (P,): slots of rows whose memory is empty
        empty = ~written.any(dim=1)[packing.cell // packing.width]
        return read.masked_fill(empty[:, None], 0.0)


def _mean_weights(q: Tensor, k: Tensor) -> Tensor:
    """Returns the attention weights (A, U, M) of (A, H, U, C) to (A, H, M, C), mean over heads."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        scores = q.to(wide) @ k.to(wide).transpose(-1, -2) / math.sqrt(q.shape[-1])  # (A, H, U, M)
    return scores.softmax(dim=-1).mean(dim=1)


class SentenceMemory:
    """First in, first out: the latest M sentence vectors of every stream, graph and all.

    All streams of a batch begin together, so all that have a t-th sentence have written equally
    many; streams that end leave from the back (they are sorted by length).

    Args:
        readers: The layers that read; each keeps its own projection of every sentence.
        size: M.
        positions: (M, D), of slots 1 to M.
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
        """Adds the vectors (A, D) of a sentence step, projected once for every reader."""
        self.latest = sentences
        self.vectors = [*self.vectors, sentences][-self._size :]
        for reader, entries in zip(self._readers, self._entries, strict=True):
            entries.append(reader.project(sentences))
            del entries[: -self._size]

    def select(self, streams: Tensor) -> None:
        """Goes on with ``streams`` (A,), int64 indices; several may go on from one."""
        if self.latest is not None:
            self.latest = self.latest[streams]
        self.vectors = [vector[streams] for vector in self.vectors]
        self._entries = [
            [(key[streams], value[streams]) for key, value in entries] for entries in self._entries
        ]

    def view(self) -> "SentenceMemory":
        """Returns the memory as it is now, for a computation that is repeated later."""
        copied = copy.copy(self)
        copied._entries = [list(entries) for entries in self._entries]
        return copied

    def read(self, reader: int, rows: int) -> tuple[Tensor, Tensor] | None:
        """Returns keys and values (A, M_t, D) of the first ``rows`` streams; None if empty."""
        entries = self._entries[reader]
        if not entries:
            return None
        keys = torch.stack([key[:rows] for key, _ in entries], dim=1)  # (A, M_t, D)
        values = torch.stack([value[:rows] for _, value in entries], dim=1)
        return keys + self._position_keys[reader][: len(entries)].to(keys.dtype), values
