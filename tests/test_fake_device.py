"""Every method on a device that is not there: no tensor stays on the host, few syncs."""

import json
import os

import pytest
import torch
from filelock import FileLock
from methods import METHODS

from tests.programs import ROOT, run

pytestmark = pytest.mark.skipif(
    not hasattr(getattr(torch._C, "_acc", None), "DeviceGuard"),
    reason="this torch takes no device guard in Python",
)


@pytest.fixture(scope="module")
def results(session_folder):
    """What the methods did; they run once, however many workers test."""
    out = session_folder / "fake_device.json"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
            env = {**os.environ, "PYTHONPATH": paths}
            done = run("tests/fake_device.py", out, env=env, timeout=300)
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


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_scoring_waits_once_at_most_to_select_what_has_a_target(method, results):
    """Not at all where the host knows how many there are: it counts sentences and answers."""
    waits = results[method.name]["scoring"]
    selecting = {line: count for line, count in waits.items() if "output_layer.py" in line}
    counts_here = method.name.startswith(
        ("thought-gestalt", "cot", "no-cot", "icot", "coconut", "codi", "pccot")
    )
    assert sum(selecting.values()) == (0 if counts_here else 1), selecting
