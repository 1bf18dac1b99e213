"""iCoT: its schedule, what is removed, and optimisers that start again."""

import lightning as L
import pytest
import torch

from lightning_models.optim import OptimizerConfig
from lightning_models.thinking_states.baselines.curricula import TokenStages, offsets
from tests.thinking_states.questions import (
    SHAPES,
    Questions,
    build,
    questions,
    resumable_trainer,
)

STEPS = {"removal": "steps", "max_latent_stage": 2, "epochs_per_stage": 2}


# ---- schedule


def test_r_is_eight_times_the_epochs_until_all_are_gone():
    stages = TokenStages(8, 39, None)
    assert [stages.at(epoch) for epoch in range(7)] == [0, 8, 16, 24, 32, 39, 39]
    assert [stages.at(n / 16) for n in (1, 2, 3, 4, 77, 78)] == [0, 1, 1, 2, 38, 39]
    lengths = torch.tensor([2, 10, 500])
    batch = {"epochs": 4.75, "sequence_id": torch.arange(3)}
    assert stages.removed(batch, 0, lengths).tolist() == [2, 10, 38]
    assert stages.removed({**batch, "epochs": 5.0}, 0, lengths).tolist() == [2, 10, 500]


def test_r_counts_every_batch_of_an_epoch_exactly():
    """Where Delta batches-of-an-epoch fractions are not exact in binary."""
    stages = TokenStages(7, 1000, None)
    assert [stages.at(n / 49) for n in range(0, 490, 7)] == list(range(70))
    assert [stages.at(n / 49) for n in range(6, 490, 7)] == list(range(70))


def test_nothing_goes_in_the_first_epochs():
    stages = TokenStages(8, 39, 0.1, pretrain_epochs=2)
    assert [stages.at(epochs) for epochs in (0.0, 1.9, 2.0, 3.0)] == [0, 0, 0, 8]
    numbers, lengths = torch.arange(50), torch.full((50,), 200)
    evaluated = stages.removed({"sequence_id": numbers}, 5, lengths)
    assert evaluated.tolist() == [5] * 50, "none of an evaluation's go in advance"
    before = stages.removed({"epochs": 1.9, "sequence_id": numbers}, 0, lengths)
    behind = stages.removed({"epochs": 2.0, "sequence_id": numbers}, 0, lengths)
    assert not before.any()
    assert behind.any()


def test_offsets_are_a_function_of_row_and_seed():
    numbers = torch.arange(200)
    drawn = offsets(numbers, 0.2, seed=3)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(offsets(numbers[order], 0.2, seed=3), drawn[order])
    assert not torch.equal(offsets(numbers, 0.2, seed=4), drawn)
    assert drawn.max() <= 100
    assert offsets(numbers, 1e-4, seed=3).max() == 100


# ---- text


def test_with_a_whole_chain_it_is_cot_and_without_one_no_cot():
    for epochs, name in ((0.0, "cot"), (5.0, "no_cot")):
        batch = questions(epochs=epochs)
        model = build("icot", removal_smoothing=None)
        other = build(name)
        mine, theirs = (m.loss(batch).terms["nll"] for m in (model, other))
        torch.testing.assert_close(mine.sum, theirs.sum)
        assert mine.normaliser == theirs.normaliser


@pytest.mark.parametrize(
    ("changes", "stage", "writes"),
    [({}, 5, True), ({}, 39, False), (STEPS, 2, True), (STEPS, 3, False)],
)
def test_evaluation_is_at_the_stage_that_training_has_reached(changes, stage, writes):
    model, batch = build("icot", **changes).eval(), questions()
    assert (model.stage, model.writes_chain) == (0, True), "that of a run not begun, until loaded"
    model.load_state_dict({**model.state_dict(), "progress_made": torch.tensor([1, stage])})
    assert model.stage == stage
    assert model.writes_chain == writes
    name = "cot" if writes else "no_cot"
    expected = build(name).eval().score(batch).log_prob
    torch.testing.assert_close(model.score(batch).log_prob, expected)


# ---- training


class Moments(L.Callback):
    """The steps that AdamW has counted after each of the trainer's."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, model, *_):
        (optimizer,) = trainer.optimizers
        counts = {int(state["step"]) for state in optimizer.state.values() if state}
        assert len(counts) <= 1
        self.steps.append(counts.pop() if counts else 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # four batches an epoch, two of them a step; r grows with batches 2, 4 and 6, then it stays
        ({"reset": "stage"}, [0, 1, 0, 1, 0, 1, 0, 1, 1, 2]),
        ({"reset": "epoch"}, [0, 1, 1, 2, 0, 1, 1, 2, 0, 1]),
        ({"reset": "never"}, [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]),
    ],
)
def test_moments_are_forgotten_when_r_grows_or_in_every_epoch(changes, expected, tmp_path):
    model, moments = build("icot", remove_per_epoch=2, remove_all_beyond=3, **changes), Moments()
    trainer = resumable_trainer(
        tmp_path, moments, max_steps=5, accumulate_grad_batches=2, limit_val_batches=0
    )
    trainer.fit(model, Questions())
    assert moments.steps == expected
    assert model.reached == (2, 3)
    assert model.progress_made.tolist() == [2, 3]


def test_a_reset_in_the_middle_of_a_step_is_one_at_its_beginning(tmp_path):
    """r grows with batch 1, 2 and 3: within an optimiser step and between two."""
    model, moments = build("icot", remove_per_epoch=4, remove_all_beyond=3), Moments()
    trainer = resumable_trainer(
        tmp_path, moments, max_steps=3, accumulate_grad_batches=2, limit_val_batches=0
    )
    trainer.fit(model, Questions())
    assert moments.steps == [0, 1, 0, 1, 1, 2]


@pytest.mark.parametrize(("reset", "stop"), [("stage", 2), ("stage", 3)])
def test_a_resumed_run_resets_where_the_other_did(reset, stop, tmp_path):
    """Stopped where moments are forgotten next, and where they must not be."""
    changes = {"remove_per_epoch": 1, "removal_smoothing": 0.5, "max_chain_tokens": 3}
    kept = L.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )

    def run(path, *callbacks):
        optimizer = OptimizerConfig(lr=1e-2, warmup=2)
        model = build("icot", double=False, reset=reset, optimizer=optimizer, **changes)
        options = {"accumulate_grad_batches": 2, "val_check_interval": 3}
        trainer = resumable_trainer(
            tmp_path, *callbacks, max_steps=6, check_val_every_n_epoch=None, **options
        )
        torch.manual_seed(1)
        trainer.fit(model, Questions(), ckpt_path=path, weights_only=True)
        return model

    whole, resumed = run(None, kept), run(str(tmp_path / f"step={stop}.ckpt"))
    for (name, mine), theirs in zip(
        resumed.state_dict().items(), whole.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert resumed.reached == whole.reached == (2, 2)


def test_data_without_epochs_are_refused():
    with pytest.raises(ValueError, match="no count of epochs"):
        build("icot").on_train_batch_start(questions(), 0)


def test_statistics_say_what_is_left():
    model, batch = build("icot", removal_smoothing=None, remove_per_epoch=4), questions(epochs=1.0)
    stats = model.loss(batch).stats
    tokens = sum(max(0, sum(n + 1 for n in steps) - 4) for _, steps, _ in SHAPES)
    assert stats["chain_tokens"].sum / stats["chain_tokens"].normaliser == tokens / 4
    assert stats["stage"] == 4
