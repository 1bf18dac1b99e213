"""Two processes do what one process with the doubled batch does, for every method."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ddp_worker import RUNS, train
from filelock import FileLock

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def of_two(text_file, tmp_path_factory):
    """The folder with what two processes left; they run once, however many workers test."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two_processes"
    out.mkdir(exist_ok=True)
    with FileLock(out / "lock"):
        if not (out / "done").exists():
            run_two(str(text_file), str(out / "cache"), str(out))
            (out / "done").touch()
    return out


def run_two(*arguments):
    """Starts both ranks and waits for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    place |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NODE_RANK": "0"}
    command = [sys.executable, str(ROOT / "tests" / "ddp_worker.py"), *arguments]
    logs = [Path(arguments[-1]) / f"rank{rank}.log" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **place, "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=log.open("w"),
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)


@pytest.mark.parametrize("method", RUNS, ids=lambda method: method.name)
def test_two_processes_train_as_one(method, of_two, cache, text_file):
    one = train(method, str(text_file), str(cache), processes=1)
    two = torch.load(of_two / f"{method.name}.pt", weights_only=True)
    assert one["weights"].keys() == two["weights"].keys()
    for key, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][key], weight, atol=1e-9, rtol=1e-7, msg=key)
    assert two["metrics"]["val/loss"] == pytest.approx(one["metrics"]["val/loss"], rel=1e-6)
    assert two["metrics"]["train/loss"] == pytest.approx(one["metrics"]["train/loss"], rel=1e-6)
    assert two["sentence_steps"] == one["sentence_steps"]
