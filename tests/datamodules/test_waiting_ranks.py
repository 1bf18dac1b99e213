"""Ranks wait for a long preparation, however short the patience of their process group is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, time
from datetime import timedelta

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from datamodules import LocalText

PATIENCE, PREPARATION = timedelta(seconds=1), 4


def be_patient(patience):
    torch.distributed.distributed_c10d._set_pg_timeout(patience, torch.distributed.group.WORLD)


class Impatient(DDPStrategy):
    def setup_environment(self):  # begins together, prepares next
        super().setup_environment()
        torch.distributed.barrier()
        be_patient(PATIENCE)
        self.began = time.monotonic()




class Slow(LocalText):
    def stored_documents(self, first=0):
        assert torch.distributed.is_initialized()  # so that the others wait within the group
        time.sleep(PREPARATION)
        return super().stored_documents(first)

    def setup(self, stage):
        be_patient(timedelta(minutes=5))
        assert time.monotonic() - self.trainer.strategy.began > PREPARATION / 2  # it has waited
        super().setup(stage)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch):
        return (self.weight * batch["tokens"].float().mean()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy=Impatient(process_group_backend="gloo"), max_steps=2,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, limit_val_batches=0,
)
data = Slow(data_files=sys.argv[1], cache_dir=sys.argv[2], block_size=8, batch_size=2)
trainer.fit(Model(), data)
assert trainer.global_step == 2
sys.stdout.write(f"trained {trainer.global_rank}\\n")  # at once: the ranks share the pipe
"""


@pytest.mark.slow
def test_ranks_outwait_the_timeout_of_their_group(lines, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(lines), str(tmp_path / "cache")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("trained")) == [
        "trained 0",
        "trained 1",
    ]
