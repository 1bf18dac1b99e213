"""Chain of continuous thought: hidden states that are fed back as inputs, one after the other."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_models.layers import record
from lightning_models.thinking_states.baselines.text import TextNetwork
from lightning_models.thinking_states.decoding import AnswerCache, read


class Latents(NamedTuple):
    """Where latents are.

    Attributes:
        latent: Which tokens are latents (B, T) bool.
        first: The column in which they begin, in every row that has any; at least 1.
        most: Of a row: so many columns hold latents.
    """

    latent: Tensor
    first: int
    most: int

    @classmethod
    def among(cls, tokens: Tensor, latent_id: int) -> "Latents":
        """Returns where latents are among tokens (B, T), by their id."""
        latent = tokens == latent_id
        columns = latent.any(dim=0).nonzero()[:, 0].tolist()
        return cls(latent, columns[0] if columns else tokens.shape[1], len(columns))


class CoconutNetwork(TextNetwork):
    """The backbone on rows in which some inputs are the state of the position before.

    Up to the first latent all columns are read at once, then one column for each latent, then the
    rest. Keys and values are kept in between, with their graph: the gradient of later losses flows
    back through all latents. Rows with fewer latents, or none, read text meanwhile.
    """

    def forward(
        self,
        tokens: Tensor,
        *,
        real: Tensor | None = None,
        cache: AnswerCache | None = None,
        latents: Latents | None = None,
    ) -> Tensor:
        """Returns the normed states (B, T, D) of tokens.

        Records ``latents``: ``states``, a list of what was fed to each of the m columns of latents
        (B, D), part of the graph, and ``latent`` (B, m) bool, where that was a latent.

        Args:
            tokens: (B, T) int64.
            real: which of them are text (B, T) bool; None: all.
            cache: what was read before, extended in place.
            latents: where they are; None: nowhere.
        """
        if latents is None:
            return super().forward(tokens, real=real, cache=cache)
        if cache is None:
            cache = AnswerCache(len(tokens), tokens.device)
        if real is None:
            real = torch.ones_like(tokens, dtype=torch.bool)
        h = self.backbone.embed(tokens)
        behind = latents.first + latents.most
        parts = [read(self.backbone, cache, h[:, : latents.first], real[:, : latents.first]).last]
        fed = []
        for column in range(latents.first, behind):
            own = latents.latent[:, column, None]
            fed.append(torch.where(own, parts[-1][:, -1], h[:, column]))
            here = real[:, column : column + 1]
            parts.append(read(self.backbone, cache, fed[-1][:, None], here).last)
        if behind < tokens.shape[1]:
            parts.append(read(self.backbone, cache, h[:, behind:], real[:, behind:]).last)
        record("latents", states=fed, latent=latents.latent[:, latents.first : behind])
        return torch.cat(parts, dim=1)
