"""What decoding keeps: the text so far, and keys and values of latent vectors and tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_models.latent_thought.network import Memory
from lightning_models.layers import KVCache


class LatentCache:
    """Rows of text under latent vectors that stay as they are until they are inferred again.

    ``kv`` and ``memory`` are set by whoever infers.
    """

    kv: KVCache
    """Keys and values of all tokens but the last of each row."""
    memory: Memory
    """Keys and values of the latent vectors."""

    def __init__(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]],
    ) -> None:
        """Takes right-padded prompts (B, P), their lengths (B,), and the rows' random streams."""
        room = prompts.new_zeros(len(prompts), max_new_tokens)
        self.text = torch.cat((prompts, room), dim=1)
        self.lengths = lengths
        self.streams = list(streams)
        self.new_tokens: int | None = None
        """Tokens of each row after its prompt; None before the first step."""

    @property
    def capacity(self) -> int:
        """Most tokens of a row."""
        return self.text.shape[1]

    def read(self, tokens: Tensor) -> None:
        """Takes the last token (B,) of each row; the first time it is the prompt's own."""
        if self.new_tokens is None:
            self.new_tokens = 0
            return
        self.text.scatter_(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        self.new_tokens += 1

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.text, self.lengths = self.text[rows], self.lengths[rows]
        self.streams = [self.streams[row] for row in rows.tolist()]
        self.memory = [(keys[rows], values[rows]) for keys, values in self.memory]
        self.kv.select(rows)
