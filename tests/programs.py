"""Programs of the project in processes of their own, without the seconds that imports take.

A server that has imported libraries, and nothing of this project, forks a process for each program.
The project's files are read as they are by then, from the folder of the program; it has signals,
exit code, environment and streams of its own, as one that ``subprocess`` has started.
"""

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from lightning.fabric.utilities import rank_zero

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
        self,
        *argv: object,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        forks_ranks: bool = False,
    ) -> None:
        """Starts it.

        Args:
            argv: the words after ``python``: FILE, ``-m MODULE`` or ``-c CODE``, and arguments.
            cwd: the folder it begins in.
            env: its whole environment; null: that of this process.
            forks_ranks: Whether the ranks that Lightning or torchrun starts as further
                interpreters are forked, too. The program then has one more child, which waits.
        """
        self.args = [str(word) for word in argv]
        reader, writer = _SERVER.Pipe(duplex=False)
        file, errors = tempfile.mkstemp()
        environment = {**(os.environ if env is None else env), **ONE_THREAD}
        self._process = _SERVER.Process(
            target=_run, args=(self.args, str(cwd), environment, writer, errors, forks_ranks)
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


def run(*argv: object, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess:
    """Runs a program to its end; arguments as ``Program`` takes them."""
    program = Program(*argv, **options)
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


def _run(
    argv: list[str],
    cwd: str,
    env: dict[str, str],
    output: Connection,
    errors: str,
    forks_ranks: bool,
) -> None:
    """Becomes the program, in the forked process."""
    gc.freeze()  # what the server has imported
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # that of a program of its own
    os.dup2(output.fileno(), 1)
    output.close()
    file = os.open(errors, os.O_WRONLY)
    os.dup2(file, 2)
    os.close(file)
    os.unlink(errors)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    if forks_ranks:
        _fork_ranks()
    _become(argv, cwd, env)


def _become(argv: list[str], cwd: str, env: Mapping[str, str]) -> None:
    """Runs the words after ``python`` as an interpreter would that has just started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # as its import does
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


# ---- ranks: interpreters that the program starts


LAUNCHERS = {
    "lightning.pytorch.strategies.launchers.subprocess_script": "subprocess.Popen",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler": "Popen",
}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
Request = tuple[list[str], str, dict[str, str], bool]


def _fork_ranks() -> None:
    """Has launchers of this process fork interpreters from its present state, before it begins.

    A child that waits for requests forks them. As the process in between ends at once, the kernel
    makes them children of this process, which waits for them and signals them as usual.
    """
    prctl = ctypes.CDLL(None).prctl
    asking, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        asking.close()
        _answer(answering)
    answering.close()
    prctl(PR_SET_CHILD_SUBREAPER, 1)

    class Forked(subprocess.Popen):
        """``Popen`` of ``[sys.executable, ...]``, whose streams are those of this process."""

        def __init__(self, args: Any, env: Any, cwd: Any = None, **options: Any) -> None:
            new_session = options.get("start_new_session", False)
            self._request: Request = (list(args), cwd or os.getcwd(), dict(env), new_session)
            super().__init__(args, env=env, cwd=cwd, **options)

        def _execute_child(self, *_: Any) -> None:
            asking.send(pickle.dumps(self._request))
            self.pid, self._child_created = int(asking.recv(32)), True

    for name, attribute in LAUNCHERS.items():
        holder = importlib.import_module(name)
        if attribute == "subprocess.Popen":
            holder.subprocess = SimpleNamespace(Popen=Forked)
        else:
            holder.Popen = Forked


def _answer(requests: socket.socket) -> NoReturn:
    """Forks an interpreter for each request, until the program has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while request := requests.recv(2**20):
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            target, arguments = _interpret, (os.getpid(), *pickle.loads(request))
            process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
            process.start()
            os.write(writer, str(process.pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # only then the interpreter is a child of the program
        requests.send(os.read(reader, 32))
        os.close(reader)
        os.close(writer)
    os._exit(0)


def _interpret(between: int, args: list[str], cwd: str, env: dict[str, str], new: bool) -> None:
    """Becomes a program that another program has started, once that is the parent."""
    while os.getppid() == between:
        time.sleep(0.001)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if new:
        os.setsid()
    _, *words = (word for word in args if word != "-u")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else that of the other ranks
    _become(words, cwd, env)
