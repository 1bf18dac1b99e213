"""Ctrl-C in a process with workers, and messages of other libraries that are left out."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def interrupts_here_only() -> Iterator[None]:
    """Lets SIGINT raise KeyboardInterrupt in this process alone, not in those it forks.

    Ctrl-C reaches every process of a terminal, and training needs the processes that build batches
    for the step in work; they end with their parent. Other handlers of SIGINT are kept.
    """
    mine = os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == mine:
            signal.default_int_handler(signum, frame)

    ordinary = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ordinary or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def was_interrupt(end: BaseException) -> bool:
    """Whether an exception is a KeyboardInterrupt, or the exit that Lightning makes of one."""
    if isinstance(end, SystemExit) and end.__context__ is not None:
        end = end.__context__
    return isinstance(end, KeyboardInterrupt)


UNHELPFUL_WARNINGS = (
    # Lightning's own use of a torch function that torch has renamed.
    r".*isinstance\(treespec, LeafSpec\).*",
    # Evaluation needs none of the callbacks that training had.
    r".*callbacks used to create the checkpoint need to be provided.*",
    # A resumed run goes on in its own folder, on purpose.
    r".*Checkpoint directory .* exists and is not empty.*",
    # The metrics are sums over ranks already.
    r".*It is recommended to use `self.log\(.*sync_dist=True\)`.*",
    # A model may move batches in its own way; our data modules have none.
    r".*You have overridden `transfer_batch_to_device` in `LightningModule`.*",
    # Training without a validation split, of which the data modules say what to do about it.
    r"Total length of `list` across ranks is zero.*",
    # Batches are built by slicing a memory map; workers are a choice (data.num_workers).
    r".*does not have many workers.*",
)
ADVERTISEMENT = " Tip: For seamless"


def silence() -> None:
    """Filters messages of other libraries that help nobody who runs ``train.py``."""
    for pattern in UNHELPFUL_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if _no_advertisement not in logger.filters:
        logger.addFilter(_no_advertisement)


def _no_advertisement(record: logging.LogRecord) -> bool:
    return ADVERTISEMENT not in record.getMessage()
