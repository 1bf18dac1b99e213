"""What only one process of several sees, and processes that launchers start: nothing hangs."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.programs import ONE_THREAD, ROOT, Program, ends
from tests.reliability.runs import IN_PARTS, SHARDED, Run, finished
from training import processes

HERE = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'reliability'}"}
MODEL = "--model=poisoned_model.PoisonedLM"
TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")


def poisoned(text_file, root, *extra, **environment):
    run = Run(text_file, root, MODEL, *extra, **HERE, **environment)
    run.name = "PoisonedLM"
    return run


def of_session(leader):
    """The processes of a program's session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(session) == leader and state not in "ZX":
                found.append(int(entry.name))
    return found


def leaves_nothing(leader, seconds=processes.PATIENCE + 5):
    """Whether the session of a program that has ended is empty within the time ranks have."""
    until = time.monotonic() + seconds
    while of_session(leader) and time.monotonic() < until:
        time.sleep(0.1)
    return of_session(leader) == []


def test_an_error_on_one_rank_is_printed_and_ends_all(text_file, tmp_path):
    """A rank that cannot write samples goes on with the others until then."""
    validations = ("--trainer.val_check_interval=3", "--samples.every_n_validations=1")
    more = ("--trainer.max_steps=100", "--checkpoint.save_on_exception=true", *validations)
    run = poisoned(text_file, tmp_path / "run", *TWO, *more, MUTE="1", FAIL="1:8")
    process = run.start()
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 4, errors[-3000:]
    assert leaves_nothing(process.pid)
    assert "step 8/100" in output  # after two validations
    assert errors.count("text samples are disabled: PoisonedLM.generate_text failed with") == 1
    assert errors.count("RuntimeError: no words") == 1
    assert errors.count("RuntimeError: as planned at 1:8") == 1
    assert errors.index("as planned at 1:8") < errors.index("error: another process of the run")
    assert errors.count("error: another process of the run") == 1


def test_an_error_of_a_rank_after_the_last_step_fails_the_run(text_file, tmp_path):
    run = poisoned(text_file, tmp_path / "run", *TWO, "--trainer.max_steps=2", FAIL="1:end")
    errors = finished(run.start(), code=4)
    assert errors.count("RuntimeError: as planned at the end") == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "process 1" in line
    assert torch.load(run.last, weights_only=True)["global_step"] == 2


LONELY = """
import os, sys, time
from training import processes

os.environ[processes.LAUNCHER] = str(os.getpid())
if (child := os.fork()) == 0:
    processes.end_with_launcher(patience=0.1)
    time.sleep(600)  # as in a collective
print(child, flush=True)
"""


def test_a_rank_that_waits_ends_after_the_one_that_launched_it():
    process = Program("-c", LONELY)
    child = int(process.stdout.readline())
    assert ends(child, 10)
    _, errors = process.communicate(10)
    assert errors.count("error: another process of the run") == 1


