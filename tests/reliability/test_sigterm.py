"""SIGTERM and Ctrl-C as the only reason for a checkpoint; test_kill.py has one after kills."""

import os
import select
import signal
import sys
import time

import pytest
import torch

from tests.programs import ROOT, Program, ends
from tests.reliability.runs import (
    SHARDED,
    Run,
    at_step,
    children,
    differences,
    finished,
    seeded,
)

STEPS = 60
SCHEDULE = (
    f"--trainer.max_steps={STEPS}",
    "--trainer.limit_train_batches=25",
    "--trainer.val_check_interval=5",
    "--trainer.accumulate_grad_batches=2",
)
TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")


TWO_WORKERS = ("--data.num_workers=2",)


def terminated_once(
    text_file, folder, seed, *extra, number=signal.SIGTERM, group=None, start=Run.start
):
    """Ends a run with a signal and goes on; returns where its end differs from a whole run's."""
    step = seeded(seed).randint(5, STEPS - 20)
    whole = Run(text_file, folder / "whole", *SCHEDULE, *extra)
    broken = Run(text_file, folder / "broken", *SCHEDULE, *extra)
    processes = whole.start(), start(broken)
    reached = at_step(processes[1], step, number, group=group)
    errors = finished(processes[1], code=128 + number)
    head = f"stopped by {number.name} after step"
    (line,) = [line for line in errors.splitlines() if head in line]
    saved = torch.load(broken.last, weights_only=True)["global_step"]
    print(f"{number.name} after step {reached} (asked {step}), saved step {saved}")
    assert reached <= saved < STEPS
    assert line.startswith(f"{head} {saved}; resume from {broken.last}")
    assert "Traceback" not in errors
    finished(processes[0])
    finished(broken.resume())
    return differences(broken, whole, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("extra", [(), ("--data.num_workers=1",), TWO], ids=["plain", "w", "ddp"])
def test_at_other_moments(text_file, tmp_path, seed, extra):
    assert terminated_once(text_file, tmp_path, seed, *extra) == []


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param((), id="plain", marks=pytest.mark.slow),
        pytest.param(("--data.num_workers=1",), id="w"),
        pytest.param(TWO, id="ddp", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c(text_file, tmp_path, extra):
    """It reaches all processes of the terminal's job: ranks, and those that build batches."""
    assert terminated_once(text_file, tmp_path, 1, *extra, number=signal.SIGINT) == []


@pytest.mark.slow
@pytest.mark.parametrize("extra", [TWO_WORKERS, (*TWO, *TWO_WORKERS)], ids=["w", "ddp"])
def test_a_whole_process_group(text_file, tmp_path, extra):
    """``kill -TERM -PGID``, and what SLURM sends: loader workers get the signal too."""
    assert terminated_once(text_file, tmp_path, 3, *extra, group=True) == []


def test_timeout(text_file, tmp_path):
    """``timeout`` signals its child, and then its group with that child in it once more."""

    def start(run):
        become = "import os, sys; os.execvp('timeout', ['timeout', '300', *sys.argv[1:]])"
        return Program("-c", become, sys.executable, *run.command, env=run.environment)

    assert terminated_once(text_file, tmp_path, 4, *TWO_WORKERS, start=start) == []


IN_A_TERMINAL = """
import os, runpy, sys

terminal = os.open(sys.argv[1], os.O_RDWR)  # that of the session from now on
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
sys.argv[:2] = []
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_closed_terminal(text_file, tmp_path):
    """Every process of the session gets SIGHUP, and what is printed then raises an OSError."""
    options = (*SCHEDULE, "--data.num_workers=1")
    whole, broken = (Run(text_file, tmp_path / name, *options) for name in ("whole", "broken"))
    process = whole.start()
    ours, theirs = os.openpty()
    place = os.ttyname(theirs)
    inside = Program("-c", IN_A_TERMINAL, place, *broken.command, env=broken.environment)
    shown = ""
    while "step 10: val/loss" not in shown:
        assert select.select([ours], [], [], 60)[0], shown[-3000:]
        shown += os.read(ours, 1000).decode(errors="replace")
    os.close(theirs)
    os.close(ours)
    inside.communicate(timeout=60)
    assert inside.returncode == 128 + signal.SIGHUP
    assert 10 <= torch.load(broken.last, weights_only=True)["global_step"] < STEPS
    finished(process)
    finished(broken.resume())
    assert differences(broken, whole, STEPS) == []


def test_workers_end_with_a_killed_parent(text_file, tmp_path):
    run = Run(text_file, tmp_path / "run", "--trainer.max_steps=100000", *TWO_WORKERS)
    process = run.start()
    at_step(process, 3, signal.SIGSTOP)
    workers = children(process.pid)
    try:
        assert len(workers) == 2
        process.kill()
        assert all(map(ends, workers))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def test_a_second_ctrl_c_ends_at_once(text_file, tmp_path):
    """Also where the step in work, here a validation batch of a second, is still to end."""
    run = slow_validation(text_file, tmp_path, 6, *AT_EPOCH_END)
    process = run.start()
    assert next(line for line in process.stdout if line.startswith("validating 6:2"))
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    finished(process, code=-signal.SIGINT)
    assert not run.last.exists()


SHORT = 9  # steps
BATCHES = 8  # of a validation
AT_EPOCH_END = ()  # epochs of 6 batches: after step 6, and not at the end
AT_THE_END = ("--trainer.val_check_interval=3",)
BETWEEN = ("--trainer.val_check_interval=3", "--trainer.accumulate_grad_batches=2")


def slow_validation(text_file, root, slow_step, *extra):
    """Returns a run whose validation after one step is slow, whichever process it is done in."""
    places = {"PYTHONPATH": str(ROOT / "tests" / "reliability"), "PAUSE": str(slow_step)}
    model = ("--model=slow_validation.SlowValidationLM", "--trainer.limit_train_batches=6")
    limits = (f"--trainer.limit_val_batches={BATCHES}", f"--trainer.max_steps={SHORT}")
    run = Run(text_file, root, *model, *limits, *extra, **places)
    run.name = "SlowValidationLM"
    return run


def interrupted(run, step, signum):
    """Sends a signal within the validation after a step; returns what is printed from then on."""
    process = run.start()
    place = f"validating {step}:2"
    seen = next((line for line in process.stdout if line.startswith(place)), None)
    assert seen is not None, process.stderr.read()[-3000:]
    if signum == signal.SIGKILL:
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum), errors[
        -3000:
    ]
    assert "Traceback" not in errors
    return rest


def interrupted_in_validation(text_file, folder, step, signum, *extra):
    """Sends a signal there and goes on; returns where its end differs from a whole run's."""
    whole = slow_validation(text_file, folder / "whole", None, *extra)
    broken = slow_validation(text_file, folder / "broken", step, *extra)
    process = whole.start()
    rest = interrupted(broken, step, signum)
    assert f"validating {step}:{BATCHES - 1}" not in rest  # its end was not waited for
    assert torch.load(broken.last, weights_only=True)["global_step"] == step
    finished(process)
    broken.environment["PAUSE"] = "None"
    finished(broken.resume())
    return differences(broken, whole, SHORT)


@pytest.mark.parametrize(
    ("step", "extra"),
    [
        pytest.param(6, AT_EPOCH_END, id="end of an epoch"),
        pytest.param(9, AT_THE_END, id="end of the run", marks=pytest.mark.slow),
        pytest.param(4, BETWEEN, id="between accumulated batches", marks=pytest.mark.slow),
        pytest.param(3, (*AT_THE_END, *TWO), id="ddp", marks=pytest.mark.slow),
        pytest.param(9, (*AT_THE_END, *SHARDED), id="sharded", marks=pytest.mark.slow),
    ],
)
def test_a_validation_is_not_waited_for(text_file, tmp_path, step, extra):
    assert interrupted_in_validation(text_file, tmp_path, step, signal.SIGTERM, *extra) == []


@pytest.mark.slow
def test_nor_on_ctrl_c(text_file, tmp_path):
    step = 6
    assert interrupted_in_validation(text_file, tmp_path, step, signal.SIGINT, *AT_EPOCH_END) == []


@pytest.mark.slow
@pytest.mark.parametrize(("step", "extra"), [(6, AT_EPOCH_END), (9, AT_THE_END)])
def test_killed_within_a_validation(text_file, tmp_path, step, extra):
    """A checkpoint that is due is not held up by the validation; a kill there loses nothing."""
    extra = (*extra, "--checkpoint.every_n_train_steps=3")
    assert interrupted_in_validation(text_file, tmp_path, step, signal.SIGKILL, *extra) == []
