"""GPT-2 with gist masking: only the last tokens of earlier sentences are visible (3.3)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_models.layers import KVCache
from lightning_models.optim import OptimizerConfig
from lightning_models.transformer import TransformerLM
from lightning_models.transformer.network import TransformerConfig, TransformerNetwork


@dataclass(frozen=True, kw_only=True)
class GistConfig(TransformerConfig):
    """A plain decoder on sentences with boundary tokens; BOS, EOS and EOD are the last three ids.

    Raises:
        ValueError: If a value is out of range.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 4:
            raise ValueError(
                f"vocab_size ({self.vocab_size}) must hold BOS, EOS and EOD after the words: at "
                "least 4; read the data with datamodules.SentenceWindows"
            )
        if self.window is not None:
            raise ValueError(
                f"window ({self.window}) must be null: a window would hide the ends of sentences"
            )

    @property
    def eos_id(self) -> int:
        """Id of EOS, the last token of a sentence."""
        return self.vocab_size - 2


def gist_mask(ends: Tensor, positions: Tensor) -> Tensor:
    """Returns the attention mask, bool (B, 1, T, N), true for visible keys.

    A token attends to itself, the earlier tokens of the same sentence, and the last token (EOS) of
    each earlier sentence.

    Args:
        ends: Bool (B, N), true for keys that are EOS.
        positions: int64 (T,) or (B, T), indices of the queries among the keys.
    """
    positions = positions.expand(len(ends), -1)  # (B, T)
    # (B, N), index of each key's sentence; EOS belongs to the sentence that it ends
    sentence = ends.cumsum(dim=1) - ends.long()
    query_sentence = sentence.gather(1, positions)[..., None]  # (B, T, 1)
    causal = torch.arange(ends.shape[1], device=ends.device) <= positions[..., None]  # (B, T, N)
    return (causal & ((sentence[:, None] == query_sentence) | ends[:, None]))[:, None]


class GistCache(KVCache):
    """A KV cache that marks the entries that end a sentence."""

    def __init__(
        self, num_layers: int, batch: int, capacity: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__(num_layers, batch, capacity, device)
        self.ends = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        """Bool (B, capacity): true for entries that are EOS; undefined after the end of a row."""

    def append_ends(self, ends: Tensor) -> Tensor:
        """Stores which of T new tokens (B, T) are EOS and returns their mask (B, 1, T, N)."""
        positions = self.positions(ends.shape[1])
        self.ends.scatter_(1, positions, ends)
        return gist_mask(self.ends[:, : self.longest + ends.shape[1]], positions)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.ends = self.ends[rows]


class GistNetwork(TransformerNetwork):
    """The plain decoder under the gist mask."""

    config: GistConfig

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns the normed states (B, T, D) of ``tokens`` (B, T), see ``TransformerNetwork``."""
        ends = tokens == self.config.eos_id
        if cache is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            mask = gist_mask(ends, positions)
        else:
            assert isinstance(cache, GistCache)
            positions, mask = cache.positions(tokens.shape[1]), cache.append_ends(ends)
        return self.run(self.embed(tokens, positions), positions, cache=cache, mask=mask)

    def new_cache(self, batch: int, capacity: int) -> GistCache:
        return GistCache(self.config.num_layers, batch, capacity, self.embedding.weight.device)


class GistLM(TransformerLM):
    """GPT-2 with the attention bottleneck of Thought Gestalt but without its recurrence (3.3).

    It reads flat windows of sentences with boundary tokens in one pass, under the mask of Mu et al.
    2023 (*Learning to compress prompts with gist tokens*). The paper leaves two choices open:

    - Documents follow each other in a window, as in the GPT-2 baseline, without a mask between
      them: sentence ends of earlier documents in the window are visible too.
    - ``flops_per_token`` equals the plain decoder's. The mask hides pairs of tokens, but kernels
      with a mask compute all of them.

    Args:
        config: Shape and style of the network.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    config: GistConfig
    network: GistNetwork

    def __init__(
        self,
        config: GistConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    def build_network(self) -> GistNetwork:
        return GistNetwork(self.config)

    def states(self, batch: dict[str, Any], *options: Any) -> Tensor:
        # The sentence of a token follows from its index in the cache: no branches within a row.
        if "prefix" not in batch:
            return super().states(batch, *options)
        cache = self.init_cache(batch["prefix"], batch["prefix_lengths"], batch["tokens"].shape[1])
        cache.select(batch["prefix_row"])
        states: Tensor = self.network(batch["tokens"], cache)
        return states
