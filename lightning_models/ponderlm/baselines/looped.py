"""LoopedLM: the whole stack of blocks several times over the same residual stream."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.optim import OptimizerConfig
from lightning_models.ponderlm.baselines.depth import DepthLM
from lightning_models.ponderlm.baselines.repeated import RepeatedNetwork
from lightning_models.ponderlm.config import PonderingConfig


@dataclass(frozen=True, kw_only=True)
class LoopedConfig(PonderingConfig):
    """A looped decoder: ``thinking_steps`` n makes n + 1 loops.

    Raises:
        ValueError: if a value is out of its range.
    """


class LoopedNetwork(RepeatedNetwork):
    """H <- blocks(H), n + 1 times from the embeddings on, then the final norm, once.

    Nothing is injected anew and nothing normed between two loops: the pre-norm stream goes on.
    """

    config: LoopedConfig

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, every_depth: bool = False
    ) -> Tensor:
        """Returns the normed states (B, T, D) of ``tokens`` (B, T), padded on the right.

        Args:
            tokens: int64.
            cache: earlier keys and values of every loop; the caller then advances it.
            every_depth: returns (B, T, n+1, D) instead: what the final norm makes of each loop.
        """
        positions, mask = self.places(tokens.shape[1], cache)
        rope, x = self.rope(positions), self.embed(tokens, positions)
        states = []
        for number in range(self.config.thinking_steps + 1):
            x = self.apply_blocks(x, rope, cache=cache, mask=mask, number=number)
            if every_depth:
                states.append(self.norm(x))
        return torch.stack(states, dim=2) if every_depth else self.norm(x)


class LoopedLM(DepthLM):
    """A decoder that applies its blocks n + 1 times (arXiv 2301.13196, 2502.17416)."""

    config: LoopedConfig
    network: LoopedNetwork

    def __init__(
        self,
        config: LoopedConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: shape of the network and number of loops.
            optimizer: optimiser and schedule.
            compile: whether to compile the network with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    def build_network(self) -> LoopedNetwork:
        """Returns a freshly initialised network."""
        return LoopedNetwork(self.config)
