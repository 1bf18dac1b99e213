"""Killed at any moment, resumed with --ckpt_path last: every bit is that of the whole run."""

import os
import shutil
import signal
import time

import pytest
import torch

from lightning_models.checkpoint import read_checkpoint
from tests.reliability.runs import (
    IN_PARTS,
    SHARDED,
    Run,
    at_step,
    children,
    differences,
    finished,
    killed,
    seeded,
    step_lines,
)

STEPS = 60
# Epochs of 25 batches; a validation falls on some of the steps that write a checkpoint.
SCHEDULE = (
    f"--trainer.max_steps={STEPS}",
    "--trainer.limit_train_batches=25",
    "--trainer.val_check_interval=10",
    "--checkpoint.every_n_train_steps=4",
)
ACCUMULATE = ("--trainer.accumulate_grad_batches=2", "--trainer.val_check_interval=5")
VARIANTS = {
    "plain": (),
    "accumulation": ACCUMULATE,
    "a worker": ("--data.num_workers=1",),
    "accumulation and a worker": (*ACCUMULATE, "--data.num_workers=1"),
    "all checkpoints kept": ("--checkpoint.save_top_k=-1", "--trainer.gradient_clip_val=0.5"),
}


TWO_RANKS = ("--trainer.devices=2", "--trainer.strategy=ddp")


def broken_twice(text_file, folder, seed, extra, *, terminate=False):
    """Kills a run twice, and with ``terminate`` ends it once more with SIGTERM, which saves by
    itself; returns where its end differs from that of a whole run."""
    rng = seeded(seed)
    whole = Run(text_file, folder / "whole", *SCHEDULE, *extra)
    broken = Run(text_file, folder / "broken", *SCHEDULE, *extra)
    first = rng.randint(5, STEPS // 2 - 5)
    processes = whole.start(), broken.start()
    reached = killed(processes[1], first, delay=rng.random() / 50)
    finished(processes[0])
    second = rng.randint(min(reached + 4, STEPS - 15), STEPS - 12)
    again = killed(broken.resume(), second, delay=rng.random() / 50)
    print(f"killed after step {reached} (asked {first}) and {again} (asked {second})")
    if terminate:
        terminated(broken, min(again + 1, STEPS - 8))
    finished(broken.resume())
    return differences(broken, whole, STEPS)


def terminated(run, step):
    """SIGTERM saves at the end of the step in work and says where."""
    process = run.resume()
    reached = at_step(process, step, signal.SIGTERM)
    errors = finished(process, code=143)
    (line,) = [line for line in errors.splitlines() if "stopped by SIGTERM" in line]
    saved = torch.load(run.last, weights_only=True)["global_step"]
    print(f"SIGTERM after step {reached} (asked {step}), saved step {saved}")
    assert reached <= saved < STEPS
    assert line == (
        f"stopped by SIGTERM after step {saved}; resume from {run.last} with --ckpt_path last"
    )
    assert "Traceback" not in errors


def test_killed_twice_and_terminated(text_file, tmp_path):
    extra = VARIANTS["accumulation and a worker"]
    assert broken_twice(text_file, tmp_path, 0, extra, terminate=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_twice_at_other_moments(text_file, tmp_path, variant, seed):
    assert broken_twice(text_file, tmp_path, seed, VARIANTS[variant]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "extra"), [(4, TWO_RANKS), (5, TWO_RANKS), (6, IN_PARTS)])
def test_two_ranks_killed_twice(text_file, tmp_path, seed, extra):
    """Dropout differs by rank, so this needs the random state of each."""
    assert broken_twice(text_file, tmp_path, seed, extra) == []


@pytest.mark.slow
def test_parts_that_four_ranks_wrote_are_resumed_by_any_number(text_file, tmp_path):
    """The batch of all ranks together has the same windows, whatever their number is."""

    def run(devices, steps, *extra):
        own = Run(text_file, tmp_path / str(devices), *IN_PARTS, *extra)
        options = [f"devices={devices}", f"max_steps={steps}", "val_check_interval=5"]
        finished(
            own.start(
                *(f"--trainer.{option}" for option in options),
                f"--data.batch_size={4 // devices}",
                "--model.config.dropout=0",
                "--model.optimizer.schedule=constant",
            )
        )
        return own

    shutil.copytree(run(4, 6).root, tmp_path / "2")
    shutil.copytree(tmp_path / "2", tmp_path / "1")
    resumed = {
        4: run(4, 9, "--ckpt_path=last"),
        2: run(2, 9, "--ckpt_path=last"),
        1: run(1, 9, "--ckpt_path=last", "--trainer.strategy=auto"),
    }
    ends = {devices: read_checkpoint(own.last) for devices, own in resumed.items()}
    assert {end.step for end in ends.values()} == {9}
    for end in ends.values():
        for name, weight in ends[4].content["state_dict"].items():
            torch.testing.assert_close(end.content["state_dict"][name], weight, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_while_a_checkpoint_is_written(text_file, tmp_path, seed):
    """Every step writes one; the kill comes when the unfinished file is seen."""
    often = (*SCHEDULE, "--checkpoint.every_n_train_steps=1", "--model.config.dim=256")
    whole = Run(text_file, tmp_path / "whole", *often)
    broken = Run(text_file, tmp_path / "broken", *often)
    processes = whole.start(), broken.start()
    step = seeded(seed).randint(4, 40)
    assert next(n for n in step_lines(processes[1]) if n >= step)
    folder, left = broken.last.parent, []
    deadline = time.monotonic() + 30
    while not left and time.monotonic() < deadline:
        left = [entry.name for entry in os.scandir(folder) if entry.name.endswith(".partial")]
    os.killpg(processes[1].pid, signal.SIGKILL)
    processes[1].communicate()
    print("seen", left, "left", sorted(path.name for path in folder.iterdir()))
    assert left
    assert torch.load(broken.last, weights_only=True)["global_step"] >= step - 1
    finished(processes[0])
    finished(broken.resume())
    assert differences(broken, whole, STEPS) == []
    assert not list(folder.glob(".last.ckpt.*"))


@pytest.mark.slow
@pytest.mark.parametrize("extra", [TWO_RANKS, SHARDED], ids=["ddp", "sharded"])
def test_a_killed_rank_ends_the_others_in_one_line(text_file, tmp_path, extra):
    run = Run(text_file, tmp_path / "run", "--trainer.max_steps=100000", *extra)
    run.forks_ranks = False  # the rank is the only child
    process = run.start()
    assert next(n for n in step_lines(process) if n >= 5)
    (other,) = children(process.pid)
    os.kill(other, signal.SIGKILL)
    start = time.monotonic()
    errors = finished(process, code=4)
    assert time.monotonic() - start < 30
    assert "Traceback" not in errors
    assert errors.count("error: another process of the run has ended") == 1
