"""Random states in checkpoints."""

import random

import numpy as np
import pytest
import torch

from callbacks import KeepOptimizerSettings, ResumeState
from callbacks.hooks import RandomState
from callbacks.resume import _rebase
from lightning_models import OptimizerConfig


def draws():
    return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)


def test_a_state_survives_a_checkpoint(tmp_path):
    random.gauss(0, 1)  # leaves its second value for the next call
    np.random.randn()
    state = RandomState.capture()
    expected = draws()
    torch.save(state.plain(), tmp_path / "state")
    draws()
    RandomState.from_plain(torch.load(tmp_path / "state", weights_only=True)).restore()
    assert draws() == expected


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
    with pytest.warns(UserWarning, match="written by 2 processes, this run has 1"):
        make_trainer(ResumeState(), max_steps=3).fit(make_model(), make_data(), ckpt_path=path)


def test_a_checkpoint_without_states_says_so(make_model, make_data, make_trainer, tmp_path):
    path = tmp_path / "x.ckpt"
    content = fit_and_save(make_model, make_data, make_trainer, path, ResumeState())
    del content["resume_state"]
    torch.save(content, path)
    with pytest.warns(UserWarning, match="holds no random state"):
        make_trainer(ResumeState(), max_steps=3).fit(make_model(), make_data(), ckpt_path=path)


def test_draws_between_batches_do_not_reach_training(make_model, make_data, make_trainer):
    import lightning as L

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