def test_a_taken_port_is_refused_before_anything_starts(text_file, tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = poisoned(text_file, tmp_path / "run", *TWO, "--trainer.max_steps=2", MASTER_PORT=port)
        process = run.start()
        errors = finished(process, code=2, timeout=90)
        assert leaves_nothing(process.pid)
    (line,) = [line for line in errors.splitlines() if "error" in line.lower()]
    assert f"MASTER_PORT ({port})" in line
    assert "Traceback" not in errors
    assert not run.root.exists()


def test_one_process_is_rank_0_whatever_its_environment_says(text_file, tmp_path):
    """Pods have a RANK, and tasks of a sweep a SLURM_PROCID."""
    environment = {"RANK": "1", "SLURM_PROCID": "1", "POISON": "0:3", **ONE_THREAD}
    more = ("--trainer.max_steps=8", "--loggers=csv", "--checkpoint.every_n_train_steps=2")
    run = poisoned(text_file, tmp_path / "run", *more, **environment)
    # a program of its own: the rank is read when Lightning is imported
    command = [sys.executable, *run.command]
    done = subprocess.run(
        command, env=run.environment, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 3, done.stderr[-3000:]
    assert done.stderr.count("error: step 4, lr ") == 1
    assert len((run.folder / "metrics.csv").read_text().splitlines()) == 4  # with a header
    assert torch.load(run.last, weights_only=True)["global_step"] == 2


def test_one_command_starts_and_restarts(text_file, tmp_path):
    """torchrun starts a run again that has failed; it goes on from its last checkpoint."""
    more = ("--name=mine", "--ckpt_path=auto", "--trainer.max_steps=8", "--loggers=csv")
    often = "--checkpoint.every_n_train_steps=2"
    run = poisoned(text_file, tmp_path / "run", *more, often, FAIL="0:5")
    launcher = ("--standalone", "--nproc_per_node=1", "--max-restarts=1")
    module = ("-m", "torch.distributed.run")
    process = Program(*module, *launcher, *run.command, env=run.environment, forks_ranks=True)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-3000:]
    assert errors.count("RuntimeError: as planned at 0:5") == 1
    folder = run.root / "mine"
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 8
    rows = (folder / "metrics.csv").read_text().splitlines()[1:]
    assert sum(row.count(",") > 0 for row in rows) >= 8
    assert {path.name for path in folder.glob("config*")} == {"config.yaml", "config_4.yaml"}
    assert os.listdir(run.root) == ["mine"]


# ---- a checkpoint in parts, of which one is damaged


@pytest.fixture(scope="module")
def with_parts(text_file, tmp_path_factory):
    """The folder of a run with checkpoints in parts of steps 2 and 4; to be read only."""
    more = ("--trainer.max_steps=4", "--checkpoint.every_n_train_steps=2")
    root = tmp_path_factory.mktemp("with_parts") / "run"
    finished(Run(text_file, root, *IN_PARTS, *more, "--checkpoint.save_top_k=-1").start())
    return root


def damage(checkpoint):
    """Changes the last byte of a checkpoint's second part; returns the part."""
    (folder,) = checkpoint.parent.glob(f"{checkpoint.name}.shards-*")
    part = sorted(folder.iterdir())[1]
    part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1]))
    return part


ON = {
    "one": ("--trainer.devices=1",),
    "ddp": (*TWO, "--trainer.accelerator=cpu"),
    "sharded": (*SHARDED, "--trainer.strategy.sharded_checkpoints=true"),
}


@pytest.mark.parametrize("processes", ON)
def test_last_falls_back_where_a_part_is_damaged(text_file, with_parts, tmp_path, processes):
    """To the furthest whole checkpoint of the run, as with a damaged file; all ranks follow."""
    root = tmp_path / "run"
    shutil.copytree(with_parts, root)
    more = ("--trainer.max_steps=5", "--checkpoint.save_top_k=-1")
    run = Run(text_file, root, *ON[processes], *more)
    part = damage(run.last)
    damage(run.last.with_name("step=4.ckpt"))
    errors = finished(run.resume())
    assert (run.folder / "config_2.yaml").is_file()
    assert torch.load(run.last, weights_only=True)["global_step"] == 5
    lines = [line for line in errors.splitlines() if str(part) in line]
    assert len(lines) == 1
    assert "skipping a damaged checkpoint" in lines[0]


def test_a_damaged_part_without_an_older_checkpoint_is_named(text_file, with_parts, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(with_parts, root)
    run = Run(text_file, root, *TWO, "--trainer.max_steps=5")
    parts = [damage(path) for path in run.last.parent.glob("*.ckpt")]
    errors = finished(run.resume(), code=2)
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert any(str(part) in line for part in parts)


UNVERIFIED = """
import sys
from functools import partial
import training.parsing

found = training.parsing.find_checkpoint
training.parsing.find_checkpoint = lambda *args, **_: found(*args, verifies=False)
sys.exit(training.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("processes", ["ddp", "sharded"])
def test_a_part_damaged_while_ranks_start_is_named_once(text_file, with_parts, tmp_path, processes):
    root = tmp_path / "run"
    shutil.copytree(with_parts, root)
    run = Run(text_file, root, *ON[processes], "--trainer.max_steps=5")
    part = damage(run.last)
    program = tmp_path / "program.py"
    program.write_text(UNVERIFIED)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    environment = {**run.environment, "PYTHONPATH": str(ROOT)}
    command = (*launcher, program, *run.command[1:], "--ckpt_path", run.last)
    process = Program(*command, env=environment, forks_ranks=True)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors[-3000:]  # torchrun's own
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert str(part) in line
