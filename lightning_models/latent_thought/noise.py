"""Standard normals that belong to a sequence, whatever batch it comes in."""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from lightning_models.runtime import seeded_generator


class Purpose(IntEnum):
    """What a draw is for; draws for different purposes are independent."""

    START = 0
    """Where inference begins."""
    INNER = 1
    """Samples within inference, and the one that the decoder learns from."""
    SCORED = 2
    """Samples that scores and texts come from."""


class Noise:
    """Draws (B, Z, D) that are a pure function of each row's key, the purpose and a number."""

    def __init__(
        self,
        keys: Sequence[tuple[int, ...]],
        shape: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Takes what the rows' draws depend on.

        Args:
            keys: one a row.
            shape: (Z, D).
            device: where draws go; they are made on the CPU, the same on every machine.
            dtype: which draws are given; they are made in float32.
        """
        self.keys, self.shape, self.device, self.dtype = keys, shape, device, dtype

    def draw(self, purpose: Purpose, number: int = 0) -> Tensor:
        """Returns standard normals (B, Z, D)."""
        rows = [
            torch.randn(
                self.shape,
                generator=seeded_generator(*key, int(purpose), number),
                dtype=torch.float32,
            )
            for key in self.keys
        ]
        return torch.stack(rows).to(self.device, self.dtype)
