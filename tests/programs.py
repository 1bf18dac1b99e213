"""Programs of the project in processes of their own, without the seconds that imports take.

A server that has imported libraries, and nothing of this project, forks a process for each program.
The project's files are read as they are by then, from the folder of the program; it has signals,
exit code, environment and streams of its own, as one that ``subprocess`` has started.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LIBRARIES = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "lightning.pytorch.cli",
    "lightning.pytorch.loggers",
    "omegaconf",
    "pandas",
    "ruamel.yaml",
    "tiktoken",
    "tokenizers",
)
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(list(LIBRARIES))


class Program:
    """A running program: what tests need of ``subprocess.Popen``, streams being text.

    It leads a session of its own, and has one thread.
    """

    def __init__(
        self, *argv: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> None:
        """Starts it.

        Args:
            argv: the words after ``python``: FILE, ``-m MODULE`` or ``-c CODE``, and arguments.
            cwd: the folder it begins in.
            env: its whole environment; null: that of this process.
        """
        self.args = [str(word) for word in argv]
        reader, writer = _SERVER.Pipe(duplex=False)
        file, errors = tempfile.mkstemp()
        environment = {**(os.environ if env is None else env), **ONE_THREAD}
        self._process = _SERVER.Process(
            target=_run, args=(self.args, str(cwd), environment, writer, errors)
        )
        with mock.patch.dict(os.environ, ONE_THREAD):  # of the server, which the first one starts
            self._process.start()
        atexit.register(self._process.kill)  # of what a failed test has left
        writer.close()
        self.pid = self._process.pid or 0
        self.stdout = os.fdopen(os.dup(reader.fileno()), newline="")
        self.stderr = os.fdopen(file, newline="")

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal that has ended it; null: it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal to the program, not to what it has started."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Waits for its end and returns the rest of stdout, and stderr.

        After ``timeout`` seconds it is killed with all it has started.
        """
        clock = threading.Timer(timeout, os.killpg, (self.pid, signal.SIGKILL))
        clock.start()
        with self.stdout, self.stderr:
            output = self.stdout.read()
            self._process.join()
            clock.cancel()
            return output, self.stderr.read()


def run(
    *argv: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess:
    """Runs a program to its end; arguments as ``Program`` takes them."""
    program = Program(*argv, cwd=cwd, env=env)
    output, errors = program.communicate(timeout)
    return subprocess.CompletedProcess(program.args, program.returncode or 0, output, errors)


def ends(pid: int | str, timeout: float = 30) -> bool:
    """Whether a process, of whoever, ends within these seconds; the kernel may take some."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def _run(argv: list[str], cwd: str, env: dict[str, str], output: Connection, errors: str) -> None:
    """Becomes the program, in the forked process."""
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # that of a program of its own
    os.dup2(output.fileno(), 1)
    output.close()
    file = os.open(errors, os.O_WRONLY)
    os.dup2(file, 2)
    os.close(file)
    os.unlink(errors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    added = ("", str(ROOT), str(ROOT / "tests"))  # by pytest
    given = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, given), *(path for path in sys.path if path not in added)]
    kind, *words = argv
    if kind not in ("-c", "-m"):
        path = os.path.abspath(kind)
        sys.argv, sys.path[:0] = [kind, *words], [os.path.dirname(path)]
        runpy.run_path(path, run_name="__main__")
        return
    source, *words = words
    sys.argv, sys.path[:0] = [kind, *words], [cwd]
    if kind == "-m":
        runpy.run_module(source, run_name="__main__", alter_sys=True)
    else:
        exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
