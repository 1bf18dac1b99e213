"""The forking decoder in plain PyTorch, and its decoding caches."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_models.layers import (
    Block,
    KVCache,
    LayerCache,
    Rope,
    initialise,
    rope_tables,
    segment_logsumexp,
)
from lightning_models.thoughtbubbles.config import ThoughtbubblesConfig
from lightning_models.thoughtbubbles.forking import (
    ForkLayer,
    ResidualStreams,
    arrange,
    first_streams,
)
from lightning_models.transformer.network import TransformerNetwork

# ---- decoding caches


class StreamCache:
    """Keys, values and scores of all earlier streams, for allocations that are strictly causal.

    The number of streams changes at fork layers, so each stretch of blocks between two of them has
    a separate KV cache, in which rows advance independently.
    """

    def __init__(
        self,
        config: ThoughtbubblesConfig,
        batch: int,
        capacity: int,
        device: torch.device | str | None = None,
    ) -> None:
        """Reserves space for ``capacity`` tokens per row and all streams they could fork into."""
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        """int64 (B,): number of tokens in each row."""
        self.window = config.allocation_window
        self.stretches = [
            StretchCache(stop - start, batch, capacity * 2**ordinal, device)
            for ordinal, (start, stop) in enumerate(config.stretches)
        ]
        self.histories: list[Tensor | None] = [None] * len(config.fork_layers)
        """Scores of the latest w - 1 tokens (B, w - 1, G) at each fork layer, for window_topk."""

    def keep_history(self, ordinal: int, table: Tensor | None, counts: Tensor) -> None:
        """Keeps the scores of each row's latest tokens.

        Args:
            ordinal: Index of the fork layer.
            table: Scores (B, w - 1 + T, G), or None for rules without a history.
            counts: int64 (B,), number of real tokens among the T in each row.
        """
        if table is None:
            return
        # A row with n of the T tokens ends at index w - 1 + n, so its latest w - 1 start at n.
        latest = torch.arange(self.window - 1, device=table.device)
        index = (counts[:, None] + latest)[..., None].expand(-1, -1, table.shape[2])  # (B, w-1, G)
        self.histories[ordinal] = table.gather(1, index)

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.tokens = self.tokens[rows]
        for stretch in self.stretches:
            stretch.select(rows)
        self.histories = [None if table is None else table[rows] for table in self.histories]


class StretchCache(KVCache):
    """KV cache of a stretch of blocks, with the scores of the cached streams."""

    def __init__(
        self, num_layers: int, batch: int, capacity: int, device: torch.device | str | None
    ) -> None:
        super().__init__(num_layers + 1, batch, capacity, device)  # one more layer for the scores

    def append_scores(self, log_p: Tensor) -> Tensor:
        """Appends log P (B, N) of new streams and returns log P of all keys (B, N_all)."""
        # stored as keys of one head with one channel, so rows of different lengths stay aligned
        scores = log_p[:, None, :, None]  # (B, 1, N, 1)
        return self.layers[-1].append(scores, scores)[0][:, 0, :, 0]


class PrefixCache:
    """All tokens so far, for global_topk, where a new token can change which streams survive."""

    def __init__(self, prompts: Tensor, lengths: Tensor, max_new_tokens: int) -> None:
        """Stores all but the last token of each right-padded prompt (B, P)."""
        self.tokens = torch.nn.functional.pad(prompts, (0, max_new_tokens))
        self.lengths = lengths - 1

    def append(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Appends ``tokens`` (B,) and returns all tokens (B, longest) with their lengths (B,)."""
        # each row writes at its own length, over padding
        self.tokens = self.tokens.scatter(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        return self.tokens[:, : int(self.lengths.max())], self.lengths

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]


# ---- network


class Decoded(NamedTuple):
    """Normalised states whose mixture predicts the next token at each position (eq. 11)."""

    states: Tensor
    """(B, N, D), grouped by token."""
    log_p: Tensor
    """(B, N) float32, log of each state's weight, not normalised over the states of a token."""
    token: Tensor
    """int64 (B, N), index of the token that a state belongs to; T in padding."""
    borders: Tensor
    """(fork layers,) float32, the kappa-th highest score in training; nan if nothing competes."""
    streams: Tensor | None
    """int64 (L, B, T), streams per token in each block, 0 for padding. None unless requested."""


