"""A disk that runs full: the previous checkpoint stays whole, and the message says so."""

import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from lightning_models.checkpoint import read_checkpoint
from training.checkpoints import AtomicCheckpointIO
from training.errors import UserError

RECIPE = {"model": {"class_path": "lightning_models.TransformerLM", "init_args": {}}}
FULL = r"cannot write the checkpoint .*last\.ckpt \({}\); the previous one is whole\. Make room"


def content(step, megabytes):
    state = {"w": torch.zeros(megabytes * 2**18)}
    return {"state_dict": state, "global_step": step, "recipe": RECIPE}


@pytest.fixture
def limited_files():
    """No file of this process may grow beyond 2 MB: the system refuses the write, as when full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("limited_files")
def test_a_refused_write_leaves_the_previous_one(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(1, 1), path)
    with pytest.raises(UserError, match=FULL.format("File too large")):
        AtomicCheckpointIO().save_checkpoint(content(2, 3), path)
    assert read_checkpoint(path).step == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB, where this machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a size-limited file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_file_system_leaves_the_previous_one(small_disk):
    path = small_disk / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(1, 1), path)
    with pytest.raises(UserError, match=FULL.format("No space left on device")):
        AtomicCheckpointIO().save_checkpoint(content(2, 3), path)
    assert read_checkpoint(path).step == 1
    assert os.listdir(small_disk) == ["last.ckpt"]


PROGRAM = """
import resource, sys
from training import main
real = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), real))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_run_ends_with_one_line_and_can_go_on(text_file, tmp_path):
    """Four steps, then four more in which no checkpoint can be written, then again with room."""
    from tests.reliability.runs import ROOT, Run, differences, finished

    schedule = (
        "--trainer.max_steps=8",
        "--checkpoint.every_n_train_steps=2",
        "--model.optimizer.schedule=constant",
    )
    whole = Run(text_file, tmp_path / "whole", *schedule)
    broken = Run(text_file, tmp_path / "broken", *schedule)
    finished(whole.start())
    finished(broken.start("--trainer.max_steps=4"))
    before = broken.last.read_bytes()
    command = [sys.executable, "-c", PROGRAM, str(len(before) // 2), *broken.command[2:]]
    done = subprocess.run(
        [*command, "--ckpt_path=last"],
        env=broken.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "the previous one is whole" in line
    assert "Traceback" not in done.stderr
    assert broken.last.read_bytes() == before
    finished(broken.resume())
    assert differences(broken, whole, 8) == []
