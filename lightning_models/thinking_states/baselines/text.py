"""Baselines that read and write text, No CoT and CoT, and the base of all baselines.

A row of text is the query, the reasoning that a method writes, the answer prefix and the answer.
Layouts are frozen dataclasses of plain values, which the loss and the data's counter share.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import linear_cross_entropy_each, logits, token_scores
from lightning_models.outputs import LossOutput, Mean, Scores, Term
from lightning_models.runtime import on_device
from lightning_models.thinking_states.backbone import (
    AnswerCache,
    HiddenStates,
    ReasoningNetwork,
    read,
)
from lightning_models.thinking_states.baselines.starting import load_backbone
from lightning_models.thinking_states.config import ReasoningConfig
from lightning_models.thinking_states.module import ReasoningLM
from lightning_models.thinking_states.rows import (
    Joined,
    aligned_right,
    answer_of,
    chain_of,
    constant,
    join,
    next_tokens,
    pack,
    query_of,
    within,
)

Batch = dict[str, Any]


Segment = tuple[Tensor, Tensor]
"""Right-padded tokens (B, W) and their lengths (B,)."""


NOTHING, QUERY, THINKING, CHAIN, PREFIX, ANSWER = range(-1, 5)
"""Kinds of the tokens of a row; padding is ``NOTHING``."""


ANSWER_PART = 16
"""A chain without a stated limit leaves 1 / 16 of the learned positions to the answer. The share is
constant, because a chain must not depend on the answer that is scored after it."""


class TextRows(NamedTuple):
    """Rows of text with their targets.

    Attributes:
        tokens: Tokens (B, T) int64.
        targets: The next token if it is predicted, else -100 (B, T) int64.
        answers: Mask of the targets in the answer and its EOS (B, T) bool.
        kinds: Kind of each token (B, T) int64.
    """

    tokens: Tensor
    targets: Tensor
    answers: Tensor
    kinds: Tensor


def line_up(*parts: tuple[int, Segment]) -> Joined:
    """Concatenates pairs of a kind and a segment; ``segment`` of the result holds the kinds."""
    joined = join(*(segment for _, segment in parts))
    labels = [*(label for label, _ in parts), NOTHING]  # index -1, after a row's end, is the last
    kinds = on_device(labels, joined.tokens.device)
    return joined._replace(segment=kinds[joined.segment])


def shortened(segment: Segment, removed: Tensor, side: str) -> Segment:
    """Returns a segment without its first or last tokens.

    Args:
        segment: Right-padded tokens and their lengths.
        removed: Number of tokens to remove from each row, at most its length (B,) int64.
        side: End that is removed, 'left' or 'right'.
    """
    tokens, lengths = segment
    lengths = lengths - removed
    if side == "left" and tokens.shape[1]:
        source = torch.arange(tokens.shape[1], device=tokens.device) + removed[:, None]  # (B, W)
        tokens = tokens.gather(1, source.clamp(max=tokens.shape[1] - 1))
    return tokens.masked_fill(~within(lengths, tokens.shape[1]), 0), lengths


@dataclass(frozen=True)
class TextLayout:
    """Query, answer prefix, answer: the text without reasoning, and the base of all others.

    Called with a batch, it counts the tokens that the loss predicts.
    """

    answer_prefix: tuple[int, ...]
    """Tokens that begin every answer."""
    step_separator: tuple[int, ...] = ()
    """Tokens before each step."""
    lm_on_query: bool = False
    """Whether the query's tokens are also predicted."""

    def __call__(self, batch: Batch) -> dict[str, float]:
        """Returns the normaliser of ``nll``: ``targets``, the batch's count of predicted tokens."""
        return {"targets": float((self.training(batch).targets >= 0).sum())}

    def training(self, batch: Batch, stage: int = 0) -> TextRows:
        """Returns the text of training.

        Args:
            batch: Batch of questions.
            stage: Stage of a curriculum, for batches without ``epochs``.
        """
        chain, learned = self.chain(batch, stage)
        prefix = constant(self.answer_prefix, batch["query"])
        return self.arrange(batch, (CHAIN, chain), (PREFIX, prefix), learned=learned)

    def scored(self, batch: Batch, middle: Segment) -> TextRows:
        """Returns the text whose answer is scored: ``middle`` ends with the answer prefix."""
        return self.arrange(batch, (PREFIX, middle))

    def chain(self, batch: Batch, stage: int) -> tuple[Segment, Tensor]:
        """Returns the reasoning that is learned, and the mask of rows that learn its end (B,) bool.

        The end of a chain is the answer prefix. In texts without a chain it is given.
        """
        none = constant((), batch["query"])
        return none, none[1] > 0

    def arrange(
        self, batch: Batch, *middle: tuple[int, Segment], learned: Tensor | None = None
    ) -> TextRows:
        """Returns rows of query, ``middle`` and answer; see ``predict`` for ``learned``."""
        line = line_up((QUERY, query_of(batch)), *middle, (ANSWER, answer_of(batch)))
        return self.predict(line, learned)

    def predict(self, line: Joined, learned: Tensor | None) -> TextRows:
        """Returns rows with their targets.

        Args:
            line: Tokens, with their kinds as ``segment``.
            learned: Whether each row's answer prefix is predicted (B,) bool. By default none is.
        """
        kinds = line.segment
        predicted = (kinds == CHAIN) | (kinds == ANSWER)
        if self.lm_on_query:
            before = kinds.roll(1, dims=1)  # a query's first token has no context to predict it
            predicted = predicted | (kinds == QUERY) & (before == QUERY)
        if learned is not None:
            predicted = predicted | (kinds == PREFIX) & learned[:, None]
        targets = next_tokens(line, predicted)
        answers = next_tokens(line, kinds == ANSWER) >= 0
        return TextRows(line.tokens, targets, answers, kinds)


