"""Device of a model, and precision of its matrix products."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["32", "tf32", "bf16"]


def pick_device(name: Device) -> torch.device:
    """Returns the device; ``auto`` uses a GPU if there is one.

    Raises:
        ValueError: If a GPU is requested and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("device (cuda) is not available here; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and has_gpu else "cpu")


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Returns a context that sets the precision of matrix products; weights stay float32."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return float32_products(precision)


@contextmanager
def float32_products(precision: Precision) -> Iterator[None]:
    """Computes products of float32 matrices in TF32 if ``precision`` is tf32, else in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
