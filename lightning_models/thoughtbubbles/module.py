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

    Under ``allocation: global_topk`` the streams of a token depend on later tokens. Scores are
    therefore labelled ``noncausal``, and generation recomputes the whole prefix for every token.
    The other allocations are strictly causal, have exact likelihoods and decode with a cache.

    Args:
        config: Shape of the network, fork layers and budget.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).

    Raises:
        ValueError: If ``compile`` is true and the number of streams depends on the text.
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
                f"compile (true): under allocation {self.config.allocation} the number of streams "
                "depends on the text, so most batches would recompile; set compile: false, or "
                "allocation: global_topk"
            )

    @property
    def causal(self) -> bool:
        """Whether the allocation in evaluation depends on earlier tokens only."""
        config = self.config
        if config.inference_allocation != "global_topk" or not config.fork_layers:
            return True
        # no choice: either no fork fits into the budget, or all of them do
        no_choice = config.ratio == 1 or not config.competes(len(config.fork_layers) - 1)
        return config.budget == "dynamic" and no_choice

    @property
    def adaptive(self) -> bool:
        """Whether the number of streams of a text depends on more than its length."""
        return self._depends_on_text(self.config.inference_allocation)

    @property
    def adaptive_training(self) -> bool:
        """Whether it does so under the training allocation."""
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
        """Whether ``score`` reads a prefix shared by several rows once, as causality permits."""
        return self.causal and not self.compile_network

    def build_network(self) -> ThoughtbubblesNetwork:
        return ThoughtbubblesNetwork(self.config)

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the summed cross-entropy of the averaged distributions (eq. 11).

        In training it also updates the thresholds of the fork layers.
        """
        decoded = self._decode(batch)
        if self.training and torch.is_grad_enabled():
            self._observe(decoded.borders)
        targets, per_row = batch["targets"], None
        num_states, device = decoded.token.shape[1], targets.device
        fixed = device.type != "cpu" or torch.compiler.is_compiling()
        fits = num_states <= 4 * chunk_rows(device)
        if fixed and fits and self.config.allocation == "global_topk":
            # Dropping the padding would synchronise with the device and break a compiled graph, so
            # its logits are computed too.
            states = _keep_padding(decoded, targets)
            per_row = num_states, targets.shape[1]
        else:
            states = _drop_padding(decoded, targets)
        mixture = states.h, self.network.output_matrix, states.log_p, states.owner
        nll = linear_mixture_cross_entropy(*mixture, states.targets, per_row=per_row)
        return LossOutput({"nll": Term(nll, (targets >= 0).sum(), "targets")})

    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns log-probabilities of a window batch's targets.

        Raises:
            ValueError: If the allocation is threshold and training observed none at this kappa.

        Records ``entropy``: ``entropy`` (B, T) of the next-token distributions, in nats;
        ``greedy``: ``greedy`` (B, T) bool, whether a target is the most likely token;
        ``thinking_steps``: ``executed`` (B, T) float64, streams of each token beyond its first,
        averaged over the blocks, and ``most``, their upper bound; and ``flops``: ``flops`` (B,)
        float64 of each row, and its ``tokens`` (B,) int64.
        """
        self._check_thresholds()
        with uncompiled(self.adaptive):  # each new number of streams would recompile
            decoded, before = self._decode_rows(batch)
        targets = batch["targets"]
        if decoded.streams is not None:
            self._record_streams(decoded.streams, before)
        states, matrix = _drop_padding(decoded, targets), self.network.output_matrix
        mixture = states.h, matrix, states.log_p, states.owner
        if wants("entropy"):
            entropy = mixture_entropies(*mixture, len(states.targets))
            record("entropy", entropy=entropy.view_as(targets))
        below = self.config.vocab_size if wants("greedy") else None
        result = mixture_scores(*mixture, states.targets, below)
        if result.greedy is not None:
            record("greedy", greedy=result.greedy.view_as(targets))
        log_prob = result.log_prob.view_as(targets)
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
        """Returns next-token logits (B, V) after ``tokens`` (B,), for which every row is ready.

        Records ``generated_steps``: ``steps`` (B,) float64, see ``thinking_steps`` in ``score``.
        """
        count = wants("generated_steps")
        if isinstance(cache, PrefixCache):
            prefix, lengths = cache.append(tokens)
            # the whole prefix again, as a new token can change which streams survive
            decoded, last = self.network(prefix, lengths, count=count), lengths - 1
        else:
            decoded = self.network(tokens[:, None], None, cache, count=count)
            last = torch.zeros_like(tokens)
        if decoded.streams is not None:
            steps = _additional(decoded.streams).gather(1, last[:, None])
            record("generated_steps", steps=steps[:, 0])
        return self._next_token(decoded, last), torch.ones_like(tokens, dtype=torch.bool)

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the nominal FLOPs per token at sequences of ``context`` tokens, including forks.

        Assumes min(kappa, 2 N) streams after each fork layer. The causal allocations keep more or
        fewer; ``score`` records the FLOPs that were executed.
        """
        parts = self.flops_by_part(context)
        flops = sum(parts.values())
        return training_flops(flops, flops - parts["output"], self.config) if training else flops

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the forward FLOPs per token, over all its streams, by part of the network.

        Assumes as many streams as ``flops_per_token``. ``forking`` counts the scores at the fork
        layers, their only matrix product.
        """
        return self._parts(self.config.streams_by_layer(context), context)

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of generating a token in a context of ``context`` tokens.

        Args:
            context: Number of tokens of the context.
            steps: Number of streams of a token beyond its first, averaged over tokens and blocks
                and distributed over the blocks in proportion to the budget. Defaults to the budget.
        """
        planned = self.passes_per_token(context) - 1
        if steps is None or planned == 0:
            return self.flops_per_token(context)
        share = steps / planned
        streams = self.config.streams_by_layer(context)
        executed = [context + (count - context) * share for count in streams]
        return sum(self._parts(executed, context).values())

    def passes_per_token(self, context: int) -> float:
        """Returns the nominal streams of a token, averaged over the blocks.

        See ``LanguageModel.passes_per_token``.
        """
        streams = self.config.streams_by_layer(context)
        return sum(streams) / len(streams) / context

    def _parts(self, streams: Sequence[float], context: int) -> dict[str, float]:
        """Returns the FLOPs per token by part, for ``context`` tokens and ``streams`` by block."""
        config = self.config
        parts = dict.fromkeys(("output", "self_attention", "feed_forward", "forking"), 0.0)
        for block, count in zip(self.network.blocks, streams, strict=True):
            assert isinstance(block, Block)
            # each stream attends to (N + 1) / 2 streams on average
            attention = linear_flops(block.attention) + 4.0 * config.dim * (count + 1) / 2
            parts["self_attention"] += count / context * attention
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
        """Returns the states of a batch to score and the streams (L, B, P - 1) of its prefixes."""
        count = wants("thinking_steps") or wants("flops")
        if "prefix" not in batch:
            return self._decode(batch, count), None
        prefix, lengths = batch["prefix"][:, :-1], batch["prefix_lengths"] - 1
        rows, tokens = batch["prefix_row"], batch["tokens"]
        cache = self.network.new_cache(len(prefix), prefix.shape[1] + 1 + tokens.shape[1])
        before = self.network(prefix, lengths, cache, count).streams
        cache.select(rows)  # one row for each prefix -> one for each continuation
        decoded = self.network(tokens, batch["mask"].sum(dim=1), cache, count)
        return decoded, None if before is None else before[:, rows]

    def _record_streams(self, streams: Tensor, before: Tensor | None = None) -> None:
        """Records thinking steps and FLOPs of a batch from its executed streams.

        Args:
            streams: Streams (L, B, T) of each token in each block.
            before: Streams (L, B, P) of a shared prefix, whose full cost is counted for each row.
        """
        blocks = [stop - start for start, stop in self.config.stretches]
        # after n fork layers a token has at most 2^n streams
        max_forks = sum((2**forks - 1) * count for forks, count in enumerate(blocks)) / len(streams)
        record("thinking_steps", executed=_additional(streams), most=max_forks)
        streams = streams if before is None else torch.cat((before, streams), dim=2)
        tokens = (streams[0] > 0).sum(dim=1)
        rows = zip(streams.sum(dim=2).t().tolist(), tokens.tolist(), strict=True)
        flops = [sum(self._parts(row, max(1, n)).values()) * n for row, n in rows]
        record("flops", flops=torch.tensor(flops, dtype=torch.float64), tokens=tokens)

    def _check_thresholds(self) -> None:
        """Raises if thresholds are needed but missing or observed at another budget.

        The sanity check before training may run without them.
        """
        config = self.config
        last = len(config.fork_layers) - 1
        unused = config.inference_allocation != "threshold" or not config.competes(last)
        checking = self._trainer is not None and self._trainer.sanity_checking
        if self.training or unused or checking:
            return
        fork = self.network.forks[last]  # streams compete there if they compete anywhere
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
                "training; use that kappa, or choose another eval_allocation"
            )

    def _observe(self, borders: Tensor) -> None:
        """Updates the thresholds with the kappa-th scores, averaged over ranks."""
        if self._trainer is not None and self.trainer.world_size > 1:
            borders = self.trainer.strategy.reduce(borders, reduce_op="mean")
        self.network.observe(borders)

    def _next_token(self, decoded: Decoded, last: Tensor) -> Tensor:
        """Returns log-probabilities (B, V) of the token after index ``last`` (B,) of each row."""
        is_last = decoded.token == last[:, None]  # (B, N), the states of token ``last``
        width = int(is_last.sum(dim=1).max())
        # (B, width), indices of these states; rows with fewer are filled up with other states
        index = is_last.int().topk(width, dim=1).indices
        alive = is_last.gather(1, index)
        log_p = decoded.log_p.gather(1, index).masked_fill(~alive, -torch.inf)
        # (B, width, D), the same index for all channels
        states = decoded.states.gather(1, index[..., None].expand(-1, -1, decoded.states.shape[-1]))
        matrix = self.network.output_matrix.to(states.dtype)
        log_prob = logits(states.flatten(0, 1), matrix).log_softmax(dim=-1)  # (B width, V)
        log_prob = log_prob.view(len(last), width, -1)
        mixed = (log_prob + log_p[..., None]).logsumexp(dim=1)  # log sum_j P_j p_j, (B, V)
        return mixed - log_p.logsumexp(dim=1, keepdim=True)  # less log sum_j P_j (eq. 11)


def _additional(streams: Tensor) -> Tensor:
    """Returns the streams (B, T) of each token beyond its first, averaged over blocks, float64.

    Args:
        streams: int64 (L, B, T), streams in each block, 0 in padding.
    """
    return (streams - 1).clamp(min=0).sum(dim=0).double() / len(streams)


LOG_ZERO = -1e9
"""Stands for log 0. It is finite, so that a token without any state has no nan."""


class _States(NamedTuple):
    """Flat states of a batch, in the form that the mixture functions take."""

    h: Tensor
    log_p: Tensor
    owner: Tensor
    targets: Tensor


def _keep_padding(decoded: Decoded, targets: Tensor) -> _States:
    """Flattens the states of all rows; padding joins the last token of its row with weight 0."""
    rows, num_tokens = targets.shape
    real = decoded.token < num_tokens  # (B, N)
    first = num_tokens * torch.arange(rows, device=targets.device)[:, None]
    owner = first + decoded.token.clamp(max=num_tokens - 1)  # (B, N), index among B T targets
    log_p = decoded.log_p.masked_fill(~real, LOG_ZERO)
    return _States(
        decoded.states.flatten(0, 1), log_p.flatten(), owner.flatten(), targets.flatten()
    )


def _drop_padding(decoded: Decoded, targets: Tensor) -> _States:
    """Flattens the states of all rows without padding."""
    rows, num_tokens = targets.shape
    real = (decoded.token < num_tokens).flatten().nonzero()[:, 0]  # indices into B N states
    first = num_tokens * torch.arange(rows, device=targets.device)[:, None]
    owner = (decoded.token + first).flatten()  # (B N,), index among B T targets
    h, log_p = decoded.states.flatten(0, 1)[real], decoded.log_p.flatten()[real]
    return _States(h, log_p, owner[real], targets.flatten())