@dataclass(frozen=True)
class ChainLayout(TextLayout):
    """Query, chain, answer prefix, answer: a whole chain of thought, learned with its end.

    Raises:
        ValueError: If the answer prefix, which ends a chain, is empty.
    """

    def __post_init__(self) -> None:
        """Checks that chains have an end."""
        if not self.answer_prefix:
            raise ValueError(
                "answer_prefix () ends a chain of thought, so it must not be empty; train with "
                "reasoning data, which have one (data.answer_prefix), or set it to token ids"
            )

    def chain(self, batch: Batch, stage: int) -> tuple[Segment, Tensor]:
        chain = chain_of(batch, self.step_separator)
        return chain, chain[1] >= 0  # all rows learn the end


# ---- networks and decoding


@dataclass(frozen=True, kw_only=True)
class TextConfig(ReasoningConfig):
    """A model that reads and writes text, and may start from another one."""

    start_from: str | None = None
    """Checkpoint or run folder of a model on the same data, e.g. a CoTLM, whose backbone training
    starts from. It is not read when a run is resumed."""
    start_which: Literal["last", "best"] = "last"
    """Checkpoint of a run in ``start_from``: its last, or its best by ``checkpoint.monitor`` (the
    choice of Coconut's public code, the CoT model of best validation accuracy)."""


