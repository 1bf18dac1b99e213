"""What decoding keeps: streams of earlier tokens, or just the tokens where later ones matter."""

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.thoughtbubbles.config import ThoughtbubblesConfig


class StreamCache:
    """Keys, values and scores of all earlier streams, for the strictly causal allocations.

    Stretches of blocks between two fork layers have their own numbers of streams, and so their own
    KV cache; rows advance at their own pace in each.
    """

    def __init__(
        self,
        config: ThoughtbubblesConfig,
        batch: int,
        capacity: int,
        device: torch.device | str | None = None,
    ) -> None:
        """Allows for ``capacity`` tokens a row, whatever they fork into."""
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        """int64 (B,): tokens of each row."""
        self.window = config.allocation_window
        self.stretches = [
            StretchCache(stop - start, batch, capacity * 2**ordinal, device)
            for ordinal, (start, stop) in enumerate(config.stretches)
        ]
        self.histories: list[Tensor | None] = [None] * len(config.fork_layers)
        """Per fork layer, window_topk's scores of the latest w - 1 tokens (B, w - 1, G)."""

    def keep_history(self, ordinal: int, table: Tensor | None, counts: Tensor) -> None:
        """Keeps the scores of each row's latest tokens.

        Args:
            ordinal: which fork layer.
            table: (B, w - 1 + T, G), or None for rules without history.
            counts: int64 (B,), how many of the T tokens each row has.
        """
        if table is None:
            return
        latest = torch.arange(self.window - 1, device=table.device)
        index = (counts[:, None] + latest)[..., None].expand(-1, -1, table.shape[2])
        self.histories[ordinal] = table.gather(1, index)

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.tokens = self.tokens[rows]
        for stretch in self.stretches:
            stretch.select(rows)
        self.histories = [None if table is None else table[rows] for table in self.histories]


class StretchCache(KVCache):
    """The KV cache of a stretch of blocks, with the scores of the streams in it."""

    def __init__(
        self, num_layers: int, batch: int, capacity: int, device: torch.device | str | None
    ) -> None:
        """Allows for ``capacity`` streams a row; the scores take one more layer of the cache."""
        super().__init__(num_layers + 1, batch, capacity, device)

    def append_scores(self, log_p: Tensor) -> Tensor:
        """Writes log P (B, N) of new streams; returns those of all keys (B, N_all)."""
        scores = log_p[:, None, :, None]
        return self.layers[-1].append(scores, scores)[0][:, 0, :, 0]


class PrefixCache:
    """The tokens so far, for global_topk: a new token may change who survived before it."""

    def __init__(self, prompts: Tensor, lengths: Tensor, max_new_tokens: int) -> None:
        """Keeps all but the last token of each right-padded prompt (B, P)."""
        self.tokens = torch.nn.functional.pad(prompts, (0, max_new_tokens))
        self.lengths = lengths - 1

    def append(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Adds ``tokens`` (B,); returns all tokens (B, longest) and lengths (B,)."""
        self.tokens = self.tokens.scatter(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        return self.tokens[:, : int(self.lengths.max())], self.lengths

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]
