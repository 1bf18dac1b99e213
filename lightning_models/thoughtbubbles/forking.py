"""The fork layer (eqs. 1 to 6): score, select, copy or drop residual streams."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.layers import make_norm, record, wants
from lightning_models.thoughtbubbles.allocation import (
    Choice,
    by_threshold,
    global_topk,
    row_budgets,
    window_topk,
)
from lightning_models.thoughtbubbles.config import ROUNDING, Allocation, ThoughtbubblesConfig
from lightning_models.thoughtbubbles.streams import Streams, arrange, score_dtype

LOWEST_LOG_ACTION = -20.0
"""Floor of log-sigmoid scores: a fork layer takes at most this off log P.

NOTE(paper): it has none; the authors' code has this one, for stability.
"""


class Forked(NamedTuple):
    """What a fork layer makes of streams."""

    streams: Streams
    border: Tensor
    """Mean over rows of the kappa-th score, a scalar; nan where nothing competes or outside of
    training."""
    history: Tensor | None
    """For window_topk with a cache: scores of the w - 1 tokens before and of these."""


class ForkLayer(nn.Module):
    """Keep and fork scores from a norm and a linear layer, and the vector that marks forks."""

    threshold: Tensor
    updates: Tensor
    observed_ratio: Tensor

    def __init__(self, config: ThoughtbubblesConfig, ordinal: int) -> None:
        """Builds the fork layer number ``ordinal`` (0-based) of the network."""
        super().__init__()
        self.config = config
        self.ordinal = ordinal
        self.norm = make_norm(config)
        self.score = nn.Linear(config.dim, 2, bias=False)
        self.fork_embedding = nn.Parameter(torch.empty(config.dim))
        self.register_buffer("threshold", torch.tensor(-torch.inf, dtype=score_dtype()))
        self.register_buffer("updates", torch.tensor(0))
        self.register_buffer("observed_ratio", torch.tensor(0.0, dtype=score_dtype()))
        nn.init.uniform_(self.fork_embedding, 0.0, 1 / math.sqrt(config.dim))

    def forward(
        self,
        streams: Streams,
        lengths: Tensor,
        allocation: Allocation,
        history: Tensor | None = None,
    ) -> Forked:
        """Returns the surviving streams and new forks, each fork left of its parent.

        Records ``fork``: ``ordinal``, the streams ``before`` and ``after``, ``parent`` (B, N'),
        indices into ``before``, ``is_fork`` (B, N'), and ``budgets`` (B,), kappa of each row.

        Args:
            streams: of T tokens.
            lengths: int64 (B,), tokens of each row.
            allocation: the rule by which candidates are chosen.
            history: see ``allocation.window_topk``; None: these tokens begin the sequence.
        """
        log_scores = self.log_scores(streams)
        with torch.no_grad():
            ranks = _ranks(log_scores.detach(), streams)
            choice, border, table = self._choose(ranks, streams, lengths, allocation, history)
            index = _compact(choice)
        return Forked(self._assemble(streams, log_scores, index), border, table)

    def log_scores(self, streams: Streams) -> Tensor:
        """Returns log p_hat (B, 2 N), float32, of fork and keep of each stream (eqs. 1 to 3)."""
        with torch.autocast(streams.x.device.type, enabled=False):
            wide = torch.promote_types(streams.x.dtype, torch.float32)
            normed = self.norm(streams.x.to(self.score.weight.dtype)).to(wide)
            logits = F.linear(normed, self.score.weight.to(wide))
            log_action = F.logsigmoid(logits).clamp(min=LOWEST_LOG_ACTION)
        return (streams.log_p[..., None] + log_action).flatten(1)

    @torch.no_grad()
    def observe(self, border: Tensor) -> None:
        """Moves the threshold towards the kappa-th score of a batch; nan leaves it as it is.

        Also notes the kappa / L it belongs to (``observed_ratio``; 0: nothing was observed).
        """
        seen = border.isfinite()
        weight = torch.where(
            self.updates > 0, 1 - self.config.threshold_decay, torch.ones_like(border)
        )
        old = torch.where(self.updates > 0, self.threshold, border)
        self.threshold.copy_(torch.where(seen, torch.lerp(old, border, weight), self.threshold))
        self.updates.add_(seen)
        self.observed_ratio.copy_(torch.where(seen, self.config.ratio, self.observed_ratio))

    def _choose(
        self,
        ranks: Tensor,
        streams: Streams,
        lengths: Tensor,
        allocation: Allocation,
        history: Tensor | None,
    ) -> tuple[Choice, Tensor, Tensor | None]:
        """Returns the choice, the kappa-th score, and window_topk's scores."""
        border = ranks.new_full((), torch.nan)
        if allocation == "window_topk":
            choice, table = self._choose_by_window(ranks, streams, history)
            return choice, border, table
        if not self._competes(streams, allocation):
            return Choice(ranks > -torch.inf, ranks.shape[1]), border, None
        if allocation == "threshold" and not self.training:
            # before anything was observed (a run's sanity check), only originals pass: log P <= 0
            return (
                by_threshold(ranks, torch.where(self.updates > 0, self.threshold, 0.0)),
                border,
                None,
            )
        width = min(self.config.most_streams(streams.num_tokens), ranks.shape[1])
        budgets = torch.minimum(row_budgets(self.config, lengths), 2 * streams.lengths)
        best, last = global_topk(ranks, budgets, width)
        if self.training:  # where only originals fit, the last of them bars all others: log P <= 0
            border = _finite_mean(last.clamp(max=0.0))
        if allocation == "global_topk":
            return best, border, None
        # the first micro-batch of a run has nothing but itself to go by
        threshold = torch.where(self.updates > 0, self.threshold, border)
        return by_threshold(ranks, threshold), border, None

    def _choose_by_window(
        self, ranks: Tensor, streams: Streams, history: Tensor | None
    ) -> tuple[Choice, Tensor]:
        """Returns the choice of window_topk, and its scores."""
        window = self.config.allocation_window
        if history is None:
            most = 2 ** (self.ordinal + 1)  # candidates of a token
            history = ranks.new_full((len(ranks), window - 1, most), -torch.inf)
        per_window = math.ceil(self.config.ratio * window - ROUNDING)
        return window_topk(ranks, streams, history, per_window)

    def _competes(self, streams: Streams, allocation: Allocation) -> bool:
        """Whether any row has more candidates than it may keep.

        For threshold that is a matter of the layer: where nothing competes in training, it is
        -inf. The others look at the sequence at hand.
        """
        if allocation == "threshold":
            return self.config.competes(self.ordinal)
        whole = streams.num_tokens if self.config.budget == "dynamic" else self.config.block_size
        return 2 * streams.x.shape[1] > self.config.ratio * whole

    def _assemble(self, streams: Streams, log_scores: Tensor, index: Tensor) -> Streams:
        """Returns the streams that the candidates ``index`` (B, N') describe; 2 N is padding."""
        total = log_scores.shape[1]
        empty = index == total
        parent = (index // 2).clamp(max=max(total // 2 - 1, 0))
        is_fork = (index % 2 == 0) & ~empty
        x = _take_rows(streams.x, parent)
        x = x + is_fork[..., None] * self.fork_embedding.to(x.dtype)
        log_p = log_scores.gather(1, index.clamp(max=total - 1)).masked_fill(empty, 0.0)
        token = streams.token.gather(1, parent).masked_fill(empty, streams.num_tokens)
        after = arrange(x, log_p, token, streams.num_tokens)
        if wants("fork"):
            record(
                "fork",
                ordinal=self.ordinal,
                before=streams,
                after=after,
                parent=parent,
                is_fork=is_fork,
                budgets=row_budgets(self.config, streams.original.sum(dim=1)),
            )
        return after


def _ranks(log_scores: Tensor, streams: Streams) -> Tensor:
    """Returns scores for selection only (eq. 4): originals' keeps +inf, padding -inf."""
    kept = torch.stack((torch.zeros_like(streams.original), streams.original), dim=-1).flatten(1)
    real = streams.real.repeat_interleave(2, dim=1)
    return log_scores.masked_fill(kept, torch.inf).masked_fill(~real, -torch.inf)


def _compact(choice: Choice) -> Tensor:
    """Returns the chosen candidates (B, width) in their order, 2 N where a row has fewer."""
    chosen, width = choice
    rows, total = chosen.shape
    place = torch.where(chosen, chosen.cumsum(dim=1) - 1, width)
    index = place.new_full((rows, width + 1), total)
    candidates = torch.arange(total, device=chosen.device).expand(rows, -1)
    return index.scatter(1, place, candidates)[:, :width]


def _take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Returns x[b, index[b]] (B, N', D)."""
    rows, num_streams, width = x.shape
    flat = index + num_streams * torch.arange(rows, device=x.device)[:, None]
    return x.reshape(-1, width).index_select(0, flat.flatten()).view(rows, -1, width)


def _finite_mean(values: Tensor) -> Tensor:
    """Returns the mean of the finite ones among ``values`` (B,); nan without any."""
    finite = values.isfinite()
    return values.where(finite, 0.0).sum() / finite.sum()
