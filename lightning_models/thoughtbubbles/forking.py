"""The fork layer (eqs. 1 to 6): residual streams, allocation rules and the layer itself."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.layers import make_norm, record, segment_sum, wants
from lightning_models.thoughtbubbles.config import ROUNDING, Allocation, ThoughtbubblesConfig

# ---- streams, their positions and scores


@dataclass(frozen=True)
class ResidualStreams:
    """The residual streams of a batch, grouped by token, with each token's original right-most.

    Rows are padded on the right to the same number of streams, so causal attention never sees
    padding.
    """

    x: Tensor
    """Residuals (B, N, D)."""
    log_p: Tensor
    """Log of the cumulative score (B, N), float32, at most 0; 0 in padding."""
    token: Tensor
    """int64 (B, N): index of the token that a stream belongs to; T in padding."""
    slot: Tensor
    """int64 (B, N): index among the streams of the same token, from the left."""
    count: Tensor
    """int64 (B, N): c, number of streams of the same token."""
    num_tokens: int
    """T."""

    @property
    def real(self) -> Tensor:
        """Bool (B, N): true except in padding."""
        return self.token < self.num_tokens

    @property
    def original(self) -> Tensor:
        """Bool (B, N): true for the right-most stream of each token, which was never a fork."""
        return self.real & (self.slot == self.count - 1)

    @property
    def lengths(self) -> Tensor:
        """int64 (B,): number of streams of each row."""
        return self.real.sum(dim=1)

    def per_token(self) -> Tensor:
        """Returns the number of streams of each token, int64 (B, T); 0 for padding."""
        ones = torch.ones_like(self.token)
        # segment T collects the padding: (B, T + 1) -> (B, T)
        return segment_sum(ones, self.token, self.num_tokens + 1)[:, :-1]

    def positions(self) -> Tensor:
        """Returns rotary positions (B, N), float32: k + 1 for token k's original, less for forks.

        The p-th fork from the right of c streams is at k + 1 - p/c, within (k, k + 1].
        NOTE(paper): appendix D divides by the number of forks q = c - 1, which is undefined
        without forks and puts the left-most fork onto the previous token; c = q + 1 does neither.
        """
        return self.token + (self.slot + 1).to(score_dtype()) / self.count

    def with_x(self, x: Tensor) -> "ResidualStreams":
        """Returns the same streams with other residuals."""
        return replace(self, x=x)


def score_dtype() -> torch.dtype:
    """Returns the dtype of scores and positions: float32, whatever the weights have, or better."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def first_streams(x: Tensor, lengths: Tensor | None = None) -> ResidualStreams:
    """Returns one stream per token, with score 1.

    Args:
        x: Embedded tokens (B, T, D).
        lengths: int64 (B,), tokens of each row; the rest is padding. Defaults to T for all rows.
    """
    rows, num_tokens = x.shape[:2]
    token = torch.arange(num_tokens, device=x.device).expand(rows, -1)  # (B, T)
    if lengths is not None:
        token = torch.where(token < lengths[:, None], token, num_tokens)  # T marks padding
    log_p = torch.zeros(rows, num_tokens, device=x.device, dtype=score_dtype())
    return ResidualStreams(
        x, log_p, token, torch.zeros_like(token), torch.ones_like(token), num_tokens
    )


def arrange(x: Tensor, log_p: Tensor, token: Tensor, num_tokens: int) -> ResidualStreams:
    """Returns streams whose slots and counts follow from the non-decreasing ``token`` (B, N)."""
    counts = segment_sum(torch.ones_like(token), token, num_tokens + 1)  # (B, T + 1)
    starts = counts.cumsum(dim=1) - counts  # (B, T + 1), index of each token's first stream
    slot = torch.arange(token.shape[1], device=token.device) - starts.gather(1, token)  # (B, N)
    return ResidualStreams(x, log_p, token, slot, counts.gather(1, token), num_tokens)


# ---- which candidates survive a fork layer
#
# A row has 2 N candidates in the order ``fork_0, keep_0, fork_1, keep_1, ...``. A rule receives
# their selection scores: +inf for the keeps of originals, -inf in padding.


WINDOW_ELEMENTS = 1 << 24
"""Maximum number of scores that window_topk unfolds at once."""


class Choice(NamedTuple):
    """The candidates that survive."""

    chosen: Tensor
    """Bool (B, 2 N)."""
    width: int
    """Upper bound on the survivors of a row."""


