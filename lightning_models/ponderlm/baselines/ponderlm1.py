"""PonderLM-1: feeds back the embedding that its own next-token distribution expects."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_models.flops import head_flops
from lightning_models.layers import KVCache
from lightning_models.optim import OptimizerConfig
from lightning_models.ponderlm.baselines.depth import DepthLM
from lightning_models.ponderlm.baselines.expectation import expected_embedding
from lightning_models.ponderlm.baselines.repeated import RepeatedNetwork
from lightning_models.ponderlm.config import PonderingConfig


@dataclass(frozen=True, kw_only=True)
class PonderLM1Config(PonderingConfig):
    """PonderLM-1 with ``thinking_steps`` S pondering passes before the one that predicts.

    Raises:
        ValueError: if a value is out of its range.
    """

    accumulate: bool = True
    """X_(s+1) = X_s + I_s, as the authors of PonderLM-1 have it; else X_0 + I_s, as their later
    comparisons with PonderLM-2 have it."""
    multiply_embedding: bool = False
    """Whether X_0 is S times the embedding, as in the authors' runs from 410m on, or once."""

    def __post_init__(self) -> None:
        """Checks that there is something to multiply by, beside what the family checks."""
        super().__post_init__()
        if self.multiply_embedding and self.thinking_steps == 0:
            raise ValueError(
                "multiply_embedding (True) multiplies embeddings by thinking_steps (0): nothing "
                "would be left of them; set multiply_embedding=false"
            )


class PonderLM1Network(RepeatedNetwork):
    """S passes, each of which adds its expected embedding to the input, and one that predicts."""

    config: PonderLM1Config

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, every_depth: bool = False
    ) -> Tensor:
        """Returns the normed states (B, T, D) of ``tokens`` (B, T), padded on the right.

        Args:
            tokens: int64.
            cache: earlier keys and values of every pass: pass s sees those of pass s; the caller
                then advances it.
            every_depth: returns (B, T, S+1, D) instead, the states of all passes.
        """
        config = self.config
        positions, mask = self.places(tokens.shape[1], cache)
        rope, first = self.rope(positions), self.embed(tokens, positions)
        if config.multiply_embedding:
            first = first * config.thinking_steps
        x, states = first, []
        for number in range(config.thinking_steps + 1):
            h = self.norm(self.apply_blocks(x, rope, cache=cache, mask=mask, number=number))
            states.append(h)
            if number < config.thinking_steps:
                x = (x if config.accumulate else first) + self.expected(h)
        return torch.stack(states, dim=2) if every_depth else states[-1]

    def expected(self, h: Tensor) -> Tensor:
        """Returns I (B, T, D) = softmax(head(H)) E for normed states H (B, T, D), E scaled."""
        # NOTE(paper): the public code scales by sqrt(D) here; ours is the embeddings' own scale,
        # the same for all methods
        mean = expected_embedding(h, self.output_matrix, self.embedding.weight)
        scaled: Tensor = self.dropout(mean * self.embedding_scale)
        return scaled


class PonderLM1(DepthLM):
    """Pondering language model (arXiv 2505.20674): S + 1 passes over a text of its own length."""

    config: PonderLM1Config
    network: PonderLM1Network

    def __init__(
        self,
        config: PonderLM1Config,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: shape of the network, passes and feedback.
            optimizer: optimiser and schedule.
            compile: whether to compile the network with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    def build_network(self) -> PonderLM1Network:
        """Returns a freshly initialised network."""
        return PonderLM1Network(self.config)

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the FLOPs per token; a training step computes each feedback's logits twice."""
        flops = super().flops_per_token(context, training)
        again = self.config.thinking_steps * head_flops(self.config)
        return flops + (again if training else 0.0)

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part, where tokens take ``steps`` steps.

        ``feedback`` is logits and expected embedding of every step.
        """
        parts = super().flops_of_steps(context, steps)
        return {**parts, "feedback": 2 * steps * head_flops(self.config)}
