"""How many operations per second a device could do at best."""

import re
import time

import torch

PEAK_BF16 = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIE": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "RTX 6000 ADA": 364e12,
    "RTX A6000": 154.8e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 4080": 97.5e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 tensor-core rate with fp32 accumulation in FLOP/s, from the makers' data sheets.
The first name whose words are part of the device's name counts, so longer ones come first."""

MATRIX_SIZE = 1024
REPEATS = 5


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the highest FLOP/s of the device; None if its name is not known.

    Args:
        device: CUDA devices are looked up by name (bf16, whatever the precision); of a CPU the
            matmul rate in the compute type is measured, with all its threads, in about 0.2 s.
        precision: the trainer's, such as ``bf16-mixed``.
    """
    if device.type == "cuda":
        return known_rate(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return _measured_rate(torch.bfloat16 if precision.startswith("bf16") else torch.float32)
    return None


def known_rate(name: str) -> float | None:
    """Returns the table's entry for a device name such as ``NVIDIA H100 80GB HBM3``, or None."""
    matches = (rate for key, rate in PEAK_BF16.items() if re.search(rf"\b{key}\b", name.upper()))
    return next(matches, None)


def _measured_rate(dtype: torch.dtype) -> float:
    """Returns FLOP/s of the fastest of a few square matmuls on the CPU."""
    a = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    b = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * MATRIX_SIZE**3 / best
