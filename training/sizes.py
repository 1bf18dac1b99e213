"""Checks of sizes against the machine, before anything is allocated or started."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from datamodules.encoding import usable_cores
from lightning_models.memory import as_gib, check_batch, host_memory, weights_size
from training.errors import UserError
from training.strategies import FullySharded

PROCESSES_PER_CORE = 8
COPIES = 4
"""Copies of each parameter in training with AdamW: weights, gradients and two moments."""


def check_sizes(trainer: L.Trainer, model: Any, data: Any, *, trains: bool) -> None:
    """Checks processes, one batch and the weights against cores and memory.

    Warns if the weights fit but gradients and moments do not.

    Raises:
        ValueError: If one is too large; the message names the option.
    """
    strategy, processes = trainer.strategy, trainer.num_devices
    device = strategy.root_device
    max_processes = PROCESSES_PER_CORE * usable_cores()
    if device.type == "cpu" and processes > max_processes:
        raise UserError(
            f"trainer.devices ({processes}) must be at most {max_processes} on this CPU, "
            f"{PROCESSES_PER_CORE} processes per core; lower it"
        )
    check_batch(data)
    share = 1
    if isinstance(strategy, FullySharded):
        share = strategy.shard_size or trainer.world_size
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory = host_memory() / processes
    half = str(trainer.precision) in ("bf16-true", "16-true")
    size = weights_size(model, memory * (2 if half else 1), share=share) / (2 if half else 1)
    if trains and COPIES * size > memory * share:
        rank_zero_warn(
            f"weights, gradients and moments take {as_gib(COPIES * size / share)} of a process's "
            f"{as_gib(memory)} of memory, before any activations; training will probably not fit"
        )
