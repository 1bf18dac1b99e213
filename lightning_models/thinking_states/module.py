"""LightningModules: Thinking States, and the base of all methods that answer questions."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_models.base import Batch, LanguageModel
from lightning_models.layers import record, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import (
    linear_cross_entropy,
    linear_cross_entropy_each,
    logits,
)
from lightning_models.outputs import LossOutput, Mean, Scores, Term
from lightning_models.thinking_states.backbone import ReasoningNetwork, backbone_flops
from lightning_models.thinking_states.config import ReasoningConfig, ThinkingStatesConfig
from lightning_models.thinking_states.network import (
    ThinkingStatesNetwork,
    answering_flops,
    reading_flops,
)
from lightning_models.thinking_states.reading import ThinkingCache, most_likely, read_queries
from lightning_models.thinking_states.rows import within
from lightning_models.thinking_states.thoughts import ThoughtLayout, ThoughtTargets, Trace

Counter = Callable[[Batch], Mapping[str, float]]


WORDING = ("answer_prefix", "step_separator")


class ReasoningLM(LanguageModel):
    """A language model on a backbone of ``transformers`` that answers questions.

    Batches hold queries, reasoning steps and answers (``datamodules.ReasoningDataModule``), which
    each method lays out in its own way. Scores are log p(answer | query) with the model's own
    greedy thoughts, which are a function of the query, so that scores are exact.

    A prompt is a query: ``init_cache`` reads all of it, and the first ``decode_step`` reads the
    answer's fixed prefix instead of the token passed to it.
    """

    reads: ClassVar[str] = "reasoning"
    config: ReasoningConfig
    network: ReasoningNetwork | None

    @property
    def batch_keys(self) -> tuple[str, ...]:
        return ("query", "query_lengths", "steps", "step_lengths", "targets")

    @property
    @abstractmethod
    def counter(self) -> Counter:
        """Function that counts the normalisers of the terms of ``loss`` in a batch of all ranks.

        Data workers call it, so it must be picklable and depend on the batch alone.
        """

    def answer_tokens(self, generated: list[int]) -> list[int]:
        """Returns the answer among generated tokens; here all of them."""
        return generated

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        if data is not None:
            self.take_wording(dataclasses.asdict(data.wording()))

    def take_wording(self, wording: Mapping[str, tuple[int, ...]]) -> None:
        """Sets ``answer_prefix`` and ``step_separator`` if they are empty.

        Args:
            wording: Token ids by field name.
        """
        current = {key: tuple(getattr(self.config, key)) for key in WORDING}
        fields = {key: tuple(wording[key]) for key in WORDING}
        missing: dict[str, Any] = {key: ids for key, ids in fields.items() if not current[key]}
        self.config = dataclasses.replace(self.config, **missing)
        for key, ids in current.items():
            if ids and ids != fields[key]:
                rank_zero_warn(
                    f"the data's {key} is {fields[key]}, the model's is {ids}: it keeps its own"
                )

    def recipe(self) -> dict[str, Any]:
        # The backbone's architecture lets a checkpoint be rebuilt without its hub or folder.
        recipe = super().recipe()
        if self.config.backbone is not None and self.network is not None:
            shape = self.network.backbone.architecture()
            recipe["init_args"]["config"]["architecture"] = shape
        return recipe

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the backbone's FLOPs per token of a row of ``context`` tokens."""
        assert self.network is not None, "the network is not built yet"
        return backbone_flops(self.network.backbone, context, training)


