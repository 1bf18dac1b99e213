"""Mixture-of-Recursions: one shared stack of blocks, applied again to the tokens a router picks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_models.flops import attention_flops
from lightning_models.layers import record, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import linear_cross_entropy
from lightning_models.outputs import Likelihood, LossOutput, Mean, Term
from lightning_models.ponderlm.baselines.depth import DepthLM
from lightning_models.ponderlm.baselines.recursion_routing import quota
from lightning_models.ponderlm.baselines.recursions import (
    MoRConfig,
    MoRNetwork,
    Recursed,
    RecursionCache,
)

__all__ = ["MoRConfig", "MoRLM", "MoRNetwork"]


class MoRLM(DepthLM):
    """Mixture-of-Recursions with expert choice (arXiv 2507.10524).

    In training a token is chosen by its rank in the whole text, later tokens included. The routers
    learn to tell from the token alone; scoring and generation go by that, causally, unless
    ``eval_routing`` says otherwise.
    """

    config: MoRConfig
    network: MoRNetwork

    def __init__(
        self,
        config: MoRConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: shape of the network, recursions and routers.
            optimizer: optimiser and schedule.
            compile: whether to compile the network with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    @property
    def causal(self) -> bool:
        """Whether scoring routes tokens without looking at later ones."""
        return self.config.eval_routing == "threshold" or not self.config.chooses

    @property
    def likelihood(self) -> Likelihood:
        """``exact`` where it is causal, else ``noncausal``."""
        return "exact" if self.causal else "noncausal"

    @property
    def adaptive(self) -> bool:
        """Whether more than a text's length decides how many of its tokens take a recursion."""
        return self.config.eval_routing == "threshold" and self.config.chooses

    def build_network(self) -> MoRNetwork:
        """Returns a freshly initialised network."""
        return MoRNetwork(self.config)

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        """Returns the routers' parameters."""
        return self.network.routers.parameters()

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the cross-entropy under expert choice, and that of the routers.

        Logged beside: ``executed_steps``, extra recursions of a token with a target.
        """
        targets, valid = batch["targets"], batch.get("mask")
        found: Recursed = self.network(batch["tokens"], valid=valid, routing="topk")
        nll = linear_cross_entropy(found.states, self.network.output_matrix, targets)
        counted = targets >= 0
        output = LossOutput({"nll": Term(nll, counted.sum(), "targets")})
        if self.config.chooses:
            output.terms["router"] = Term(
                self.config.router_weight * found.router_loss, found.decisions
            )
        output.stats["executed_steps"] = Mean((found.executed * counted).sum(), counted.sum())
        return output

    def read(self, batch: dict[str, Any], every_depth: bool) -> tuple[Tensor, Tensor]:
        """Returns states and executed recursions by ``eval_routing``; see ``DepthLM``.

        Records ``flops``, see ``LanguageModel.adaptive``.
        """
        valid = batch.get("mask", torch.ones_like(batch["tokens"], dtype=torch.bool))
        found: Recursed = self.network(
            batch["tokens"],
            every_depth=every_depth,
            valid=valid,
            routing=self.config.eval_routing,
        )
        if wants("flops"):
            flops = self._executed_flops(found.executed, valid)
            record("flops", flops=flops, tokens=valid.sum(dim=1))
        return found.states, found.executed

    def init_cache(  # type: ignore[override]
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> RecursionCache:
        """Returns the cache after all but the last token of each right-padded prompt (B, P)."""
        num_tokens = prompts.shape[1]
        cache = self.network.new_cache(len(prompts), num_tokens + max_new_tokens)
        if num_tokens > 1:
            valid = torch.arange(num_tokens - 1, device=prompts.device) < lengths[:, None] - 1
            self.network(prompts[:, :-1], cache, valid=valid, routing="threshold")
        return cache

    def decode_step(  # type: ignore[override]
        self, cache: RecursionCache, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns next-token logits (B, V) after ``tokens`` (B,); every row is ready.

        Records ``generated_steps``: ``steps`` (B,) int64, the additional steps of each token.
        """
        found: Recursed = self.network(tokens[:, None], cache, routing="threshold")
        record("generated_steps", steps=found.executed[:, 0])
        h = found.states
        logits = h[:, 0] @ self.network.output_matrix.to(h.dtype).t()
        return logits.float(), torch.ones_like(tokens, dtype=torch.bool)

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the forward FLOPs per token under expert choice, by part; see ``LanguageModel``.

        Threshold routing costs as much where it takes as many tokens as the capacities say; what
        it takes is what ``score`` records.
        """
        shares = [quota(capacity, context) / context for capacity in self.config.capacities]
        return self.flops_of_shares(context, shares)

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part, where tokens take ``steps`` recursions.

        Recursions are taken to be shared out like the capacities, scaled to fewer steps or, for
        more, moved towards 1; only attention depends on that.

        Raises:
            ValueError: if there are not so many.
        """
        capacities, most = self.config.capacities, self.config.thinking_steps
        if not 0 <= steps <= most:
            raise ValueError(f"steps ({steps}) must be between 0 and thinking_steps ({most})")
        usual = sum(capacities)
        if steps <= usual:
            shares = [capacity * steps / usual for capacity in capacities]
        else:
            missing = (most - steps) / (most - usual)
            shares = [1 - (1 - capacity) * missing for capacity in capacities]
        return self.flops_of_shares(context, shares)

    def _executed_flops(self, executed: Tensor, valid: Tensor) -> Tensor:
        """Returns the FLOPs (B,) float64 of texts whose tokens (B, T) took ``executed`` steps."""
        depths = torch.arange(1, self.config.thinking_steps + 1, device=executed.device)
        taken = ((executed[..., None] >= depths) & valid[..., None]).sum(dim=1).tolist()  # (B, K)
        lengths = [max(1, length) for length in valid.sum(dim=1).tolist()]
        flops = [
            n * sum(self.flops_of_shares(n, [count / n for count in counts]).values())
            for n, counts in zip(lengths, taken, strict=True)
        ]
        return torch.tensor(flops, dtype=torch.float64) * valid.any(dim=1).cpu()

    def flops_of_shares(self, context: int, shares: Sequence[float]) -> dict[str, float]:
        """Returns the forward FLOPs per token by part, if such shares take the recursions."""
        config, parts = self.config, self.plain_flops(context)
        projections = parts["self_attention"] - attention_flops(config, context)
        applied = [1.0, *shares]
        keys = sum(share * (share * context + 1) / 2 for share in applied)  # that a token sees
        return {
            "output": parts["output"],
            "self_attention": sum(applied) * projections + keys * attention_flops(config, 1),
            "feed_forward": sum(applied) * parts["feed_forward"],
            "routers": 2.0 * config.dim * config.thinking_steps,
        }
