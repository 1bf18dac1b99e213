"""Signals that end a run (SIGTERM, SIGHUP, SIGUSR1, Ctrl-C) after a checkpoint; stalled runs."""

import faulthandler
import os
import signal
import sys
import threading
import time
from functools import partial
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from callbacks.hooks import AgreedEnd, SumsOverRanks
from callbacks.save_checkpoints import SaveCheckpoints
from callbacks.trainer_state import in_accumulation

SAME_REQUEST_SECONDS = 1.0


class Terminated(AgreedEnd):
    """Raised when a run ends on a signal; the message names the checkpoint to resume from."""

    def __init__(self, message: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


ENDING = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run; if ranks get several, the first in this order counts."""
LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)
"""Signals that stay ignored if they are ignored when the program starts, e.g. under nohup."""


class Termination(SumsOverRanks):
    """Ends training on a signal of ``ENDING``, after a checkpoint.

    The current optimiser step is finished, ``last.ckpt`` is written and ``Terminated`` is raised,
    on all ranks at the same step, whichever of them got the signal. With several ranks, the next
    step is finished too if the signal comes after the reduction of ``NonFinite``, which informs all
    ranks.

    A validation is aborted at its next batch, after writing a ``last.ckpt`` from which
    ``PendingValidation`` repeats it. The exception is a validation between two accumulated
    micro-batches of several ranks, whose gradients a checkpoint does not hold bit-exactly: then the
    validation and the step are finished first. A second SIGINT ends the process immediately, and so
    does a SIGTERM more than a second after the first signal; an earlier one is the same request
    (``timeout`` and launchers signal the process and its group). A run that finishes in the
    meantime ends as usual. SIGHUP means that the terminal was closed, so later output to it is
    dropped. If SIGINT or SIGHUP is ignored at the start, as in background jobs of a shell script
    and under nohup, it stays ignored.

    Lightning's handlers end without a checkpoint, and with several ranks its SIGTERM and SIGUSR1
    handlers communicate between ranks.

    A run in which no batch ends for ``stall_minutes`` exits with 1, after each stalled rank has
    written the stacks of all threads to stderr.

    Args:
        stall_minutes: Maximum number of minutes without the end of a training or validation batch,
            or a checkpoint; callbacks must not take longer in between. Null means no limit.

    Raises:
        ValueError: If ``stall_minutes`` is not above 0.
    """

    def __init__(self, stall_minutes: float | None = None) -> None:
        if stall_minutes is not None and stall_minutes <= 0:
            raise ValueError(f"stall_minutes ({stall_minutes}) must be above 0, or null for never")
        self.stall_minutes = stall_minutes
        self._watches = False
        self._asked: int | None = None  # the signal that this rank got
        self._asked_at = 0.0
        self._ending: signal.Signals | None = None  # the signal that all ranks agree on
        self._ranks: list[float] | None = None  # number of ranks that got each signal of ENDING
        self._terminals: list[int] = []  # standard streams that are terminals

    def values_to_sum(self) -> list[float]:
        return [float(self._asked == signum) for signum in ENDING]

    def receive_sums(self, sums: list[float]) -> None:
        self._ranks = sums  # until the end of the batch

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # handles signals from now on; the trainer restores the former handlers when it ends
        self._asked = signal.SIGTERM if trainer.received_sigterm else None
        self._asked_at = time.monotonic()
        self._ending = None
        self._watches = True
        self._runs()
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        if threading.current_thread() is threading.main_thread():
            for signum in ENDING:
                ignored = signal.getsignal(signum) == signal.SIG_IGN
                if not (ignored and signum in LEFT_IGNORED):
                    signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signum == signal.SIGHUP:
            _drop_output(self._terminals)
        if self._asked is None:
            self._asked, self._asked_at = signum, now
        elif signum in (signal.SIGUSR1, signal.SIGHUP):
            return
        elif signum == signal.SIGINT or now - self._asked_at > SAME_REQUEST_SECONDS:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # requests the checkpoint at the end of an optimiser step, just before it is written
        self._runs()
        if self._ending or in_accumulation(trainer):
            return
        self._agree(trainer)
        if self._ending:
            for callback in _writers(trainer):
                callback.request()

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking or (trainer.world_size > 1 and in_accumulation(trainer)):
            return
        self._agree(trainer)
        if self._ending:
            for callback in _writers(trainer):
                callback.save_in_validation(trainer)
            raise _terminated(trainer, self._ending)

    def _agree(self, trainer: L.Trainer) -> None:
        """Agrees on a signal with all ranks, which are at the same batch; cheap on one rank."""
        if self._ending:
            return
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            # in a validation, or without NonFinite
            any_rank = partial(trainer.strategy.reduce_boolean_decision, all=False)
            any_asked = any_rank(self._asked is not None)
            ranks = [float(any_asked and any_rank(self._asked == signum)) for signum in ENDING]
        asked_for = [signum for signum, count in zip(ENDING, ranks, strict=True) if count]
        if asked_for:
            self._ending = asked_for[0]
            step, name = trainer.global_step, self._ending.name
            rank_zero_info(f"{name}: writing a checkpoint after step {step}, then exiting")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._ending:
            raise _terminated(trainer, self._ending)

    # ---- stalled runs

    def _runs(self) -> None:
        if self._watches and self.stall_minutes is not None:
            faulthandler.dump_traceback_later(
                60 * self.stall_minutes, exit=True, file=sys.__stderr__ or sys.stderr
            )

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._runs()

    def on_save_checkpoint(self, *_: Any, **__: Any) -> None:
        self._runs()

    def on_exception(self, *_: Any, **__: Any) -> None:
        self._watches = False
        if self.stall_minutes is not None:
            faulthandler.cancel_dump_traceback_later()

    def teardown(self, *_: Any, **__: Any) -> None:
        self.on_exception()


def _drop_output(streams: list[int]) -> None:
    """Redirects streams to the null device: writing to a closed terminal raises an OSError."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(devnull, stream)
    os.close(devnull)


def _writers(trainer: L.Trainer) -> list[SaveCheckpoints]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, SaveCheckpoints)]


def _terminated(trainer: L.Trainer, signum: signal.Signals) -> Terminated:
    end = "no checkpoint was written, because this run keeps none"
    paths = [writer.last_model_path for writer in _writers(trainer) if writer.last_model_path]
    if paths:
        end = f"resume from {paths[0]} with --ckpt_path last"
    text = f"stopped by {signum.name} after step {trainer.global_step}; {end}"
    return Terminated(text, signum)
