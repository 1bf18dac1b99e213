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

    Training and scoring compute all slots in parallel by Jacobi iterations; generation goes slot
    by slot. Scores are exact log-likelihoods of what computes them: of the parallel computation
    with ``eval_iterations``, or of generation where ``inference`` is sequential.

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
        """Whether ``score`` reads what several rows begin with once: if it goes slot by slot."""
        return self.config.inference == "sequential" and not self.compile_network

    def build_network(self) -> SlotNetwork:
        return SlotNetwork(self.config)

    # ---- training

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the summed cross-entropy of the last pass, and what else the method adds.

        Also logs the cross-entropy after each number of steps, where that is measured.
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
        """Returns J: drawn in training, the same on all ranks, else as configured."""
        if not self.training:
            return self.config.eval_iterations
        step = 0 if self._trainer is None else self._trainer.global_step
        return draw_iterations(self.config, step)

    def _measure_depths(self, pondered: Pondered, targets: Tensor, output: LossOutput) -> Tensor:
        """Returns the mean cross-entropy after each number of steps (K+1,), and logs it."""
        every = self.config.depth_losses_every
        with torch.no_grad():
            states = self._stopped(pondered)
        if every > 1:
            valid = (targets >= 0).nonzero(as_tuple=True)  # row and place of each target
            chosen = tuple(index[::every] for index in valid)
            states, targets = states[chosen], targets[chosen]
        count = (targets >= 0).sum()
        losses = depth_losses(states, self.network.output_matrix, targets)  # (..., K+1)
        sums = losses.flatten(0, -2).sum(dim=0)
        for steps, total in enumerate(sums):
            output.stats[f"depth_{steps}/nll"] = Mean(total, count)
        return sums / count.clamp(min=1)

    def _stopped(self, pondered: Pondered) -> Tensor:
        """Hidden states (B, T, K+1, D) the head reads if every token stops after step i."""
        return pondered.states

    # ---- scoring

    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns exact log-probabilities of a window batch's targets.

        Records what ``step_scores`` records (the depth losses of PonderLM-3 are of renormalised
        partial sums: the last one differs from the score by the order of tau); ``states``, see
        ``network.record_states``; ``router`` where there is one: ``log_steps`` and ``log_tail``
        (B, T, K+1); with ``inference: sequential`` ``flops``, see ``LanguageModel.adaptive``.
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
                own = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
                # a row costs what it does alone, with its prefix
                real = torch.cat((real, own), dim=1)
                executed = torch.cat((executed, pondered.executed), dim=1)
                flops = slot_network.executed_flops(self.network, executed, real)
                record("flops", flops=flops, tokens=real.sum(dim=1))
            record_states(pondered.states, None)
        else:
            pondered = self.network(tokens, self._iterations())
        return pondered

    def _prefix(self, batch: dict[str, Any]) -> tuple[SlotCache | None, Tensor, Tensor]:
        """Returns copies of the cache of each row's prefix, and what its tokens (B, P) executed.

        The latter are steps, int64, and which tokens are no padding, bool; P is 0 without prefixes.
        """
        tokens = batch["tokens"]
        if "prefix" not in batch:
            none = tokens[:, :0]
            return None, none, none.bool()
        prefix, rows = batch["prefix"][:, :-1], batch["prefix_row"]
        lengths = batch["prefix_lengths"] - 1  # the last token is the first of ``tokens``
        room = prefix.shape[1] + tokens.shape[1]
        cache = sequential.new_cache(self.network, len(prefix), room)
        executed = sequential.read_text(self.network, prefix, lengths, cache).executed
        real = torch.arange(prefix.shape[1], device=prefix.device) < lengths[:, None]
        cache.select(rows)
        return cache, executed[rows], real[rows]

    # ---- generation

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> SlotCache:
        room = prompts.shape[1] + max_new_tokens
        cache = sequential.new_cache(self.network, len(prompts), room)
        if prompts.shape[1] > 1:
            how = self.config.prefill
            sequential.read_prompt(self.network, cache, prompts[:, :-1], lengths - 1, how)
        return cache

    def decode_step(self, cache: SlotCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Computes one slot of each row; ready are those whose token has taken its last step.

        Returns next-token logits (B, V), zeros in rows that are not ready.

        Records ``generated_steps``: ``steps`` int64, the additional steps of each token that is
        ready.
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
        """Returns the FLOPs per token of one pass over all slots; see ``LanguageModel``."""
        return slot_network.flops_by_part(self.network, context)


class PonderLM(PonderLM2):
    """PonderLM-3: a router decides how many steps each token takes (arXiv 2603.02023).

    In training later steps are damped by a differentiable attention mask, and states are
    integrated by the step distribution; outside training, steps of tail mass below tau are
    skipped.

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
        """Adds the penalty, and logs the steps that tokens take.

        ``expected_steps`` is sum_{k >= 1} w_k, ``executed_steps`` those of tau; also rho_i, f_k
        and n_k of the penalty.
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
        """Adds the penalty, a mean over the micro-batch."""
        assert pondered.steps is not None
        tail, valid = pondered.steps.log_tail.flatten(0, 1), (targets >= 0).flatten()
        found = minimum_ponder_penalty(tail, losses, self.config, valid)
        output.terms["penalty"] = Term(found.value, 1.0)
        if found.ratios is None or found.fractions is None or found.counts is None:
            return
        for steps, ratio in enumerate(found.ratios):
            output.stats[f"depth_{steps}/rho"] = ratio
        for steps, (share, count) in enumerate(zip(found.fractions, found.counts, strict=True), 1):
            output.stats[f"depth_{steps}/fraction"] = share
            output.stats[f"depth_{steps}/penalised"] = count.float()

    def _stopped(self, pondered: Pondered) -> Tensor:
        """Partial sums h(<=i) (B, T, K+1, D), renormalised except for the paper's penalty."""
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
    """Returns log-probabilities of targets of tokens that take additional steps.

    Records ``thinking_steps``: ``executed`` (B, T) int64, additional steps of each token, and
    ``most``, K; ``depth_losses``: ``losses`` (B, T, K+1), cross-entropy in nats if every token
    stops after step i, 0 where there is no target; ``entropy``: ``entropy`` (B, T) of the
    next-token distributions, in nats; ``greedy``: ``greedy`` (B, T) bool, whether a target is the
    most likely token.

    Args:
        model: Its network has the output matrix.
        h: Normed states that predict (B, T, D).
        by_step: Returns the states (B, T, K+1, D) that predict after each number of steps.
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
    # of all rows: to select those with a target, training would wait for the device
    each = [linear_cross_entropy_each(h, matrix, targets)[1] for h in states.unbind(dim=-2)]
    return torch.stack(each, dim=-1)
