"""The fork layer (eqs. 1 to 6): streams, allocation rules, and the layer that applies them."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.layers import make_norm, record, segment_sum, wants
from lightning_models.thoughtbubbles.config import ROUNDING, Allocation, ThoughtbubblesConfig

# ---- streams of tokens, where they stand and what they score


@dataclass(frozen=True)
class ResidualStreams:
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

    def with_x(self, x: Tensor) -> "ResidualStreams":
        """Returns the same streams with other residuals."""
        return replace(self, x=x)


def score_dtype() -> torch.dtype:
    """Returns the dtype of scores and positions: float32, whatever the weights have, or better."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def first_streams(x: Tensor, lengths: Tensor | None = None) -> ResidualStreams:
    """Returns one stream a token, with score 1.

    Args:
        x: Embedded tokens (B, T, D).
        lengths: int64 (B,), tokens of each row; the rest is padding. None: all T.
    """
    rows, num_tokens = x.shape[:2]
    token = torch.arange(num_tokens, device=x.device).expand(rows, -1)
    if lengths is not None:
        token = torch.where(token < lengths[:, None], token, num_tokens)
    log_p = torch.zeros(rows, num_tokens, device=x.device, dtype=score_dtype())
    return ResidualStreams(
        x, log_p, token, torch.zeros_like(token), torch.ones_like(token), num_tokens
    )


def arrange(x: Tensor, log_p: Tensor, token: Tensor, num_tokens: int) -> ResidualStreams:
    """Returns streams with slots and counts read off their tokens (B, N), which never decrease."""
    counts = segment_sum(torch.ones_like(token), token, num_tokens + 1)
    starts = counts.cumsum(dim=1) - counts
    slot = torch.arange(token.shape[1], device=token.device) - starts.gather(1, token)
    return ResidualStreams(x, log_p, token, slot, counts.gather(1, token), num_tokens)


# ---- which candidates survive a fork layer
#
# Candidates are ordered ``fork_0, keep_0, fork_1, keep_1, ...`` (2 N a row). A rule gets their
# scores for selection, in which originals' keeps are +inf and padding is -inf.


WINDOW_ELEMENTS = 1 << 24
"""Most scores that window_topk unfolds at once."""


class Choice(NamedTuple):
    """Who survives: ``chosen`` bool (B, 2 N), and the most survivors that a row can have."""

    chosen: Tensor
    width: int


def row_budgets(config: ThoughtbubblesConfig, lengths: Tensor) -> Tensor:
    """Returns kappa of each row (int64, the shape of ``lengths``), at least its length.

    NOTE(paper): a padded row has the budget of its own tokens, so that batching changes nothing.
    """
    if config.budget == "fixed":
        return lengths.clamp(min=config.most_streams(0))
    return (lengths.double() * config.ratio - ROUNDING).ceil().long().clamp(min=lengths)


def global_topk(scores: Tensor, budgets: Tensor, width: int) -> tuple[Choice, Tensor]:
    """Returns the best ``budgets`` candidates of each row, and the score of the last of them.

    Args:
        scores: (B, 2 N).
        budgets: int64 (B,), survivors of each row, at most ``width``.
        width: min(kappa, 2 N) of a row without padding.
    """
    # of equal scores the first ones, whatever the padding: topk would make that depend on the width
    values, best = (x[:, :width] for x in scores.sort(dim=1, descending=True, stable=True))
    rank = torch.arange(width, device=scores.device)
    inside = (rank < budgets[:, None]) & (values > -torch.inf)  # (B, width)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, inside)  # (B, 2 N)
    last = F.pad(values, (1, 0), value=-torch.inf).gather(1, budgets[:, None])[:, 0]
    return Choice(chosen, width), last


def by_threshold(scores: Tensor, threshold: Tensor) -> Choice:
    """Returns the candidates above ``threshold``, a scalar, and all originals."""
    chosen = (scores > threshold) | (scores == torch.inf)
    return Choice(chosen, _widest(chosen))


def window_topk(
    scores: Tensor, streams: ResidualStreams, history: Tensor, per_window: int
) -> tuple[Choice, Tensor]:
    """Returns the candidates that rank among the ``per_window`` best of the latest w tokens.

    A candidate of token i is compared with those of tokens i - w + 1 to i: later ones would leak.

    Args:
        scores: (B, 2 N).
        streams: Whose candidates these are.
        history: (B, w - 1, G) scores of the tokens before, -inf where there are none; G is the
            most candidates a token can have here.
        per_window: Ceil(r w).

    Returns:
        The choice, and the scores (B, w - 1 + T, G) of history and these tokens.
    """
    rows, num_tokens, width = len(scores), streams.num_tokens, history.shape[2]
    # each token's candidates in a row of G: fork and keep of its first stream, of its second, ...
    place = streams.token[..., None] * width + 2 * streams.slot[..., None]
    place = (place + torch.arange(2, device=scores.device)).flatten(1)
    dump = num_tokens * width  # padding goes after all tokens
    grid = scores.new_full((rows, dump + width), -torch.inf)
    grid = grid.scatter(1, place.clamp(max=dump), scores)  # (B, (T + 1) G)
    table = torch.cat((history, grid[:, :dump].view(rows, num_tokens, width)), dim=1)
    borders = _window_borders(table, history.shape[1] + 1, per_window)  # (B, T)
    borders = torch.cat((borders, borders.new_zeros(rows, 1)), dim=1)  # of padding
    border = borders.gather(1, streams.token).repeat_interleave(2, dim=1)  # (B, 2 N)
    chosen = (scores >= border) & (scores > -torch.inf)
    return Choice(chosen, _widest(chosen)), table


