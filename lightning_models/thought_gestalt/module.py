"""Thought Gestalt as a LightningModule."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_models.base import LanguageModel
from lightning_models.flops import head_flops, linear_flops, training_flops
from lightning_models.layers import record, segment_sum, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import (
    linear_cross_entropy,
    linear_cross_entropy_each,
    token_entropies,
    token_scores,
)
from lightning_models.outputs import LossOutput, Mean, Scores, Term
from lightning_models.runtime import on_device
from lightning_models.thought_gestalt.cache import GestaltCache
from lightning_models.thought_gestalt.config import ThoughtGestaltConfig
from lightning_models.thought_gestalt.network import ThoughtGestaltNetwork
from lightning_models.thought_gestalt.packing import EOD, EOS, LEXICAL, SentenceStep, pack

KINDS = {"lexical": LEXICAL, "eos": EOS, "eod": EOD}
"""Classes of targets by their name in ``step_normalisers`` and statistics."""

SENTENCE_SLOTS = 27
"""Slots of an average sentence: about 25 tokens (section 2.2), BOS and EOS."""


class ThoughtGestaltLM(LanguageModel):
    """Decoder that processes one sentence at a time and attends to vectors of earlier sentences.

    *Modeling Language as a Sequence of Thoughts* (Borazjanizadeh and McClelland).
    Batches hold ``tokens`` and ``targets`` (B, S, U), ``lengths`` and ``is_last`` (B, S), and in
    training ``sentence_steps``, the maximum number of sentence steps over ranks.

    Args:
        config: Shape of the network, memory, dropouts and their schedule.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network's blocks with torch.compile (in place).
    """

    reads = "sentences"
    shards_blocks = False
    config: ThoughtGestaltConfig
    network: ThoughtGestaltNetwork

    def __init__(
        self,
        config: ThoughtGestaltConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)
        self.sentence_steps = 0
        """Number of sentence steps trained so far, the same on all ranks."""

    @property
    def batch_keys(self) -> tuple[str, ...]:
        return ("tokens", "targets", "lengths", "is_last")

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``score`` computes sentences shared by several streams only once."""
        return not self.compile_network

    def build_network(self) -> ThoughtGestaltNetwork:
        return ThoughtGestaltNetwork(self.config)

    # ---- training

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the cross-entropy of all targets, with EOS targets weighted (section 2.3).

        In training it also counts the sentence steps. Statistics: ``lexical_loss``, ``eos_loss``
        and ``eod_loss``, unweighted nats per target of each class, and ``sentence_steps``, the
        number trained so far (logged as the mean over the micro-batches of an optimiser step).

        Records ``sentences``: ``vectors``, a list of the sentence vectors (A, D) of every sentence
        step, and ``nll``, a list of the summed losses of each step's targets in nats, both part of
        the graph. With ``memory: detached`` later steps read detached copies, so their losses do
        not depend on the vectors. Without memory there are no vectors.
        """
        steps = self._steps(batch)
        weights = self._target_weights()
        total, sums = self._losses(steps, self._dropout_shares(batch, len(steps)), weights)
        if len(steps) < 2 and torch.is_grad_enabled():
            # Memory was not read, but DDP waits for a gradient of every parameter.
            idle = [p.sum() for p in self.network.parameters() if p.requires_grad]
            total = total + 0.0 * torch.stack(idle).sum()
        counts = _kind_counts(steps, self.device)
        # NOTE(paper): the normaliser of the weighted sum is not published. Here it is the sum of
        # the weights, so that the loss stays a mean when the weight of EOS targets changes.
        normaliser = (counts * weights).sum()
        over = {name: self._weight(name) for name in KINDS}
        stats: dict[str, Tensor | Mean] = {
            f"{name}_loss": Mean(sums[index], counts[index]) for name, index in KINDS.items()
        }
        stats["sentence_steps"] = on_device(self.sentence_steps, self.device)
        return LossOutput({"nll": Term(total, normaliser, over)}, stats)

    def _losses(
        self, steps: list[SentenceStep], shares: list[float], weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the differentiable weighted sum over all targets, and the sum (3,) by class."""
        matrix = self.network.output_matrix

        def consume(step: SentenceStep, h: Tensor) -> tuple[Tensor, Tensor]:
            """Returns the weighted sum of a step's losses and the sum by class."""
            return _kind_losses(h, matrix, step.targets, step.target_kind, weights)

        if not steps:
            sums = torch.zeros(1 + len(KINDS), dtype=torch.float32, device=self.device)
            return sums[0], sums[1:]
        if self.network.recomputes:
            # losses inside each checkpointed step, so that only its scalars are kept
            parts = zip(*self.network.run(steps, shares, consume), strict=True)
            total, sums = (torch.stack(part).sum(dim=0) for part in parts)
            return total, sums
        vectors: list[Tensor] = []
        states = list(self.network.run(steps, shares, lambda step, h: h, vectors))
        if wants("sentences"):
            nll = [
                linear_cross_entropy(h, matrix, step.targets)
                for h, step in zip(states, steps, strict=True)
            ]
            record("sentences", vectors=vectors, nll=nll)
        # all steps in one pass over the vocabulary: (sum of P,)
        targets = torch.cat([step.targets for step in steps])
        kinds = torch.cat([step.target_kind for step in steps])
        return _kind_losses(torch.cat(states), matrix, targets, kinds, weights)

    def _steps(self, batch: dict[str, Any]) -> list[SentenceStep]:
        slots = self.config.block_size
        sentences = batch["tokens"], batch["lengths"], batch["is_last"]
        return pack(*sentences, slots, batch.get("targets"), batch.get("owners"))[0]

    def _weight(self, name: str) -> float:
        """Returns the weight of a class of targets in the current epoch."""
        if name != "eos" or self._trainer is None:
            return 1.0
        early = self._trainer.current_epoch < self.config.eos_weight_epochs
        return 1.0 if early else self.config.eos_weight

    def _target_weights(self) -> Tensor:
        """Returns the weights (3,) of the classes of targets."""
        weights = {index: self._weight(name) for name, index in KINDS.items()}
        values = [weights[index] for index in sorted(weights)]
        return on_device(values, self.device, torch.float32)

    # ---- the warm-in of token and sentence dropout

    def _dropout_shares(self, batch: dict[str, Any], num_steps: int) -> list[float]:
        """Returns the dropout share of each sentence step of a batch, and counts the steps.

        Outside of training nothing is counted and the list is empty.
        """
        if not (self.training and torch.is_grad_enabled()):
            return []
        first = self.sentence_steps
        self.sentence_steps += int(batch.get("sentence_steps", num_steps))
        half, full = self.config.warm_in
        done: list[float] = [*range(first, first + num_steps)]
        if full <= 1:  # fractions of the run
            done = [self.progress(f"warm_in ({list(self.config.warm_in)})")] * num_steps
        return [0.5 * (step >= half) + 0.5 * (step >= full) for step in done]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["sentence_steps"] = self.sentence_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        moments = [state["state"].values() for state in checkpoint.get("optimizer_states", ())]
        for values in (checkpoint.get("state_dict", {}), *itertools.chain(*moments)):
            for key, value in values.items():  # gates of older checkpoints are 0-d
                if key != "step" and torch.is_tensor(value) and value.dim() == 0:
                    values[key] = value.reshape(1)
        self.sentence_steps = checkpoint.get("sentence_steps", 0)

    # ---- evaluation and decoding

    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns exact log-probabilities of the targets of whole documents.

        ``owners`` in the batch, lists (B, S), let streams that begin alike share the computation of
        sentences without targets (see ``packing.pack``). Only the states of one sentence step are
        held at a time.

        Records ``entropy``: ``entropy`` (B, S, U) of the next-token distributions in nats, nan in
        unused slots; ``greedy``: ``greedy`` (B, S, U) bool, whether a target is the most likely
        token.
        """
        targets, matrix = batch["targets"], self.network.output_matrix
        dtype = torch.promote_types(matrix.dtype, torch.float32)
        log_prob = targets.new_zeros(targets.numel(), dtype=dtype)
        entropy = torch.full_like(log_prob, torch.nan, dtype=torch.float32)
        greedy = torch.zeros_like(log_prob, dtype=torch.bool)
        below = self.config.vocab_size if wants("greedy") else None

        def consume(step: SentenceStep, h: Tensor) -> None:
            """Writes the scores of a step's states (P, D) to their slots."""
            if wants("entropy"):
                entropy[step.source] = token_entropies(h, matrix)
            result = token_scores(h, matrix, step.targets, below, step.num_targets)
            log_prob[step.source] = result.log_prob  # (P,) -> (B S U,)
            if result.greedy is not None:
                greedy[step.source] = result.greedy

        for _ in self.network.run(self._steps(batch), (), consume):
            pass
        if wants("entropy"):
            record("entropy", entropy=entropy.view_as(targets))
        record("greedy", greedy=greedy.view_as(targets))
        num_targets = (targets >= 0).flatten(1).sum(dim=1)
        no_term = log_prob.new_zeros(len(targets))
        return Scores(log_prob.view_as(targets), no_term, num_targets, self.likelihood)

    @property
    def context_limit(self) -> None:
        """No limit: memory has a fixed size, and positions are indices within a sentence."""
        return

    def check_context(self, length: int) -> None:
        """Accepts any length, since the decoding cache cuts long sentences."""

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> GestaltCache:
        with torch.compiler.set_stance("force_eager"):  # single slots and caches run in eager mode
            return GestaltCache.prefill(self.network, prompts, lengths, max_new_tokens)

    def decode_step(self, cache: GestaltCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # Returns next-token logits (B, V) after ``tokens`` (B,) and the mask of ready rows.
        with torch.compiler.set_stance("force_eager"):
            h, ready = cache.step(self.network, tokens)
        return (h @ self.network.output_matrix.to(h.dtype).t()).float(), ready

    # ---- cost

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the FLOPs per slot, including BOS and EOS, of documents of ``context`` slots.

        Assumes sentences of ``SENTENCE_SLOTS`` slots, or ``block_size`` if fewer. The cost of a
        sentence's vector and its keys and values is divided by its slots. Memory fills up in the
        course of a document, so longer documents read more of it.
        """
        parts = self.flops_by_part(context)
        forward = sum(parts.values())
        if not training:
            return forward
        stack = forward - parts["output"] - self._write_flops()
        if not self.config.checkpoint_sentences:
            return training_flops(forward, stack, self.config)
        # the backward pass recomputes the blocks, and the output layer with its gradients
        return training_flops(forward + parts["output"], stack, self.config) + stack

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the forward FLOPs per slot by part of the network, see ``flops_per_token``.

        ``sentence_head`` computes the sentence vectors; ``cross_attention`` projects them for every
        reader and reads them.
        """
        sums: dict[str, float] = {}
        slots, sizes = self._slots, self._memory_sizes(context)
        sentences = sum(share for _, share in sizes)
        for block in self.network.layers:
            for remembered, share in sizes:
                for name, flops in block.flops(slots, remembered).items():
                    sums[name] = sums.get(name, 0.0) + share * flops
        parts = {name: flops / sentences / slots for name, flops in sums.items()}
        parts["output"] = head_flops(self.config)
        head, readers = self.network.sentence_head, self.network.readers
        if head is None:
            return parts
        if readers:
            projected = sum(linear_flops(x.key) + linear_flops(x.value) for x in readers)
            parts["cross_attention"] = parts.get("cross_attention", 0.0) + projected / slots
        return {**parts, "sentence_head": linear_flops(head) / slots}

    @property
    def _slots(self) -> int:
        """Number of slots of a sentence in the FLOP count."""
        return min(SENTENCE_SLOTS, self.config.block_size)

    def _memory_sizes(self, context: int) -> list[tuple[int, float]]:
        """Returns (m, number of sentences that have m others in memory) for a document.

        The last sentence counts as a fraction. There is at least one sentence.
        """
        sentences, full = max(1.0, context / self._slots), self.config.memory_size
        sizes = [(m, min(1.0, max(0.0, sentences - m))) for m in range(full)]
        return [*sizes, (full, max(0.0, sentences - full))]

    def _write_flops(self) -> float:
        """Returns the FLOPs per slot of computing and projecting sentence vectors."""
        if self.network.sentence_head is None:
            return 0.0
        flops = linear_flops(self.network.sentence_head)
        for reader in self.network.readers:
            flops += linear_flops(reader.key) + linear_flops(reader.value)
        return flops / self._slots


def _kind_losses(
    h: Tensor, matrix: Tensor, targets: Tensor, kinds: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the differentiable weighted sum of losses, and the unweighted sum (3,) by class."""
    total, losses = linear_cross_entropy_each(h, matrix, targets, weights[kinds])
    return total, segment_sum(losses, kinds, len(weights))


def _kind_counts(steps: list[SentenceStep], device: torch.device) -> Tensor:
    """Returns the number of targets of each class, float64 (3,)."""
    counts = torch.zeros(len(KINDS), dtype=torch.float64, device=device)
    for step in steps:
        counts.index_add_(0, step.target_kind, (step.targets >= 0).double())
    return counts
