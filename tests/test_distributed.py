"""Several processes do what one process does with all their rows, for every method."""

import functools
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from distributed_worker import RUNS, STRATEGIES, train
from filelock import FileLock
from methods import IN_FULL

from tests.programs import ROOT, Program

BY_NAME = {method.name: method for method in RUNS}
IN_TWO = [*(method.name for method in IN_FULL), "streams of a corpus"]
VARIANTS = [name for name in BY_NAME if name not in IN_TWO]
TWO = "ddp,sharded,sharded_bf16"
IN_FOUR = [name for name in BY_NAME if name != "streams of a corpus"]  # has two at a time


@pytest.fixture(scope="module")
def results(text_file, session_folder, request):
    """Returns what processes left; those of a group run once, however many workers test.

    Of a group the methods are trained whose tests were selected.
    """
    own = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params["name"] for item in own}

    def load(strategies: str, names: list[str], strategy: str, name: str):
        names = [each for each in names if each in selected]
        out = session_folder / f"{strategies}-{len(names)}"
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
    place |= {"PYTHONPATH": paths, "NODE_RANK": "0"}
    command = ("tests/distributed_worker.py", out, *arguments)
    ranks = [
        Program(*command, env={**os.environ, **place, "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    with ThreadPoolExecutor(processes) as pool:
        ended = list(pool.map(lambda rank: rank.communicate(timeout=900), ranks))
    codes = [rank.returncode for rank in ranks]
    assert codes == [0] * processes, "\n".join(errors[-10_000:] for _, errors in ended)


@functools.cache
def alone(name, text, cache, strategy="one"):
    """What one process ends with."""
    return train(BY_NAME[name], strategy, text, cache)


@pytest.fixture
def differences(results, text_file, tmp_path_factory):
    """Returns what a strategy ends with otherwise than one process."""

    def compare(strategies: str, names: list[str], strategy: str, name: str) -> list[str]:
        cache = tmp_path_factory.getbasetemp() / "cache_of_one"
        one = alone(name, str(text_file), str(cache))
        several = results(strategies, names, strategy, name)
        assert one["weights"].keys() == several["weights"].keys()
        assert one["moments"].keys() == several["moments"].keys()
        found = [
            key
            for kind in ("weights", "moments")
            for key, value in one[kind].items()
            if not torch.allclose(several[kind][key], value, atol=1e-9, rtol=1e-7)
        ]
        ours, theirs = one["metrics"], several["metrics"]
        losses = ("val/loss", "train/loss")
        found += [key for key in losses if theirs[key] != pytest.approx(ours[key], rel=1e-8)]
        found += [key for key in ("sentence_steps", "texts") if several[key] != one[key]]
        kept = ("keeps_gradients", "keeps_checkpoint")
        return found + [key for key in kept if not several.get(key, True)]

    return compare


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
@pytest.mark.parametrize("name", IN_TWO)
def test_two_processes_train_as_one(name, strategy, differences):
    assert differences(TWO, IN_TWO, strategy, name) == []


@pytest.mark.parametrize("name", IN_TWO)
def test_mixed_precision_gathers_bf16(name, results, text_file, tmp_path_factory):
    """Where blocks are units; steps equal those under autocast up to rounding."""
    cache = tmp_path_factory.getbasetemp() / "cache_of_one"
    one = alone(name, str(text_file), str(cache), "one_bf16")
    several = results(TWO, IN_TWO, "sharded_bf16", name)
    by_block = BY_NAME[name].build(**BY_NAME[name].alone).shards_blocks
    assert several["gathered"] == ["torch.bfloat16" if by_block else "torch.float32"]
    assert one["gathered"] == several["own"] == ["torch.float32"]
    assert several["beside_stream"] == one["beside_stream"]
    assert several["keeps_checkpoint"]
    assert several["keeps_gradients"]
    moved = off = 0.0
    for key, before in BY_NAME[name].build(**BY_NAME[name].alone).network.named_parameters():
        weight, own = one["weights"][key], several["weights"][key]
        assert own.dtype == torch.float32
        moved += (weight - before).square().sum().item()
        off += (own - weight).square().sum().item()
    assert off < 0.1**2 * moved
    assert several["metrics"]["val/loss"] == pytest.approx(one["metrics"]["val/loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_two_sharded_processes_train_variants_as_one(name, differences):
    assert differences("sharded", VARIANTS, "sharded", name) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded4", "replicas"])
@pytest.mark.parametrize("name", IN_FOUR)
def test_four_processes_train_as_one(name, strategy, differences):
    assert differences("sharded4,replicas", IN_FOUR, strategy, name) == []
