"""Two processes measure what one does. This file is also what the two of them run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]


def measure(folder, rank, ranks):
    """A step on two batches of sentences, and a validation of them, shared by the ranks."""
    from callbacks import GateAnalysis
    from lightning_models import OptimizerConfig, ThoughtGestaltConfig, ThoughtGestaltLM
    from tests.thought_gestalt.cases import SIZES, streams

    torch.manual_seed(0)
    quiet = {"attention_dropout": 0, "token_dropout": 0, "sentence_dropout": 0}
    config = ThoughtGestaltConfig(**{**SIZES, **quiet})
    model = ThoughtGestaltLM(config, OptimizerConfig(schedule="constant", warmup=0))
    made = [streams([[3, 1, 2, 2, 4], [2, 5]]), streams([[1, 4, 2, 2, 2, 5, 1]], seed=1)]
    loader = DataLoader(made[rank::ranks], batch_size=None)
    analysis = GateAnalysis(every_n_steps=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision="64-true",
        max_steps=1,
        accumulate_grad_batches=2 // ranks,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[analysis],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, loader, loader)
    return analysis._norms.values.tolist()


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    norms = measure(one, 0, 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, __file__, str(two)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        (row,) = json.loads((two / f"{rank}.json").read_text())
        assert row == pytest.approx(norms[0], rel=1e-9)
    names = {path.name for path in (one / "gate_analysis").glob("*.csv")}
    assert "val-step=1-reach.csv" in names
    assert names == {path.name for path in (two / "gate_analysis").glob("*.csv")}
    for name in names - {"gates.csv", "gradient_norms.csv", "gradient_share.csv"}:
        first, second = ((folder / "gate_analysis" / name).read_text() for folder in (one, two))
        assert second == first


if __name__ == "__main__":
    number = int(os.environ["RANK"])
    found = measure(sys.argv[1], number, int(os.environ["WORLD_SIZE"]))
    (Path(sys.argv[1]) / f"{number}.json").write_text(json.dumps(found))