def row_budgets(config: ThoughtbubblesConfig, lengths: Tensor) -> Tensor:
    """Returns kappa of each row (int64, the shape of ``lengths``), at least its length.

    NOTE(paper): padding does not count towards a row's budget, so batching changes nothing.
    """
    if config.budget == "fixed":
        return lengths.clamp(min=config.most_streams(0))
    # float64, less ROUNDING: a product such as 1.1 * 10 must not round up to 12
    return (lengths.double() * config.ratio - ROUNDING).ceil().long().clamp(min=lengths)


def global_topk(scores: Tensor, budgets: Tensor, width: int) -> tuple[Choice, Tensor]:
    """Chooses the candidates with the highest scores of each row, up to the row's budget.

    Args:
        scores: Selection scores (B, 2 N).
        budgets: int64 (B,), number of survivors of each row, at most ``width``.
        width: min(kappa, 2 N) of a row without padding.

    Returns:
        The choice, and the lowest chosen score of each row (B,).
    """
    # A stable sort breaks ties in favour of earlier candidates. topk would break them differently
    # at another padded width.
    values, best = (x[:, :width] for x in scores.sort(dim=1, descending=True, stable=True))
    rank = torch.arange(width, device=scores.device)
    inside = (rank < budgets[:, None]) & (values > -torch.inf)  # (B, width), never padding
    # back from sorted order to candidate order
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, inside)  # (B, 2 N)
    # The last chosen score is values[budget - 1]. Padding shifts it to index ``budget``, so that
    # an empty row with budget 0 reads -inf.
    last = F.pad(values, (1, 0), value=-torch.inf).gather(1, budgets[:, None])[:, 0]  # (B,)
    return Choice(chosen, width), last


def by_threshold(scores: Tensor, threshold: Tensor) -> Choice:
    """Chooses all originals and the candidates whose scores exceed a scalar threshold."""
    chosen = (scores > threshold) | (scores == torch.inf)
    return Choice(chosen, _widest(chosen))


def window_topk(
    scores: Tensor, streams: ResidualStreams, history: Tensor, per_window: int
) -> tuple[Choice, Tensor]:
    """Chooses the candidates that rank among the ``per_window`` best of the latest w tokens.

    A candidate of token i competes only with the candidates of tokens i - w + 1 to i, since
    comparing it with later ones would leak information.

    Args:
        scores: Selection scores (B, 2 N).
        streams: The N streams that the candidates come from.
        history: Scores (B, w - 1, G) of the preceding tokens, -inf before the sequence. G is the
            maximum number of candidates of a token at this layer.
        per_window: Number of survivors per window, ceil(r w).

    Returns:
        The choice, and the scores (B, w - 1 + T, G) of the history followed by these tokens.
    """
    rows, num_tokens, width = len(scores), streams.num_tokens, history.shape[2]
    # Lay out the candidates as a grid with G columns per token: candidate j of slot s goes to
    # column 2 s + j of its token, where j is 0 for the fork and 1 for the keep.
    column = streams.token[..., None] * width + 2 * streams.slot[..., None]  # (B, N, 1)
    column = (column + torch.arange(2, device=scores.device)).flatten(1)  # (B, N, 2) -> (B, 2 N)
    end = num_tokens * width  # padding (token T) is scattered past the end and cut off
    grid = scores.new_full((rows, end + width), -torch.inf)
    grid = grid.scatter(1, column.clamp(max=end), scores)  # (B, (T + 1) G)
    table = torch.cat((history, grid[:, :end].view(rows, num_tokens, width)), dim=1)
    borders = _window_borders(table, history.shape[1] + 1, per_window)  # (B, T)
    # one more entry for token T, so that padding can be gathered
    borders = torch.cat((borders, borders.new_zeros(rows, 1)), dim=1)  # (B, T + 1)
    border = borders.gather(1, streams.token).repeat_interleave(2, dim=1)  # (B, N) -> (B, 2 N)
    chosen = (scores >= border) & (scores > -torch.inf)  # a border of -inf must not admit padding
    return Choice(chosen, _widest(chosen)), table