@dataclass(frozen=True, kw_only=True)
class ChainConfig(TextConfig):
    """A model that may write reasoning before its answer.

    Raises:
        ValueError: If a value is out of range.
    """

    max_chain_tokens: int | None = None
    """Maximum number of tokens of a chain at inference, after which the answer begins in any case.
    The default, null, is the rest of ``block_size`` after the query. Learned positions may end a
    chain earlier."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        if self.max_chain_tokens is not None and self.max_chain_tokens < 0:
            raise ValueError(
                f"max_chain_tokens ({self.max_chain_tokens}) must not be negative; null takes the "
                "rest of block_size"
            )

    @property
    def added_positions(self) -> int:
        # a question within block_size, then a chain of the stated length and the answer prefix
        if self.max_chain_tokens is None:
            return 0
        return self.max_chain_tokens + len(self.answer_prefix)


class TextCache(AnswerCache):
    """Cache of rows that write text, which tracks whether each is in its chain or its answer.

    The answer prefix ends a chain. A chain that grows too long is cut, by forcing the prefix.

    Args:
        last: The last token of each query (B,) int64, which is read first if nothing is pending.
        limits: Maximum number of tokens of each row's chain (B,) int64.
        pending: Tokens that are read once, before any chosen ones, see ``AnswerCache``.
        end: Tokens that end a chain. If there are none, rows write no chain.
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
        self._end = on_device(end, limits.device, torch.int64)
        self._tail = limits.new_full((len(limits), len(end)), -1)  # latest tokens, to find the end
        self._limits = limits
        self._written = 0  # tokens after each query, equal as rows begin together
        self._begun = False
        self.answering = torch.full_like(limits, not end, dtype=torch.bool)
        """Mask of the rows that write their answers (B,) bool."""

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._last, self._tail = self._last[rows], self._tail[rows]
        self._limits, self.answering = self._limits[rows], self.answering[rows]

    def keep_room(self, positions: int) -> None:
        """Lowers the limits so that chains with their prefixes end within ``positions``."""
        chain_start = self.lengths + max(len(self.pending), 1)  # (B,) positions before the chain
        max_chain = positions - chain_start - len(self._end)
        self._limits = torch.minimum(self._limits, max_chain.clamp(min=0))

    def take(self, tokens: Tensor) -> Tensor:
        """Returns the next inputs (B, t), and tracks the tokens written so far (B,).

        The first call ignores its tokens: nothing is written yet.
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
        """Returns logits (B, V) that force the prefix in rows whose chains are too long."""
        if not len(self._end):
            return logits
        late = ~self.answering & (self._limits <= self._written)
        index = (self._written - self._limits).clamp(min=0, max=len(self._end) - 1)  # in the prefix
        only = torch.full_like(logits, -torch.inf).scatter(1, self._end[index][:, None], 0.0)
        return torch.where(late[:, None], only, logits)


class TextNetwork(ReasoningNetwork):
    """The backbone on rows of text.

    Args:
        config: The configuration of the backbone.
    """

    def forward(
        self,
        tokens: Tensor,
        *,
        real: Tensor | None = None,
        cache: AnswerCache | None = None,
        at: Tensor | None = None,
    ) -> HiddenStates:
        """Returns the hidden states of tokens.

        Args:
            tokens: Tokens (B, T) int64, padded on the right unless there is a cache.
            real: Mask of tokens that are not padding (B, T) bool, used with a cache only. By
                default none is padding.
            cache: Keys and values of earlier tokens, extended in place.
            at: Index of the token of each row whose states in all layers are returned (B,) int64,
                see `Backbone.forward`.
        """
        h = self.embed(tokens)
        if cache is not None:
            return read(self.backbone, cache, h, real, at=at)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden: HiddenStates = self.backbone(h, positions, at=at)
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the input embeddings (B, T, D) of tokens (B, T)."""
        return self.backbone.embed(tokens)


