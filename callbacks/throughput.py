"""Tokens seen, speed, cost and memory of training, and peak rates of GPUs."""

import re
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from callbacks.hooks import gather
from callbacks.trainer_state import in_accumulation, log_interval

TOKENS = "train/tokens"
"""Log tag and checkpoint key of the number of real tokens seen in training."""


class Throughput(L.Callback):
    """Logs tokens and ``throughput/*`` every ``trainer.log_every_n_steps`` optimiser steps.

    - ``train/tokens``: real tokens of all ranks since the run began, including earlier processes;
      left out if an older checkpoint did not count them.
    - ``tokens_per_second``: real tokens (see `real_tokens`) of all ranks per second of training,
      including waiting for data, but not validation, checkpoints and the first step (warm-up,
      compilation).
    - ``flops_per_token``: training FLOPs as the model counts them.
    - ``mfu``: model FLOPs utilisation, 0 to 1: the product of both over the devices' peak rate
      (dense bf16 for known GPUs); left out for other devices unless ``peak_tflops`` is set.
    - ``peak_memory_gib``: peak GPU memory allocated by this process; left out on a CPU.

    Args:
        peak_tflops: Peak rate of one device in TFLOP/s, or null to look it up by the GPU's name.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"peak_tflops ({peak_tflops}) must be above 0, or null to look it up")
        self.peak_tflops = peak_tflops
        self.tokens_per_second: float | None = None
        self._peak: float | None = None
        self._clock = _Clock()
        self._tokens: Tensor | int = 0
        self._seen: int | None = 0
        self._unlogged: Tensor | int = 0
        self._warm = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not trainer.global_step:
            self._seen, self._unlogged = 0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock, self._tokens, self._warm = _Clock(), 0, False
        self._peak = None if self.peak_tflops is None else self.peak_tflops * 1e12
        if self._peak is None and pl_module.device.type == "cuda":
            name = torch.cuda.get_device_name(pl_module.device)
            self._peak = known_rate(name)
            if self._peak is None:
                rank_zero_info(
                    f"the peak rate of {name} is unknown: throughput/mfu is not logged; set "
                    "throughput.peak_tflops"
                )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._warm:
            self._clock.start()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        stepped = not in_accumulation(trainer)
        tokens = real_tokens(batch)
        self._unlogged = self._unlogged + tokens
        due = stepped and trainer.global_step % log_interval(trainer) == 0
        if self._warm:
            self._tokens = self._tokens + tokens
            if due:
                _synchronise(pl_module.device)
                self._log(trainer, pl_module, batch)
        elif stepped:
            _synchronise(pl_module.device)
            self._warm = True
            self._clock.start()
        if due and self._seen is not None:
            unlogged = torch.as_tensor(self._unlogged).to(pl_module.device)
            self._seen += int(trainer.strategy.reduce(unlogged, reduce_op="sum"))
            self._unlogged = 0
            pl_module.log(TOKENS, float(self._seen))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause(pl_module)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._pause(pl_module)
        if self._seen is not None:
            checkpoint[TOKENS] = self._seen + sum(gather(int(self._unlogged)))

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._seen, self._unlogged = checkpoint.get(TOKENS), 0
        if self._seen is None and trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(f"the checkpoint does not count tokens: {TOKENS} is not logged")

    def _pause(self, pl_module: L.LightningModule) -> None:
        if self._clock.running:
            _synchronise(pl_module.device)
            self._clock.stop()

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> None:
        """Logs the current window and starts the next one."""
        tokens = torch.as_tensor(self._tokens).to(pl_module.device)
        total = float(trainer.strategy.reduce(tokens, reduce_op="sum"))
        seconds = self._clock.lap()
        self._tokens = 0
        self.tokens_per_second = total / seconds
        model: Any = pl_module
        flops = model.flops_per_token(context_length(batch), training=True)
        values = {
            "tokens_per_second": self.tokens_per_second,
            "flops_per_token": flops,
        }
        if pl_module.device.type == "cuda":
            values["peak_memory_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
        if self._peak is not None:
            devices_rate = self._peak * trainer.world_size
            values["mfu"] = self.tokens_per_second * flops / devices_rate
        pl_module.log_dict({f"throughput/{name}": value for name, value in values.items()})


class _Clock:
    """A stopwatch with pauses."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    @property
    def running(self) -> bool:
        """Whether the clock is running."""
        return self._since is not None

    def start(self) -> None:
        """Starts the clock if it is stopped."""
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Stops the clock."""
        if self._since is not None:
            self._total += time.perf_counter() - self._since
            self._since = None

    def lap(self) -> float:
        """Returns the seconds since the last lap, above 0, and continues."""
        self.stop()
        seconds, self._total = max(self._total, 1e-9), 0.0
        self.start()
        return seconds


def real_tokens(batch: dict[str, Any]) -> Tensor | int:
    """Returns the number of real tokens in a batch, without padding.

    Args:
        batch: A batch with ``mask`` (true for real tokens) or ``lengths`` (of sentences); otherwise
            all ``tokens`` count. In questions with reasoning, ``query``, ``steps`` and ``targets``
            count, independent of the method.
    """
    if "query" in batch:
        answers = (batch["targets"] >= 0).sum()
        return batch["query_lengths"].sum() + batch["step_lengths"].sum() + answers
    for key in ("mask", "lengths"):
        if key in batch:
            return batch[key].sum()
    return batch["tokens"].numel()


def context_length(batch: dict[str, Any]) -> int:
    """Returns the length of a row of the batch in tokens, including padding.

    In questions with reasoning it is the sum of the longest query, chain of steps and answer.
    """
    if "query" in batch:
        chain = int(batch["step_lengths"].sum(1).max())
        return int(batch["query"].shape[1] + chain + batch["targets"].shape[1])
    return batch["tokens"][0].numel()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- peak rates

# Lightning's get_available_flops lists sparse rates for some of these GPUs, and no H200 or L40S.
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
"""Dense bf16 tensor-core rate with fp32 accumulation in FLOP/s, from the vendors' data sheets. The
first key that is part of the device's name counts, so longer keys come first."""


def known_rate(name: str) -> float | None:
    """Returns the table's entry for a device name such as ``NVIDIA H100 80GB HBM3``, or None."""
    matches = (rate for key, rate in PEAK_BF16.items() if re.search(rf"\b{key}\b", name.upper()))
    return next(matches, None)
