"""Residual streams of tokens: who they belong to, where they stand, what they score."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_models.layers import segment_sum


@dataclass(frozen=True)
class Streams:
    """The streams of a batch, those of one token next to each other, its original right-most.

    Rows may have different numbers of them: they are padded on the right, so that causal attention
    never looks at padding.
    """

    x: Tensor
    """Residuals (B, N, D)."""
    log_p: Tensor
    """log of the cumulative score (B, N), float32, at most 0; 0 in padding."""
    token: Tensor
    """int64 (B, N): which of the T tokens a stream belongs to; T in padding."""
    slot: Tensor
    """int64 (B, N): place among the streams of its token, from the left."""
    count: Tensor
    """int64 (B, N): streams of its token, c."""
    num_tokens: int
    """T."""

    @property
    def real(self) -> Tensor:
        """Bool (B, N): not padding."""
        return self.token < self.num_tokens

    @property
    def original(self) -> Tensor:
        """Bool (B, N): the right-most stream of its token, the one that never was a fork."""
        return self.real & (self.slot == self.count - 1)

    @property
    def lengths(self) -> Tensor:
        """int64 (B,): streams of each row."""
        return self.real.sum(dim=1)

    def per_token(self) -> Tensor:
        """Returns the number of streams of each token, int64 (B, T); 0 for padding."""
        ones = torch.ones_like(self.token)
        return segment_sum(ones, self.token, self.num_tokens + 1)[:, :-1]

    def positions(self) -> Tensor:
        """Returns rotary positions (B, N), float32: token k's original at k + 1, forks below.

        The p-th fork from the right of c streams stands at k + 1 - p/c, within (k, k + 1].
        NOTE(paper): appendix D divides by the number of forks q = c - 1, which is undefined
        without forks and puts the left-most fork onto the previous token; c = q + 1 does neither.
        """
        return self.token + (self.slot + 1).to(score_dtype()) / self.count

    def with_x(self, x: Tensor) -> "Streams":
        """Returns the same streams with other residuals."""
        return replace(self, x=x)


def score_dtype() -> torch.dtype:
    """Returns the dtype of scores and positions: float32, whatever the weights have, or better."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def first_streams(x: Tensor, lengths: Tensor | None = None) -> Streams:
    """Returns one stream a token, with score 1.

    Args:
        x: embedded tokens (B, T, D).
        lengths: int64 (B,), tokens of each row; the rest is padding. None: all T.
    """
    rows, num_tokens = x.shape[:2]
    token = torch.arange(num_tokens, device=x.device).expand(rows, -1)
    if lengths is not None:
        token = torch.where(token < lengths[:, None], token, num_tokens)
    log_p = torch.zeros(rows, num_tokens, device=x.device, dtype=score_dtype())
    return Streams(x, log_p, token, torch.zeros_like(token), torch.ones_like(token), num_tokens)


def arrange(x: Tensor, log_p: Tensor, token: Tensor, num_tokens: int) -> Streams:
    """Returns streams with slots and counts read off their tokens (B, N), which never decrease."""
    counts = segment_sum(torch.ones_like(token), token, num_tokens + 1)
    starts = counts.cumsum(dim=1) - counts
    slot = torch.arange(token.shape[1], device=token.device) - starts.gather(1, token)
    return Streams(x, log_p, token, slot, counts.gather(1, token), num_tokens)