class TextLM(ReasoningLM):
    """A language model on rows of text: query, reasoning of the method, answer.

    A method defines its text by ``layout``, and by ``writes_chain`` whether it writes reasoning. If
    it does, it also writes the answer prefix; otherwise the prefix is given.
    """

    config: TextConfig
    network: TextNetwork

    def on_fit_start(self) -> None:
        # A resumed run has its backbone already.
        super().on_fit_start()
        if self.config.start_from is not None and self.trainer.ckpt_path is None:
            path, which = self.config.start_from, self.config.start_which
            load_backbone(self.network, self.config, path, which)

    @property
    @abstractmethod
    def layout(self) -> TextLayout:
        """Layout of questions as rows of text."""

    @property
    def counter(self) -> TextLayout:
        """The layout, which counts what it predicts."""
        return self.layout

    @property
    def writes_chain(self) -> bool:
        """Whether the model writes reasoning before its answer."""
        return False

    @property
    def stage(self) -> int:
        """The stage of a curriculum that training has reached; 0 without one."""
        return 0

    def build_network(self) -> TextNetwork:
        return TextNetwork(self.config)

    # ---- training

    def loss(self, batch: Batch) -> LossOutput:
        """Returns the summed cross-entropy of the text that the method learns.

        Statistics: ``answer_nll``, nats per token of the answer and its EOS alone, and the result
        of ``statistics``.
        """
        rows = self.layout.training(batch, self.stage)
        return self.losses(batch, rows, self.states(rows))

    def losses(self, batch: Batch, rows: TextRows, hidden: HiddenStates) -> LossOutput:
        """Returns the terms of the objective, given the hidden states of the batch's text."""
        nll, answers = self.cross_entropy(rows, hidden.last)
        return LossOutput({"nll": nll}, {"answer_nll": answers, **self.statistics(batch, rows)})

    def cross_entropy(self, rows: TextRows, h: Tensor) -> tuple[Term, Mean]:
        """Returns the loss on all targets and on the answers, from normed states h (B, T, D)."""
        # logits only for predicted tokens (P,): most of a row is the query
        learned = (rows.targets >= 0).flatten().nonzero()[:, 0]
        targets, answers = rows.targets.flatten()[learned], rows.answers.flatten()[learned]
        states, matrix = h.flatten(0, 1)[learned], self.network.output_matrix  # (P, D), (V, D)
        nll, per_target = linear_cross_entropy_each(states, matrix, targets)
        count = on_device(len(learned), h.device)
        return Term(nll, count, "targets"), Mean((per_target * answers).sum(), answers.sum())

    def statistics(self, batch: Batch, rows: TextRows) -> dict[str, Tensor | Mean]:
        """Returns further statistics of a training batch's text; here none."""
        return {}

    def states(self, rows: TextRows, at: Tensor | None = None) -> HiddenStates:
        """Returns the hidden states of rows of text, and at the tokens ``at`` of all layers."""
        hidden: HiddenStates = self.network(rows.tokens, at=at)
        return hidden

    # ---- scoring

    def score(self, batch: Batch) -> Scores:
        """Returns log p(answer | query), after the model's own greedy reasoning."""
        targets = batch["targets"]
        rows = self.scored_rows(batch)
        h = self.states(rows).last
        states, answers = h[rows.answers], rows.targets[rows.answers]
        matrix = self.network.output_matrix
        scores = token_scores(states, matrix, answers, count=len(answers)).log_prob  # (P,)
        log_prob = scores.new_zeros(targets.shape)
        log_prob[targets >= 0] = scores  # both masks select in the order of rows and tokens
        num_targets = (targets >= 0).sum(dim=1)
        return Scores(log_prob, log_prob.new_zeros(len(log_prob)), num_targets, self.likelihood)

    def scored_rows(self, batch: Batch) -> TextRows:
        """Returns the text whose answer is scored."""
        return self.layout.scored(batch, self.before_answer(batch))

    def before_answer(self, batch: Batch) -> Segment:
        """Returns the text before the answers: the model's greedy chain, and the prefix."""
        if not self.writes_chain:
            return constant(self.config.answer_prefix, batch["query"])
        filled = (batch["targets"] >= 0).any(dim=1)  # padding rows need no chain
        lengths = torch.zeros_like(batch["query_lengths"])
        if not bool(filled.any()):
            return constant((), batch["query"])
        tokens, lengths[filled] = self.write_chains(
            batch["query"][filled], batch["query_lengths"][filled]
        )
        return tokens.new_zeros(len(filled), tokens.shape[1]).index_put_((filled,), tokens), lengths

    @torch.no_grad()
    def write_chains(self, query: Tensor, lengths: Tensor) -> Segment:
        """Returns the model's greedy text up to its answers: chains and prefixes.

        Args:
            query: Queries (B, Q) int64, padded on the right.
            lengths: Tokens of each query (B,) int64.
        """
        cache = self.init_cache(query, lengths, 0)
        tokens, written, chosen = query[:, 0], [], []
        rows = torch.arange(len(query), device=query.device)  # rows that still write
        while True:
            out, _ = self.decode_step(cache, tokens)
            writing = (~cache.answering).nonzero()[:, 0]
            if not len(writing):
                break
            # a row whose chain has ended leaves, as it would take positions while it waits
            if len(writing) < len(rows):
                cache.select(writing)
                rows = rows[writing]
            tokens = out[writing, : self.config.vocab_size].argmax(dim=-1)
            written.append(query.new_zeros(len(query)).index_copy(0, rows, tokens))  # (B,)
            chosen.append(torch.zeros_like(lengths, dtype=torch.bool).index_fill(0, rows, True))
        packed = pack(torch.stack(written, dim=1), torch.stack(chosen, dim=1))
        return packed.values, packed.lengths

    # ---- decoding

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> TextCache:
        """Reads the queries, right-padded prompts (B, P), and returns the cache after them.

        The first step ignores its tokens and reads the answer prefix or, if the model writes a
        chain or there is no prefix, the last token of each query.
        """
        last = prompts.gather(1, lengths[:, None] - 1)[:, 0]
        end = self.config.answer_prefix if self.writes_chain else ()
        limits = self._chain_limits(lengths)
        cache = TextCache(last, limits, pending=self.pending(), end=end)
        held = 0 if len(cache.pending) else 1  # the last token waits for the first step
        self.read_query(cache, prompts[:, : prompts.shape[1] - held], lengths - held)
        positions = self.network.backbone.position_limit
        if positions is not None:
            stated = getattr(self.config, "max_chain_tokens", None) is not None
            cache.keep_room(positions if stated else positions - positions // ANSWER_PART)
        return cache

    def pending(self) -> tuple[int, ...]:
        """Returns the tokens that the first step reads instead of its argument."""
        return () if self.writes_chain else self.config.answer_prefix

    def _chain_limits(self, lengths: Tensor) -> Tensor:
        """Returns the longest chain of each row (B,) int64."""
        config = self.config
        if isinstance(config, ChainConfig) and config.max_chain_tokens is not None:
            return torch.full_like(lengths, config.max_chain_tokens)
        return (config.block_size - lengths).clamp(min=0)

    def read_query(self, cache: TextCache, tokens: Tensor, lengths: Tensor) -> None:
        """Fills the cache with the queries (B, P), right-padded."""
        if tokens.shape[1]:
            tokens, real = aligned_right(tokens, lengths)
            self.network(tokens, real=real, cache=cache)

    def decode_step(self, cache: TextCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # Returns next-token logits (B, V) after ``tokens`` (B,); every row is ready.
        h = self.network(cache.take(tokens), cache=cache).last[:, -1]
        out = logits(h, self.network.output_matrix.to(h.dtype)).float()
        return cache.forced(out), torch.ones_like(tokens, dtype=torch.bool)

    def answer_tokens(self, generated: list[int]) -> list[int]:
        # The tokens after the answer prefix if the model writes it. A chain without an end has no
        # answer.
        if not self.writes_chain:
            return generated
        prefix = list(self.config.answer_prefix)
        for start in range(len(generated) - len(prefix) + 1):
            if generated[start : start + len(prefix)] == prefix:
                return generated[start + len(prefix) :]
        return []


# ---- No CoT


@dataclass(frozen=True, kw_only=True)
class NoCoTConfig(TextConfig):
    """A backbone that answers without reasoning; it adds no fields.

    Raises:
        ValueError: If a value is out of range.
    """


class NoCoTLM(TextLM):
    """Fine-tuning on questions and their answers alone, the first baseline of Thinking States.

    Text: query, answer prefix, answer. The prefix is given, never predicted.

    Args:
        config: Configuration of the backbone.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    config: NoCoTConfig

    def __init__(
        self,
        config: NoCoTConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def layout(self) -> TextLayout:
        """Query, prefix, answer."""
        return TextLayout(self.config.answer_prefix, lm_on_query=self.config.lm_on_query)


# ---- CoT


@dataclass(frozen=True, kw_only=True)
class CoTConfig(ChainConfig):
    """A backbone that writes its reasoning, then its answer.

    Raises:
        ValueError: If a value is out of range.
    """


class CoTLM(TextLM):
    """Chain of thought (Wei et al., 2022), fine-tuned: the slow and strong baseline.

    Text: query, each step after a separator, answer prefix, answer; everything after the query is
    learned. An answer is scored after the model's own greedy chain, which is a function of the
    query, so that scores are exact.

    Args:
        config: Configuration of the backbone and the longest chain.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    config: CoTConfig

    def __init__(
        self,
        config: CoTConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def layout(self) -> ChainLayout:
        """Query, chain, prefix, answer."""
        config = self.config
        return ChainLayout(config.answer_prefix, config.step_separator, config.lm_on_query)

    @property
    def writes_chain(self) -> bool:
        return True