def _window_borders(table: Tensor, window: int, rank: int) -> Tensor:
    """Returns the ``rank``-th highest score (B, T) of each window, or -inf if it has fewer."""
    rows, length, width = table.shape
    num_tokens = length - window + 1
    if rank > window * width:
        return table.new_full((rows, num_tokens), -torch.inf)
    step = max(1, WINDOW_ELEMENTS // (rows * window * width))
    borders = [
        table[:, start : start + step + window - 1]
        .unfold(1, window, 1)  # (B, s, G, w), s windows at a time
        .flatten(2)  # (B, s, G w)
        .topk(rank, dim=2)
        .values[..., -1]  # (B, s)
        for start in range(0, num_tokens, step)
    ]
    return torch.cat(borders, dim=1)


def _widest(chosen: Tensor) -> int:
    return int(chosen.sum(dim=1).max()) if chosen.numel() else 0


# ---- fork layer


LOWEST_LOG_ACTION = -20.0
"""Floor of the log-sigmoid scores, so that one fork layer lowers log P by at most 20.

NOTE(paper): the paper has no floor; the authors' code has this one, for stability.
"""


class Forked(NamedTuple):
    """Output of a fork layer."""

    streams: ResidualStreams
    border: Tensor
    """Mean over rows of the kappa-th score, a scalar; nan if nothing competes or outside
    training."""
    history: Tensor | None
    """Scores (B, w - 1 + T, G) of the preceding w - 1 tokens and these, for window_topk only."""


class ForkLayer(nn.Module):
    """Scores, forks and prunes streams: a norm, a linear layer and a learned fork embedding."""

    threshold: Tensor
    updates: Tensor
    observed_ratio: Tensor

    def __init__(self, config: ThoughtbubblesConfig, ordinal: int) -> None:
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
        streams: ResidualStreams,
        lengths: Tensor,
        allocation: Allocation,
        history: Tensor | None = None,
    ) -> Forked:
        """Returns the surviving streams and new forks, each fork left of its parent.

        Records ``fork``: ``ordinal``, the streams ``before`` and ``after``, ``parent`` (B, N'),
        indices into ``before``, ``is_fork`` (B, N'), and ``budgets`` (B,), kappa of each row.

        Args:
            streams: Streams of T tokens.
            lengths: int64 (B,), number of tokens of each row.
            allocation: The rule that chooses among the candidates.
            history: See ``window_topk``. Defaults to an empty history, for the first tokens of a
                sequence.
        """
        log_scores = self.log_scores(streams)
        with torch.no_grad():  # selection is discrete; gradients flow through log_scores alone
            ranks = _ranks(log_scores.detach(), streams)
            choice, border, table = self._choose(ranks, streams, lengths, allocation, history)
            index = _compact(choice)
        return Forked(self._assemble(streams, log_scores, index), border, table)

    def log_scores(self, streams: ResidualStreams) -> Tensor:
        """Returns log p_hat (B, 2 N), float32, for fork and keep of each stream (eqs. 1 to 3)."""
        # in float32 under autocast too: scores multiply over the fork layers
        with torch.autocast(streams.x.device.type, enabled=False):
            acc_dtype = torch.promote_types(streams.x.dtype, torch.float32)
            normed = self.norm(streams.x.to(self.score.weight.dtype)).to(acc_dtype)
            logits = F.linear(normed, self.score.weight.to(acc_dtype))  # (B, N, 2): fork, keep
            log_action = F.logsigmoid(logits).clamp(min=LOWEST_LOG_ACTION)
        return (streams.log_p[..., None] + log_action).flatten(1)  # (B, N, 2) -> (B, 2 N)

    @torch.no_grad()
    def observe(self, border: Tensor) -> None:
        """Updates the running mean of the kappa-th score with the value of a batch; skips nan.

        Also stores the kappa / L of the observation in ``observed_ratio``, which is 0 before the
        first one.
        """
        # torch.where instead of branches: no synchronisation with the device
        observed = border.isfinite()
        # the first observation replaces the initial -inf
        weight = torch.where(
            self.updates > 0, 1 - self.config.threshold_decay, torch.ones_like(border)
        )
        old = torch.where(self.updates > 0, self.threshold, border)
        self.threshold.copy_(torch.where(observed, torch.lerp(old, border, weight), self.threshold))
        self.updates.add_(observed)
        self.observed_ratio.copy_(torch.where(observed, self.config.ratio, self.observed_ratio))

    def _choose(
        self,
        ranks: Tensor,
        streams: ResidualStreams,
        lengths: Tensor,
        allocation: Allocation,
        history: Tensor | None,
    ) -> tuple[Choice, Tensor, Tensor | None]:
        """Returns the choice, the kappa-th score, and the table of scores under window_topk."""
        border = ranks.new_full((), torch.nan)
        if allocation == "window_topk":
            choice, table = self._choose_by_window(ranks, streams, history)
            return choice, border, table
        if not self._competes(streams, allocation):  # every real candidate fits
            return Choice(ranks > -torch.inf, ranks.shape[1]), border, None
        if allocation == "threshold" and not self.training:
            # Before the first observation (in the sanity check of a run) the threshold is 0, which
            # admits originals only, since log P <= 0.
            threshold = torch.where(self.updates > 0, self.threshold, 0.0)
            return by_threshold(ranks, threshold), border, None
        width = min(self.config.most_streams(streams.num_tokens), ranks.shape[1])
        budgets = torch.minimum(row_budgets(self.config, lengths), 2 * streams.lengths)
        best, last = global_topk(ranks, budgets, width)
        if self.training:
            # The kappa-th score is +inf if only originals fit. Clamped to 0, which log P never
            # exceeds, it still excludes all other candidates.
            border = _finite_mean(last.clamp(max=0.0))
        if allocation == "global_topk":
            return best, border, None
        # the first micro-batch of a run is compared with its own kappa-th score
        threshold = torch.where(self.updates > 0, self.threshold, border)
        return by_threshold(ranks, threshold), border, None

    def _choose_by_window(
        self, ranks: Tensor, streams: ResidualStreams, history: Tensor | None
    ) -> tuple[Choice, Tensor]:
        """Returns the choice of window_topk and its table of scores."""
        window = self.config.allocation_window
        if history is None:
            # G: each fork layer at most doubles a token's streams
            width = 2 ** (self.ordinal + 1)
            history = ranks.new_full((len(ranks), window - 1, width), -torch.inf)
        per_window = math.ceil(self.config.ratio * window - ROUNDING)
        return window_topk(ranks, streams, history, per_window)

    def _competes(self, streams: ResidualStreams, allocation: Allocation) -> bool:
        """Whether a row may have more candidates than its budget.

        Under threshold this depends on the layer alone, since a layer where nothing competes in
        training never observes a threshold. Otherwise it depends on the length of the sequence.
        """
        if allocation == "threshold":
            return self.config.competes(self.ordinal)
        full = streams.num_tokens if self.config.budget == "dynamic" else self.config.block_size
        return 2 * streams.x.shape[1] > self.config.ratio * full

    def _assemble(
        self, streams: ResidualStreams, log_scores: Tensor, index: Tensor
    ) -> ResidualStreams:
        """Builds the new streams from candidate indices (B, N'), where 2 N marks padding."""
        total = log_scores.shape[1]
        empty = index == total  # (B, N')
        # candidates 2 i and 2 i + 1 are fork and keep of stream i; padding reads the last stream
        parent = (index // 2).clamp(max=max(total // 2 - 1, 0))  # (B, N')
        is_fork = (index % 2 == 0) & ~empty
        x = _take_rows(streams.x, parent)  # (B, N', D)
        x = x + is_fork[..., None] * self.fork_embedding.to(x.dtype)  # v' marks forks
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


def _ranks(log_scores: Tensor, streams: ResidualStreams) -> Tensor:
    """Returns the selection scores (eq. 4): +inf for the keeps of originals, -inf in padding."""
    # (B, N, 2) -> (B, 2 N): never a fork, and a keep if the stream is an original
    kept = torch.stack((torch.zeros_like(streams.original), streams.original), dim=-1).flatten(1)
    real = streams.real.repeat_interleave(2, dim=1)  # (B, 2 N)
    return log_scores.masked_fill(kept, torch.inf).masked_fill(~real, -torch.inf)


def _compact(choice: Choice) -> Tensor:
    """Returns the indices (B, width) of the chosen candidates in order, padded with 2 N."""
    chosen, width = choice
    rows, total = chosen.shape
    # The i-th chosen candidate goes to column i, all others to column ``width``, which is cut off.
    column = torch.where(chosen, chosen.cumsum(dim=1) - 1, width)  # (B, 2 N)
    index = column.new_full((rows, width + 1), total)
    candidates = torch.arange(total, device=chosen.device).expand(rows, -1)
    return index.scatter(1, column, candidates)[:, :width]


def _take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Returns x[b, index[b]] (B, N', D)."""
    rows, num_streams, width = x.shape
    # index_select over B N flat rows reads one index per row, where gather would read one per
    # channel
    flat = index + num_streams * torch.arange(rows, device=x.device)[:, None]  # (B, N')
    return x.reshape(-1, width).index_select(0, flat.flatten()).view(rows, -1, width)


def _finite_mean(values: Tensor) -> Tensor:
    """Returns the mean of the finite ``values`` (B,), or nan if there are none."""
    finite = values.isfinite()
    return values.where(finite, 0.0).sum() / finite.sum()
