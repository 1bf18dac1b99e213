"""GPT-2 with gist masking: earlier sentences are read through their last tokens only (3.3)."""

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
    """A plain decoder on sentences between boundary tokens: BOS, EOS and EOD are its last ids.

    Raises:
        ValueError: If a value is out of its range.
    """

    def __post_init__(self) -> None:
        """Checks that there are boundary tokens, and no second mask."""
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
        """The token that ends a sentence."""
        return self.vocab_size - 2


def gist_mask(ends: Tensor, places: Tensor) -> Tensor:
    """Returns which keys the queries may see, bool (B, 1, T, N).

    A token sees itself and what is before it of its own sentence, and of earlier sentences the
    last token, EOS.

    Args:
        ends: Bool (B, N), the tokens that are EOS.
        places: int64 (T,) or (B, T), where the queries stand among the keys.
    """
    places = places.expand(len(ends), -1)
    sentence = ends.cumsum(dim=1) - ends.long()  # of each token; EOS belongs to what it ends
    own = sentence.gather(1, places)[..., None]
    before = torch.arange(ends.shape[1], device=ends.device) <= places[..., None]
    return (before & ((sentence[:, None] == own) | ends[:, None]))[:, None]


class GistCache(KVCache):
    """A KV cache that knows which of its entries end a sentence."""

    def __init__(
        self, num_layers: int, batch: int, capacity: int, device: torch.device | str | None = None
    ) -> None:
        """Allows for ``capacity`` entries a row."""
        super().__init__(num_layers, batch, capacity, device)
        self.ends = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        """Bool (B, capacity): entries that are EOS; after a row's length it means nothing."""

    def append_ends(self, ends: Tensor) -> Tensor:
        """Notes which of T new tokens (B, T) are EOS; returns what they may see (B, 1, T, N)."""
        places = self.positions(ends.shape[1])
        self.ends.scatter_(1, places, ends)
        return gist_mask(self.ends[:, : self.longest + ends.shape[1]], places)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.ends = self.ends[rows]


class GistNetwork(TransformerNetwork):
    """The plain decoder under the gist mask."""

    config: GistConfig

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns the normed states (B, T, D) of ``tokens`` (B, T); see TransformerNetwork."""
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
    """GPT-2 whose attention is as narrow as Thought Gestalt's, without its recurrence (3.3).

    It reads flat windows of marked sentences in one pass (Mu et al. 2023, *Learning to compress
    prompts with gist tokens*, masks attention in this way). Two choices that the paper leaves open:

    - Documents follow each other in a window as in the GPT-2 baseline. No mask keeps them apart:
      ends of sentences are also read where they belong to an earlier document of the window.
    - ``flops_per_token`` is that of the plain decoder. The mask hides pairs of tokens, but kernels
      that take a mask compute all of them.

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
        # Which sentence a token is in follows from its place in the cache: no branches in a row.
        if "prefix" not in batch:
            return super().states(batch, *options)
        cache = self.init_cache(batch["prefix"], batch["prefix_lengths"], batch["tokens"].shape[1])
        cache.select(batch["prefix_row"])
        states: Tensor = self.network(batch["tokens"], cache)
        return states
