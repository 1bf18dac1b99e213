"""Commands that end well, badly, or are stopped."""

import signal
import sys

import pytest

from studies.processes import CommandError, execute


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
