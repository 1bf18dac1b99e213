"""What a resumed run takes from its checkpoint, and what it reports of its learning rate."""

import copy
import logging
import random

import lightning as L
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from callbacks import KeepOptimizerSettings, ResumeState, ScheduleChange
from callbacks.optimizer_settings import _rebase
from callbacks.resume import _added
from lightning_models import OptimizerConfig

# ---- random states and settings


def draws():
    return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)


def fit_and_save(make_model, make_data, make_trainer, path, *callbacks):
    trainer = make_trainer(*callbacks, max_steps=2)
    trainer.fit(make_model(), make_data())
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def test_states_of_other_ranks_are_not_taken_silently(
    make_model, make_data, make_trainer, tmp_path
):
    path = tmp_path / "x.ckpt"
    content = fit_and_save(make_model, make_data, make_trainer, path, ResumeState())
    content["resume_state"]["random"] *= 2
    torch.save(content, path)
    with pytest.warns(UserWarning, match="written by 2 processes, but this run has 1"):
        make_trainer(ResumeState(), max_steps=3).fit(make_model(), make_data(), ckpt_path=path)


def test_a_checkpoint_without_states_says_so(make_model, make_data, make_trainer, tmp_path):
    path = tmp_path / "x.ckpt"
    content = fit_and_save(make_model, make_data, make_trainer, path, ResumeState())
    del content["resume_state"]
    torch.save(content, path)
    with pytest.warns(UserWarning, match="has no random state"):
        make_trainer(ResumeState(), max_steps=3).fit(make_model(), make_data(), ckpt_path=path)


def test_draws_between_batches_do_not_reach_training(make_model, make_data, make_trainer):
    class Draws(L.Callback):
        def on_train_batch_end(self, *_):
            draws()

    ends = []
    for extra in ((), (Draws(),)):
        model = make_model(dropout=0.3)
        make_trainer(ResumeState(), *extra, max_steps=4).fit(model, make_data())
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_a_second_fit_of_the_process_starts_afresh(make_model, make_data, make_trainer):
    callback = ResumeState()
    ends = []
    for _ in range(2):
        model = make_model(dropout=0.3)
        make_trainer(callback, max_steps=3).fit(model, make_data())
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


class Steps(L.Callback):
    """Keeps the batches of each optimiser step, its gradient, and the weights before it."""

    def __init__(self):
        self.batches, self.steps = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        weights = copy.deepcopy(pl_module.network)
        gradients = [p.grad.clone() for p in pl_module.network.parameters()]
        self.steps.append((self.batches, weights, gradients))
        self.batches = []


def gradient_of_mean(network, batches):
    """The gradient of the mean loss of all tokens of some batches."""
    network.zero_grad()
    nats, tokens = 0.0, 0
    for batch in batches:
        logits = network(batch["tokens"]) @ network.output_matrix.t()
        counted = batch["targets"] >= 0
        nats = nats + F.cross_entropy(logits[counted], batch["targets"][counted], reduction="sum")
        tokens += int(counted.sum())
    (nats / tokens).backward()
    return [p.grad for p in network.parameters()]


@pytest.mark.parametrize("length", [6, 8])
def test_other_epochs_than_the_checkpoints_have_whole_steps(
    make_model, make_data, make_trainer, tmp_path, length
):
    """As with another number of processes: no batch is left out, none counts more than others."""
    options = {"accumulate_grad_batches": 3, "limit_val_batches": 0}
    trainer = make_trainer(ResumeState(), max_steps=4, limit_train_batches=7, **options)
    trainer.fit(make_model(), make_data(batch_size=4))  # 7 + 3 batches
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    steps = Steps()
    options |= {"limit_train_batches": length, "max_epochs": 4}
    trainer = make_trainer(ResumeState(), steps, **options)
    trainer.fit(make_model(), make_data(batch_size=2), ckpt_path=tmp_path / "x.ckpt")
    assert steps.batches == []
    sizes = [len(batches) for batches, _, _ in steps.steps]
    assert sum(sizes) == 4 * length - 10
    assert sizes == {6: [2, 3, 3, 3, 3], 8: [1, 3, 2, 3, 3, 2, 3, 3, 2]}[length]
    for batches, weights, gradients in steps.steps:
        for ours, theirs in zip(gradients, gradient_of_mean(weights, batches), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


class Break(L.Callback):
    """Saves a checkpoint after so many batches, and ends the run."""

    def __init__(self, path, batches):
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer, *_):
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batches:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


