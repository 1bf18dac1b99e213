"""LightningModules of PonderLM-2 and PonderLM-3."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_models.base import LanguageModel
from lightning_models.layers import record, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import (
    linear_cross_entropy,
    linear_cross_entropy_each,
    logits,
    token_entropies,
)
from lightning_models.outputs import LossOutput, Mean, Scores, Term
from lightning_models.ponderlm import network as slot_network
from lightning_models.ponderlm import sequential
from lightning_models.ponderlm.config import PonderConfig, PonderingConfig, PonderLM2Config
from lightning_models.ponderlm.network import (
    Pondered,
    PonderNetwork,
    SlotNetwork,
    draw_iterations,
    record_states,
)
from lightning_models.ponderlm.router import minimum_ponder_penalty, partial_states
from lightning_models.ponderlm.sequential import SlotCache


class PonderLM2(LanguageModel):
    """PonderLM-2: every token takes K additional steps in latent slots (arXiv 2509.23184).

    Training and scoring compute all slots in parallel by Jacobi iterations, generation slot by
    slot. Scores are exact log-likelihoods of the parallel computation with ``eval_iterations``, or
    of generation if ``inference`` is sequential.

    Args:
        config: Shape of the network, steps and iterations.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network's blocks with torch.compile (in place).
    """

    shards_blocks = False
    config: PonderLM2Config
    network: SlotNetwork

    def __init__(
        self,
        config: PonderLM2Config,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``score`` reads a prefix shared by several rows once, as it can slot by slot."""
        return self.config.inference == "sequential" and not self.compile_network

    def build_network(self) -> SlotNetwork:
        return SlotNetwork(self.config)

    # ---- training

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the summed cross-entropy of the last pass and the method's additional terms.

        Also logs the cross-entropy after each number of steps if the config asks for it.
        """
        pondered: Pondered = self.network(batch["tokens"], self._iterations())
        targets = batch["targets"]
        nll = linear_cross_entropy(pondered.read_out, self.network.output_matrix, targets)
        output = LossOutput({"nll": Term(nll, (targets >= 0).sum(), "targets")})
        measured = self.config.measures_depths
        losses = self._measure_depths(pondered, targets, output) if measured else None
        self._add(pondered, targets, losses, output)
        return output

    def _add(
        self, pondered: Pondered, targets: Tensor, losses: Tensor | None, output: LossOutput
    ) -> None:
        """Adds the method's additional terms and statistics."""

    def _iterations(self) -> int | None:
        """Returns J, which is drawn in training and ``eval_iterations`` otherwise."""
        if not self.training:
            return self.config.eval_iterations
        step = 0 if self._trainer is None else self._trainer.global_step
        return draw_iterations(self.config, step)

    def _measure_depths(self, pondered: Pondered, targets: Tensor, output: LossOutput) -> Tensor:
        """Returns and logs the mean cross-entropy after each number of steps (K+1,)."""
        every = self.config.depth_losses_every
        with torch.no_grad():
            states = self._stopped(pondered)
        if every > 1:
            valid = (targets >= 0).nonzero(as_tuple=True)  # row and column of each target
            chosen = tuple(index[::every] for index in valid)
            states, targets = states[chosen], targets[chosen]  # (n, K+1, D), (n,)
        count = (targets >= 0).sum()
        losses = depth_losses(states, self.network.output_matrix, targets)  # (..., K+1)
        sums = losses.flatten(0, -2).sum(dim=0)
        for steps, total in enumerate(sums):
            output.stats[f"depth_{steps}/nll"] = Mean(total, count)
        return sums / count.clamp(min=1)

    def _stopped(self, pondered: Pondered) -> Tensor:
        """Returns the inputs (B, T, K+1, D) of the output layer if tokens stop after step i."""
        return pondered.states

    # ---- scoring

    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns exact log-probabilities of a window batch's targets.

        Records the statistics of ``step_scores``; ``states``, see ``network.record_states``; with a
        router, ``router``: ``log_steps`` and ``log_tail`` (B, T, K+1); and with ``inference:
        sequential`` ``flops``, see ``LanguageModel.adaptive``. PonderLM-3 computes depth losses
        from renormalised partial sums, so the last one differs from the score by order tau.
        """
        pondered = self._ponder(batch)
        if pondered.steps is not None:
            steps = pondered.steps
            record("router", log_steps=steps.log_steps, log_tail=steps.log_tail)
        h, by_step = pondered.read_out, lambda: self._stopped(pondered)
        return step_scores(self, h, by_step, batch["targets"], pondered.executed)

    def _ponder(self, batch: dict[str, Any]) -> Pondered:
        tokens = batch["tokens"]
        if self.config.inference == "sequential" and not self.training:
            valid = batch.get("mask", torch.ones_like(tokens))
            lengths = valid.sum(dim=1)  # (B,)
            cache, executed, real = self._prefix(batch)
            pondered = sequential.read_text(self.network, tokens, lengths, cache)
            if wants("flops"):
                new = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
                # each row is charged for its whole prefix, as if it were scored alone
                real = torch.cat((real, new), dim=1)  # (B, P + T)
                executed = torch.cat((executed, pondered.executed), dim=1)
                flops = slot_network.executed_flops(self.network, executed, real)
                record("flops", flops=flops, tokens=real.sum(dim=1))
            record_states(pondered.states, None)
        else:
            pondered = self.network(tokens, self._iterations())
        return pondered

    def _prefix(self, batch: dict[str, Any]) -> tuple[SlotCache | None, Tensor, Tensor]:
        """Reads the shared prefixes of a batch.

        Returns:
            For each row a copy of its prefix's cache, or None without prefixes; the executed steps
            int64 (B, P) of the prefix's tokens; and bool (B, P), false in padding. P may be 0.
        """
        tokens = batch["tokens"]
        if "prefix" not in batch:
            empty = tokens[:, :0]
            return None, empty, empty.bool()
        prefix, rows = batch["prefix"][:, :-1], batch["prefix_row"]
        lengths = batch["prefix_lengths"] - 1  # the last token is the first of ``tokens``
        num_tokens = prefix.shape[1] + tokens.shape[1]
        cache = sequential.new_cache(self.network, len(prefix), num_tokens)
        executed = sequential.read_text(self.network, prefix, lengths, cache).executed
        real = torch.arange(prefix.shape[1], device=prefix.device) < lengths[:, None]
        cache.select(rows)  # one row for each prefix -> one for each row of the batch
        return cache, executed[rows], real[rows]

    # ---- generation

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> SlotCache:
        num_tokens = prompts.shape[1] + max_new_tokens
        cache = sequential.new_cache(self.network, len(prompts), num_tokens)
        if prompts.shape[1] > 1:
            prefill = self.config.prefill
            sequential.read_prompt(self.network, cache, prompts[:, :-1], lengths - 1, prefill)
        return cache

    def decode_step(self, cache: SlotCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Computes one slot of each row; a row is ready after the last step of its token.

        Returns next-token logits (B, V), zero in rows that are not ready, and the mask of ready
        rows (B,).

        Records ``generated_steps``: ``steps`` int64, the additional steps of each ready token.
        """
        ready = sequential.advance(self.network, cache, tokens)
        if wants("generated_steps"):
            record("generated_steps", steps=cache.last[ready])
        matrix = self.network.output_matrix
        out = torch.zeros(len(tokens), len(matrix), device=tokens.device)
        if bool(ready.any()):
            h = cache.read_out[ready]
            out[ready] = logits(h, matrix.to(h.dtype)).float()
        return out, ready

    # ---- compute

    def flops_per_token(self, context: int, training: bool = False) -> float:
        if training:
            return slot_network.training_flops(self.network, context)
        return slot_network.scoring_flops(self.network, context)

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        return slot_network.generation_flops(self.network, context, steps)

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the FLOPs per token of one pass over all slots, see ``LanguageModel``."""
        return slot_network.flops_by_part(self.network, context)


class PonderLM(PonderLM2):
    """PonderLM-3: a router decides how many steps each token takes (arXiv 2603.02023).

    In training a differentiable attention mask attenuates later steps, and states are integrated
    over the step distribution. Outside of training, steps with tail mass below tau are skipped.

    Args:
        config: Shape of the network, steps, router and penalty.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network's blocks with torch.compile (in place).
    """

    config: PonderConfig
    network: PonderNetwork

    def __init__(
        self,
        config: PonderConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    def build_network(self) -> PonderNetwork:
        return PonderNetwork(self.config)

    @property
    def adaptive(self) -> bool:
        """Whether scoring skips the steps that tokens do not take."""
        return self.config.inference == "sequential"

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        return self.network.router.parameters()

    def _add(
        self, pondered: Pondered, targets: Tensor, losses: Tensor | None, output: LossOutput
    ) -> None:
        """Adds the penalty and logs the steps of tokens.

        ``expected_steps`` is sum_{k >= 1} w_k, and ``executed_steps`` are the steps not skipped at
        tau. Also logs rho_i, f_k and n_k of the penalty.
        """
        self._log_steps(pondered, targets, output)
        if self.config.penalty_weight:
            self._penalise(pondered, targets, losses, output)

    def _log_steps(self, pondered: Pondered, targets: Tensor, output: LossOutput) -> None:
        assert pondered.steps is not None
        valid = targets >= 0
        expected = pondered.steps.log_tail[..., 1:].detach().exp().sum(dim=-1)
        output.stats["expected_steps"] = Mean((expected * valid).sum(), valid.sum())
        output.stats["executed_steps"] = Mean((pondered.executed * valid).sum(), valid.sum())

    def _penalise(
        self, pondered: Pondered, targets: Tensor, losses: Tensor | None, output: LossOutput
    ) -> None:
        """Adds the penalty, which is a mean over the micro-batch."""
        assert pondered.steps is not None
        tail, valid = pondered.steps.log_tail.flatten(0, 1), (targets >= 0).flatten()
        penalty = minimum_ponder_penalty(tail, losses, self.config, valid)
        output.terms["penalty"] = Term(penalty.value, 1.0)
        if penalty.ratios is None or penalty.fractions is None or penalty.counts is None:
            return
        for steps, ratio in enumerate(penalty.ratios):
            output.stats[f"depth_{steps}/rho"] = ratio
        by_step = zip(penalty.fractions, penalty.counts, strict=True)
        for steps, (fraction, count) in enumerate(by_step, 1):
            output.stats[f"depth_{steps}/fraction"] = fraction
            output.stats[f"depth_{steps}/penalised"] = count.float()

    def _stopped(self, pondered: Pondered) -> Tensor:
        # partial sums h(<=i) (B, T, K+1, D), renormalised except for the paper's penalty
        assert pondered.steps is not None
        renormalised = not self.training or self.config.penalty != "paper"
        return partial_states(pondered.states, pondered.steps.log_steps, renormalised)


def step_scores(
    model: LanguageModel,
    h: Tensor,
    by_step: Callable[[], Tensor],
    targets: Tensor,
    executed: Tensor,
) -> Scores:
    """Returns log-probabilities of targets for a model whose tokens take additional steps.

    Records ``thinking_steps``: ``executed`` (B, T) int64, additional steps of each token, and
    ``most``, K; ``depth_losses``: ``losses`` (B, T, K+1), cross-entropy in nats if every token
    stops after step i, 0 without a target; ``entropy``: ``entropy`` (B, T) of the next-token
    distributions, in nats; ``greedy``: ``greedy`` (B, T) bool, whether a target is the most likely
    token.

    Args:
        model: Model whose network has the output matrix.
        h: Normed states (B, T, D) that predict.
        by_step: Function that returns the states (B, T, K+1, D) that predict after each number of
            steps.
        targets: int64 (B, T), -100 where nothing is predicted.
        executed: Additional steps of each token, int64 (B, T).
    """
    config, matrix = cast(PonderingConfig, model.config), cast(Any, model.network).output_matrix
    record("thinking_steps", executed=executed, most=config.thinking_steps)
    if wants("depth_losses"):
        record("depth_losses", losses=depth_losses(by_step(), matrix, targets))
    if wants("entropy"):
        record("entropy", entropy=token_entropies(h, matrix))
    log_prob = model.target_log_probs(h, targets)
    num_targets = (targets >= 0).sum(dim=1)
    return Scores(log_prob, log_prob.new_zeros(len(log_prob)), num_targets, model.likelihood)


@torch.no_grad()
def depth_losses(states: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy (..., K+1) in nats of targets after i steps, 0 without a target.

    Args:
        states: Normed states after i steps (..., K+1, D).
        matrix: Output matrix (V, D).
        targets: int64 (...), -100 where nothing is predicted.
    """
    # over all positions, since selecting targets would synchronise with the device in training
    nll_by_depth = [linear_cross_entropy_each(h, matrix, targets)[1] for h in states.unbind(dim=-2)]
    return torch.stack(nll_by_depth, dim=-1)
