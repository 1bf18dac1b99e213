"""Two processes do what one process with the doubled batch does, for every method."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from methods import METHODS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def runs(text_file, tmp_path_factory):
    """Folders with what one and what two processes left."""
    cache = tmp_path_factory.mktemp("cache")
    folders = []
    for processes in (1, 2):
        out = tmp_path_factory.mktemp(f"processes{processes}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(processes), "tests/ddp_worker.py"]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        done = subprocess.run(
            [*command, str(text_file), str(cache), str(out)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        folders.append(out)
    return folders


@pytest.mark.parametrize("name", [method.name for method in METHODS])
def test_two_processes_train_as_one(runs, name):
    one, two = (torch.load(folder / f"{name}.pt", weights_only=True) for folder in runs)
    assert one["weights"].keys() == two["weights"].keys()
    for key, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][key], weight, atol=1e-9, rtol=1e-7, msg=key)
    assert two["metrics"]["val/loss"] == pytest.approx(one["metrics"]["val/loss"], rel=1e-6)
    assert two["metrics"]["train/loss"] == pytest.approx(one["metrics"]["train/loss"], rel=1e-6)
    assert two["sentence_steps"] == one["sentence_steps"]
