"""What a resumed run says of its learning rate."""

import logging

import lightning as L
import pytest

from callbacks import KeepOptimizerSettings, ScheduleChange
from lightning_models import OptimizerConfig

TOLD = "the schedule now"


def told(caplog):
    return [message for message in caplog.messages if TOLD in message]


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
        return told(caplog)

    return run


def test_another_length_is_told_in_one_line(resumed):
    """Step 5 is beyond the end of four, and of eight it has 0.1 + 0.45 * (1 + cos(5 pi / 8))."""
    assert resumed() == [
        "warning: the schedule now ends at step 8: the learning rate goes from 1.0e-04 to 3.8e-04"
    ]


def test_the_numbers_are_those_of_training(make_model, make_data, make_trainer, tmp_path):
    """The second step of the resumed run has the rate that a run of the new length has there."""
    whole = rates_of(make_model, make_data, make_trainer, 8, None)
    path = tmp_path / "x.ckpt"
    rates_of(make_model, make_data, make_trainer, 4, None, path)
    resumed = rates_of(make_model, make_data, make_trainer, 8, path)
    assert resumed[1:] == whole[5:]
    assert resumed[0] == pytest.approx(1e-4)


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
    assert told(caplog) == []


def test_a_schedule_without_a_length_says_nothing(resumed):
    assert resumed(before="constant", schedule="constant") == []


def test_another_kind_of_schedule_is_told_too(resumed):
    (line,) = resumed(schedule="constant")
    assert line.endswith("the learning rate goes from 1.0e-04 to 1.0e-03")


def test_another_peak_rate_has_its_own_report(resumed):
    assert resumed(KeepOptimizerSettings(), lr=0.5) == []
