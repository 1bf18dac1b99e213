"""What a decoder of text keeps: keys, values, and where each row is within chain and answer."""

import torch
from torch import Tensor

from lightning_models.thinking_states.decoding import AnswerCache


class TextCache(AnswerCache):
    """Watches rows that write a chain for the answer prefix that ends it.

    A chain that grows too long is broken off: from there on the prefix is the only possible text.

    Args:
        last: The last token of each query (B,) int64: where nothing is pending, it is the first to
            be read.
        limits: Most tokens of each row's chain (B,) int64.
        pending: see ``AnswerCache``.
        end: The tokens that end a chain; empty: no chains are written.
    """

    def __init__(
        self,
        last: Tensor,
        limits: Tensor,
        *,
        pending: tuple[int, ...] = (),
        end: tuple[int, ...] = (),
    ) -> None:
        super().__init__(len(limits), limits.device, pending)
        self._last = last
        self._end = torch.tensor(end, dtype=torch.int64, device=limits.device)
        self._tail = limits.new_full((len(limits), len(end)), -1)
        self._limits = limits
        self._written = 0  # tokens behind each query: rows begin together
        self._begun = False
        self.answering = torch.full_like(limits, not end, dtype=torch.bool)
        """Whether what each row writes next is its answer (B,) bool."""

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        super().select(rows)
        self._last, self._tail = self._last[rows], self._tail[rows]
        self._limits, self.answering = self._limits[rows], self.answering[rows]

    def take(self, tokens: Tensor) -> Tensor:
        """Returns what is read next (B, t), and notes what was written (B,).

        At first nothing was written: what is given then is not looked at.
        """
        if not self._begun:
            self._begun = True
            return self.next_inputs(self._last)
        if len(self._end):
            self._tail = torch.cat((self._tail[:, 1:], tokens[:, None]), dim=1)
            self._written += 1
            self.answering = self.answering | (self._tail == self._end).all(dim=1)
        return self.next_inputs(tokens)

    def forced(self, logits: Tensor) -> Tensor:
        """Returns logits (B, V) in which rows whose chain is too long go on with the prefix."""
        if not len(self._end):
            return logits
        late = ~self.answering & (self._limits <= self._written)
        place = (self._written - self._limits).clamp(min=0, max=len(self._end) - 1)
        only = torch.full_like(logits, -torch.inf).scatter(1, self._end[place][:, None], 0.0)
        return torch.where(late[:, None], only, logits)
