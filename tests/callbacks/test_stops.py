"""A run that is stopped in any way and resumed ends as the one that was never stopped."""

import contextlib
import csv
import dataclasses
import signal
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from methods import METHODS

from callbacks import (
    PendingValidation,
    ResumeState,
    SaveCheckpoints,
    ScheduleChange,
    Terminated,
    Termination,
)
from lightning_models.checkpoint import read_checkpoint
from tests.reliability.runs import same
from training.loggers import MetricsFile, purge_step

EPOCH, EPOCHS = 7, 2  # with two micro-batches a step, the last step of an epoch has one
QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}
VALIDATIONS = {
    "not": {"limit_val_batches": 0},
    "by epoch": {"limit_val_batches": 1},
    "every 2": {"limit_val_batches": 1, "val_check_interval": 2},
    "over epochs": {
        "limit_val_batches": 1,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
    },
}
MODELS = {method.name: method for method in METHODS}
SMALL = {"gpt2": {"num_layers": 1}, "thought-gestalt": {"num_layers": 2, "sentence_layer": 1}}
FIXTURES = {"gpt2": "make_data", "thought-gestalt": "make_sentences"}


class At(L.Callback):
    """Calls a function as soon as so many batches are done, and sees each step."""

    def __init__(self, batches, stop):
        self.batches, self.stop, self.rates = batches, stop, []

    def on_train_batch_end(self, trainer, *_):
        if done(trainer) == self.batches:
            self.stop()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append((trainer.current_epoch, optimizer.param_groups[0]["lr"]))


class TimeIsUp(Timer):
    """The timer that ``max_time`` makes; its time is up after so many batches."""

    def __init__(self, batches):
        super().__init__(duration={"hours": 1}, interval="step", verbose=False)
        self.batches = batches

    def setup(self, trainer, pl_module, stage):
        self.trainer = trainer

    def time_elapsed(self, stage="train"):
        return 7200.0 if done(self.trainer) >= self.batches else 0.0


class PlannedError(Exception):
    pass


