"""Commands that end well, badly, or are stopped."""

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from studies.processes import CommandError, execute, stop_running


def test_output_goes_to_the_log(tmp_path):
    code = "import sys; print('said'); print('warned', file=sys.stderr)"
    execute([sys.executable, "-c", code], tmp_path / "log")
    assert sorted((tmp_path / "log").read_text().split()) == ["said", "warned"]


def test_a_failure_tells_the_command_and_its_last_lines(tmp_path):
    code = "print(*range(100), sep='\\n'); raise SystemExit('no such luck')"
    with pytest.raises(CommandError) as failure:
        execute([sys.executable, "-u", "-c", code], tmp_path / "log")
    message = str(failure.value)
    assert "ended with code 1" in message
    assert "no such luck" in message
    assert "| 99\n" in message
    assert "| 50\n" not in message
    assert f"{sys.executable} -u -c" in message


def test_threads_are_limited(tmp_path):
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    execute([sys.executable, "-c", code], tmp_path / "log", threads=3)
    assert (tmp_path / "log").read_text() == "3\n"


def test_commands_of_other_threads_can_be_stopped(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        code = "import time; print('up', flush=True); time.sleep(60)"
        future = pool.submit(execute, [sys.executable, "-c", code], tmp_path / "log")
        while not future.done() and not (
            (tmp_path / "log").exists() and (tmp_path / "log").read_text()
        ):
            time.sleep(0.01)
        stop_running()
        with pytest.raises(CommandError, match="code -15"):
            future.result(timeout=30)


PATIENT = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
import os
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(60)
"""


def test_a_stopped_study_lets_the_command_save_its_state(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            execute([sys.executable, "-c", PATIENT, str(tmp_path / "state")], tmp_path / "log")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert (tmp_path / "state").read_text() == "saved"
