"""Signals within this process; tests/reliability has the real thing."""

import faulthandler
import os
import signal

import lightning as L
import pytest
import torch

from callbacks import PendingValidation, ResumeState, SaveCheckpoints, Terminated, Termination
from tests.programs import run as run_program


class Asks(L.Callback):
    """Sends a signal to this very process in a training batch, or a validation's (step, batch)."""

    def __init__(self, at, saved, number):
        self.at, self.saved, self.number, self.validated = at, saved, number, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.at:
            os.kill(os.getpid(), self.number)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.validated.append((trainer.global_step, batch_idx))
        if self.at == self.validated[-1]:
            os.kill(os.getpid(), self.number)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved.append((trainer.global_step, trainer.validating))


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler, also where the tests are a background job that ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(make_model, make_data, make_trainer):
    def start(at, *callbacks, saved=None, number=signal.SIGTERM, watch=None, **options):
        asks = Asks(at, [] if saved is None else saved, number)
        trainer = make_trainer(
            asks,
            ResumeState(),
            PendingValidation(),
            *callbacks,
            Termination(watch),
            **{"max_steps": 6, **options},
        )
        trainer.fit(make_model(), make_data())
        return trainer

    return start


def last(tmp_path):
    return tmp_path / "checkpoints" / "last.ckpt"


def stopped(run, tmp_path, at, every=None, number=signal.SIGTERM, **options):
    """Runs until it is stopped; returns (step, whether in validation) of each written file."""
    seen = []
    writer = SaveCheckpoints(monitor=None, save_top_k=0, every_n_train_steps=every)
    with pytest.raises(Terminated) as caught:
        run(at, writer, saved=seen, number=number, enable_checkpointing=True, **options)
    path = last(tmp_path)
    assert f"stopped by {number.name} after step {seen[-1][0]}; " in str(caught.value)
    assert f"resume from {path} with --ckpt_path last" in str(caught.value)
    assert caught.value.exit_code == 128 + number
    assert torch.load(path, weights_only=True)["global_step"] == seen[-1][0]
    return seen


EACH = pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP]
)


@EACH
def test_it_saves_after_the_step_in_work(run, tmp_path, number):
    assert stopped(run, tmp_path, 2, number=number, limit_val_batches=0) == [(3, False)]


class EndedAtOnce(Exception):
    pass


@pytest.mark.parametrize(
    ("number", "window", "ends"),
    [(signal.SIGTERM, 1.0, False), (signal.SIGTERM, -1.0, True), (signal.SIGINT, 1.0, True)],
)
def test_a_second_signal(run, tmp_path, monkeypatch, number, window, ends):
    """It ends the process at once, but a SIGTERM within a second is the first request again."""

    class Again(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.fit_loop.epoch_loop.total_batch_idx == 2:
                os.kill(os.getpid(), number)

    def end(_):
        raise EndedAtOnce

    monkeypatch.setattr(signal, "raise_signal", end)
    monkeypatch.setattr("callbacks.termination.SAME_REQUEST_SECONDS", window)
    writer = SaveCheckpoints(monitor=None, save_top_k=0)
    options = {"number": number, "enable_checkpointing": True, "limit_val_batches": 0}
    with pytest.raises(EndedAtOnce if ends else Terminated):
        run(2, writer, Again(), **options)
    if not ends:
        assert torch.load(last(tmp_path), weights_only=True)["global_step"] == 3


def test_an_accumulated_step_is_finished_first(run, tmp_path):
    options = {"limit_val_batches": 0, "accumulate_grad_batches": 3}
    assert stopped(run, tmp_path, 3, **options) == [(2, False)]


def test_a_validation_that_is_due_is_left_to_the_resumed_run(run, tmp_path):
    assert stopped(run, tmp_path, 1, val_check_interval=2) == [(2, True)]
    assert torch.load(last(tmp_path), weights_only=True)["pending_validation"]


@EACH
@pytest.mark.parametrize("every", [None, 2])
def test_a_validation_is_left_at_its_next_batch(run, tmp_path, every, number):
    """Where the checkpoint of that step was due, it has been written by then."""
    options = {"number": number, "limit_val_batches": 3, "val_check_interval": 2, "every": every}
    assert stopped(run, tmp_path, (2, 0), **options) == [(2, True)]
    assert torch.load(last(tmp_path), weights_only=True)["pending_validation"]


def test_a_validation_between_accumulated_batches_is_left_too(run, tmp_path):
    options = {"limit_val_batches": 3, "val_check_interval": 3, "accumulate_grad_batches": 2}
    assert stopped(run, tmp_path, (1, 0), **options) == [(1, True)]
    content = torch.load(last(tmp_path), weights_only=True)
    assert content["pending_validation"]
    assert content["resume_state"]["unfinished_step"]


def test_asked_in_the_last_batch_of_a_validation_it_trains_one_step_more(run, tmp_path):
    assert stopped(run, tmp_path, (2, 0), val_check_interval=2) == [(3, False)]
    assert not torch.load(last(tmp_path), weights_only=True)["pending_validation"]


def test_without_checkpoints_it_says_so(run):
    with pytest.raises(Terminated, match="after step 2; no checkpoint was written"):
        run(1, limit_val_batches=0)


def test_a_run_that_ends_by_itself_ends_as_always(run):
    trainer = run(5, limit_val_batches=0)
    assert trainer.global_step == 6
    assert trainer.state.finished


@EACH
def test_the_former_handler_is_put_back(run, number):
    before = signal.getsignal(number)
    run(99, limit_val_batches=0)
    assert signal.getsignal(number) == before
    with pytest.raises(Terminated):
        run(1, limit_val_batches=0, number=number)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(run, number):
    """As in background jobs of a script, and under nohup."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert run(1, limit_val_batches=0, number=number).global_step == 6
    finally:
        signal.signal(number, before)


# ---- runs that stand still

STANDS_STILL = """
import time
import lightning as L
from callbacks import Termination
from datamodules import LocalText
from lightning_models import TransformerLM

class Stands(TransformerLM):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            time.sleep(60)
        return super().training_step(batch, batch_idx)

shape = {"vocab_size": 257, "block_size": 16, "num_layers": 1, "dim": 8, "num_heads": 1}
data = LocalText(data_files=%r, cache_dir=%r, block_size=16, batch_size=2)
options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "devices": 1}
trainer = L.Trainer(max_steps=9, callbacks=[Termination(stall_minutes=0.03)], **options)
trainer.fit(Stands(shape, {}), data)
"""


def test_a_run_that_stands_still_ends_with_its_stacks(text_file, tmp_path):
    code = STANDS_STILL % (str(text_file), str(tmp_path))
    done = run_program("-c", code, timeout=50)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in training_step" in done.stderr


def test_no_clock_runs_after_training(run, tmp_path, monkeypatch):
    """Whether it has ended by itself, or by an error; also when a checkpoint is written later."""
    running = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: running.append(1))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", running.clear)
    trainer = run(None, watch=5.0)
    assert not running
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert not running
    with pytest.raises(Terminated):
        run(2, watch=5.0)
    assert not running
