"""What the four baselines share: a backbone that reads text, and how text becomes answers."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_models.output_layer import linear_cross_entropy_each, logits, token_log_probs
from lightning_models.outputs import LossOutput, Mean, Scores, Term
from lightning_models.thinking_states.backbone import Backbone
from lightning_models.thinking_states.baselines.layout import Batch, Segment, TextLayout, TextRows
from lightning_models.thinking_states.baselines.text_cache import TextCache
from lightning_models.thinking_states.config import ReasoningConfig
from lightning_models.thinking_states.decoding import AnswerCache, read
from lightning_models.thinking_states.reasoner import ReasoningLM
from lightning_models.thinking_states.rows import aligned_right, constant, pack


@dataclass(frozen=True, kw_only=True)
class ChainConfig(ReasoningConfig):
    """A model that may write reasoning in front of its answer.

    Raises:
        ValueError: if a value is out of its range.
    """

    max_chain_tokens: int | None = None
    """Longest chain at inference, in tokens; behind it the answer begins whatever was written.
    null: what ``block_size`` leaves beside the query."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        if self.max_chain_tokens is not None and self.max_chain_tokens < 0:
            raise ValueError(
                f"max_chain_tokens ({self.max_chain_tokens}) must not be negative; null takes what "
                "block_size leaves"
            )


class TextNetwork(nn.Module):
    """The backbone on rows of text.

    Args:
        config: what to build.
    """

    sharded = False

    def __init__(self, config: ReasoningConfig) -> None:
        super().__init__()
        self.backbone = Backbone(config)

    @property
    def blocks(self) -> Any:
        """The backbone's layers."""
        return self.backbone.model.layers

    @property
    def output_matrix(self) -> Tensor:
        """The unembedding (V, D)."""
        return self.backbone.output_matrix

    def forward(
        self, tokens: Tensor, *, real: Tensor | None = None, cache: AnswerCache | None = None
    ) -> Tensor:
        """Returns the normed states (B, T, D) of tokens.

        Args:
            tokens: (B, T) int64; without a cache padded on the right.
            real: which of them are text (B, T) bool, with a cache; None: all.
            cache: what was read before, extended in place.
        """
        h = self.backbone.embed(tokens)
        if cache is not None:
            return read(self.backbone, cache, h, real).last
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        last: Tensor = self.backbone(h, positions).last
        return last


