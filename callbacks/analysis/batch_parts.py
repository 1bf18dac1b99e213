"""Parts of batches, where an analysis cannot, or need not, look at all at once."""

from typing import Any

import numpy as np
from torch import Tensor, ones_like


def rows_of(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Returns the rows from ``start`` up to ``stop`` of everything in a batch that has rows."""
    rows = len(batch["tokens"])

    def part(value: Any) -> Any:
        has_rows = isinstance(value, Tensor | list) and len(value) == rows
        return value[start:stop] if has_rows else value

    return {key: part(value) for key, value in batch.items()}


def first_tokens(batch: dict[str, Any], number: int) -> dict[str, Any]:
    """Returns the first tokens of each row of a batch of windows; counts of whole rows stay."""
    shape = batch["tokens"].shape

    def part(value: Any) -> Any:
        by_token = isinstance(value, Tensor) and value.shape[:2] == shape
        return value[:, :number] if by_token else value

    return {key: part(value) for key, value in batch.items()}


def real_tokens(batch: dict[str, Any]) -> np.ndarray:
    """Returns bool (B, T): where the batch has tokens rather than padding."""
    mask: Tensor = batch.get("mask", ones_like(batch["tokens"]).bool())
    return mask.cpu().numpy()
