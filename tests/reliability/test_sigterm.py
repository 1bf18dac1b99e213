"""SIGTERM as the only reason for a checkpoint; test_kill.py has a quick one behind kills."""

import signal

import pytest
import torch

from tests.reliability.runs import Run, assert_same_end, at_step, finished, seeded

STEPS = 60
SCHEDULE = (
    f"--trainer.max_steps={STEPS}",
    "--trainer.limit_train_batches=25",
    "--trainer.val_check_interval=5",
    "--trainer.accumulate_grad_batches=2",
)
TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")


def terminate_and_compare(text_file, folder, seed, *extra):
    step = seeded(seed).randint(5, STEPS - 20)
    whole = Run(text_file, folder / "whole", *SCHEDULE, *extra)
    broken = Run(text_file, folder / "broken", *SCHEDULE, *extra)
    processes = whole.start(), broken.start()
    reached = at_step(processes[1], step, signal.SIGTERM)
    errors = finished(processes[1], code=143)
    (line,) = [line for line in errors.splitlines() if "stopped by SIGTERM" in line]
    saved = torch.load(broken.last, weights_only=True)["global_step"]
    print(f"SIGTERM behind step {reached} (asked {step}), saved step {saved}")
    assert reached <= saved < STEPS
    assert line.startswith(f"stopped by SIGTERM behind step {saved}; it goes on from {broken.last}")
    assert "Traceback" not in errors
    finished(processes[0])
    finished(broken.resume())
    assert_same_end(broken, whole, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("extra", [(), ("--data.num_workers=1",), TWO], ids=["plain", "w", "ddp"])
def test_at_other_moments(text_file, tmp_path, seed, extra):
    terminate_and_compare(text_file, tmp_path, seed, *extra)