class Fails(L.Callback):
    """An error in the batch after so many."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_start(self, trainer, *_):
        if done(trainer) == self.batches:
            raise PlannedError


def done(trainer):
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


def steps_of(batches, accumulate):
    """Optimiser steps of the first batches, whose last one ends a step."""
    epochs, rest = divmod(batches, EPOCH)
    return epochs * -(-EPOCH // accumulate) + rest // accumulate


def interrupted(kind, batches, accumulate):
    """Callbacks and trainer options that stop a run after so many batches."""
    if kind == "max_time":
        return [TimeIsUp(batches)], {}
    if kind == "SIGTERM":
        return [At(batches, lambda: signal.raise_signal(signal.SIGTERM))], {}
    if kind == "error":
        return [Fails(batches)], {}
    if kind == "limit":
        return [], {"limit_train_batches": batches, "max_epochs": 1}
    return [], {"max_steps": steps_of(batches, accumulate)}


@pytest.fixture
def train(request, tmp_path):
    """Trains in a folder, from its last checkpoint if there is one; returns its end."""

    def run(folder, name, options, stop=None, **optimizer):
        method, folder = MODELS[name], tmp_path / folder
        model = method.build(**method.noise, **SMALL[name], dim=16)
        model.optimizer_config = dataclasses.replace(model.optimizer_config, **optimizer)
        torch.manual_seed(5)
        last = folder / "last.ckpt"
        start = last if last.is_file() else None
        purge = None if start is None else purge_step(read_checkpoint(start))
        sees = At(None, None)
        callbacks, limits = stop or ([], {})
        fails = any(isinstance(callback, Fails) for callback in callbacks)
        trainer = L.Trainer(
            default_root_dir=folder,
            logger=MetricsFile(folder, "log", "0", purge),
            callbacks=[
                SaveCheckpoints(str(folder), save_top_k=0, save_on_exception=fails),
                *callbacks,
                sees,
                ScheduleChange(),
                ResumeState(),
                PendingValidation(),
                Termination(),
            ],
            **{**QUIET, "max_epochs": EPOCHS, "limit_train_batches": EPOCH, **options, **limits},
        )
        data = request.getfixturevalue(FIXTURES[name])(batch_size=2)
        with contextlib.suppress(Terminated, PlannedError):
            trainer.fit(model, data, ckpt_path=start, weights_only=True)
        return SimpleNamespace(rates=sees.rates, rows=rows(folder), end=read_checkpoint(last))

    return run


def rows(folder):
    """The rows of the log as (step, values of those cells that are filled)."""
    with (folder / "log" / "0" / "metrics.csv").open(newline="") as file:
        cells = [dict(row) for row in csv.DictReader(file)]
    return [(int(row.pop("step")), {k: v for k, v in row.items() if v}) for row in cells]


def without_extra(rows, whole, steps):
    """Rows but for the validations at those steps that only a run that ends there does."""
    return [
        (step, row)
        for step, row in rows
        if step not in steps or "val/loss" not in row or (step, row) in whole
    ]


def assert_equal(stopped, whole):
    assert stopped.end.step == whole.end.step
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(stopped.end.content[key], whole.end.content[key]), key
    random = [run.end.content["resume_state"]["random"] for run in (stopped, whole)]
    assert same(*random)


KINDS = ("max_steps", "max_time", "SIGTERM")
STOPS = [(kind, places) for kind in KINDS for places in ([4], [EPOCH], [4, 9])]
STOPS += [("max_time", [3]), ("limit", [4]), ("error", [3]), ("error", [5, 8])]
CASES = [("gpt2", *stop, validation, 2) for stop in STOPS for validation in VALIDATIONS]
CASES += [("gpt2", *stop, "every 2", 1) for stop in STOPS]
CASES += [("thought-gestalt", *stop, "by epoch", 2) for stop in STOPS]


@pytest.fixture(scope="module")
def wholes():
    return {}


@pytest.mark.parametrize(("name", "kind", "places", "validation", "accumulate"), CASES, ids=str)
def test_it_ends_as_if_never_stopped(train, wholes, name, kind, places, validation, accumulate):
    options = {**VALIDATIONS[validation], "accumulate_grad_batches": accumulate}
    # the schedule has the length of the run: max_steps would change it
    schedule = "constant" if kind in ("max_steps", "limit") else "cosine"
    key = name, validation, accumulate, schedule
    if key not in wholes:
        wholes[key] = train("whole", name, options, schedule=schedule)
    whole, rates = wholes[key], []
    for place in places:
        stop = interrupted(kind, place, accumulate)
        rates += train("stopped", name, options, stop, schedule=schedule).rates
    stopped = train("stopped", name, options, schedule=schedule)
    assert whole.end.step == EPOCHS * -(-EPOCH // accumulate)
    assert_equal(stopped, whole)
    assert rates + stopped.rates == whole.rates
    ends = {steps_of(place + accumulate - 1, accumulate) - 1 for place in places}
    extra = ends if kind in ("max_time", "limit") else ()
    assert without_extra(stopped.rows, whole.rows, extra) == whole.rows


# ---- resumed with other settings


@pytest.mark.parametrize(("before", "after"), [("every 2", "over epochs"), ("over epochs", "not")])
@pytest.mark.parametrize("place", [6, EPOCH])
def test_another_validation_interval_leaves_the_steps_of_the_log(train, before, after, place):
    """After batch 6 a validation was due in both, after 7 in neither."""
    whole = train("whole", "gpt2", VALIDATIONS["not"])
    train("stopped", "gpt2", VALIDATIONS[before], interrupted("max_time", place, 1))
    stopped = train("stopped", "gpt2", VALIDATIONS[after])
    assert_equal(stopped, whole)
    assert [row for row in stopped.rows if "train/loss" in row[1]] == whole.rows
    assert [step for step, _ in whole.rows] == list(range(EPOCH * EPOCHS))


@pytest.mark.parametrize("accumulate", [1, 3, 4])
@pytest.mark.parametrize("old", [False, True])
def test_a_step_that_has_begun_is_not_finished_with_another_accumulation(
    train, tmp_path, accumulate, old
):
    """Three micro-batches, of which the third is half a step."""
    options = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    train("run", "gpt2", options, interrupted("max_time", 3, 2))
    if old:
        as_older_versions(tmp_path / "run" / "last.ckpt")
    line = (
        rf"accumulate_grad_batches \({accumulate}\): the checkpoint was written .*"
        "resume with the accumulation"
    )
    with pytest.raises(ValueError, match=line):
        train("run", "gpt2", {**options, "accumulate_grad_batches": accumulate})


@pytest.mark.parametrize("place", [2, 3, EPOCH, 9])
def test_checkpoints_of_older_versions_go_on_where_they_were_written(train, tmp_path, place):
    """Their loops say that a cut epoch is done, and they know nothing of steps."""
    options = {"accumulate_grad_batches": 2, **VALIDATIONS["by epoch"]}
    whole = train("whole", "thought-gestalt", options)
    train("stopped", "thought-gestalt", options, interrupted("max_time", place, 2))
    loops = as_older_versions(tmp_path / "stopped" / "last.ckpt")["loops"]["fit_loop"]
    assert loops["epoch_progress"]["total"]["completed"] == -(-place // EPOCH), "counted as done"
    assert_equal(train("stopped", "thought-gestalt", options), whole)


def as_older_versions(path):
    content = torch.load(path, weights_only=True)
    for key in ("step_start", "step_place"):
        content["resume_state"].pop(key, None)
    torch.save(content, path)
    return content


def test_another_accumulation_begins_with_a_shorter_step(make_model, make_data, tmp_path):
    """Batches 2 and 3 of four remain: the step is their mean, though a stop lies between them.

    The gradients are compared with the gradient of the mean over all targets of a step.
    """
    seen = Gradients()

    def run(accumulate, batches):
        last = tmp_path / "last.ckpt"
        writer = SaveCheckpoints(str(tmp_path), save_top_k=0)
        trainer = L.Trainer(
            callbacks=[writer, ResumeState(), seen, TimeIsUp(batches)],
            default_root_dir=tmp_path,
            logger=False,
            max_epochs=1,
            limit_train_batches=8,
            limit_val_batches=0,
            accumulate_grad_batches=accumulate,
            **QUIET,
        )
        start = last if last.is_file() else None
        trainer.fit(make_model(), make_data(batch_size=2), ckpt_path=start, weights_only=True)

    for accumulate, batches in ((2, 2), (4, 3), (4, 8)):
        run(accumulate, batches)
    groups = [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert len(seen.steps) == len(groups)
    data = make_data(batch_size=2)
    data.prepare_data()
    data.setup("fit")
    for (weights, gradient), group in zip(seen.steps, groups, strict=True):
        model = make_model()
        model.configure_model()
        model.network.load_state_dict(weights)
        batches = [data.training_source().batch(n) for n in group]
        tokens, targets = (
            torch.cat([batch[key] for batch in batches]) for key in ("tokens", "targets")
        )
        logits = model.network(tokens) @ model.network.output_matrix.T
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        expected = [parameter.grad for parameter in model.network.parameters()]
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


class Gradients(L.Callback):
    """Notes weights and gradients at each optimiser step."""

    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        weights = {key: w.clone() for key, w in pl_module.network.state_dict().items()}
        self.steps.append((weights, [p.grad.clone() for p in pl_module.network.parameters()]))
