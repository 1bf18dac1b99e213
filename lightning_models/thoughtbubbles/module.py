"""Thoughtbubbles as a LightningModule."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_models.base import LanguageModel
from lightning_models.flops import head_flops, linear_flops, training_flops
from lightning_models.layers import Block, record, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import (
    chunk_rows,
    linear_mixture_cross_entropy,
    logits,
    mixture_entropies,
    mixture_scores,
)
from lightning_models.outputs import Likelihood, LossOutput, Scores, Term
from lightning_models.runtime import uncompiled
from lightning_models.thoughtbubbles.config import ThoughtbubblesConfig
from lightning_models.thoughtbubbles.forking import ForkLayer
from lightning_models.thoughtbubbles.network import (
    Decoded,
    PrefixCache,
    StreamCache,
    ThoughtbubblesNetwork,
)


class ThoughtbubblesLM(LanguageModel):
    """Decoder whose residual streams fork and are pruned under a budget (arXiv 2510.00219).

    Under ``allocation: global_topk`` the streams of a token depend on later tokens: scores are
    labelled ``noncausal``, and generation computes the whole prefix again for every token. The
    other allocations are strictly causal, exact, and decode with a cache.

    Args:
        config: Shape of the network, fork layers and budget.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).

    Raises:
        ValueError: If it is to be compiled, and texts decide the number of streams.
    """

    config: ThoughtbubblesConfig
    network: ThoughtbubblesNetwork

    def __init__(
        self,
        config: ThoughtbubblesConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)
        if compile and self.adaptive_training:
            raise ValueError(
                f"compile (true): under allocation {self.config.allocation} texts decide the "
                "number of streams, so that most batches would compile anew; set compile: false, "
                "or allocation: global_topk"
            )

    @property
    def causal(self) -> bool:
        """Whether the allocation used in evaluation looks at earlier tokens only."""
        config = self.config
        if config.inference_allocation != "global_topk" or not config.fork_layers:
            return True
        nobody_chooses = config.ratio == 1 or not config.competes(len(config.fork_layers) - 1)
        return config.budget == "dynamic" and nobody_chooses

    @property
    def adaptive(self) -> bool:
        """Whether the number of a text's streams depends on more than its length."""
        return self._depends_on_text(self.config.inference_allocation)

    @property
    def adaptive_training(self) -> bool:
        """The same under the allocation of training."""
        return self._depends_on_text(self.config.allocation)

    def _depends_on_text(self, allocation: str) -> bool:
        last = len(self.config.fork_layers) - 1
        return allocation != "global_topk" and self.config.competes(last)

    @property
    def likelihood(self) -> Likelihood:
        """``exact`` for causal allocations, else ``noncausal``."""
        return "exact" if self.causal else "noncausal"

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``score`` reads what several rows begin with once: if no later token counts."""
        return self.causal and not self.compile_network

    def build_network(self) -> ThoughtbubblesNetwork:
        return ThoughtbubblesNetwork(self.config)

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the summed cross-entropy of the averaged distributions (eq. 11).

        In training it also moves the thresholds of the fork layers.
        """
        decoded = self._decode(batch)
        if self.training and torch.is_grad_enabled():
            self._observe(decoded.borders)
        targets, per_row = batch["targets"], None
        number, device = decoded.token.shape[1], targets.device
        fixed = device.type != "cpu" or torch.compiler.is_compiling()
        fits = number <= 4 * chunk_rows(device)
        if fixed and fits and self.config.allocation == "global_topk":
            # dropping padding would sync with the device, and break a compiled graph; its logits
            # are computed instead
            states = _side_by_side(decoded, targets)
            per_row = number, targets.shape[1]
        else:
            states = _flatten(decoded, targets)
        mixture = states.h, self.network.output_matrix, states.log_p, states.owner
        nll = linear_mixture_cross_entropy(*mixture, states.targets, per_row=per_row)
        return LossOutput({"nll": Term(nll, (targets >= 0).sum(), "targets")})

    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns log-probabilities of a window batch's targets.

        Raises:
            ValueError: If thresholds decide that were not observed in training at this kappa.

        Records ``entropy``: ``entropy`` (B, T) of the next-token distributions, in nats;
        ``greedy``: ``greedy`` (B, T) bool, whether a target is the most likely token;
        ``thinking_steps``: ``executed`` (B, T) float64, streams of each token beyond its first, the
        mean over the blocks, and ``most``, what they are at most; and ``flops``: ``flops`` (B,)
        float64 of each row, and its ``tokens`` (B,) int64.
        """
        self._check_thresholds()
        with uncompiled(self.adaptive):  # each number of streams would compile anew
            decoded, before = self._decode_rows(batch)
        targets = batch["targets"]
        if decoded.streams is not None:
            self._record_streams(decoded.streams, before)
        states, matrix = _flatten(decoded, targets), self.network.output_matrix
        mixture = states.h, matrix, states.log_p, states.owner
        if wants("entropy"):
            entropy = mixture_entropies(*mixture, len(states.targets))
            record("entropy", entropy=entropy.view_as(targets))
        below = self.config.vocab_size if wants("greedy") else None
        found = mixture_scores(*mixture, states.targets, below)
        if found.greedy is not None:
            record("greedy", greedy=found.greedy.view_as(targets))
        log_prob = found.log_prob.view_as(targets)
        num_targets = (targets >= 0).sum(dim=1)
        return Scores(log_prob, log_prob.new_zeros(len(targets)), num_targets, self.likelihood)

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> StreamCache | PrefixCache:
        self._check_thresholds()
        if not self.causal:
            return PrefixCache(prompts, lengths, max_new_tokens)
        cache = self.network.new_cache(len(prompts), prompts.shape[1] + max_new_tokens)
        if prompts.shape[1] > 1:
            self.network(prompts[:, :-1], lengths - 1, cache)
        return cache

    def decode_step(
        self, cache: StreamCache | PrefixCache, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns next-token logits (B, V) after ``tokens`` (B,); every row is ready.

        Records ``generated_steps``: ``steps`` (B,) float64, see ``thinking_steps`` in ``score``.
        """
        count = wants("generated_steps")
        if isinstance(cache, PrefixCache):
            prefix, lengths = cache.append(tokens)
            decoded, last = self.network(prefix, lengths, count=count), lengths - 1
        else:
            decoded = self.network(tokens[:, None], None, cache, count=count)
            last = torch.zeros_like(tokens)
        if decoded.streams is not None:
            steps = _additional(decoded.streams).gather(1, last[:, None])
            record("generated_steps", steps=steps[:, 0])
        return self._next_token(decoded, last), torch.ones_like(tokens, dtype=torch.bool)

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the nominal FLOPs per token at sequences of ``context`` tokens, forks included.

        Those of min(kappa, 2 N) streams after every fork layer. The causal allocations keep more
        or fewer: what ran is what ``score`` records.
        """
        parts = self.flops_by_part(context)
        flops = sum(parts.values())
        return training_flops(flops, flops - parts["output"], self.config) if training else flops

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the forward FLOPs per token, those of all its streams, by what they are spent on.

        For as many streams as ``flops_per_token``; ``forking`` is their scores at the fork layers,
        none of whose other work is a product of matrices.
        """
        return self._parts(self.config.streams_by_layer(context), context)

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of generating a token in a context of ``context`` tokens.

        Args:
            context: Tokens.
            steps: Streams of a token beyond its first, the mean over tokens and blocks: shared out
                over the blocks as the budget would; None: those of the budget.
        """
        planned = self.passes_per_token(context) - 1
        if steps is None or planned == 0:
            return self.flops_per_token(context)
        share = steps / planned
        streams = self.config.streams_by_layer(context)
        streams_taken = [context + (count - context) * share for count in streams]
        return sum(self._parts(streams_taken, context).values())

    def passes_per_token(self, context: int) -> float:
        """Returns the nominal streams of a token, a mean over the blocks; see ``LanguageModel``."""
        streams = self.config.streams_by_layer(context)
        return sum(streams) / len(streams) / context

    def _parts(self, streams: Sequence[float], context: int) -> dict[str, float]:
        """Returns the FLOPs per token by part of ``context`` tokens with ``streams`` by block."""
        config = self.config
        parts = dict.fromkeys(("output", "self_attention", "feed_forward", "forking"), 0.0)
        for block, count in zip(self.network.blocks, streams, strict=True):
            assert isinstance(block, Block)
            looking = linear_flops(block.attention) + 4.0 * config.dim * (count + 1) / 2
            parts["self_attention"] += count / context * looking
            parts["feed_forward"] += count / context * linear_flops(block.feed_forward)
        for fork, layer in zip(self.network.forks, config.fork_layers, strict=True):
            before = streams[layer - 1] if layer else context
            parts["forking"] += before / context * linear_flops(fork)
        decoded = streams[-1] if config.output_average == "mixture" else context
        parts["output"] = decoded / context * head_flops(config)
        return parts

    def _decode(self, batch: dict[str, Any], count: bool = False) -> Decoded:
        lengths = batch["mask"].sum(dim=1) if "mask" in batch else None
        decoded: Decoded = self.network(batch["tokens"], lengths, count=count)
        return decoded

    def _decode_rows(self, batch: dict[str, Any]) -> tuple[Decoded, Tensor | None]:
        """Returns the states of a batch to score, and the streams (L, B, P - 1) of its prefixes."""
        count = wants("thinking_steps") or wants("flops")
        if "prefix" not in batch:
            return self._decode(batch, count), None
        prefix, lengths = batch["prefix"][:, :-1], batch["prefix_lengths"] - 1
        rows, tokens = batch["prefix_row"], batch["tokens"]
        cache = self.network.new_cache(len(prefix), prefix.shape[1] + 1 + tokens.shape[1])
        before = self.network(prefix, lengths, cache, count).streams
        cache.select(rows)
        decoded = self.network(tokens, batch["mask"].sum(dim=1), cache, count)
        return decoded, None if before is None else before[:, rows]

    def _record_streams(self, streams: Tensor, before: Tensor | None = None) -> None:
        """Records steps and FLOPs of a batch by the streams (L, B, T) that ran.

        Args:
            streams: In each block, of each token.
            before: The same (L, B, P) of tokens before these; they cost a row as much as if it had
                read them alone.
        """
        blocks = [stop - start for start, stop in self.config.stretches]
        most = sum((2**forks - 1) * number for forks, number in enumerate(blocks)) / len(streams)
        record("thinking_steps", executed=_additional(streams), most=most)
        streams = streams if before is None else torch.cat((before, streams), dim=2)
        tokens = (streams[0] > 0).sum(dim=1)
        rows = zip(streams.sum(dim=2).t().tolist(), tokens.tolist(), strict=True)
        flops = [sum(self._parts(row, max(1, n)).values()) * n for row, n in rows]
        record("flops", flops=torch.tensor(flops, dtype=torch.float64), tokens=tokens)

    def _check_thresholds(self) -> None:
        """Refuses thresholds of another budget; a sanity check before training may do without."""
        config = self.config
        last = len(config.fork_layers) - 1
        unused = config.inference_allocation != "threshold" or not config.competes(last)
        checking = self._trainer is not None and self._trainer.sanity_checking
        if self.training or unused or checking:
            return
        fork = self.network.forks[last]  # where any compete, those of the last one do
        assert isinstance(fork, ForkLayer)
        observed = float(fork.observed_ratio)
        if observed == 0:
            raise ValueError(
                "allocation threshold: this model has no thresholds; train it with allocation "
                "global_topk or threshold, or choose another eval_allocation"
            )
        if not math.isclose(observed, config.ratio, rel_tol=1e-6):
            raise ValueError(
                f"kappa ({config.kappa}): the thresholds were observed at {observed:g}L in "
                "training; leave kappa as it was, or choose another eval_allocation"
            )

    def _observe(self, borders: Tensor) -> None:
        """Moves the thresholds by the mean over ranks of the kappa-th scores."""
        if self._trainer is not None and self.trainer.world_size > 1:
            borders = self.trainer.strategy.reduce(borders, reduce_op="mean")
        self.network.observe(borders)

    def _next_token(self, decoded: Decoded, last: Tensor) -> Tensor:
        """Returns log-probabilities (B, V) after token ``last`` (B,) of each row."""
        own = decoded.token == last[:, None]
        most = int(own.sum(dim=1).max())
        places = own.int().topk(most, dim=1).indices  # the token's streams, padded by others
        alive = own.gather(1, places)
        log_p = decoded.log_p.gather(1, places).masked_fill(~alive, -torch.inf)
        states = decoded.states.gather(
            1, places[..., None].expand(-1, -1, decoded.states.shape[-1])
        )
        matrix = self.network.output_matrix.to(states.dtype)
        own_log_prob = logits(states.flatten(0, 1), matrix).log_softmax(dim=-1)
        own_log_prob = own_log_prob.view(len(last), most, -1)
        mixed = (own_log_prob + log_p[..., None]).logsumexp(dim=1)
        return mixed - log_p.logsumexp(dim=1, keepdim=True)


def _additional(streams: Tensor) -> Tensor:
    """Returns the streams (B, T) of tokens beyond their first, the mean over the blocks, float64.

    Args:
        streams: int64 (L, B, T) in each block, 0 in padding.
    """
    return (streams - 1).clamp(min=0).sum(dim=0).double() / len(streams)


LOG_ZERO = -1e9
"""Log of a weight that is none; finite, for a token that has no state."""


class _States(NamedTuple):
    """States of a batch side by side, as the mixture functions take them."""

    h: Tensor
    log_p: Tensor
    owner: Tensor
    targets: Tensor


def _side_by_side(decoded: Decoded, targets: Tensor) -> _States:
    """Returns the states of all rows; padding weighs nothing in the last token of its row."""
    rows, num_tokens = targets.shape
    real = decoded.token < num_tokens
    first = num_tokens * torch.arange(rows, device=targets.device)[:, None]
    owner = first + decoded.token.clamp(max=num_tokens - 1)
    log_p = decoded.log_p.masked_fill(~real, LOG_ZERO)
    return _States(
        decoded.states.flatten(0, 1), log_p.flatten(), owner.flatten(), targets.flatten()
    )


def _flatten(decoded: Decoded, targets: Tensor) -> _States:
    """Returns the states of all rows, padding left out."""
    rows, num_tokens = targets.shape
    real = (decoded.token < num_tokens).flatten().nonzero()[:, 0]
    first = num_tokens * torch.arange(rows, device=targets.device)[:, None]
    owner = (decoded.token + first).flatten()
    h, log_p = decoded.states.flatten(0, 1)[real], decoded.log_p.flatten()[real]
    return _States(h, log_p, owner[real], targets.flatten())
