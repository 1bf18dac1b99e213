"""When checkpoints are written; and runs that ended within a validation begin with it."""

import contextlib
import re
from datetime import timedelta

import lightning as L
import pytest
import torch

from callbacks import PendingValidation, ResumeState, SaveCheckpoints
from lightning_models import TransformerLM

# ---- when checkpoints are written


class Writes(L.Callback):
    """Notes (global step, micro-batches so far) of each written file."""

    def __init__(self):
        self.at = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        processed = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        self.at.append((trainer.global_step, processed))


@pytest.fixture
def run(make_model, make_data, make_trainer, tmp_path):
    def start(checkpoint, **options):
        writes = Writes()
        trainer = make_trainer(checkpoint, writes, enable_checkpointing=True, **options)
        trainer.fit(make_model(), make_data())
        return writes.at, sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    return start


def step_of(tmp_path, name):
    return torch.load(tmp_path / "checkpoints" / name, weights_only=True)["global_step"]


def test_last_does_not_wait_for_a_validation(run, tmp_path):
    """Lightning's own writes nothing before val/loss is known."""
    at, names = run(SaveCheckpoints(every_n_train_steps=2), max_steps=5, limit_val_batches=0)
    assert at == [(2, 2), (4, 4), (5, 5)]
    assert names == ["last.ckpt"]
    assert step_of(tmp_path, "last.ckpt") == 5


def test_the_best_does_not_wait_for_the_interval(run, tmp_path):
    checkpoint = SaveCheckpoints(every_n_train_steps=4)
    _, names = run(checkpoint, max_steps=4, val_check_interval=2)
    (best,) = (name for name in names if re.fullmatch(r"best-step=\d\.ckpt", name))
    assert step_of(tmp_path, best) in (2, 4)
    assert checkpoint.best_model_score is not None


def test_one_step_can_be_the_last_and_the_best(run, tmp_path):
    """Writing last.ckpt must not count as the validated checkpoint of the same step."""
    _, names = run(SaveCheckpoints(every_n_train_steps=2), max_steps=2, val_check_interval=2)
    assert names == ["best-step=2.ckpt", "last.ckpt"]


def test_all_are_kept_once(run):
    checkpoint = SaveCheckpoints(every_n_train_steps=1, save_top_k=-1)
    _, names = run(checkpoint, max_steps=3, val_check_interval=3)
    assert names == ["last.ckpt", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert checkpoint.best_model_path.endswith("step=3.ckpt")


def test_what_is_due_is_written_before_and_after_a_validation(run, tmp_path):
    """The one before it is last.ckpt alone: a numbered name may hold a value of the validation."""
    checkpoint = SaveCheckpoints(
        every_n_train_steps=2,
        save_top_k=-1,
        filename="{step}-{val/bpb:.1f}",
        auto_insert_metric_name=False,
    )
    at, names = run(checkpoint, max_steps=2, val_check_interval=2)
    assert at == [(2, 2)] * 3  # last, validation, numbered, last
    assert len(names) == 2


def test_never_between_accumulated_batches(run):
    checkpoint = SaveCheckpoints(train_time_interval=timedelta(0))
    at, _ = run(checkpoint, max_steps=3, accumulate_grad_batches=3, limit_val_batches=0)
    assert at == [(1, 3), (2, 6), (3, 9)]


def test_time_is_asked_when_logging(run):
    checkpoint = SaveCheckpoints(train_time_interval=timedelta(0))
    at, _ = run(checkpoint, max_steps=5, log_every_n_steps=2, limit_val_batches=0)
    assert [step for step, _ in at] == [2, 4, 5]


def test_no_validation_is_no_error_at_the_end_of_an_epoch(run, recwarn):
    run(SaveCheckpoints(), max_epochs=2, limit_train_batches=2, limit_val_batches=0)
    assert not any("could not find the monitored key" in str(w.message) for w in recwarn)


def test_another_folder_starts_its_own_ranking(tmp_path, recwarn):
    old, new = (
        SaveCheckpoints(dirpath=str(tmp_path / "a")),
        SaveCheckpoints(dirpath=str(tmp_path / "b")),
    )
    old.best_model_path = "a/best.ckpt"
    new.load_state_dict(old.state_dict())
    assert new.best_model_path == ""
    assert not recwarn


@pytest.mark.parametrize(("mode", "worst"), [("min", float("inf")), ("max", -float("inf"))])
def test_checkpoints_ranked_anew_are_below_the_next_one(mode, worst):
    checkpoint = SaveCheckpoints(mode=mode, save_top_k=2)
    checkpoint.best_k_models = {"a.ckpt": torch.tensor(0.3), "b.ckpt": torch.tensor(0.7)}
    checkpoint.restart_ranking()
    values = {path: float(value) for path, value in checkpoint.best_k_models.items()}
    assert values == {"a.ckpt": worst, "b.ckpt": worst}
    assert all(isinstance(value, torch.Tensor) for value in checkpoint.best_k_models.values())


# ---- validations that were cut short: steps, values and counters as ever

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
