"""Scores on tasks while a model trains, and that they leave training alone.

This file is also what two processes run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from task_data import write_folder

from callbacks import TaskScores
from lightning_models import LatentThoughtLM, TransformerLM

TASKS = ["lambada_local", "piqa_local"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(write_folder(tmp_path / "data")))


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """A TensorBoard logger, and the scores that are written to it by step."""
    logger = TensorBoardLogger(tmp_path)
    steps = {}

    def add_scalar(name, value, step):
        if name.startswith("tasks/"):
            steps.setdefault(step, {})[name] = float(value)

    monkeypatch.setattr(logger.experiment, "add_scalar", add_scalar)
    return logger, steps


def test_scores_are_logged_every_n_steps(make_model, make_data, make_trainer, logged, folder):
    logger, steps = logged
    scores = TaskScores(TASKS, every_n_steps=2, limit=2, batch_size=3)
    trainer = make_trainer(scores, logger=logger, max_steps=5, accumulate_grad_batches=2)
    trainer.fit(make_model(), make_data())
    assert list(steps) == [1, 3]  # those of the scalars logged with steps 2 and 4
    names = {"tasks/lambada_local/perplexity", "tasks/lambada_local/acc"}
    names |= {"tasks/piqa_local/acc", "tasks/piqa_local/acc_norm"}
    assert set(steps[1]) == names
    perplexities = [values["tasks/lambada_local/perplexity"] for values in steps.values()]
    assert perplexities[0] > perplexities[1] > 1


@pytest.mark.parametrize("kind", [TransformerLM, LatentThoughtLM])
def test_training_is_not_touched(make_data, make_trainer, logged, folder, kind):
    """The same weights to the last bit, with dropout; modes and random states are put back."""
    from typing import get_type_hints

    import lightning as L

    from lightning_models import OptimizerConfig

    sizes = {"vocab_size": 257, "block_size": 32, "dim": 16, "num_layers": 1, "num_heads": 2}
    sizes |= {"dropout": 0.2}
    if kind is LatentThoughtLM:
        sizes |= {"latents_per_layer": 2, "inner_steps": 2, "prior_layers": 1, "window": 16}
        sizes |= {"num_layers": 2}
    weights = []
    for callbacks in ([], [TaskScores(["piqa_local"], every_n_steps=1, limit=2)]):
        L.seed_everything(0, verbose=False)
        config = get_type_hints(kind.__init__)["config"](**sizes)
        model = kind(config, OptimizerConfig(schedule="constant", warmup=0))
        make_trainer(*callbacks, logger=logged[0], max_steps=3).fit(model, make_data())
        assert model.training
        weights.append(model.state_dict())
    assert logged[1].keys() == {0, 1, 2}
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_scores_are_those_of_the_command(make_model, make_data, make_trainer, logged, folder):
    """The latest ones are those of the trained weights."""
    from contextlib import nullcontext

    from evaluation.tasks.adapter import HarnessModel
    from evaluation.tasks.harness import load_tasks, score_tasks

    logger, steps = logged
    model, data = make_model(), make_data()
    make_trainer(TaskScores(TASKS, every_n_steps=3), logger=logger, max_steps=3).fit(model, data)
    lm = HarnessModel(
        model.eval(), data.tokenizer, batch_size=2, context=nullcontext, progress=False
    )
    results = score_tasks(lm, load_tasks(TASKS, None, None), bootstrap_iters=0, silent=True)
    found = results["results"]["lambada_local"]["perplexity,none"]
    assert steps[2]["tasks/lambada_local/perplexity"] == pytest.approx(found, rel=1e-4)


def test_a_resumed_run_does_not_score_twice(make_model, make_data, make_trainer, logged, folder):
    logger, steps = logged
    scores = TaskScores(["piqa_local"], every_n_steps=2, limit=1)
    trainer = make_trainer(scores, logger=logger, max_steps=2)
    trainer.fit(make_model(), make_data())
    again = TaskScores(["piqa_local"], every_n_steps=2, limit=1)
    again.load_state_dict(scores.state_dict())
    again.on_train_batch_end(trainer, trainer.lightning_module, None, None, 0)
    assert list(steps) == [1]


def test_what_is_wrong_shows_at_once(make_model, make_data, make_trainer, folder, monkeypatch):
    def fit(*tasks, **options):
        trainer = make_trainer(TaskScores(list(tasks), **options), max_steps=1)
        trainer.fit(make_model(), make_data())

    with pytest.raises(ValueError, match="include_path .nowhere. is not a folder"):
        fit("piqa_local", include_path="nowhere")
    monkeypatch.delenv("DATA")
    with pytest.raises(ValueError, match="set the environment variable DATA"):
        fit("piqa_local")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tasks": []}, "tasks .* must name some"),
        ({"tasks": ["a"], "every_n_steps": 0}, "every_n_steps .0. must be at least 1"),
        ({"tasks": ["a"], "limit": 0}, "limit .0. must be at least 1"),
    ],
)
def test_bad_options(options, expected):
    with pytest.raises(ValueError, match=expected):
        TaskScores(**options)


def test_each_rank_needs_an_example(make_model, make_trainer):
    class Two:
        world_size = 2

    with pytest.raises(ValueError, match="limit .1. must give each of the 2 processes"):
        TaskScores(["piqa_local"], limit=1).on_fit_start(Two(), make_model())


def test_its_public_name_is_that_of_callbacks():
    """Its file is the evaluation's, which imports callbacks; test_imports forbids the reverse."""
    from evaluation.tasks import callback

    assert callback.TaskScores is TaskScores
    assert TaskScores.__module__ == "callbacks"


# ---- ranks


class Kept(TaskScores):
    """Keeps what is logged."""

    def _scores(self, trainer, pl_module):
        self.values = super()._scores(trainer, pl_module)
        return self.values


def scores_of_ranks(folder, ranks):
    """Scores of a model that one step hardly changes."""
    import lightning as L

    from datamodules import LocalText
    from lightning_models import OptimizerConfig, TransformerConfig

    text = folder / "text.txt"
    text.write_text("the thought reads the memory " * 60)
    options = {"block_size": 32, "batch_size": 2, "cache_dir": str(folder)}
    data = LocalText(data_files=str(text), val_fraction=0, test_fraction=0, **options)
    sizes = {"vocab_size": 257, "block_size": 32, "dim": 16, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    model = TransformerLM(
        TransformerConfig(**sizes), OptimizerConfig(lr=1e-12, schedule="constant", warmup=0)
    )
    kept = Kept(["lambada_local", "piqa_local"], every_n_steps=1, batch_size=2)
    silent = ("logger", "checkpointing", "progress_bar", "model_summary")
    L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[kept],
        max_steps=1,
        limit_val_batches=0,
        default_root_dir=folder,
        **{name if name == "logger" else f"enable_{name}": False for name in silent},
    ).fit(model, data)
    return kept.values


@pytest.mark.slow
def test_two_ranks_score_what_one_does(tmp_path, folder):
    """An odd number of examples: one rank has one more."""
    expected = scores_of_ranks(tmp_path, 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert found == [pytest.approx(expected, rel=1e-4), {}]
    assert len(expected) == 4


if __name__ == "__main__":
    values = scores_of_ranks(Path(sys.argv[1]), 2)
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(values))