STATED = {"global_batch": 8, "train_windows": "random"}


@pytest.mark.parametrize("batches", [4, 6, 28])  # 28: in another epoch; 6: in the middle of a step
def test_a_run_of_stated_steps_goes_on_with_the_same_rows_in_other_micro_batches(
    make_model, make_data, make_trainer, tmp_path, batches
):
    """Steps of four micro-batches go on as steps of two, with the weights of steps of one."""
    path, ends = tmp_path / "x.ckpt", []
    options = {"max_steps": 10, "precision": "64-true", "limit_val_batches": 0}

    def train(rows, *callbacks, ckpt_path=None):
        model, steps = make_model(), Steps()
        epoch = 6 * 8 // rows  # micro-batches of six steps
        trainer = make_trainer(
            ResumeState(), steps, *callbacks, **options, limit_train_batches=epoch
        )
        trainer.fit(model, make_data(batch_size=rows, **STATED), ckpt_path=ckpt_path)
        ids = [batch["sequence_id"].tolist() for each, *_ in steps.steps for batch in each]
        ends.append((model.network.state_dict(), trainer.callback_metrics["train/loss"]))
        return trainer, [number for each in ids for number in each]

    trainer, whole = train(8)
    assert (trainer.num_training_batches, whole) == (6, list(range(80)))
    train(2, Break(path, batches))
    trainer, rest = train(4, ckpt_path=path)
    assert (trainer.global_step, trainer.accumulate_grad_batches) == (10, 2)
    assert rest == whole[2 * batches :]
    for (key, ours), theirs in zip(ends[2][0].items(), ends[0][0].values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=key)
    assert ends[2][1].item() == pytest.approx(ends[0][1].item(), rel=1e-6)  # logged in float32
    if batches % 4:
        with pytest.raises(ValueError, match=r"2 of the 4 micro-batches.*steps have 1"):
            train(8, ckpt_path=path)


