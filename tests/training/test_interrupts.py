"""Ctrl-C outside of training, and the processes it does not reach."""

import os
import signal
import sys

import pytest

from callbacks import Progress
from tests.programs import run
from training import main
from training.signals import interrupts_here_only


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler, also where the tests are a background job that ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)


def test_before_the_first_step_the_exit_code_is_130(fit, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Progress, "on_sanity_check_start", interrupt)
    options = ("--trainer.max_steps=2", "--trainer.num_sanity_val_steps=1")
    assert fit(tmp_path, *options) == 130
    errors = capsys.readouterr().err
    assert errors.endswith("interrupted\n")
    assert "Traceback" not in errors


def test_before_there_is_a_trainer_the_exit_code_is_130(monkeypatch, capsys):
    monkeypatch.setattr("training.program.LatentCLI", interrupt)
    assert main(["fit"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(KeyboardInterrupt):
        main(["fit", "--debug"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_exits_stay(monkeypatch):
    monkeypatch.setattr("training.program.LatentCLI", lambda _: sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        main(["fit"])


FORKS = """
import os, signal, sys
from training.signals import interrupts_here_only

signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupts_here_only():
    if (child := os.fork()) == 0:
        signal.raise_signal(signal.SIGINT)
        os._exit(5)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_processes_are_not_reached():
    done = run("-c", FORKS)
    assert done.returncode == 5, done.stderr


def test_a_handler_of_someone_else_stays():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_here_only():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
