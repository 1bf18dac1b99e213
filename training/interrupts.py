"""Ctrl-C reaches every process of a terminal; only those that train decide what it means."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def interrupts_here_only() -> Iterator[None]:
    """Has SIGINT raise KeyboardInterrupt in this process, as ever, and not in those it forks.

    Processes that build batches would end on the Ctrl-C after which training still needs them, for
    the step in work. They end with their parent. Any other handler is left as it is.
    """
    mine = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == mine:
            signal.default_int_handler(number, frame)

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
    """Whether it is a KeyboardInterrupt, or the exit that Lightning makes of one."""
    if isinstance(end, SystemExit) and end.__context__ is not None:
        end = end.__context__
    return isinstance(end, KeyboardInterrupt)
