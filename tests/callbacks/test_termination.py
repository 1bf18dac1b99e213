"""SIGTERM within this process; tests/reliability has the real thing."""

import os
import signal

import lightning as L
import pytest
import torch

from callbacks import SaveCheckpoints, Terminated, Termination


class Asks(L.Callback):
    """Sends SIGTERM to this very process within a training batch."""

    def __init__(self, at, saved):
        self.at, self.saved = at, saved

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved.append((trainer.global_step, trainer.validating))


@pytest.fixture
def run(make_model, make_data, make_trainer):
    def start(at, *callbacks, saved=None, **options):
        asks = Asks(at, [] if saved is None else saved)
        trainer = make_trainer(asks, *callbacks, Termination(), **{"max_steps": 6, **options})
        trainer.fit(make_model(), make_data())
        return trainer

    return start


def stopped(run, tmp_path, at, **options):
    """Runs until it is stopped; returns (step, whether in validation) of each written file."""
    seen = []
    writer = SaveCheckpoints(monitor=None, save_top_k=0)
    with pytest.raises(Terminated) as caught:
        run(at, writer, saved=seen, enable_checkpointing=True, **options)
    path = tmp_path / "checkpoints" / "last.ckpt"
    assert f"it goes on from {path} with --ckpt_path last" in str(caught.value)
    assert caught.value.exit_code == 143
    assert torch.load(path, weights_only=True)["global_step"] == seen[-1][0]
    return seen


def test_it_saves_behind_the_step_in_work(run, tmp_path):
    assert stopped(run, tmp_path, 2, limit_val_batches=0) == [(3, False)]


def test_an_accumulated_step_is_finished_first(run, tmp_path):
    options = {"limit_val_batches": 0, "accumulate_grad_batches": 3}
    assert stopped(run, tmp_path, 3, **options) == [(2, False)]


def test_a_validation_that_is_due_is_waited_for(run, tmp_path):
    """Written before it, in case time runs out, and behind it, so that its values are not lost."""
    assert stopped(run, tmp_path, 1, val_check_interval=2) == [(2, False), (2, True)]


def test_without_checkpoints_it_says_so(run):
    with pytest.raises(Terminated, match="behind step 2; no checkpoint was written"):
        run(1, limit_val_batches=0)


def test_a_run_that_ends_by_itself_ends_as_always(run):
    trainer = run(5, limit_val_batches=0)
    assert trainer.global_step == 6
    assert trainer.state.finished


def test_the_former_handler_is_put_back(run):
    before = signal.getsignal(signal.SIGTERM)
    run(99, limit_val_batches=0)
    assert signal.getsignal(signal.SIGTERM) == before
