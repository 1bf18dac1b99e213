"""PonderLM-3 and PonderLM-2 as LightningModules."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_models.base import LanguageModel
from lightning_models.layers import record, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import (
    greedy_targets,
    linear_cross_entropy,
    logits,
    token_entropies,
    token_log_probs,
)
from lightning_models.outputs import LossOutput, Mean, Scores, Term
from lightning_models.ponderlm import compute, sequential
from lightning_models.ponderlm.cache import SlotCache
from lightning_models.ponderlm.config import PonderConfig, PonderLM2Config
from lightning_models.ponderlm.jacobi import draw_iterations, record_states
from lightning_models.ponderlm.network import Pondered, PonderNetwork, SlotNetwork
from lightning_models.ponderlm.penalty import minimum_ponder_penalty
from lightning_models.ponderlm.router import partial_states


class PonderLM2(LanguageModel):
    """PonderLM-2: every token takes K additional steps in latent slots (arXiv 2509.23184).

    Training and scoring compute all slots in parallel by Jacobi iterations; generation goes slot
    by slot. Scores are exact log-likelihoods of what computes them: of the parallel computation
    with ``eval_iterations``, or of generation where ``inference`` is sequential.
    """

    config: PonderLM2Config
    network: SlotNetwork

    def __init__(
        self,
        config: PonderLM2Config,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: shape of the network, steps and iterations.
            optimizer: optimiser and schedule.
            compile: whether to compile the network's blocks with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    def build_network(self) -> SlotNetwork:
        """Returns a freshly initialised network."""
        return SlotNetwork(self.config)

    # ---- training

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the summed cross-entropy of the last pass, and what else the method adds.

        Where it is measured, the cross-entropy behind each number of steps is logged beside.
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
        """Adds terms and statistics of the method's own."""

    def _iterations(self) -> int | None:
        """Returns J: drawn in training, the same on all ranks, else as configured."""
        if not self.training:
            return self.config.eval_iterations
        step = 0 if self._trainer is None else self._trainer.global_step
        return draw_iterations(self.config, step)

    def _measure_depths(self, pondered: Pondered, targets: Tensor, output: LossOutput) -> Tensor:
        """Returns the mean cross-entropy behind each number of steps (K+1,), and logs it."""
        every = self.config.depth_losses_every
        with torch.no_grad():
            states = self._stopped(pondered)
        if every > 1:
            valid = (targets >= 0).nonzero(as_tuple=True)
            chosen = tuple(index[::every] for index in valid)
            states, targets = states[chosen], targets[chosen]
        count = (targets >= 0).sum()
        sums = self._depth_losses(states, targets).flatten(0, -2).sum(dim=0)
        for steps, total in enumerate(sums):
            output.stats[f"depth_{steps}/nll"] = Mean(total, count)
        return sums / count.clamp(min=1)

    @torch.no_grad()
    def _depth_losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """Returns the cross-entropy (..., K+1) in nats of targets (...) behind states of steps."""
        matrix, count = self.network.output_matrix, states.shape[-2]
        losses = [-token_log_probs(states[..., i, :], matrix, targets) for i in range(count)]
        return torch.stack(losses, dim=-1)

    def _stopped(self, pondered: Pondered) -> Tensor:
        """Returns what would predict if tokens stopped after i steps (B, T, K+1, D)."""
        return pondered.states

    # ---- scoring

    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns exact log-probabilities of a window batch's targets.

        Records ``thinking_steps``: ``executed`` (B, T) int64, additional steps of each token, and
        ``most``, K; ``depth_losses``: ``losses`` (B, T, K+1), cross-entropy in nats if tokens
        stopped after i steps (of PonderLM-3 with partial sums of their own mass: the last differs
        from the score by the order of tau); ``entropy``: ``entropy`` (B, T) of the next-token
        distributions, in nats; ``greedy``: ``greedy`` (B, T) bool, whether a target is the most
        likely token; ``states``, see ``jacobi.record_states``; ``router`` where there is one:
        ``log_steps`` and ``log_tail`` (B, T, K+1); with ``inference: sequential`` ``flops``, see
        ``LanguageModel.adaptive``.
        """
        pondered, targets = self._ponder(batch), batch["targets"]
        record("thinking_steps", executed=pondered.executed, most=self.config.thinking_steps)
        if pondered.steps is not None:
            steps = pondered.steps
            record("router", log_steps=steps.log_steps, log_tail=steps.log_tail)
        if wants("depth_losses"):
            losses = self._depth_losses(self._stopped(pondered), targets)
            record("depth_losses", losses=losses)
        matrix = self.network.output_matrix
        if wants("entropy"):
            record("entropy", entropy=token_entropies(pondered.read_out, matrix))
        if wants("greedy"):
            h = pondered.read_out
            record("greedy", greedy=greedy_targets(h, matrix, targets, self.config.vocab_size))
        log_prob = token_log_probs(pondered.read_out, matrix, targets)
        num_targets = (targets >= 0).sum(dim=1)
        return Scores(log_prob, log_prob.new_zeros(len(log_prob)), num_targets, self.likelihood)

    def _ponder(self, batch: dict[str, Any]) -> Pondered:
        tokens = batch["tokens"]
        if self.config.inference == "sequential" and not self.training:
            lengths = batch["mask"].sum(dim=1) if "mask" in batch else _full_lengths(tokens)
            pondered = sequential.read_text(self.network, tokens, lengths)
            if wants("flops"):
                real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
                flops = compute.executed_flops(self.network, pondered.executed, real)
                record("flops", flops=flops, tokens=lengths)
            record_states(pondered.states, None)
        else:
            pondered = self.network(tokens, self._iterations())
        return pondered

    # ---- generation

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> SlotCache:
        """Returns the cache after all but the last token of each right-padded prompt (B, P)."""
        room = prompts.shape[1] + max_new_tokens
        cache = sequential.new_cache(self.network, len(prompts), room)
        if prompts.shape[1] > 1:
            how = self.config.prefill
            sequential.read_prompt(self.network, cache, prompts[:, :-1], lengths - 1, how)
        return cache

    def decode_step(self, cache: SlotCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Computes one slot of each row; ready are those whose token has taken its last step.

        Returns next-token logits (B, V), zeros in rows that are not ready.

        Records ``generated_steps``: ``steps`` int64, the additional steps that each token which is
        through has taken.
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
        """Returns the FLOPs per token of all passes of scoring, or of a training step."""
        if training:
            return compute.training_flops(self.network, context)
        return compute.scoring_flops(self.network, context)

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of generating a token that takes ``steps`` additional steps."""
        return compute.generation_flops(self.network, context, steps)

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the FLOPs per token of one pass over all slots; see ``LanguageModel``."""
        return compute.parts(self.network, context)


class PonderLM(PonderLM2):
    """PonderLM-3: a router decides how many steps each token takes (arXiv 2603.02023).

    In training later steps are damped by a differentiable attention mask, and states are
    integrated by the step distribution; outside training, steps of tail mass below tau are
    skipped.
    """

    config: PonderConfig
    network: PonderNetwork

    def __init__(
        self,
        config: PonderConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: shape of the network, steps, router and penalty.
            optimizer: optimiser and schedule.
            compile: whether to compile the network's blocks with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    def build_network(self) -> PonderNetwork:
        """Returns a freshly initialised network."""
        return PonderNetwork(self.config)

    @property
    def adaptive(self) -> bool:
        """Whether scoring skips the steps that tokens do not take."""
        return self.config.inference == "sequential"

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        """Returns the router's parameters."""
        return self.network.router.parameters()

    def _add(
        self, pondered: Pondered, targets: Tensor, losses: Tensor | None, output: LossOutput
    ) -> None:
        """Adds the penalty, and logs the steps that tokens take.

        ``expected_steps`` is sum_{k >= 1} w_k, ``executed_steps`` those of tau; beside them rho_i,
        f_k and n_k of the penalty.
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
        valid = pondered.steps.log_tail[targets >= 0]
        found = minimum_ponder_penalty(valid, losses, self.config)
        output.terms["penalty"] = Term(found.value, 1.0)
        if found.ratios is None or found.fractions is None or found.counts is None:
            return
        for steps, ratio in enumerate(found.ratios):
            output.stats[f"depth_{steps}/rho"] = ratio
        for steps, (share, count) in enumerate(zip(found.fractions, found.counts, strict=True), 1):
            output.stats[f"depth_{steps}/fraction"] = share
            output.stats[f"depth_{steps}/penalised"] = count.float()

    def _stopped(self, pondered: Pondered) -> Tensor:
        """Returns the partial sums h(<=i), of their own mass but for the paper's penalty."""
        assert pondered.steps is not None
        renormalised = not self.training or self.config.penalty != "paper"
        return partial_states(pondered.states, pondered.steps.log_steps, renormalised)


def _full_lengths(tokens: Tensor) -> Tensor:
    return torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
