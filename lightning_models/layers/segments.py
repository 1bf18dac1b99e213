"""Sums, maxima and log-sum-exps over groups of entries of the last axis.

Uses the kernels of torch-scatter where that package is installed, torch's own otherwise; both give
the same values. Compiled code always takes torch's own, which do not break the graph.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor


def segment_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns the sums (..., count) of the ``values`` (..., N) that share an ``index`` (..., N)."""
    scatter = _torch_scatter()
    if scatter is not None:
        result: Tensor = scatter.scatter_sum(values, index, dim=-1, dim_size=count)
        return result
    return values.new_zeros(*values.shape[:-1], count).scatter_add(-1, index, values)


def segment_max(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns the maxima (..., count) of the float ``values`` of each group; -inf without any."""
    scatter = _torch_scatter()
    if scatter is not None:
        highest: Tensor = scatter.scatter_max(values, index, dim=-1, dim_size=count)[0]
        members = segment_sum(torch.ones_like(values), index, count)
        return highest.masked_fill(members == 0, -math.inf)
    empty = values.new_full((*values.shape[:-1], count), -math.inf)
    return empty.scatter_reduce(-1, index, values, "amax")


def segment_logsumexp(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns log(sum(exp(values))) (..., count) of each group; -inf without any.

    Args:
        values: finite float (..., N).
        index: int64 (..., N), the group of each entry, in [0, count).
        count: number of groups.
    """
    highest = segment_max(values.detach(), index, count)
    shifted = (values - highest.gather(-1, index)).exp()
    return highest + segment_sum(shifted, index, count).log()


def _torch_scatter() -> Any:
    return None if torch.compiler.is_compiling() else _import_torch_scatter()


@functools.lru_cache(maxsize=1)
def _import_torch_scatter() -> Any:
    try:
        import torch_scatter
    except (ImportError, OSError):  # OSError: built for another torch
        return None
    return torch_scatter
