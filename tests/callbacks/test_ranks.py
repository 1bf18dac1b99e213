"""Two processes find what one does. This file is also what the two of them run."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]


def trainer_of(folder, ranks, *callbacks, precision="64-true", **options):
    return L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision=precision,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def loader(batches, rank, ranks):
    return DataLoader(batches[rank::ranks], batch_size=None)


def validation(name, folder, rank, ranks):
    """A validation of two batches by one of ``analyses.CASES``."""
    from tests.callbacks.analyses import BY_NAME, CASES

    (case,) = (case for case in CASES if case.name == name)
    method = BY_NAME[case.method]
    made = [method.batch(rows, 24, seed) for seed, rows in enumerate((3, 2))]
    alone = {"convergence_rows": 0} if "convergence_rows" in case.options else {}  # of a rank each
    options = {"precision": "32-true", "use_distributed_sampler": False}
    trainer = trainer_of(folder, ranks, case.make(num_batches=2, **alone), **options)
    trainer.validate(case.build(), loader(made, rank, ranks), verbose=False)


def gates(folder, rank, ranks):
    """A step on two batches of sentences, and a validation of them; returns gradient norms."""
    from callbacks import GateAnalysis
    from lightning_models import OptimizerConfig, ThoughtGestaltConfig, ThoughtGestaltLM
    from tests.thought_gestalt.cases import SIZES, streams

    quiet = {"attention_dropout": 0, "token_dropout": 0, "sentence_dropout": 0}
    config = ThoughtGestaltConfig(**{**SIZES, **quiet})
    model = ThoughtGestaltLM(config, OptimizerConfig(schedule="constant", warmup=0))
    made = [streams([[3, 1, 2, 2, 4], [2, 5]]), streams([[1, 4, 2, 2, 2, 5, 1]], seed=1)]
    analysis = GateAnalysis(every_n_steps=1)
    options = {"max_steps": 1, "accumulate_grad_batches": 2 // ranks, "num_sanity_val_steps": 0}
    trainer = trainer_of(folder, ranks, analysis, use_distributed_sampler=False, **options)
    trainer.fit(model, loader(made, rank, ranks), loader(made, rank, ranks))
    (norms,) = analysis._norms.rows
    return norms


def thoughts(folder, rank, ranks):
    """A validation of eleven questions; returns what is logged of their answers."""
    from callbacks import AnswerAccuracy, ThoughtTrace
    from datamodules import StateTracking
    from lightning_models import ThinkingStatesConfig, ThinkingStatesLM

    sizes = {"vocab_size": 257, "block_size": 96, "num_layers": 3, "dim": 16, "num_heads": 2}
    model = ThinkingStatesLM(ThinkingStatesConfig(**sizes, chunk_size=4, max_thought_tokens=3))
    data = StateTracking(
        task="vars",
        operations=[1, 2],
        train_examples=8,
        val_examples=11,
        test_examples=0,
        block_size=96,
        batch_size=4 // ranks,
        cache_dir=str(folder.parent / "cache"),
    )
    data.is_right = lambda text, answer: "3" in answer or "5" in answer  # whatever is written
    trainer = trainer_of(folder, ranks, ThoughtTrace(), AnswerAccuracy(max_new_tokens=7))
    (logged,) = trainer.validate(model, data, verbose=False)
    found = {name: value for name, value in logged.items() if "accuracy" in name}
    assert 0 < found["val/accuracy"] < 1
    assert set(found) == {"val/accuracy", *(f"val/accuracy/operations_{n}" for n in (1, 2))}
    return list(found.values())


TABLES = {
    "fork_analysis": {"val-step=0-scalars.csv", "val-step=0-windows.csv"},
    "gate_analysis": {"val-step=1-reach.csv", "val-step=1-attention.csv"},
    "posterior_analysis": {"val-step=0-layers.csv", "val-step=0-sweep.csv"},
    "step_allocation": {"val-step=0-utility.csv", "val-step=0-sweep.csv"},
    "thought_trace": {"val-step=0-chunks.csv", "val-step=0-groups.csv"},
}
"""Name of the folder that is written -> tables that must be there."""


def measure(name, folder, rank, ranks):
    """Does it, and notes what this rank found besides the tables."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    special = {"gate_analysis": gates, "thought_trace": thoughts}
    found = special.get(name, partial(validation, name))(folder, rank, ranks)
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_two_ranks_find_what_one_does(tmp_path, name):
    one, two = tmp_path / "one", tmp_path / "two"
    measure(name, one, 0, 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, __file__, name, str(two)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = json.loads((one / "0.json").read_text())
    for rank in (0, 1):
        found = json.loads((two / f"{rank}.json").read_text())
        assert found == (expected and pytest.approx(expected, rel=1e-9))
    tables = {path.name for path in (one / name).glob("*.csv")}
    assert TABLES[name] <= tables
    assert tables == {path.name for path in (two / name).glob("*.csv")}
    for table in {each for each in tables if each.startswith("val-step=")}:
        first, second = ((folder / name / table).read_text() for folder in (one, two))
        assert second == first


if __name__ == "__main__":
    measure(sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
