"""Two processes measure what one does. This file is also what the two of them run."""

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 257, "block_size": 32, "dim": 16, "num_layers": 2, "num_heads": 2}


def measure(folder, rank, ranks):
    """A validation of two batches, shared by the ranks."""
    from formats import WINDOWS

    from callbacks import StepAllocation
    from lightning_models import PonderConfig, PonderLM

    torch.manual_seed(0)
    config = PonderConfig(**SIZES, thinking_steps=2, router_init="uniform", tau=0.3)
    model = PonderLM(config)
    made = [WINDOWS.batch(rows, 24, seed) for seed, rows in enumerate((3, 2))]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision="64-true",
        use_distributed_sampler=False,
        callbacks=[StepAllocation(alphas=(-1, 1), convergence_rows=0)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.validate(model, DataLoader(made[rank::ranks], batch_size=None), verbose=False)


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    measure(one, 0, 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, __file__, str(two)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = {path.name for path in (one / "step_allocation").glob("*.csv")}
    assert {"val-step=0-utility.csv", "val-step=0-sweep.csv"} < names
    assert names == {path.name for path in (two / "step_allocation").glob("*.csv")}
    for name in names:
        first, second = ((folder / "step_allocation" / name).read_text() for folder in (one, two))
        assert second == first


if __name__ == "__main__":
    measure(sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
