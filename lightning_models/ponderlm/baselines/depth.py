"""What the LightningModules of PonderLM's baselines share: scores and FLOPs by depth."""

from typing import Any

import torch
from torch import Tensor

from lightning_models.layers import record, wants
from lightning_models.output_layer import greedy_targets, token_entropies, token_log_probs
from lightning_models.outputs import Scores
from lightning_models.ponderlm.config import PonderingConfig
from lightning_models.transformer import TransformerLM


class DepthLM(TransformerLM):
    """A decoder whose tokens take additional steps, all of them K unless it says otherwise."""

    config: PonderingConfig

    def read(self, batch: dict[str, Any], every_depth: bool) -> tuple[Tensor, Tensor]:
        """Returns the normed states of a batch for scoring, and its executed steps.

        The states are (B, T, D), or (B, T, K+1, D) with ``every_depth``: those behind i steps, the
        last of which predict. Executed steps are (B, T) int64.
        """
        tokens = batch["tokens"]
        states = self.network(tokens, every_depth=every_depth)
        return states, torch.full_like(tokens, self.config.thinking_steps)

    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns log-probabilities of a window batch's targets.

        Records ``thinking_steps``: ``executed`` (B, T) int64, additional steps of each token, and
        ``most``, K; ``depth_losses``: ``losses`` (B, T, K+1), cross-entropy in nats if tokens
        stopped after i steps, 0 where there is no target; ``entropy``: ``entropy`` (B, T) of the
        next-token distributions, in nats; ``greedy``: ``greedy`` (B, T) bool, whether a target is
        the most likely token.
        """
        targets, every_depth = batch["targets"], wants("depth_losses")
        states, executed = self.read(batch, every_depth)
        matrix = self.network.output_matrix  # behind the pass: a sharded one is gathered by then
        record("thinking_steps", executed=executed, most=self.config.thinking_steps)
        if every_depth:
            record("depth_losses", losses=depth_losses(states, matrix, targets))
            states = states[..., -1, :]
        if wants("entropy"):
            record("entropy", entropy=token_entropies(states, matrix))
        if wants("greedy"):
            greedy = greedy_targets(states, matrix, targets, self.config.vocab_size)
            record("greedy", greedy=greedy)
        log_prob = token_log_probs(states, matrix, targets)
        num_targets = (targets >= 0).sum(dim=1)
        return Scores(log_prob, log_prob.new_zeros(len(log_prob)), num_targets, self.likelihood)

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of generating a token, the mean over a text of ``context`` tokens.

        Args:
            context: tokens.
            steps: additional steps of a token on average; None: K.
        """
        steps = self.config.thinking_steps if steps is None else steps
        return sum(self.flops_of_steps(context, steps).values())

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the forward FLOPs per token, all K steps of it, by what they are spent on."""
        return self.flops_of_steps(context, self.config.thinking_steps)

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part, where tokens take ``steps`` steps.

        Here every step is another application of the blocks to the whole text.
        """
        parts = self.plain_flops(context)
        return {
            name: flops * (1 if name == "output" else 1 + steps) for name, flops in parts.items()
        }

    def plain_flops(self, context: int) -> dict[str, float]:
        """Returns the FLOPs per token by part of a plain decoder of this size."""
        return super().flops_by_part(context)


@torch.no_grad()
def depth_losses(states: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy (B, T, K+1) in nats of each target behind i steps, 0 without one.

    Args:
        states: normed states behind i steps (B, T, K+1, D).
        matrix: output matrix (V, D).
        targets: int64 (B, T), -100 where nothing is predicted.
    """
    each = [token_log_probs(h, matrix, targets) for h in states.unbind(dim=2)]
    return torch.stack(each, dim=-1).neg()
