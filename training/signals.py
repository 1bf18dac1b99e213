"""Handling of Ctrl-C in a process with workers, and filters for messages from other libraries."""

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
    """Lets SIGINT raise KeyboardInterrupt only in this process, not in its forks.

    Ctrl-C reaches every process of a terminal, but training needs its data-loading processes for
    the current step; they end with their parent. Other handlers of SIGINT are kept.
    """
    owner_pid = os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == owner_pid:
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
    """Returns whether an exception is a KeyboardInterrupt, or Lightning's exit after one."""
    if isinstance(end, SystemExit) and end.__context__ is not None:
        end = end.__context__
    return isinstance(end, KeyboardInterrupt)


UNHELPFUL_WARNINGS = (
    # Lightning uses a torch function that torch has renamed.
    r".*isinstance\(treespec, LeafSpec\).*",
    # Evaluation needs none of the training callbacks.
    r".*callbacks used to create the checkpoint need to be provided.*",
    # A resumed run deliberately continues in its folder.
    r".*Checkpoint directory .* exists and is not empty.*",
    # The metrics are already summed over ranks.
    r".*It is recommended to use `self.log\(.*sync_dist=True\)`.*",
    # Models check batches and may move them in a custom way; our data modules do not.
    r".*You have overridden `(on_before_batch_transfer|transfer_batch_to_device)` in `Lightning.*",
    # Training without a validation split, which the data modules report.
    r"Total length of `list` across ranks is zero.*",
    # Batches are slices of a memory map; workers are optional (data.num_workers).
    r".*does not have many workers.*",
)
ADVERTISEMENT = " Tip: For seamless"


def silence() -> None:
    """Filters messages from other libraries that do not help users of ``train.py``."""
    for pattern in UNHELPFUL_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if _no_advertisement not in logger.filters:
        logger.addFilter(_no_advertisement)


def _no_advertisement(record: logging.LogRecord) -> bool:
    return ADVERTISEMENT not in record.getMessage()