def _window_borders(table: Tensor, window: int, rank: int) -> Tensor:
    """Returns the ``rank``-th score (B, T) of each window of tokens; -inf if it has fewer."""
    rows, length, width = table.shape
    num_tokens = length - window + 1
    if rank > window * width:
        return table.new_full((rows, num_tokens), -torch.inf)
    step = max(1, WINDOW_ELEMENTS // (rows * window * width))
    borders = [
        table[:, start : start + step + window - 1]
        .unfold(1, window, 1)  # (B, s, G, w), s windows at a time
        .flatten(2)
        .topk(rank, dim=2)
        .values[..., -1]
        for start in range(0, num_tokens, step)
    ]
    return torch.cat(borders, dim=1)


def _widest(chosen: Tensor) -> int:
    return int(chosen.sum(dim=1).max()) if chosen.numel() else 0


# ---- fork layer


LOWEST_LOG_ACTION = -20.0
"""Floor of log-sigmoid scores: a fork layer takes at most this off log P.

NOTE(paper): it has none; the authors' code has this one, for stability.
"""


class Forked(NamedTuple):
    """What a fork layer makes of streams."""

    streams: ResidualStreams
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
        streams: ResidualStreams,
        lengths: Tensor,
        allocation: Allocation,
        history: Tensor | None = None,
    ) -> Forked:
        """Returns the surviving streams and new forks, each fork left of its parent.

        Records ``fork``: ``ordinal``, the streams ``before`` and ``after``, ``parent`` (B, N'),
        indices into ``before``, ``is_fork`` (B, N'), and ``budgets`` (B,), kappa of each row.

        Args:
            streams: Of T tokens.
            lengths: int64 (B,), tokens of each row.
            allocation: The rule by which candidates are chosen.
            history: See ``window_topk``; None: these tokens begin the sequence.
        """
        log_scores = self.log_scores(streams)
        with torch.no_grad():
            ranks = _ranks(log_scores.detach(), streams)
            choice, border, table = self._choose(ranks, streams, lengths, allocation, history)
            index = _compact(choice)
        return Forked(self._assemble(streams, log_scores, index), border, table)

    def log_scores(self, streams: ResidualStreams) -> Tensor:
        """Returns log p_hat (B, 2 N), float32, of fork and keep of each stream (eqs. 1 to 3)."""
        with torch.autocast(streams.x.device.type, enabled=False):
            wide = torch.promote_types(streams.x.dtype, torch.float32)
            normed = self.norm(streams.x.to(self.score.weight.dtype)).to(wide)
            logits = F.linear(normed, self.score.weight.to(wide))  # (B, N, 2): fork, keep
            log_action = F.logsigmoid(logits).clamp(min=LOWEST_LOG_ACTION)
        return (streams.log_p[..., None] + log_action).flatten(1)  # (B, N, 2) -> (B, 2 N)

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
        streams: ResidualStreams,
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
        self, ranks: Tensor, streams: ResidualStreams, history: Tensor | None
    ) -> tuple[Choice, Tensor]:
        """Returns the choice of window_topk, and its scores."""
        window = self.config.allocation_window
        if history is None:
            most = 2 ** (self.ordinal + 1)  # candidates of a token
            history = ranks.new_full((len(ranks), window - 1, most), -torch.inf)
        per_window = math.ceil(self.config.ratio * window - ROUNDING)
        return window_topk(ranks, streams, history, per_window)

    def _competes(self, streams: ResidualStreams, allocation: Allocation) -> bool:
        """Whether any row has more candidates than it may keep.

        For threshold that is a matter of the layer: where nothing competes in training, it is
        -inf. The others look at the sequence at hand.
        """
        if allocation == "threshold":
            return self.config.competes(self.ordinal)
        whole = streams.num_tokens if self.config.budget == "dynamic" else self.config.block_size
        return 2 * streams.x.shape[1] > self.config.ratio * whole

    def _assemble(
        self, streams: ResidualStreams, log_scores: Tensor, index: Tensor
    ) -> ResidualStreams:
        """Returns the streams that the candidates ``index`` (B, N') describe; 2 N is padding."""
        total = log_scores.shape[1]
        empty = index == total
        # two candidates a stream, (B, N')
        parent = (index // 2).clamp(max=max(total // 2 - 1, 0))
        is_fork = (index % 2 == 0) & ~empty  # forks have the even numbers
        x = _take_rows(streams.x, parent)  # (B, N', D)
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


def _ranks(log_scores: Tensor, streams: ResidualStreams) -> Tensor:
    """Returns scores for selection only (eq. 4): originals' keeps +inf, padding -inf."""
    kept = torch.stack((torch.zeros_like(streams.original), streams.original), dim=-1).flatten(1)
    real = streams.real.repeat_interleave(2, dim=1)
    return log_scores.masked_fill(kept, torch.inf).masked_fill(~real, -torch.inf)


def _compact(choice: Choice) -> Tensor:
    """Returns the chosen candidates (B, width) in their order, 2 N where a row has fewer."""
    chosen, width = choice
    rows, total = chosen.shape
    # the chosen go to the columns 0, 1, ..., the others to a last one, which is cut off
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