class ThinkingStatesLM(ReasoningLM):
    """Thinking States: thinks in words while it reads (Latent Reasoning with Supervised ...).

    After every chunk of the query the thinking block T writes a thought. The compression block C
    turns it into a state, which is added to the next chunk's tokens near the input. Training forces
    the thoughts made of the batch's steps, so all chunks are computed at once; at inference the
    model decodes its thoughts.

    Args:
        config: Configuration of backbone, chunks, thoughts and their loss.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the training step's network with torch.compile (in place).
    """

    config: ThinkingStatesConfig
    network: ThinkingStatesNetwork

    @property
    def batch_keys(self) -> tuple[str, ...]:
        return (*super().batch_keys, "step_places")

    def __init__(
        self,
        config: ThinkingStatesConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    def build_network(self) -> ThinkingStatesNetwork:
        return ThinkingStatesNetwork(self.config)

    @property
    def layout(self) -> ThoughtLayout:
        """Layout of a batch's rows."""
        return ThoughtLayout.of(self.config)

    @property
    def counter(self) -> ThoughtLayout:
        """Counts ``targets``, ``queries``, ``thought_tokens`` and ``trivial_thoughts``."""
        return self.layout

    # ---- data

    def setup(self, stage: str) -> None:
        # Warns if inference would cut thoughts of the data. These may have
        # ``longest_thought(chunk_size)``: tokens of the longest thought in training, with
        # separators and without the end, on the grid ``left_align``; other grids differ slightly.
        super().setup(stage)
        longest = getattr(getattr(self.trainer, "datamodule", None), "longest_thought", None)
        tokens = 0 if longest is None else longest(self.config.chunk_size)
        max_tokens = self.config.max_thought_tokens
        if tokens > max_tokens:
            rank_zero_warn(
                f"max_thought_tokens ({max_tokens}) cuts thoughts at inference that training has "
                f"whole: the data's longest one has {tokens} tokens; set "
                f"max_thought_tokens={tokens} or above"
            )

    # ---- training

    def transfer_batch_to_device(self, batch: Any, device: torch.device, index: int) -> Any:
        # ``rows`` are built on the host: on an accelerator this would synchronise.
        if self.training:
            batch = {**batch, "rows": self.layout.rows(batch)}
        return super().transfer_batch_to_device(batch, device, index)

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the cross-entropies of answers and thoughts (eq. 6).

        The term ``nll`` sums over the answer and its EOS and, with ``lm_on_query``, the query; the
        term ``thoughts`` is weighted by ``thought_weight``. Statistics: ``thought_nll``, nats per
        token of non-trivial thoughts, including ends; ``trivial_share``, the share of trivial
        thoughts; and in steps that the trainer logs ``thought_accuracy`` and ``trivial_accuracy``,
        T's accuracy under teacher forcing on non-trivial thoughts and on ends of trivial ones.
        """
        rows = batch["rows"] if "rows" in batch else self.layout.rows(batch)
        forced = self.network(rows)
        nll = linear_cross_entropy(forced.answers, self.network.output_matrix, rows.answers.tokens)
        count = (rows.answers.tokens >= 0).sum()
        output = LossOutput({"nll": Term(nll, count, "targets")})
        self._add_thoughts(forced.thoughts, rows.thoughts, output)
        return output

    def _add_thoughts(self, h: Tensor, targets: ThoughtTargets, output: LossOutput) -> None:
        """Adds the thoughts' term and statistics, computed from T's states (B, P, D)."""
        matrix, config = self.network.thinking_matrix, self.config
        weights = torch.where(targets.trivial, config.trivial_weight, 1.0)
        if config.thought_loss == "chunk_sum":
            weights = weights / targets.sizes  # (B, P), 1 in sum over each thought
        total, per_target = linear_cross_entropy_each(h, matrix, targets.tokens, weights)
        output.terms["thoughts"] = self._thought_term(total * config.thought_weight, targets)
        chunks = (targets.valid / targets.sizes).sum()
        output.stats |= {
            "thought_nll": Mean((per_target * targets.nontrivial).sum(), targets.nontrivial.sum()),
            "trivial_share": Mean(targets.trivial.sum(), chunks),
        }
        if self._is_logged:
            self._measure(h, matrix, targets, output)

    def _thought_term(self, total: Tensor, targets: ThoughtTargets) -> Term:
        """Returns the term of the weighted sum ``total``, with its normaliser.

        ``token_mean`` is the weighted mean over all thought tokens, including their ends.
        ``chunk_sum`` is eq. 6: the mean over a thought's tokens, summed over the chunks of a query
        and averaged over queries.
        """
        if self.config.thought_loss == "chunk_sum":
            return Term(total, float(len(targets.tokens)), "queries")
        # trivial thoughts are one token each, which counts trivial_weight instead of 1
        over = {"thought_tokens": 1.0, "trivial_thoughts": self.config.trivial_weight - 1.0}
        count, trivial = targets.valid.sum(), targets.trivial.sum()
        return Term(total, count + over["trivial_thoughts"] * trivial, over)

    @property
    def _is_logged(self) -> bool:
        """Whether the trainer logs the current optimiser step; the same on all ranks."""
        trainer = self._trainer
        if trainer is None or not trainer.log_every_n_steps:
            return False
        return (trainer.global_step + 1) % trainer.log_every_n_steps == 0

    def _measure(
        self, h: Tensor, matrix: Tensor, targets: ThoughtTargets, output: LossOutput
    ) -> None:
        """Adds the accuracies of T, in a second pass over the vocabulary: losses keep no logits."""
        predicted = most_likely(h.detach().flatten(0, 1), matrix.detach()).view(
            targets.tokens.shape
        )
        right = predicted == targets.tokens  # (B, P)
        output.stats |= {
            "thought_accuracy": Mean((right & targets.nontrivial).sum(), targets.nontrivial.sum()),
            "trivial_accuracy": Mean((right & targets.trivial).sum(), targets.trivial.sum()),
        }

    # ---- scoring

    @torch.no_grad()
    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns the exact log p(answer and EOS | query) with the model's own greedy thoughts.

        Records ``trace``, a ``Trace``, as ``thoughts`` and, if the batch has steps, the thoughts
        made of them as ``gold_thoughts``.
        """
        layout, targets, prefix = self.layout, batch["targets"], len(self.config.answer_prefix)
        cache = self._read(batch["query"], batch["query_lengths"])
        tokens, length = layout.answer_tokens(batch), layout.row_lengths(batch)
        real = within(length - batch["query_lengths"], tokens.shape[1])
        states = cache.advance(tokens, real)
        if cache.trace is not None:
            record("thoughts", trace=cache.trace)
        if "steps" in batch and wants("gold_thoughts"):
            record("gold_thoughts", trace=layout.gold_trace(batch))
        # the first state, after the query, predicts the first token of the prefix or the answer
        states = torch.cat((cache.last[:, None], states), dim=1)  # (B, P + A, D)
        log_prob = self.target_log_probs(states[:, prefix:], targets)
        num_targets = (targets >= 0).sum(dim=1)
        return Scores(log_prob, log_prob.new_zeros(len(log_prob)), num_targets, self.likelihood)

    def _read(self, query: Tensor, lengths: Tensor, prefix: Sequence[int] = ()) -> ThinkingCache:
        """Reads queries with thoughts, and returns the cache after them."""
        read = read_queries(self.network, query, lengths, self.config.prefill)
        trace = Trace(read.thoughts(), read.rounds) if wants("thoughts") else None
        return ThinkingCache(self.network, read, tuple(prefix), trace)

    # ---- generation

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> ThinkingCache:
        """Reads right-padded queries (B, Q), and returns the cache after them.

        Records ``trace``, the ``Trace`` of the queries' thoughts, as ``thoughts``; thoughts during
        the answers are added to it as they come.
        """
        cache = self._read(prompts, lengths, self.config.answer_prefix)
        if cache.trace is not None:
            record("thoughts", trace=cache.trace)
        return cache

    def decode_step(self, cache: ThinkingCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns next-token logits (B, V) float32, and the mask of ready rows, which are all.

        The first step reads the answer's prefix instead of ``tokens``.
        """
        with torch.no_grad():
            h = cache.decode(tokens)
            out = logits(h, self.network.output_matrix.to(h.dtype)).float()
        return out, torch.ones(len(tokens), dtype=torch.bool, device=out.device)

    # ---- compute

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the FLOPs per token of a row of ``context`` tokens; see ``reading_flops``."""
        return reading_flops(self.network, context, training)

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of a token of the answer; see ``answering_flops``.

        Args:
            context: Number of tokens before it.
            steps: Mean number of thought tokens per token of the answer. Defaults to one with
                ``think_in_decode``, else to none.
        """
        return answering_flops(self.network, context, steps)
