"""How commands of this package end: one line for bad input, and how to go on."""

import signal
import sys
from collections.abc import Callable
from typing import Any

from studies.processes import CommandError
from studies.study import StudyError

SIGTERM_CODE = 128 + signal.SIGTERM


def run_guarded(work: Callable[[], None]) -> int:
    """Does the work and returns the exit code.

    0: done; 1: a command failed, told with its last lines; 2: bad input, told in one line; 130 or
    143: stopped. Started again the work goes on where it stood, but for bad input.
    """
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        work()
    except StudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"error: {error}Start it again to go on from here.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; start it again to go on from here", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _stop(*_: Any) -> None:
    sys.exit(SIGTERM_CODE)
