"""Entry point of ``train.py``: dispatches verbs and returns exit codes."""

import os
import shutil
import signal
import subprocess
import sys

from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks import NonFiniteError
from callbacks.hooks import AgreedEnd
from lightning_models.recipe import as_started
from training import listing
from training.cli import LatentCLI
from training.errors import LOST_LINE, LOST_PROCESS, check_verb, explain, lost_process
from training.help import EXAMPLE, VERBS
from training.parsing import DEBUG_FLAG
from training.processes import LAUNCHER, LostRankError, await_launched, code_without_report
from training.run_folder import WaitedError
from training.signals import INTERRUPTED, interrupts_here_only, silence, was_interrupt


def main(args: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    The codes are 0 for success; 2 for bad input, 3 for a non-finite loss or gradient, and 4 if
    another process of the run has ended, each reported in one line; 129, 130 or 143 after SIGHUP,
    Ctrl-C or SIGTERM, with a checkpoint if training was running; and 138 after SIGUSR1, which
    requeues the SLURM job.

    Args:
        args: The command line. Defaults to ``sys.argv[1:]``.
    """
    argv = sys.argv[1:] if args is None else args
    silence()
    try:
        with interrupts_here_only():
            if argv[:1] == ["list"]:
                return listing.main(argv[1:])
            if argv[:1] == ["plan"]:
                from training.plan import Planner

                Planner(argv[1:])
                return 0
            if argv and not argv[0].startswith("-"):
                check_verb(argv, VERBS, EXAMPLE)
            _execute(argv)
    except AgreedEnd as stop:
        return _end_on_all_ranks(stop, DEBUG_FLAG in argv)
    except SIGTERMException:  # before the first step
        return 128 + signal.SIGTERM
    except (KeyboardInterrupt, SystemExit) as end:
        if not was_interrupt(end) or DEBUG_FLAG in argv:
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        message = explain(error)
        if lost_process(error) and DEBUG_FLAG not in argv:
            print(f"error: {LOST_LINE}: {' '.join(str(error).split())}", file=sys.stderr)
            return LOST_PROCESS
        if message is None or DEBUG_FLAG in argv:
            raise
        if (code := code_without_report(error)) is not None:
            return code
        print(as_started(f"error: {message}"), file=sys.stderr)
        return LOST_PROCESS if isinstance(error, LostRankError) else 2
    return 0


def _execute(argv: list[str]) -> None:
    """Runs a verb, and restarts it if it had to wait for another run."""
    try:
        await_launched(LatentCLI(argv).trainer)
    except WaitedError:  # the checkpoint may have been replaced in the meantime
        _execute(argv)
    finally:
        os.environ.pop(LAUNCHER, None)  # programs started later are not ranks of this run


def _end_on_all_ranks(stop: AgreedEnd, debug: bool) -> int:
    """Ends a run as all ranks have agreed: rank 0 reports why, and returns the exit code.

    The other ranks exit with 0: if one failed, a launcher would kill rank 0 before it has reported.
    """
    if getattr(rank_zero_only, "rank", 0):
        return 0
    if isinstance(stop, NonFiniteError):
        if debug:
            raise stop
        print(f"error: {stop}", file=sys.stderr)
    else:
        print(stop, file=sys.stderr)
        if stop.exit_code == 128 + signal.SIGUSR1:
            _requeue()
    return int(stop.exit_code)


def _requeue() -> None:
    """Requeues the SLURM job after the SIGUSR1 that ``--signal=USR1@SECONDS`` asked for."""
    job, command = os.environ.get("SLURM_JOB_ID"), shutil.which("scontrol")
    if job is not None and command is not None:
        subprocess.run([command, "requeue", job], check=False)