class TextLM(ReasoningLM):
    """A backbone that reads rows of text: query, what the method writes, answer.

    A method says with ``layout`` what the text is, and with ``writes_chain`` whether it writes
    reasoning in front of the answer. If it does, its answers stand behind the answer prefix that it
    writes, too; if not, the prefix is given.
    """

    network: TextNetwork

    @property
    @abstractmethod
    def layout(self) -> TextLayout:
        """How questions become rows of text."""

    @property
    def counter(self) -> TextLayout:
        """The layout, which counts what it predicts."""
        return self.layout

    @property
    def writes_chain(self) -> bool:
        """Whether the model writes reasoning in front of its answer."""
        return False

    @property
    def stage(self) -> int:
        """The stage of a curriculum that training has reached; 0 without one."""
        return 0

    def build_network(self) -> TextNetwork:
        """Returns a freshly initialised network, or one with trained weights."""
        return TextNetwork(self.config)

    # ---- training

    def loss(self, batch: Batch) -> LossOutput:
        """Returns the summed cross-entropy of the text that the method learns.

        Statistics: ``answer_nll``, nats per token of the answer alone, its EOS among them; and
        those of ``statistics``.
        """
        rows = self.layout.training(batch, self.stage)
        h, learned = self.states(rows), rows.targets >= 0
        # logits only where something is predicted: most of a row is the query
        nll, each = linear_cross_entropy_each(
            h[learned], self.network.output_matrix, rows.targets[learned]
        )
        answers = rows.answers[learned]
        stats: dict[str, Tensor | Mean] = {
            "answer_nll": Mean((each * answers).sum(), answers.sum())
        }
        stats |= self.statistics(batch, rows)
        return LossOutput({"nll": Term(nll, learned.sum(), "targets")}, stats)

    def statistics(self, batch: Batch, rows: TextRows) -> dict[str, Tensor | Mean]:
        """Returns what is to be logged of the text of a training batch; here nothing."""
        return {}

    def states(self, rows: TextRows) -> Tensor:
        """Returns the normed states (B, T, D) of rows of text."""
        h: Tensor = self.network(rows.tokens)
        return h

    # ---- scoring

    def score(self, batch: Batch) -> Scores:
        """Returns log p(answer | query), behind the reasoning that the model itself writes."""
        targets = batch["targets"]
        rows = self.scored_rows(batch)
        h = self.states(rows)
        found = token_log_probs(
            h[rows.answers], self.network.output_matrix, rows.targets[rows.answers]
        )
        log_prob = found.new_zeros(targets.shape)
        log_prob[targets >= 0] = found  # both in the order of rows, and of tokens in a row
        num_targets = (targets >= 0).sum(dim=1)
        return Scores(log_prob, log_prob.new_zeros(len(log_prob)), num_targets, self.likelihood)

    def scored_rows(self, batch: Batch) -> TextRows:
        """Returns the text whose answer is scored."""
        return self.layout.scored(batch, self.before_answer(batch))

    def before_answer(self, batch: Batch) -> Segment:
        """Returns what stands in front of the answers: the model's own chain, and the prefix."""
        if not self.writes_chain:
            return constant(self.config.answer_prefix, batch["query"])
        asked = (batch["targets"] >= 0).any(dim=1)  # rows that only fill up need no chain
        lengths = torch.zeros_like(batch["query_lengths"])
        if not bool(asked.any()):
            return constant((), batch["query"])
        tokens, lengths[asked] = self.write_chains(
            batch["query"][asked], batch["query_lengths"][asked]
        )
        return tokens.new_zeros(len(asked), tokens.shape[1]).index_put_((asked,), tokens), lengths

    @torch.no_grad()
    def write_chains(self, query: Tensor, lengths: Tensor) -> Segment:
        """Returns what the model writes, greedily, up to its answers: chains and prefixes.

        Args:
            query: (B, Q) int64, padded on the right.
            lengths: (B,) int64.

        Raises:
            ValueError: if parameters are sharded: the chains of each rank have their own length.
        """
        if self.network.sharded:
            raise ValueError(
                "strategy: chains of thought cannot be written with sharded parameters, because "
                "those of each process have their own length; set trainer.strategy=ddp, or "
                "trainer.limit_val_batches=0"
            )
        cache = self.init_cache(query, lengths, 0)
        tokens, written, chosen = query[:, 0], [], []
        while True:
            out, _ = self.decode_step(cache, tokens)
            if bool(cache.answering.all()):
                break
            tokens = out[:, : self.config.vocab_size].argmax(dim=-1)
            written.append(tokens)
            chosen.append(~cache.answering)
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
        """Returns the cache behind the queries, right-padded prompts (B, P).

        The first step reads the answer prefix, whatever it is given; where a chain is written, or
        there is no prefix, the last token of each query.
        """
        last = prompts.gather(1, lengths[:, None] - 1)[:, 0]
        end = self.config.answer_prefix if self.writes_chain else ()
        limits = self._chain_limits(lengths)
        cache = TextCache(last, limits, pending=self.pending(), end=end)
        held = 0 if len(cache.pending) else 1
        self.read_query(cache, prompts[:, : prompts.shape[1] - held], lengths - held)
        return cache

    def pending(self) -> tuple[int, ...]:
        """Returns what the first step reads in place of what it is given."""
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
        """Returns next-token logits (B, V) after ``tokens`` (B,); every row is ready."""
        h = self.network(cache.take(tokens), cache=cache)[:, -1]
        out = logits(h, self.network.output_matrix.to(h.dtype)).float()
        return cache.forced(out), torch.ones_like(tokens, dtype=torch.bool)

    def answer_tokens(self, generated: list[int]) -> list[int]:
        """Returns what stands behind the answer prefix, where the model writes that; else all.

        Nothing, where a chain never came to its end.
        """
        if not self.writes_chain:
            return generated
        prefix = list(self.config.answer_prefix)
        for start in range(len(generated) - len(prefix) + 1):
            if generated[start : start + len(prefix)] == prefix:
                return generated[start + len(prefix) :]
        return []
