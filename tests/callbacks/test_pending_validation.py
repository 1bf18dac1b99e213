"""A run that ended within a validation begins with it: steps, values and counters as ever."""

import contextlib

import lightning as L
import pytest
import torch

from callbacks import PendingValidation, ResumeState, SaveCheckpoints
from lightning_models import TransformerLM

SCHEDULE = {"max_steps": 8, "limit_train_batches": 5, "limit_val_batches": 2}
BY_EPOCH, BY_STEP, UNALIGNED = {}, {"val_check_interval": 2}, {"val_check_interval": 3}


class NoisyLM(TransformerLM):
    """A validation that depends on the global random stream."""

    def validation_step(self, batch, batch_idx):
        scores = self.score(batch)
        self.val_metrics.add(torch.rand(()) - scores.total(), scores.num_targets.sum(), None)


class Log(L.Callback):
    """Notes what a logger would be given by each validation, and all checkpoints within them."""

    def __init__(self, break_at=None):
        self.rows, self.break_at, self.validations = [], break_at, 0

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1 and self.validations + 1 == self.break_at:
            raise KeyboardInterrupt  # of the process, at any point of a validation

    def on_validation_end(self, trainer, pl_module):
        self.validations += 1
        loops = trainer.fit_loop.epoch_loop
        place = (trainer.current_epoch, trainer.global_step, loops._batches_that_stepped)
        self.rows.append((*place, float(trainer.callback_metrics["val/loss"])))

    def state_dict(self):
        return {"validations": self.validations}

    def load_state_dict(self, state):
        self.validations = state["validations"]


@pytest.fixture
def fit(make_model, make_data, make_trainer, tmp_path):
    def start(name, log=None, ckpt_path=None, **options):
        log = log or Log()
        writer = SaveCheckpoints(str(tmp_path / name), every_n_train_steps=1)
        callbacks = (log, ResumeState(), PendingValidation(), writer)
        trainer = make_trainer(*callbacks, enable_checkpointing=True, **{**SCHEDULE, **options})
        with contextlib.suppress(SystemExit):  # what Lightning makes of an interrupt
            trainer.fit(make_model(NoisyLM, dropout=0.3), make_data(), ckpt_path=ckpt_path)
        return log.rows, tmp_path / name / "last.ckpt"

    return start


def load(path):
    return torch.load(path, weights_only=True)


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


@pytest.mark.parametrize(
    ("schedule", "validation"),
    [(BY_EPOCH, 1), (BY_STEP, 1), ({**BY_STEP, "max_steps": 7}, 3)],
    ids=["end of an epoch", "within an epoch", "end of the run"],
)
def test_the_resumed_run_makes_up_for_it(fit, schedule, validation):
    rows, whole = fit("whole", **schedule)
    before, broken = fit("broken", Log(break_at=validation), **schedule)
    assert load(broken)["pending_validation"]
    after, _ = fit("broken", ckpt_path=str(broken), **schedule)
    assert before + after == rows
    ours, theirs = load(broken), load(whole)
    assert ours["global_step"] == theirs["global_step"] >= 7
    assert not ours["pending_validation"]
    assert names(broken) == names(whole)  # the best is ranked as ever
    for name, weight in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], weight), name


def test_later_checkpoints_are_not_pending(fit):
    """Whatever the first one left in the counters must not have its validation done thrice."""
    rows, _ = fit("whole", **BY_STEP)
    before, broken = fit("broken", Log(break_at=1), **BY_STEP)
    middle, _ = fit("broken", ckpt_path=str(broken), **{**BY_STEP, "max_steps": 2})
    assert before + middle == rows[:1]
    after, _ = fit("broken", ckpt_path=str(broken), **BY_STEP)
    assert after == rows[1:]


@pytest.mark.parametrize("max_steps", [2, 4])
def test_a_run_that_does_not_validate_there_forgets_it(fit, max_steps):
    """Another interval; and the run that has had all its steps still ends where it should."""
    _, broken = fit("broken", Log(break_at=1), **BY_STEP)
    rows, _ = fit("broken", ckpt_path=str(broken), **{**UNALIGNED, "max_steps": max_steps})
    assert [step for _, step, *_ in rows] == [3] * (max_steps == 4)
    content = load(broken)
    assert content["global_step"] == max_steps
    assert not content["pending_validation"]