class AttenuatedBlock(Block):
    """A block whose attention and residual writes are attenuated by scores (eqs. 8 to 10)."""

    def forward(
        self,
        x: Tensor,
        *,
        rope: Rope | None = None,
        cache: LayerCache | None = None,
        key_bias: Tensor | None = None,
        mask: Tensor | None = None,
        log_p: Tensor | None = None,
    ) -> Tensor:
        """Returns the streams (B, N, D) after this block.

        Args:
            x: Streams (B, N, D).
            rope: Rotary tables for the positions of the streams.
            cache: Earlier keys and values.
            key_bias: Scaled log P (B, N_all) of every key.
            mask: See ``SelfAttention``.
            log_p: log P (B, N). If None, all scores are 1 and the block is a plain one.
        """
        if log_p is None:
            return super().forward(x, rope=rope, cache=cache, mask=mask)
        p = log_p.exp().to(x.dtype)  # (B, N)
        attended = self.attention(
            self.attention_norm(x),
            rope=rope,
            cache=cache,
            key_bias=key_bias,
            mask=mask,
            value_scale=p,
        )
        p = p[..., None]  # (B, N, 1), scales each stream's residual writes
        x = x + p * self.dropout(attended)
        return x + p * self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class ThoughtbubblesNetwork(TransformerNetwork):
    """A plain decoder with attenuated blocks and with fork layers before some of them.

    Parameters have the plain decoder's names, except for the fork layers under ``forks``.
    """

    config: ThoughtbubblesConfig
    block_class = AttenuatedBlock

    def __init__(self, config: ThoughtbubblesConfig) -> None:
        super().__init__(config)
        self.forks = nn.ModuleList(
            ForkLayer(config, ordinal) for ordinal in range(len(config.fork_layers))
        )
        initialise(self.forks, config)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        cache: StreamCache | None = None,
        count: bool = False,
    ) -> Decoded:
        """Returns the states that predict the successors of ``tokens`` (B, T).

        Args:
            tokens: int64 (B, T), padded on the right.
            lengths: int64 (B,), number of tokens in each row. Defaults to T for all rows.
            cache: Streams of earlier tokens, to which the new ones are appended.
            count: Whether to return the number of streams of each token.
        """
        # N = T: one stream per token, with score 1
        streams = first_streams(self.embed(tokens, tokens), lengths)
        if lengths is None:
            lengths = tokens.new_full((len(tokens),), tokens.shape[1])
        borders, counts = [], []
        for ordinal in range(len(self.config.stretches)):
            if ordinal > 0:
                streams, border = self._fork(streams, lengths, ordinal - 1, cache)
                borders.append(border)
            streams = self._run_stretch(streams, ordinal, cache)
            if count:
                start, stop = self.config.stretches[ordinal]
                counts += [streams.per_token()] * (stop - start)
        if cache is not None:
            cache.tokens = cache.tokens + lengths
        if self.config.output_average == "residual_norm" and borders:
            streams = _averaged(streams)
        observed = torch.stack(borders) if borders else streams.log_p.new_empty(0)
        counted = torch.stack(counts) if count else None
        return Decoded(self.norm(streams.x), streams.log_p, streams.token, observed, counted)

    def _fork(
        self, streams: ResidualStreams, lengths: Tensor, ordinal: int, cache: StreamCache | None
    ) -> tuple[ResidualStreams, Tensor]:
        """Returns the streams after a fork layer and the layer's kappa-th score."""
        config = self.config
        allocation = config.allocation if self.training else config.inference_allocation
        history = None if cache is None else cache.histories[ordinal]
        forked = self.forks[ordinal](streams, lengths, allocation, history)
        if cache is not None:
            cache.keep_history(ordinal, forked.history, lengths)
        return forked.streams, forked.border

    def _run_stretch(
        self, streams: ResidualStreams, ordinal: int, cache: StreamCache | None
    ) -> ResidualStreams:
        """Runs the blocks of a stretch, within which the set of streams stays the same."""
        # One less than in the paper, so that originals have the positions of a plain decoder;
        # rotary attention only depends on differences between positions.
        positions, log_p, mask, stretch = streams.positions() - 1, streams.log_p, None, None
        if cache is not None:
            stretch = cache.stretches[ordinal]
            positions = positions + cache.tokens[:, None]
            mask = stretch.mask(positions.shape[1])
            log_p = stretch.append_scores(log_p)  # (B, N) -> (B, N_all)
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_base)
        # before the first fork layer all scores are 1, and the blocks are plain
        key_bias = log_p * self.config.bias_factor if ordinal > 0 else None
        x = streams.x
        for layer, index in enumerate(range(*self.config.stretches[ordinal])):
            x = self.blocks[index](
                x,
                rope=rope,
                cache=None if stretch is None else stretch.layers[layer],
                key_bias=key_bias,
                mask=mask,
                log_p=streams.log_p if ordinal > 0 else None,
            )
        if stretch is not None:
            stretch.advance(streams.lengths)
        return streams.with_x(x)

    def observe(self, borders: Tensor) -> None:
        """Updates the threshold of each fork layer with its entry of ``borders`` (fork layers,)."""
        for ordinal, border in enumerate(borders):
            fork = self.forks[ordinal]
            assert isinstance(fork, ForkLayer)
            fork.observe(border)

    def new_cache(self, batch: int, capacity: int) -> StreamCache:  # type: ignore[override]
        return StreamCache(self.config, batch, capacity, self.embedding.weight.device)


def _averaged(streams: ResidualStreams) -> ResidualStreams:
    """Returns one stream per token, sum_j P_j x_j / sum_j P_j.

    The authors' code omits the division. A norm follows, so the scale only matters relative to its
    epsilon, which would otherwise dominate states with low scores.
    """
    rows, _, width = streams.x.shape
    tokens = streams.num_tokens + 1
    # log sum_j P_j of each stream's token (B, N)
    total = segment_logsumexp(streams.log_p, streams.token, tokens).gather(1, streams.token)
    # index of each stream's token among the B (T + 1) tokens of all rows, (B N,)
    flat = (streams.token + tokens * torch.arange(rows, device=streams.x.device)[:, None]).flatten()
    wide = streams.x.to(torch.promote_types(streams.x.dtype, torch.float32))
    weighted = (streams.log_p - total).exp().to(wide.dtype)[..., None] * wide  # (B, N, D)
    sums = weighted.new_zeros(rows * tokens, width).index_add(0, flat, weighted.flatten(0, 1))
    x = sums.view(rows, tokens, width)[:, :-1].to(streams.x.dtype)  # (B, T, D), padding cut off
    # (B, T), whether a token has any stream; padding has none
    alive = streams.token.new_zeros(rows, tokens).scatter(1, streams.token, 1)[:, :-1]
    token = torch.arange(tokens - 1, device=x.device).expand(rows, -1)
    token = torch.where(alive > 0, token, streams.num_tokens)
    log_p = streams.log_p.new_zeros(x.shape[:2])
    return arrange(x, log_p, token, streams.num_tokens)
