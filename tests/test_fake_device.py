"""Every method on a device that is not there: no tensor stays on the host, few syncs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from methods import METHODS

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not hasattr(getattr(torch._C, "_acc", None), "DeviceGuard"),
    reason="this torch takes no device guard in Python",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the methods did; they run once, however many workers test."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fake_device.json"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
            command = [sys.executable, str(ROOT / "tests" / "fake_device.py"), str(out)]
            done = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_it_does_there_what_it_does_here(method, results):
    found = results[method.name]
    assert "error" not in found, found["error"]
    assert all(each < 1e-5 for each in found["differences"].values()), found["differences"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_training_step_waits_no_more_often_than_it_says(method, results):
    found = results[method.name]["training"]
    assert sum(found.values()) == method.waits, found
