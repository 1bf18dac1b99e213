"""The Latent-Thought Language Model as a LightningModule, and its decoding cache."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_models.base import LanguageModel
from lightning_models.flops import training_flops
from lightning_models.latent_thought.config import LatentThoughtConfig
from lightning_models.latent_thought.network import (
    LatentThoughtNetwork,
    Memory,
    inference_flops,
    pass_by_part,
    published_training_flops,
)
from lightning_models.latent_thought.posterior import (
    InnerLoop,
    Noise,
    Posterior,
    Purpose,
    divergence_floor,
    infer,
)
from lightning_models.latent_thought.reading import LearningReading, Reading
from lightning_models.layers import KVCache, record, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import (
    IGNORE_INDEX,
    linear_cross_entropy,
    token_scores,
)
from lightning_models.outputs import Likelihood, LossOutput, Mean, Scores, Term
from lightning_models.runtime import gradients_on, in_eval_mode, ordinary

# ---- decoding cache


class LatentCache:
    """Decoding cache of rows of text, whose latent vectors are constant until inferred again.

    The model sets ``kv`` and ``memory`` after inference.
    """

    kv: KVCache
    """Keys and values of all tokens except the last of each row."""
    memory: Memory
    """Keys and values of the latent vectors."""

    def __init__(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]],
    ) -> None:
        space = prompts.new_zeros(len(prompts), max_new_tokens)
        self.text = torch.cat((prompts, space), dim=1)  # (B, P + new tokens)
        self.lengths = lengths
        self.streams = list(streams)
        self.new_tokens: int | None = None
        """Number of tokens of each row after its prompt, None before the first step."""

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a row."""
        return self.text.shape[1]

    def read(self, tokens: Tensor) -> None:
        """Appends the last token (B,) of each row, which in the first call the prompt contains."""
        if self.new_tokens is None:
            self.new_tokens = 0
            return
        self.text.scatter_(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        self.new_tokens += 1

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.text, self.lengths = self.text[rows], self.lengths[rows]
        self.streams = [self.streams[row] for row in rows.tolist()]
        self.memory = [(keys[rows], values[rows]) for keys, values in self.memory]
        self.kv.select(rows)


# ---- LightningModule


Batch = dict[str, Any]

TRAINED, SCORED, WRITTEN = range(3)
"""Use of a row's draws, the second element of their key after the seed."""


def mask_of(batch: Batch) -> Tensor:
    """Returns the mask of real tokens (B, T) bool; without a mask in the batch all are real."""
    return batch["mask"] if "mask" in batch else torch.ones_like(batch["tokens"], dtype=torch.bool)


class LatentThoughtLM(LanguageModel):
    """Decoder conditioned on latent vectors that are inferred for each sequence.

    *Scalable Language Models with Posterior Inference of Latent Thought Vectors* (Kong et al.).
    Reads windows of tokens. With ``context`` (B,) in a batch, latent vectors are inferred from that
    number of tokens of each row alone, and scores are estimates.

    Args:
        config: Decoder, latent vectors, prior and inference.
        optimizer: Optimiser and schedule of the slow learning.
        compile: Whether to compile the network with torch.compile (in place).
    """

    whole_rows = True
    shards_blocks = False
    config: LatentThoughtConfig
    network: LatentThoughtNetwork

    def __init__(
        self,
        config: LatentThoughtConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def batch_keys(self) -> tuple[str, ...]:
        return (*super().batch_keys, "sequence_id")

    @property
    def likelihood(self) -> Likelihood:
        """``lower_bound`` by default.

        A Langevin sample has no density, so only the ``noncausal`` likelihood given the sample is
        known. With the noise that inference has adapted to, the bound is an ``estimate``.
        """
        if self.config.inference == "langevin":
            return "noncausal"
        return "lower_bound" if self.config.bound_noise == "fresh" else "estimate"

    @property
    def causal(self) -> bool:
        """False, since latents are inferred from the whole sequence, for which the KL term pays."""
        return False

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``score`` infers from and reads a prefix shared by several rows only once."""
        return not self.compile_network

    def build_network(self) -> LatentThoughtNetwork:
        return LatentThoughtNetwork(self.config)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, index: int) -> Any:
        # Adds the rows' indices as a list for drawing noise on the host, without a device sync.
        moved = super().transfer_batch_to_device(batch, device, index)
        return {**moved, "numbers": batch["sequence_id"].tolist()}

    # ---- training

    def loss(self, batch: Batch) -> LossOutput:
        """Returns -log p(x | z) of the targets at the inferred z, the objective of slow learning.

        Fast learning infers q(z | x) first. The terms are ``nll``; with an encoder ``kl_loss``, its
        annealed KL divergence; and with ``slow_gradient: trajectory`` a zero, ``trajectory``, that
        carries the inner gradients. The statistics are ``elbo/token``, ``nll/token``, ``kl/token``
        and ``kl_floor/token`` in nats. They use the sample to which inference has adapted, so this
        ELBO is not a bound.

        Records the statistics of ``infer``.
        """
        tokens, targets, mask = batch["tokens"], batch["targets"], mask_of(batch)  # (B, T) each
        # attached to the graph, through which slow learning goes
        start = self.network.begin(tokens)
        with self._fast_mode():
            reading: Reading
            if self.config.slow_gradient == "trajectory":
                reading = LearningReading(self.network, tokens, targets, mask, start)
            else:
                shared = None if self._drops() else start
                reading = Reading(self.network, tokens, targets, mask, shared)
            posterior = self._infer(reading, self._keys(batch, TRAINED), self._fast_rate())
        # The inner sample (B, Z, D) is detached, except with an encoder: only the decoder learns.
        h = self.network(start, posterior.inner)  # (B, T, D)
        nll = linear_cross_entropy(h, self.network.output_matrix, targets)
        divergence, count = posterior.divergence(), (targets >= 0).sum()  # (B, Z), ()
        kl = divergence.masked_fill(~reading.informed[:, None], 0.0).sum()
        terms = {"nll": Term(nll, count, "targets")}
        if self.config.inference == "amortised":
            terms["kl_loss"] = Term(self._kl_weight() * kl, count, "targets")
        if isinstance(reading, LearningReading):
            # NOTE(paper): the public code adds the gradients of sums over a batch to the gradient
            # of a token mean; here both are means over tokens, for any number of ranks.
            terms["trajectory"] = Term(reading.surrogate(), count, "targets")
        return LossOutput(terms, self._statistics(nll, kl, count), sequence_nats=kl.detach())

    def _infer(
        self, reading: Reading, keys: Sequence[tuple[int, ...]], rate: float | None = None
    ) -> Posterior:
        """Returns q of each row by fast learning, which enables gradients if it needs them."""
        config = self.config
        loop = InnerLoop(config, config.inner_lr[1] if rate is None else rate)
        shape = config.num_latents, config.dim
        acc_dtype = torch.promote_types(self.network.output_matrix.dtype, torch.float32)
        noise = Noise(keys, shape, reading.tokens.device, acc_dtype)
        if config.inference == "amortised":
            return infer(reading, noise, loop)
        with gradients_on():
            return infer(reading, noise, loop)

    def _drops(self) -> bool:
        """Whether training has dropout, which inference by gradient must disable."""
        dropouts = self.config.dropout, self.config.attention_dropout
        return self.config.inference != "amortised" and max(dropouts) > 0

    def _fast_mode(self) -> contextlib.AbstractContextManager[None]:
        return in_eval_mode(self.network) if self._drops() else contextlib.nullcontext()

    def _keys(self, batch: Batch, use: int) -> list[tuple[int, ...]]:
        """Returns the key of each row's draws, which in training includes the step."""
        seed, step = self.config.inference_seed, 0
        if use == TRAINED and self._trainer is not None:
            step = self._trainer.global_step
        ids = batch["numbers"] if "numbers" in batch else batch["sequence_id"].tolist()
        return [(seed, use, step, row_id) for row_id in ids]

    def _fast_rate(self) -> float:
        """Returns eta_fast at this point of training, or its final value without a trainer."""
        first, last = self.config.inner_lr
        if first == last or self.config.inference != "variational":
            return last
        return first + (last - first) * self.progress(f"inner_lr ({[first, last]})")

    def _kl_weight(self) -> float:
        """Returns the weight of an encoder's KL term at this point of training."""
        part = self.config.kl_annealing
        return min(1.0, self.progress(f"kl_annealing ({part})") / part) if part else 1.0

    def _statistics(self, nll: Tensor, kl: Tensor, count: Tensor) -> dict[str, Tensor | Mean]:
        nats, divergence = nll.detach(), kl.detach()
        # rounded, so that few values are computed and cached
        floor = self._floor(round(self._fast_rate(), 3)) / self.config.block_size
        return {
            "elbo/token": Mean(-(nats + divergence), count),
            "nll/token": Mean(nats, count),
            "kl/token": Mean(divergence, count),
            "kl_floor/token": torch.full((), floor, device=self.device),
        }

    # ---- evaluation

    def score(self, batch: Batch) -> Scores:
        """Returns log p(x | z) of the targets and -KL(q || p) of each sequence, an ELBO.

        By default z is drawn from q with noise that inference has not seen, so that the sum is an
        unbiased estimate of a lower bound; see ``bound_noise``. With ``context`` in the batch, q is
        inferred from that number of tokens of each row and z is its mean, for an estimate of
        log p(rest | context). With ``prefix``, q is inferred once for each prefix. Draws depend on
        the seed and the sequence's index alone.

        Without ``prefix`` records ``posterior``: ``mean`` and ``log_variance`` (B, Z, D; None for a
        chain), ``kl`` (B, Z), ``nll`` (B,) at the scored sample, ``nll_other`` (B,) at the sample
        of another row (None if there is no other), ``targets`` (B,), ``informed`` (B,) bool,
        ``kl_floor``, nats of a sequence (:func:`divergence_floor`), and ``latents_per_layer``;
        ``prior_log_prob``: ``log_prob`` (B, T) of the targets in nats at the prior's mean, z = 0;
        ``greedy``: ``greedy`` (B, T) bool, whether a target is the most likely token under z; and
        what ``infer`` records.
        """
        batch = ordinary(batch)
        targets = batch["targets"]
        shared = "prefix" in batch
        has_context = shared or "context" in batch
        keys = self._keys(batch, SCORED)
        if shared:  # rows with the same prefix have the same key
            by_prefix = dict(zip(batch["prefix_row"].tolist(), keys, strict=True))
            keys = [by_prefix[row] for row in range(len(batch["prefix"]))]
        with self._fast_mode():
            reading = self._context_reading(batch) if has_context else self._reading(batch)
            posterior = self._infer(reading, keys)
        divergence = posterior.divergence()  # (B, Z)
        if has_context:
            z = posterior.mean.masked_fill(~reading.informed[:, None, None], 0.0)
        else:
            z = self._scored_sample(posterior, keys)
        with torch.no_grad():
            # (B, T, D)
            h = self._given_states(batch, z) if has_context else self.network(reading.start, z)
        log_prob = self.target_log_probs(h, targets)  # (B, T)
        num_targets = (targets >= 0).sum(dim=1)
        if wants("posterior") and not shared:
            record(
                "posterior",
                mean=posterior.mean.detach(),
                log_variance=posterior.log_variance,
                kl=divergence.detach(),
                nll=-log_prob.sum(dim=1),
                nll_other=self._nll_of_others(reading, z),
                targets=num_targets,
                informed=reading.informed,
                kl_floor=self._floor(self.config.inner_lr[1]),
                latents_per_layer=self.config.latents_per_layer,
            )
        if has_context:
            return Scores(log_prob, log_prob.new_zeros(len(log_prob)), num_targets, "estimate")
        if wants("prior_log_prob"):
            with torch.no_grad():
                h = self.network(reading.start, torch.zeros_like(z))
            scores = token_scores(h, self.network.output_matrix, targets)
            record("prior_log_prob", log_prob=scores.log_prob)
        kl = divergence.detach().sum(dim=1).masked_fill(~reading.informed, 0.0)
        return Scores(log_prob, -kl, num_targets, self.likelihood)

    def _nll_of_others(self, reading: Reading, z: Tensor) -> Tensor | None:
        """Returns -log p(x | z') (B,) with z' of another text, a control for z (B, Z, D).

        The other text is the previous informed row. Returns None if there is only one.
        """
        (rows,) = torch.nonzero(reading.informed, as_tuple=True)
        if len(rows) < 2:
            return None
        others = z.index_copy(0, rows, z[rows.roll(1)])  # uninformed rows keep their z
        with torch.no_grad():
            h = self.network(reading.start, others)  # (B, T, D)
            scores = token_scores(h, self.network.output_matrix, reading.targets)
        return -scores.log_prob.sum(dim=1)

    def _floor(self, rate: float) -> float:
        """Returns an approximate lower bound on a sequence's KL divergence, in nats."""
        config = self.config
        return divergence_floor(InnerLoop(config, rate)) * config.num_latents * config.dim

    def _reading(self, batch: Batch) -> Reading:
        read = batch["tokens"], batch["targets"], mask_of(batch)
        return Reading(self.network, *read, selects=True)

    def _context_reading(self, batch: Batch) -> Reading:
        """Returns the reading of the prefixes, or the first ``context`` tokens of each row."""
        if "prefix" in batch:
            tokens, lengths = batch["prefix"], batch["prefix_lengths"]
            known = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        else:
            lengths = batch["context"]
            # the decoder is causal, so tokens after the longest context can be cut off
            longest = max(1, int(lengths.max()))
            tokens, real = batch["tokens"][:, :longest], mask_of(batch)[:, :longest]
            known = real & (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None])
        return Reading(self.network, tokens, _following(tokens, known), known, selects=True)

    def _given_states(self, batch: Batch, z: Tensor) -> Tensor:
        """Returns the states (B, T, D) of the tokens, with a z for each row or for each prefix."""
        network, tokens = self.network, batch["tokens"]
        if "prefix" not in batch:
            return network(network.begin(tokens), z)
        prefix, rows, memory = batch["prefix"][:, :-1], batch["prefix_row"], network.remember(z)
        cache = network.new_cache(len(prefix), prefix.shape[1] + tokens.shape[1])
        network.decode(network.begin(prefix, cache), memory, cache)
        cache.advance(batch["prefix_lengths"] - 1)
        cache.select(rows)
        memory = [(keys[rows], values[rows]) for keys, values in memory]
        return network.decode(network.begin(tokens, cache), memory, cache)

    def _scored_sample(self, posterior: Posterior, keys: Sequence[tuple[int, ...]]) -> Tensor:
        if self.config.bound_noise == "inner":
            return posterior.inner.detach()
        _, vectors, width = posterior.mean.shape
        # independent of the draws that q was fitted to
        noise = Noise(keys, (vectors, width), posterior.mean.device, posterior.mean.dtype)
        return posterior.sample(noise.draw(Purpose.SCORED)).detach()

    # ---- decoding

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> LatentCache:
        """Returns the cache after all but the last token of each right-padded prompt (B, P).

        z is a sample of q(z | prompt) (eq. 7), or of the prior (eq. 8) for a prompt of one token,
        which has no targets to infer from.
        """
        rows = streams or [(0, row) for row in range(len(prompts))]
        cache = LatentCache(prompts, lengths, max_new_tokens, rows)
        self._think(cache)
        return cache

    def _think(self, cache: LatentCache) -> None:
        """Infers latent vectors from the text so far and reads all but its last token."""
        longest = int(cache.lengths.max())
        text, index = cache.text[:, :longest], torch.arange(longest, device=cache.text.device)
        known = index < cache.lengths[:, None]  # (B, longest), false in padding
        seed = self.config.inference_seed
        keys = [(seed, WRITTEN, *stream) for stream in cache.streams]
        with self._fast_mode():
            reading = Reading(self.network, text, _following(text, known), known)
            posterior = self._infer(reading, keys)
        shape = posterior.mean.shape[1], posterior.mean.shape[2]
        noise = Noise(keys, shape, posterior.mean.device, posterior.mean.dtype)
        z = posterior.sample(noise.draw(Purpose.SCORED)).detach()  # (B, Z, D)
        cache.memory = self.network.remember(z)
        cache.kv = self.network.new_cache(len(text), cache.capacity)
        if longest > 1:
            start = self.network.begin(text[:, :-1], cache.kv)
            self.network.decode(start, cache.memory, cache.kv)
            cache.kv.advance(cache.lengths - 1)  # padding of shorter rows is overwritten later

    def decode_step(self, cache: LatentCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns next-token logits (B, V) after ``tokens`` (B,), for which every row is ready.

        After every ``resample_every`` new tokens z is inferred again from the whole text.
        """
        cache.read(tokens)
        every = self.config.resample_every
        if every and cache.new_tokens and cache.new_tokens % every == 0:
            self._think(cache)
        start = self.network.begin(tokens[:, None], cache.kv)
        h = self.network.decode(start, cache.memory, cache.kv)  # (B, 1, D)
        cache.kv.advance(1)
        logits = h[:, 0] @ self.network.output_matrix.to(h.dtype).t()  # (B, V)
        return logits.float(), torch.ones_like(tokens, dtype=torch.bool)

    # ---- compute

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the FLOPs per token at sequences of ``context`` tokens, including inference of z.

        An inner step computes no gradients of weights; see ``published_flops_per_token`` for the
        paper's count.
        """
        once = sum(pass_by_part(self.network, context).values())
        fast = inference_flops(self.network, context, training)
        if not training:
            return once + fast
        blocks = once - self.flops_by_part(context)["output"]
        slow = training_flops(once, blocks, self.config)
        if self.config.inference == "amortised":
            return slow + training_flops(fast, fast, self.config)
        return slow + fast  # inner steps have frozen weights and recompute nothing

    def flops_by_part(self, context: int) -> dict[str, float]:
        return pass_by_part(self.network, context)  # Fig. 3

    def passes_per_token(self, context: int) -> float:
        """Returns T_fast + 1 as in Table 1, or 1 with an encoder."""
        amortised = self.config.inference == "amortised"
        return 1.0 if amortised else 1.0 + self.config.inner_steps

    def published_flops_per_token(self, context: int) -> float:
        return published_training_flops(self.network, context)


def _following(tokens: Tensor, known: Tensor) -> Tensor:
    """Returns the next token (B, T) at each position where it is known, and -100 elsewhere."""
    following = torch.roll(tokens, -1, dims=1)  # token t + 1 at t; the last one wraps around
    following_known = torch.roll(known, -1, dims=1)
    following_known[:, -1] = False
    return following.masked_fill(~(known & following_known), IGNORE_INDEX)
