"""The plain decoder as a LightningModule: the control that every method is compared with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_models.base import LanguageModel
from lightning_models.flops import attention_flops, head_flops, linear_flops, training_flops
from lightning_models.layers import Branches, FeedForward, KVCache, SelfAttention, record, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import linear_cross_entropy, token_entropies
from lightning_models.outputs import LossOutput, Scores, Term
from lightning_models.transformer.network import TransformerConfig, TransformerNetwork


class TransformerLM(LanguageModel):
    """Plain autoregressive transformer, GPT-2 style (Radford et al. 2019) or LLaMA style.

    Args:
        config: Shape and style of the network.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    config: TransformerConfig
    network: TransformerNetwork

    def __init__(
        self,
        config: TransformerConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def slots_per_token(self) -> int:
        """Number of entries of the decoding cache that a token takes."""
        return 1

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``score`` reads a prefix shared by several rows once, unless it is compiled."""
        return self.causal and not self.compile_network

    def build_network(self) -> TransformerNetwork:
        return TransformerNetwork(self.config)

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the summed next-token cross-entropy of a window batch."""
        h = self.network(batch["tokens"])
        nll = linear_cross_entropy(h, self.network.output_matrix, batch["targets"])
        return LossOutput({"nll": Term(nll, (batch["targets"] >= 0).sum(), "targets")})

    def score(self, batch: dict[str, Any]) -> Scores:
        """Returns exact log-probabilities of a window batch's targets.

        Records ``entropy``: ``entropy`` (B, T) of the next-token distributions, in nats; and
        ``greedy``: ``greedy`` (B, T) bool, whether a target is the most likely token.
        """
        h, targets = self.states(batch), batch["targets"]
        if wants("entropy"):
            record("entropy", entropy=token_entropies(h, self.network.output_matrix))
        log_prob = self.target_log_probs(h, targets)
        num_targets = (targets >= 0).sum(dim=1)
        return Scores(log_prob, log_prob.new_zeros(len(log_prob)), num_targets, self.likelihood)

    def states(self, batch: dict[str, Any], *options: Any) -> Tensor:
        """Returns the normed states (B, T, D) of the batch's tokens, given their prefixes if any.

        Further arguments are passed to the network.
        """
        if "prefix" not in batch:
            states: Tensor = self.network(batch["tokens"], None, *options)
            return states
        branches = Branches(batch, self.slots_per_token)
        return branches.rows(self.network(branches.tokens, branches, *options))

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> KVCache:
        self.check_context(int(lengths.max()) + max_new_tokens - 1)  # the last token is never read
        slots = self.slots_per_token
        cache = self.network.new_cache(len(prompts), slots * (prompts.shape[1] + max_new_tokens))
        if prompts.shape[1] > 1:
            self.network(prompts[:, :-1], cache)
            # keeps the entries of real tokens; padding and the last token are written over later
            cache.advance(slots * (lengths - 1))
        return cache

    def decode_step(self, cache: KVCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # Returns next-token logits (B, V) after ``tokens`` (B,), for which every row is ready.
        h = self.network(tokens[:, None], cache)  # (B, 1, D)
        cache.advance(self.slots_per_token)
        logits = h[:, 0] @ self.network.output_matrix.to(h.dtype).t()
        return logits.float(), torch.ones_like(tokens, dtype=torch.bool)

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the FLOPs per token at sequences of ``context`` tokens."""
        parts = self.flops_by_part(context)
        flops = sum(parts.values())
        return training_flops(flops, flops - parts["output"], self.config) if training else flops

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the forward FLOPs per token by part of the network, see ``LanguageModel``."""
        parts = list(self.network.blocks.modules())
        projections = sum(linear_flops(part) for part in parts if isinstance(part, SelfAttention))
        return {
            "output": head_flops(self.config),
            "self_attention": projections + attention_flops(self.config, context),
            "feed_forward": sum(linear_flops(x) for x in parts if isinstance(x, FeedForward)),
        }
