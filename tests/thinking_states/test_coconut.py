"""Coconut: stages by epoch and by row, where latents stand, checkpoints, ends of runs."""

import math
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch

from callbacks import LastStageStopping, SaveCheckpoints
from lightning_models.thinking_states.baselines.curricula import StepStages
from tests.thinking_states.questions import (
    Questions,
    V,
    build,
    questions,
    resumable_trainer,
)

LATENT = V + 2
STAGES = {"max_latent_stage": 2, "epochs_per_stage": 1}
MIXED = {**STAGES, "first_stage": 3, "uniform_prob": 0.6, "curriculum_seed": 2}
"""Rows of one batch at different stages, so with different numbers of latents."""


# ---- curriculum


def test_some_rows_are_shown_at_a_stage_drawn_among_their_steps():
    count = 600
    shapes = [(2, [1] * 4, 1)] * count
    stages = StepStages(epochs_per_stage=1, last=2, first=3, uniform_prob=0.3)
    found = stages.of_rows(questions(shapes, epochs=0.0), 0)
    for stage in range(5):
        expected = 0.3 / 5 + (0.7 if stage == 3 else 0.0)
        spread = math.sqrt(expected * (1 - expected) / count)
        share = (found == stage).double().mean().item()
        assert share == pytest.approx(expected, abs=4 * spread), stage
    assert (stages.of_rows(questions(shapes[:3]), 1) == 1).all()
    other = replace(stages, seed=1).of_rows(questions(shapes[:99], epochs=0.0), 0)
    assert not torch.equal(other, found[:99]), "they are a function of the seed"


def test_first_latents_stand_below_each_other():
    found = build("coconut", **MIXED).layout.training(questions(epochs=0.0))
    latent = found.tokens == LATENT
    counts = latent.sum(dim=1)
    assert len(set(counts.tolist())) > 1
    first = latent[counts > 0].long().argmax(dim=1)
    assert len(set(first.tolist())) == 1


# ---- training


def test_a_checkpoint_is_scored_at_its_own_stage(tmp_path):
    model = build("coconut", double=False, **STAGES)
    trainer = resumable_trainer(tmp_path, max_epochs=3, limit_val_batches=0)
    trainer.fit(model, Questions())
    assert model.reached == (2, 2)
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    loaded = type(model).load_from_checkpoint(path, weights_only=True).eval()
    assert loaded.reached == (2, 2)
    assert loaded.latents == 4
    batch = questions()
    assert torch.equal(loaded.score(batch).log_prob, model.eval().score(batch).log_prob)


def test_stages_may_be_skipped_or_fractions_of_an_epoch():
    skipped = StepStages(epochs_per_stage=3, last=3, first=1)
    assert [skipped.at(epoch) for epoch in (0.0, 2.999, 3.0, 6.0, 9.0, 30.0)] == [1, 1, 2, 3, 4, 4]
    stages = StepStages(epochs_per_stage=0.4, last=3)
    found = [stages.at(step * 0.1) for step in range(18)]
    assert found == [min(step // 4, 4) for step in range(18)]
    assert StepStages(epochs_per_stage=0.1, last=9).at(3 / 10) == 3, "0.3 / 0.1 is below 3"


class Accuracy(L.Callback):
    """Logs these accuracies, one after each epoch."""

    def __init__(self, *accuracies):
        self.accuracies = iter(accuracies)

    def on_validation_epoch_end(self, trainer, model):
        model.log("val/accuracy", next(self.accuracies))


def test_the_best_checkpoint_is_one_of_the_latest_stage(tmp_path):
    """A model that still writes its chain answers better; its value is not to be compared."""
    accuracy = Accuracy(0.9, 0.8, 0.2, 0.3, 0.25)  # stages 0, 0, 1, 1, 1, of one epoch each
    save = SaveCheckpoints(str(tmp_path), monitor="val/accuracy", mode="max", save_top_k=1)
    curriculum = {"max_latent_stage": 0, "epochs_per_stage": 2}
    model = build("coconut", double=False, **curriculum)
    trainer = resumable_trainer(tmp_path, accuracy, save, max_epochs=5, num_sanity_val_steps=0)
    trainer.fit(model, Questions())
    (best,) = tmp_path.glob("best-*.ckpt")
    assert Path(save.best_model_path) == best
    assert float(save.best_model_score) == pytest.approx(0.3)
    assert torch.load(best, weights_only=True)["state_dict"]["progress_made"].tolist() == [3, 1]


ALL_RIGHT = {"stopping_threshold": 0.9995}
BY_BATCHES = {"val_check_interval": 4, "check_val_every_n_epoch": None}


@pytest.mark.parametrize(
    ("name", "changes", "rule", "accuracies", "epochs", "options"),
    [
        # the last stage of the first four begins with the third epoch
        ("coconut", {}, ALL_RIGHT, [1.0, 1.0, 0.9, 1.0, 1.0], 4, {}),
        ("coconut", {}, ALL_RIGHT, [1.0, 1.0, 0.9, 1.0, 1.0], 4, BY_BATCHES),
        ("icot", {"removal": "steps"}, ALL_RIGHT, [1.0, 1.0, 1.0, 1.0, 1.0], 3, {}),
        ("coconut", {}, {"patience": 1}, [0.9, 0.8, 0.2, 0.3, 0.3], 5, {}),
        ("coconut", {"first_stage": 1}, {"patience": 1}, [0.2, 0.1, 0.3, 0.4, 0.5], 2, {}),
        ("cot", None, ALL_RIGHT, [0.9, 1.0, 1.0, 1.0, 1.0], 2, {}),
    ],
)
def test_a_run_ends_early_in_the_last_stage_alone(
    name, changes, rule, accuracies, epochs, options, tmp_path
):
    curriculum = {"max_latent_stage": 0, "epochs_per_stage": 2}
    model = build(name, double=False, **({} if changes is None else curriculum | changes))
    stop = LastStageStopping("val/accuracy", mode="max", **rule)
    options = {"max_epochs": 5, "num_sanity_val_steps": 0, **options}
    trainer = resumable_trainer(tmp_path, Accuracy(*accuracies), stop, **options)
    trainer.fit(model, Questions())
    assert trainer.global_step == 4 * epochs
