"""Several processes do what one process does with all their rows, for every method."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker import RUNS, STRATEGIES, train
from filelock import FileLock
from methods import IN_FULL

ROOT = Path(__file__).parent.parent
BY_NAME = {method.name: method for method in RUNS}
IN_TWO = [*(method.name for method in IN_FULL), "streams of a corpus"]
VARIANTS = [name for name in BY_NAME if name not in IN_TWO]
IN_FOUR = [name for name in BY_NAME if name != "streams of a corpus"]  # has two at a time


@pytest.fixture(scope="module")
def results(text_file, tmp_path_factory):
    """Returns what processes left; those of a group run once, however many workers test."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def load(strategies: str, names: list[str], strategy: str, name: str):
        out = base / f"{strategies}-{len(names)}"
        out.mkdir(exist_ok=True)
        with FileLock(out / "lock"):
            if not (out / "done").exists():
                run(STRATEGIES[strategy][0], out, str(text_file), strategies, *names)
                (out / "done").touch()
        return torch.load(out / strategy / f"{name}.pt", weights_only=True)

    return load


def run(processes, out, *arguments):
    """Starts all ranks and waits for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    place |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NODE_RANK": "0"}
    command = [sys.executable, str(ROOT / "tests" / "distributed_worker.py"), str(out), *arguments]
    logs = [out / f"rank{rank}.log" for rank in range(processes)]
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
        codes = [rank.wait(timeout=900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * processes, "\n".join(log.read_text()[-3000:] for log in logs)


@functools.cache
def alone(name, text, cache):
    """What one process ends with."""
    return train(BY_NAME[name], "one", text, cache)


@pytest.fixture
def differences(results, text_file, tmp_path_factory):
    """Returns what a strategy ends with otherwise than one process."""

    def compare(strategies: str, names: list[str], strategy: str, name: str) -> list[str]:
        cache = tmp_path_factory.getbasetemp() / "cache_of_one"
        one = alone(name, str(text_file), str(cache))
        several = results(strategies, names, strategy, name)
        assert one["weights"].keys() == several["weights"].keys()
        found = [
            key
            for key, weight in one["weights"].items()
            if not torch.allclose(several["weights"][key], weight, atol=1e-9, rtol=1e-7)
        ]
        ours, theirs = one["metrics"], several["metrics"]
        losses = ("val/loss", "train/loss")
        found += [key for key in losses if theirs[key] != pytest.approx(ours[key], rel=1e-8)]
        found += [key for key in ("sentence_steps", "texts") if several[key] != one[key]]
        return found if several.get("keeps_gradients", True) else [*found, "gradients"]

    return compare


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
@pytest.mark.parametrize("name", IN_TWO)
def test_two_processes_train_as_one(name, strategy, differences):
    assert differences("ddp,sharded", IN_TWO, strategy, name) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_two_sharded_processes_train_variants_as_one(name, differences):
    assert differences("sharded", VARIANTS, "sharded", name) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded4", "replicas"])
@pytest.mark.parametrize("name", IN_FOUR)
def test_four_processes_train_as_one(name, strategy, differences):
    assert differences("sharded4,replicas", IN_FOUR, strategy, name) == []