@pytest.mark.parametrize(
    ("first", "batches", "then", "cure"),
    [
        ({}, 12, {"global_batch": 8}, None),  # three steps of 4 x 2 rows
        ({"global_batch": 8}, 12, {}, None),
        ({}, 10, {"global_batch": 8}, "set data.global_batch to null"),
        ({}, 12, {"global_batch": 16}, "set data.global_batch to null"),
        ({}, 12, {"global_batch": 8, "seed": 1}, "set data.global_batch to null"),
        ({"global_batch": 16}, 16, {}, "set data.global_batch to 16"),
        ({"global_batch": 16}, 16, {"global_batch": 8}, "set data.global_batch to 16"),
    ],
)
def test_runs_that_state_their_batch_and_those_that_do_not_go_on_at_the_same_row(
    make_model, make_data, make_trainer, tmp_path, recwarn, first, batches, then, cure
):
    path = tmp_path / "x.ckpt"

    def train(steps, size, stated, *callbacks, ckpt_path=None):
        options = {} if "global_batch" in stated else {"accumulate_grad_batches": 8 // size}
        trainer = make_trainer(
            ResumeState(), steps, *callbacks, max_steps=5, limit_val_batches=0, **options
        )
        trainer.fit(make_model(), make_data(batch_size=size, **stated), ckpt_path=ckpt_path)
        return [n for each, *_ in steps.steps for batch in each for n in batch["sequence_id"]]

    train(Steps(), 2, first, Break(path, batches))
    if cure is not None:
        with pytest.raises(ValueError, match=cure):
            train(Steps(), 4, then, ckpt_path=path)
        return
    rows = train(Steps(), 4, then, ckpt_path=path)
    assert [int(row) for row in rows] == list(range(24, 40))
    assert not [w for w in recwarn if "order of the training data" in str(w.message)]


def test_sums_of_other_ranks_are_added_up_where_there_are_fewer():
    sums = [{"loss": [1.0, 2.0]}, {"loss": [0.5, 4.0], "kl": [3.0, 1.0]}]
    assert _added(sums) == {"loss": [1.5, 6.0], "kl": [3.0, 1.0]}


def test_a_new_base_rate_keeps_the_place_in_the_schedule():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    _rebase(scheduler, [8.0])
    assert scheduler.get_last_lr() == [2.0]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(8.0 / 5)


def test_other_schedules_scale_with_their_base():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    optimizer.step()
    scheduler.step()
    _rebase(scheduler, [8.0])
    assert optimizer.param_groups[0]["lr"] == 4.0


def test_settings_stay_restored_without_the_callback(make_model, make_data, make_trainer, tmp_path):
    """What ``KeepOptimizerSettings`` changes: with it the new rate, without it the old one."""
    path = tmp_path / "x.ckpt"
    fit_and_save(make_model, make_data, make_trainer, path)
    rates = []
    for callbacks in ((), (KeepOptimizerSettings(),)):
        model = make_model()
        model.optimizer_config = OptimizerConfig(lr=0.25, schedule="constant", warmup=0)
        trainer = make_trainer(*callbacks, max_steps=3)
        trainer.fit(model, make_data(), ckpt_path=path)
        rates.append({group["lr"] for group in trainer.optimizers[0].param_groups})
    assert rates == [{1e-3}, {0.25}]


# ---- the schedule

CHANGE = "the schedule now"


def reported(caplog):
    return [message for message in caplog.messages if CHANGE in message]


@pytest.fixture
def resumed(make_model, make_data, make_trainer, tmp_path, caplog):
    """Trains four steps, goes on to eight; returns what is said of the schedule."""

    def fit(steps, path, *callbacks, **optimizer):
        model = make_model()
        model.optimizer_config = OptimizerConfig(**{"lr": 1e-3, "warmup": 0, **optimizer})
        trainer = make_trainer(ScheduleChange(), *callbacks, max_steps=steps, limit_val_batches=0)
        trainer.fit(model, make_data(), ckpt_path=path)
        return trainer

    def run(*callbacks, before="cosine", **changes):
        path = tmp_path / "x.ckpt"
        fit(4, None, schedule=before).save_checkpoint(path)
        with caplog.at_level(logging.INFO):
            fit(8, path, *callbacks, **changes)
        return reported(caplog)

    return run


def test_another_length_is_reported_in_one_line(resumed):
    """Step 5 is beyond the end of four, and of eight it has 0.1 + 0.45 * (1 + cos(5 pi / 8))."""
    assert resumed() == [
        "warning: the schedule now ends at step 8: the learning rate goes from 1.0e-04 to 3.8e-04"
    ]


def test_the_numbers_are_those_of_training(make_model, make_data, make_trainer, tmp_path):
    """Each step of the resumed run has the rate that a run of the new length has there."""
    whole = rates_of(make_model, make_data, make_trainer, 8, None)
    path = tmp_path / "x.ckpt"
    rates_of(make_model, make_data, make_trainer, 4, None, path)
    resumed = rates_of(make_model, make_data, make_trainer, 8, path)
    assert resumed == whole[4:]


def rates_of(make_model, make_data, make_trainer, steps, start, save=None):
    class Rates(L.Callback):
        seen: list

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.seen.append(optimizer.param_groups[0]["lr"])

    rates = Rates()
    rates.seen = []
    model = make_model()
    model.optimizer_config = OptimizerConfig(lr=1e-3, warmup=0)
    trainer = make_trainer(rates, ScheduleChange(), max_steps=steps, limit_val_batches=0)
    trainer.fit(model, make_data(), ckpt_path=start)
    if save is not None:
        trainer.save_checkpoint(save)
    return rates.seen


def test_nothing_is_said_of_an_exact_resumption(
    make_model, make_data, make_trainer, tmp_path, caplog
):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    with caplog.at_level(logging.INFO):
        for extra, path in (((Saves(),), None), ((), tmp_path / "x.ckpt")):
            model = make_model()
            model.optimizer_config = OptimizerConfig(lr=1e-3, warmup=2)
            trainer = make_trainer(ScheduleChange(), *extra, max_steps=8, limit_val_batches=0)
            trainer.fit(model, make_data(), ckpt_path=path)
    assert trainer.global_step == 8
    assert reported(caplog) == []


def test_a_schedule_without_a_length_says_nothing(resumed):
    assert resumed(before="constant", schedule="constant") == []


def test_a_horizon_is_the_end_of_the_schedule(resumed):
    """It has 0.1 + 0.45 * (1 + cos(5 pi / 20)) at step 5 of 20."""
    (line,) = resumed(horizon=20)
    assert "the schedule now ends at step 20: the learning rate goes" in line


def test_another_kind_of_schedule_is_reported_too(resumed):
    (line,) = resumed(schedule="constant")
    assert line.endswith("the learning rate goes from 1.0e-04 to 1.0e-03")


def test_another_peak_rate_has_its_own_report(resumed):
    assert resumed(KeepOptimizerSettings(), lr=0.5) == []
