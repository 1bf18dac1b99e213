"""Two processes find what one does. This file is also what the two of them run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 257, "block_size": 96, "num_layers": 3, "dim": 16, "num_heads": 2}


def measure(folder, ranks):
    """A validation of twelve questions, shared by the ranks; writes what is logged."""
    from callbacks import AnswerAccuracy, ThoughtTrace
    from datamodules import StateTracking
    from lightning_models import ThinkingStatesConfig, ThinkingStatesLM

    torch.manual_seed(0)
    model = ThinkingStatesLM(ThinkingStatesConfig(**SIZES, chunk_size=4, max_thought_tokens=3))
    data = StateTracking(
        task="vars",
        operations=[1, 2],
        train_examples=8,
        val_examples=11,
        test_examples=0,
        block_size=96,
        batch_size=4 // ranks,
        cache_dir=str(Path(folder).parent / "cache"),
    )
    data.is_right = lambda text, answer: "3" in answer or "5" in answer  # whatever is written
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision="64-true",
        callbacks=[ThoughtTrace(), AnswerAccuracy(max_new_tokens=7)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    (logged,) = trainer.validate(model, data, verbose=False)
    if trainer.is_global_zero:
        found = {name: value for name, value in logged.items() if "accuracy" in name}
        (Path(folder) / "logged.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_two_ranks_find_what_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    measure(one, 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, __file__, str(two)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = {path.name for path in (one / "thought_trace").glob("*.csv")}
    assert {"val-step=0-chunks.csv", "val-step=0-groups.csv"} < names
    assert names == {path.name for path in (two / "thought_trace").glob("*.csv")}
    for name in names:
        first, second = ((folder / "thought_trace" / name).read_text() for folder in (one, two))
        assert second == first
    first, second = (json.loads((folder / "logged.json").read_text()) for folder in (one, two))
    assert second == first
    assert 0 < first["val/accuracy"] < 1
    assert {"val/accuracy", "val/accuracy/operations_1", "val/accuracy/operations_2"} == set(first)


if __name__ == "__main__":
    measure(sys.argv[1], int(os.environ["WORLD_SIZE"]))
