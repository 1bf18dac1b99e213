"""Commands as processes of their own, each with a log file."""

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

PATIENCE = 60.0
"""Seconds that a command has to save its state when the study is stopped."""
LAST_LINES = 15

_running: set["subprocess.Popen[bytes]"] = set()

Execute = Callable[[Sequence[str], Path], None]
"""Runs a command with a log file, or raises ``CommandError``."""


class CommandError(Exception):
    """A command ended with an error; the message has the command and its last lines."""

    def __init__(self, command: Sequence[str], code: int, log: Path) -> None:
        """Takes the command, its exit code and its log."""
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        super().__init__(
            f"this command ended with code {code} (its output: {log}):\n"
            f"  {shlex.join(command)}\n" + "".join(f"  | {line}\n" for line in lines)
        )


def execute(command: Sequence[str], log: Path, threads: int | None = None) -> None:
    """Runs a command, its output going to a file.

    If the study is stopped meanwhile, the command is told to end first: training then saves a
    checkpoint.

    Args:
        command: program and arguments.
        log: file for its output.
        threads: that it may compute with; None: what the machine has.

    Raises:
        CommandError: if it ends with another code than 0.
    """
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with log.open("wb") as output:
        # in a session of its own: Ctrl-C reaches the study alone, which then ends the command
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **limit},
        )
        _running.add(process)
        try:
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            _running.discard(process)
    if code:
        raise CommandError(command, code, log)


def executor(jobs: int) -> Execute:
    """Returns what runs a command where several are under way, which share the processors."""
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    return partial(execute, threads=threads)


def stop_running() -> None:
    """Tells the commands that other threads run to end."""
    for process in list(_running):
        process.terminate()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
