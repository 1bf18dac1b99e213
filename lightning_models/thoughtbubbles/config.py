"""Configuration of Thoughtbubbles."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_models.layers import DecoderConfig

Allocation = Literal["global_topk", "threshold", "window_topk"]


@dataclass(frozen=True, kw_only=True)
class ThoughtbubblesConfig(DecoderConfig):
    """A GPT-2 style decoder with rotary positions whose residual streams fork under a budget.

    Raises:
        ValueError: If a value is out of range. The message names key, value and cure.
    """

    dials: ClassVar[Mapping[str, str]] = {"kappa": r"$\kappa$"}

    positions: Literal["rope"] = "rope"
    """Rotary only, since forks have fractional positions."""
    kappa: int | str = "2L"
    """kappa, the maximum number of streams of a sequence: a ratio to its length (``2L``, ``4L``),
    or a count for sequences of block_size tokens (1024 at 512 tokens is 2L)."""
    budget: Literal["dynamic", "fixed"] = "dynamic"
    """Budget of a sequence shorter or longer than block_size: dynamic keeps the ratio (App. E.1),
    fixed keeps the count."""
    fork_layers: tuple[int, ...] = (3, 7, 11)
    """Blocks (0-based) before which streams fork and are pruned."""
    allocation: Allocation = "global_topk"
    """Rule that decides which streams survive. global_topk keeps the kappa best of the whole
    sequence, as the paper does; it is not causal, since later tokens compete too. threshold keeps
    all above a running mean of the kappa-th score, and window_topk the best among the candidates
    of the latest allocation_window tokens. The last two are strictly causal."""
    eval_allocation: Allocation | None = None
    """Allocation in evaluation and generation. Null means as in training."""
    allocation_window: int = 64
    """w of window_topk, in tokens, including the token itself."""
    threshold_decay: float = 0.99
    """Decay of the running mean that threshold compares with, per micro-batch."""
    # NOTE(paper): eq. 8 divides by sqrt(d_model), the authors' code by sqrt(C)
    bias_scale: Literal["inv_sqrt_dhead", "one", "inv_sqrt_dmodel"] = "inv_sqrt_dhead"
    """Factor on log P in the attention scores (eq. 8): 1/sqrt(C) as in the authors' code, 1
    (full P in the softmax and on the values, about P^2 together), or the paper's 1/sqrt(D)."""
    output_average: Literal["mixture", "residual_norm"] = "mixture"
    """Combines a token's streams. mixture averages their distributions, weighted by P / sum P
    (eq. 11); residual_norm averages their residuals, weighted by P, and decodes the normed mean
    once (kappa/L times fewer logits)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fork_layers", tuple(sorted(self.fork_layers)))
        super().__post_init__()
        outside = [layer for layer in self.fork_layers if not 0 <= layer < self.num_layers]
        if outside or len(set(self.fork_layers)) < len(self.fork_layers):
            raise ValueError(
                f"fork_layers ({list(self.fork_layers)}) must be different blocks among 0 to "
                f"{self.num_layers - 1} (num_layers {self.num_layers})"
            )
        if self.window is not None:
            raise ValueError(
                f"window ({self.window}) must be null: a window would count streams, not tokens"
            )
        if self.ratio < 1:
            raise ValueError(
                f"kappa ({self.kappa}) is {self.ratio:g} streams per token at block_size "
                f"{self.block_size}; it must be at least 1 (1L), as originals always survive"
            )
        if self.allocation_window < 1:
            raise ValueError(f"allocation_window ({self.allocation_window}) must be at least 1")
        if not 0 <= self.threshold_decay < 1:
            raise ValueError(f"threshold_decay ({self.threshold_decay}) must be in [0, 1)")

    @property
    def ratio(self) -> float:
        """Streams per token, r = kappa / L."""
        match = re.fullmatch(r"(-?\d{1,9}\.?\d{0,9}|\.\d{1,9})L?", str(self.kappa))
        if match is None:
            raise ValueError(
                f"kappa ({self.kappa}) must be a number of streams (1024) or a ratio (2L)"
            )
        if str(self.kappa).endswith("L"):
            return float(match[1])
        return float(match[1]) / self.block_size

    @property
    def inference_allocation(self) -> Allocation:
        """Allocation in evaluation and generation."""
        return self.eval_allocation or self.allocation

    @property
    def uses_budget(self) -> bool:
        """Whether ``budget`` has any effect outside training."""
        return self.inference_allocation == "global_topk"

    @property
    def bias_factor(self) -> float:
        """Value of ``bias_scale``."""
        factors = {
            "inv_sqrt_dhead": 1 / math.sqrt(self.head_dim),
            "one": 1.0,
            "inv_sqrt_dmodel": 1 / math.sqrt(self.dim),
        }
        return factors[self.bias_scale]

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """Half-open ranges of blocks between fork layers, as (start, stop)."""
        return list(itertools.pairwise((0, *self.fork_layers, self.num_layers)))

    def most_streams(self, length: int) -> int:
        """Returns kappa for a sequence of ``length`` tokens, at least ``length``."""
        counted = length if self.budget == "dynamic" else self.block_size
        return max(length, math.ceil(self.ratio * counted - ROUNDING))

    def streams_by_layer(self, length: int) -> list[int]:
        """Returns N at each block for ``length`` tokens under global_topk.

        A fork layer turns N streams into min(kappa, 2 N).
        """
        streams, counts = length, []
        for layer in range(self.num_layers):
            if layer in self.fork_layers:
                streams = min(self.most_streams(length), 2 * streams)
            counts.append(streams)
        return counts

    def competes(self, ordinal: int) -> bool:
        """Returns whether the fork layer with this ordinal (0-based) may have to prune streams.

        It prunes none as long as 2^(ordinal + 1) streams per token fit into the budget.
        """
        return ordinal >= 0 and 2.0 ** (ordinal + 1) > self.ratio


ROUNDING = 1e-6
"""Tolerance subtracted before rounding up, so that 1.1 * 10 is 11."""
