"""A module of ``transformers`` that computes wholly in float64.

Its norms, softmax and rotary angles are float32 whatever the weights are, so a double model agrees
with float64 formulas only to about 1e-7. Here the module's own code runs with float64 in the place
of float32: nothing of it is written again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


class Double:
    """The ``torch`` that such a module sees: float32 is another name for float64."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double(module: ModuleType) -> Iterator[None]:
    """Within it ``module`` (e.g. ``transformers.models.qwen2.modeling_qwen2``) knows no float32.

    Build the model within it, call ``.double()`` on it, and run it within it: its rotary
    frequencies are computed when it is built.
    """
    theirs = module.__dict__["torch"]
    module.__dict__["torch"] = Double()
    try:
        yield
    finally:
        module.__dict__["torch"] = theirs
