"""Progress of a training run: loss, speed and remaining time."""

import math
import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Timer, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from callbacks.throughput import Throughput
from callbacks.trainer_state import in_accumulation, log_interval, newest_written
from lightning_models.recipe import as_started


class Progress(TQDMProgressBar):
    """Shows a bar of optimiser steps on a terminal, and plain lines in files, pipes and job logs.

    Both show the logged losses, tokens per second (from the ``Throughput`` callback) and the time
    left until max_steps, max_epochs or max_time, whichever comes first. Each validation prints a
    line, and so does the end of training, with the last checkpoint and a command to evaluate
    it.

    Args:
        refresh_rate: Number of batches between updates of the bar; 0 disables the output.
        line_every_n_steps: Number of optimiser steps between lines if the output is not a
            terminal. Null uses trainer.log_every_n_steps.
        leave: Whether to keep a bar after its epoch.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"

    def __init__(
        self, refresh_rate: int = 1, line_every_n_steps: int | None = None, leave: bool = False
    ) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self.line_every_n_steps = line_every_n_steps
        self._lines = False
        self._pace = _Pace()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if trainer.is_global_zero and self.is_enabled and not sys.stdout.isatty():
            self._lines = True
            self.disable()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._pace = _Pace()
        self.train_progress_bar.total = _finite(_total_steps(trainer))
        self.train_progress_bar.set_description("Training")

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.bar_format = self.BAR_FORMAT
        return bar

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        pass  # the bar counts the steps of the run, so an epoch does not reset it

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if in_accumulation(trainer):
            return
        step = trainer.global_step
        self._pace.step(step)
        if self._lines:
            interval = self.line_every_n_steps or log_interval(trainer)
            if step % interval == 0 or step == _total_steps(trainer):
                self._print_line(trainer, pl_module)
        elif self.is_enabled and (batch_idx + 1) % self.refresh_rate == 0:
            self.train_progress_bar.n = step
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        values = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/")
        }
        line = f"step {trainer.global_step}: {_join(values)}"
        if self._lines:
            print(line, flush=True)
        else:
            self.print(line)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the bar is closed by now; a run that ended with an error does not get here
        path = newest_written(trainer) if self._lines or self.is_enabled else None
        if path is not None:
            name = shlex.quote(str(_from_here(path)))
            hint = as_started(f"python evaluate.py perplexity --ckpt {name}")
            print(f"checkpoint: {name} ({hint})", flush=True)

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        values = {  # without validation values, which have separate lines
            name: value
            for name, value in super().get_metrics(trainer, pl_module).items()
            if name != "v_num" and not name.startswith("val/")
        }
        rates = [c.tokens_per_second for c in trainer.callbacks if isinstance(c, Throughput)]  # type: ignore[attr-defined]
        if rates and rates[0] is not None:
            values["tok/s"] = f"{rates[0]:,.0f}"
        left = self.seconds_left(trainer)
        if left is not None:
            values["left"] = str(timedelta(seconds=int(left)))
        return values

    def seconds_left(self, trainer: L.Trainer) -> float | None:
        """Returns the seconds until the run ends at its current pace, or None without a limit."""
        ends = []
        total = _total_steps(trainer)
        if self._pace.seconds_per_step is not None and math.isfinite(total):
            ends.append(max(0.0, total - trainer.global_step) * self._pace.seconds_per_step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            remaining = callback.time_remaining() if isinstance(callback, Timer) else None
            if remaining is not None:
                ends.append(max(0.0, remaining))
        return min(ends) if ends else None

    def _print_line(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        total = _finite(_total_steps(trainer))
        position = f"step {trainer.global_step}" + (f"/{total}" if total is not None else "")
        print(f"{position}: {_join(self.get_metrics(trainer, pl_module))}", flush=True)


class _Pace:
    """Wall-clock seconds per optimiser step of this process, including validations."""

    def __init__(self) -> None:
        self._start: tuple[int, float] | None = None
        self.seconds_per_step: float | None = None

    def step(self, step: int) -> None:
        """Records the end of a step; the first one (warm-up) only starts the clock."""
        now = time.monotonic()
        if self._start is None:
            self._start = (step, now)
        elif step > self._start[0]:
            self.seconds_per_step = (now - self._start[1]) / (step - self._start[0])


def _total_steps(trainer: L.Trainer) -> float:
    """Returns the optimiser steps of the whole run, or infinity without a limit."""
    return trainer.estimated_stepping_batches


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _finite(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _join(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )
