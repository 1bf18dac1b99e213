"""What sequential inference keeps: keys and values of executed slots, and where each row stands."""

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.ponderlm.router import Steps


class SlotCache:
    """Rows that advance slot by slot, each at its own token and step.

    Skipped slots leave nothing behind, so rows hold different numbers of entries.
    """

    def __init__(self, kv: KVCache, capacity: int, like: Tensor, thinking_steps: int) -> None:
        """Starts every row before its first token.

        Args:
            kv: empty.
            capacity: entries of a row at most.
            like: an embedding (B, D), whose dtype and device the states have.
            thinking_steps: K.
        """
        rows, device = len(like), like.device
        self.kv = kv
        self.bias: Tensor | None = None
        """Attention bias of each entry as a key (B, capacity); None while none has any."""
        self._capacity = capacity
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        """Index of the token each row is at."""
        self.slot = torch.zeros(rows, dtype=torch.int64, device=device)
        """Slot that comes next."""
        self.last = torch.full((rows,), thinking_steps, device=device)
        """The token's last step, known behind slot 0."""
        self.state = torch.zeros_like(like)
        """Post-norm output of the slot before."""
        self.read_out = torch.zeros_like(like)
        """What the output matrix will be applied to: of PonderLM-3, the sum so far."""
        self.steps: Steps | None = None
        """The token's step distribution, known behind slot 0."""

    def add_bias(self, bias: Tensor) -> None:
        """Writes the bias (B, N) of the next N entries of each row."""
        self._write(self.kv.positions(bias.shape[1]), bias)

    def _write(self, places: Tensor, bias: Tensor) -> None:
        if self.bias is None:
            self.bias = bias.new_zeros(len(bias), self._capacity)
        self.bias.scatter_(1, places, bias)

    def keep(self, kept: Tensor, bias: Tensor | None) -> None:
        """Keeps those of the N entries just written that are marked.

        Args:
            kept: bool (B, N).
            bias: of all N as keys (B, N).
        """
        places = self.kv.positions(kept.shape[1])
        order = self.kv.keep(kept)
        if bias is not None:
            self._write(places, bias.where(kept, 0.0).gather(1, order))  # nothing stale behind

    def key_bias(self, num_new: int) -> Tensor | None:
        """Returns the bias (B, N) of all entries, with those to be written."""
        return None if self.bias is None else self.bias[:, : self.kv.longest + num_new]

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.kv.select(rows)
        for name in ("token", "slot", "last", "state", "read_out"):
            setattr(self, name, getattr(self, name)[rows])
        if self.bias is not None:
            self.bias = self.bias[rows]
        if self.steps is not None:
            self.steps = Steps(*(part[rows] for part in self.steps))
