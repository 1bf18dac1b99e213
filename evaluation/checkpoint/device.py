"""Where and in which precision the model runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["32", "bf16"]


def pick_device(name: Device) -> torch.device:
    """Returns the device; ``auto`` takes a GPU where there is one.

    Raises:
        ValueError: if a GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("device (cuda) is not available here; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and has_gpu else "cpu")


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Returns the context of a precision: weights stay float32, bf16 rounds matrix products."""
    if precision == "32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
