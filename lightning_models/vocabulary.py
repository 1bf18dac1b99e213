"""The output layer in chunks: logits of a whole batch are never held.

They are the largest tensor of a small language model (16 x 1024 tokens at V = 50304 take 3.3 GB),
so losses and scores walk over the tokens in chunks.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Target value where nothing is predicted."""

CHUNK_ROWS = {"cpu": 256, "cuda": 2048}
"""Rows whose logits are held at once, by device type; enough of them to feed the matrix units."""


class TokenChunk(NamedTuple):
    """Consecutive states that belong to ``tokens`` consecutive tokens from ``first`` on."""

    rows: slice
    first: int
    tokens: int


def target_index(targets: Tensor) -> Tensor:
    """Returns flat targets that can be gathered; ids outside the vocabulary still raise there."""
    return targets.reshape(-1).masked_fill(targets.reshape(-1) == IGNORE_INDEX, 0)


def product_dtype(h: Tensor) -> torch.dtype:
    """Returns the dtype in which matrix products with ``h`` run: autocast's, or its own."""
    if torch.is_autocast_enabled(h.device.type):
        return torch.get_autocast_dtype(h.device.type)
    return h.dtype


def chunk_rows(device: torch.device) -> int:
    """Returns the largest number of rows of a chunk."""
    return CHUNK_ROWS.get(device.type, CHUNK_ROWS["cuda"])


def row_chunks(num_rows: int, device: torch.device) -> list[slice]:
    """Returns equal slices of the rows, at most CHUNK_ROWS each."""
    count = max(1, math.ceil(num_rows / chunk_rows(device)))
    size = max(1, math.ceil(num_rows / count))
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def token_chunks(owner: Tensor) -> list[TokenChunk]:
    """Returns chunks of about CHUNK_ROWS states, never cut between two states of one token.

    Args:
        owner: int64 (N,), the token of each state, never decreasing.
    """
    if not len(owner):
        return []
    size = chunk_rows(owner.device)
    marks = torch.arange(0, len(owner), size, device=owner.device)
    starts = torch.searchsorted(owner, owner[marks])  # back to the token's first state
    starts = torch.unique_consecutive(starts)
    stops = torch.cat((starts[1:], starts.new_tensor([len(owner)])))
    table = torch.stack((starts, stops, owner[starts], owner[stops - 1]), dim=1)
    return [
        TokenChunk(slice(start, stop), first, last - first + 1)
        for start, stop, first, last in table.tolist()
    ]


def logits(h: Tensor, weight: Tensor) -> Tensor:
    """Returns ``h weight^T`` (n, V) in float32 or better; the product runs in their dtype."""
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    with torch.autocast(h.device.type, enabled=False):
        return (h @ weight.t()).to(wide)
