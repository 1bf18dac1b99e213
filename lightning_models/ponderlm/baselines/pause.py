"""Pause tokens: n identical learned tokens behind every token, read in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_models.layers import KVCache, initialise
from lightning_models.optim import OptimizerConfig
from lightning_models.ponderlm.baselines.depth import DepthLM
from lightning_models.ponderlm.config import PonderingConfig
from lightning_models.transformer.network import TransformerNetwork


@dataclass(frozen=True, kw_only=True)
class PauseConfig(PonderingConfig):
    """A plain decoder with ``thinking_steps`` n pauses behind every token.

    Raises:
        ValueError: if a value is out of its range.
    """


class PauseNetwork(TransformerNetwork):
    """A token owns n + 1 slots of one causal sequence, all at its position; the last predicts.

    PonderLM-2's slots with a learned constant in place of the fed-back states, in one pass. The
    pause is a parameter of its own, drawn and scaled like a token's embedding: one row more of the
    vocabulary, which no output can name.
    """

    # NOTE(paper): the public code takes an unused row of the vocabulary, and scales embeddings by
    # sqrt(D) here, elsewhere by sqrt(2.5 D); one scale for all methods makes them comparable
    config: PauseConfig

    def __init__(self, config: PauseConfig) -> None:
        """Builds and initialises the network; the decoder's weights are drawn first."""
        super().__init__(config)
        self.pause = nn.Embedding(1, config.dim) if config.thinking_steps else None
        if self.pause is not None:
            initialise(self.pause, config)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, every_depth: bool = False
    ) -> Tensor:
        """Returns the normed states (B, T, D) of the last pauses of ``tokens`` (B, T).

        Args:
            tokens: int64, padded on the right.
            cache: earlier slots; the caller then advances it by n + 1 a token.
            every_depth: returns (B, T, n+1, D) instead, those of all slots.
        """
        slots = self.config.thinking_steps + 1
        num_new = tokens.shape[1] * slots
        if cache is None:
            place, mask = torch.arange(num_new, device=tokens.device), None
        else:
            place, mask = cache.positions(num_new), cache.mask(num_new)
        x = self.embed_slots(tokens).flatten(1, 2)
        h = self.run(x, place // slots, cache=cache, mask=mask).unflatten(1, (-1, slots))
        return h if every_depth else h[:, :, -1]

    def embed_slots(self, tokens: Tensor) -> Tensor:
        """Returns the inputs (B, T, n+1, D) of the slots of ``tokens`` (B, T)."""
        x = self.embed(tokens, tokens)[:, :, None]
        if self.pause is None:
            return x
        pauses = self.pause(tokens.new_zeros(*tokens.shape, self.config.thinking_steps))
        return torch.cat((x, self.dropout(pauses * self.embedding_scale)), dim=2)


class PauseLM(DepthLM):
    """A decoder that reads n learned pauses behind every token (arXiv 2310.02226)."""

    config: PauseConfig
    network: PauseNetwork

    def __init__(
        self,
        config: PauseConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: shape of the network and number of pauses.
            optimizer: optimiser and schedule.
            compile: whether to compile the network with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    def build_network(self) -> PauseNetwork:
        """Returns a freshly initialised network."""
        return PauseNetwork(self.config)

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> KVCache:
        """Returns the cache after all but the last token of each right-padded prompt (B, P)."""
        slots = self.config.thinking_steps + 1
        cache = self.network.new_cache(len(prompts), slots * (prompts.shape[1] + max_new_tokens))
        if prompts.shape[1] > 1:
            self.network(prompts[:, :-1], cache)
            cache.advance(slots * (lengths - 1))
        return cache

    def decode_step(self, cache: KVCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns next-token logits (B, V) behind the pauses of ``tokens`` (B,); all are ready."""
        h = self.network(tokens[:, None], cache)
        cache.advance(self.config.thinking_steps + 1)
        logits = h[:, 0] @ self.network.output_matrix.to(h.dtype).t()
        return logits.float(), torch.ones_like(tokens, dtype=torch.bool)

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part, with ``steps`` pauses behind it.

        Slots see each other: attention grows with the square of their number.
        """
        slots = 1 + steps
        parts = self.plain_flops(max(1, round(slots * context)))
        return {name: flops * (1 if name == "output" else slots) for name, flops in parts.items()}
