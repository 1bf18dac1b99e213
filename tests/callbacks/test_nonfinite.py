"""Gradient norms; and a loss or gradient that is not a number never reaches the weights."""

import math
import signal
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from callbacks import (
    GradientNorm,
    NonFinite,
    NonFiniteError,
    ResumeState,
    SaveCheckpoints,
    Termination,
)
from callbacks.nonfinite import _all_finite, weights_are_finite
from callbacks.termination import ENDING
from callbacks.trainer_state import unscaled
from lightning_models import OptimizerConfig, TransformerLM
from tests.callbacks.conftest import Recorder

POISON = math.nan


class Poisoned(TransformerLM):
    """Its loss is not a number on some micro-batches (numbers count from 0 over the run)."""

    bad: tuple = ()
    value = POISON
    only_gradient = False

    def loss(self, batch):
        output = super().loss(batch)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx in self.bad:
            nll = output.terms["nll"]
            if self.only_gradient:
                wrong = nll.sum + (nll.sum - nll.sum.detach()) * 1e38 * 1e38
            else:
                wrong = nll.sum * self.value
            output.terms["nll"] = nll._replace(sum=wrong)
        return output


class Snapshots(L.Callback):
    """Weights and optimiser state after each micro-batch."""

    def __init__(self):
        self.at = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        weights = [p.detach().clone() for p in pl_module.parameters()]
        state = trainer.optimizers[0].state_dict()["state"]
        moments = [v.clone() for entry in state.values() for v in entry.values()]
        self.at.append((weights, moments, trainer.optimizers[0].param_groups[0]["lr"]))


class Overflow(L.Callback):
    """Has one step leave an infinite weight, by default one that no loss and no gradient shows."""

    def __init__(self, step, shown=False):
        self.step, self.shown = step, shown

    def setup(self, trainer, pl_module, stage):
        pl_module.spare = torch.nn.Parameter(torch.zeros(3))

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step:
            weights = pl_module.network.embedding.weight if self.shown else pl_module.spare
            with torch.no_grad():
                weights[-1] = math.inf


class WithSetting(L.Callback):
    """Gives the optimiser a setting that OptimizerConfig refuses."""

    def __init__(self, key, value):
        self.key, self.value = key, value

    def on_train_batch_start(self, trainer, *_):
        trainer.optimizers[0].param_groups[0][self.key] = self.value


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def run(make_model, make_data, make_trainer):
    def start(*callbacks, bad=(), value=POISON, only_gradient=False, ckpt_path=None, **options):
        model = make_model(Poisoned)
        model.bad, model.value, model.only_gradient = bad, value, only_gradient
        trainer = make_trainer(*callbacks, **{"max_steps": 6, **options})
        trainer.fit(model, make_data(), ckpt_path=ckpt_path)
        return model, trainer

    return start


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_it_stops_with_one_line_that_says_where(run, value):
    with pytest.raises(NonFiniteError) as caught:
        run(NonFinite(), bad=(3,), value=value)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("step 4, lr 0.001: the loss of batch 3 is ")
    assert f"(terms: nll {value}), sequence_ids 12, 13, 14, 15." in text
    assert "The weights were not updated. No checkpoint was written yet." in text
    assert "--nonfinite.action skip" in text
    assert caught.value.exit_code == 3


def test_the_last_good_checkpoint_is_named_and_stays(run, tmp_path):
    checkpoint = SaveCheckpoints(every_n_train_steps=2, save_on_exception=True)
    with pytest.raises(NonFiniteError) as caught:
        run(NonFinite(), checkpoint, bad=(4,), enable_checkpointing=True, limit_val_batches=0)
    path = tmp_path / "checkpoints" / "last.ckpt"
    assert f"The last good checkpoint is {path}." in str(caught.value)
    for file in path.parent.glob("*.ckpt"):
        content = torch.load(file, weights_only=True)
        assert content["global_step"] == 4
        assert all(value.isfinite().all() for value in content["state_dict"].values())


def test_a_resumed_run_names_what_it_came_from(run, tmp_path):
    path = tmp_path / "start.ckpt"
    _, trainer = run(NonFinite(), max_steps=2)
    trainer.save_checkpoint(path)
    with pytest.raises(NonFiniteError, match=r"step 4, .*good checkpoint is .*start\.ckpt"):
        run(NonFinite(), bad=(3,), ckpt_path=path)


def test_the_micro_batch_of_an_accumulated_step_is_named(run):
    with pytest.raises(NonFiniteError, match="step 2, .* the loss of batch 3 is nan"):
        run(NonFinite(), bad=(3,), accumulate_grad_batches=3)


def test_a_gradient_alone_is_seen_too(run):
    with pytest.raises(NonFiniteError, match="the gradient norm is .* batches 2, 3"):
        run(NonFinite(), bad=(3,), only_gradient=True, accumulate_grad_batches=2)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_skipped_step_touches_nothing(run, accumulate, clip):
    snapshots, recorder = Snapshots(), Recorder()
    bad = (2 * accumulate,)  # within the third step
    with pytest.warns(UserWarning, match=r"step 3, .* is skipped \(1 so far\)"):
        run(
            NonFinite("skip"),
            snapshots,
            recorder,
            bad=bad,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
        )
    ends = snapshots.at[accumulate - 1 :: accumulate]
    before, after, later = ends[1], ends[2], ends[3]
    assert equal(before[0], after[0])
    assert equal(before[1], after[1])
    assert not equal(after[0], later[0])
    assert all(weight.isfinite().all() for weight in later[0])
    skipped = [row.get("train/skipped_steps") for row in recorder.rows]
    assert skipped[accumulate - 1 :: accumulate] == [None, None, 1, 1, 1, 1]


def test_the_schedule_goes_on_past_a_skipped_step(make_model, make_data, make_trainer):
    rates = []
    for bad in ((), (2,)):
        model = make_model(Poisoned)
        model.bad = bad
        model.optimizer_config = OptimizerConfig(schedule="linear", warmup=0)
        snapshots = Snapshots()
        trainer = make_trainer(NonFinite("skip"), snapshots, max_steps=5)
        if bad:
            with pytest.warns(UserWarning, match="is skipped"):
                trainer.fit(model, make_data())
        else:
            trainer.fit(model, make_data())
        rates.append([lr for _, _, lr in snapshots.at])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) >= 4


@pytest.mark.filterwarnings("ignore:.*is skipped.*")
def test_too_many_in_a_row_stop(run):
    with pytest.raises(NonFiniteError, match=r"step 5, .*max_skipped_in_a_row \(2\)") as caught:
        run(NonFinite("skip", max_skipped_in_a_row=2), bad=(0, 2, 3, 4))
    assert "batch 4" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*is skipped.*")
def test_a_resumed_run_goes_on_counting(run, tmp_path):
    path = tmp_path / "start.ckpt"
    _, trainer = run(NonFinite("skip"), bad=(1,), max_steps=2)
    trainer.save_checkpoint(path)
    callback = NonFinite("skip", max_skipped_in_a_row=1)
    with pytest.raises(NonFiniteError, match="step 3"):
        run(callback, bad=(2,), ckpt_path=path)
    assert callback.skipped == 1


def test_good_steps_are_left_alone(run):
    ends = [
        torch.cat([p.detach().flatten() for p in run(ResumeState(), *guard)[0].parameters()])
        for guard in ((), (NonFinite(),), (NonFinite("skip"),))
    ]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_it_waits_for_the_device_once_a_step(run, monkeypatch):
    looked, counts = [], []

    def counted(original):
        return lambda self: looked.append(1) or original(self)

    for name in ("__bool__", "__int__", "__float__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    for guard in ((), (NonFinite(),)):
        looked.clear()
        run(*guard, accumulate_grad_batches=3, max_steps=4, limit_val_batches=0)
        counts.append(len(looked))
    assert counts[1] - counts[0] == 4


@pytest.mark.parametrize("action", ["stop", "skip"])
@pytest.mark.parametrize(
    ("key", "value"), [("lr", math.inf), ("lr", math.nan), ("weight_decay", math.nan)]
)
def test_a_setting_that_is_not_finite_never_reaches_the_weights(run, action, key, value):
    kept = Kept()
    with pytest.raises(NonFiniteError, match=f"step 1, .*{key} is {value}.*were not updated"):
        run(WithSetting(key, value), NonFinite(action), kept)
    assert equal(kept.before, [p.detach() for p in kept.model.parameters()])


def test_a_clipping_norm_that_is_nan_never_reaches_the_weights(run):
    kept = Kept()
    with pytest.raises(NonFiniteError, match=r"step 1, .*trainer.gradient_clip_val is nan"):
        run(NonFinite(), kept, gradient_clip_val=math.nan)
    assert equal(kept.before, [p.detach() for p in kept.model.parameters()])


class Kept(L.Callback):
    """The weights before the first step, and the model."""

    def on_train_start(self, trainer, pl_module):
        self.model = pl_module
        self.before = [p.detach().clone() for p in pl_module.parameters()]


WRITERS = {
    "last": {"every_n_train_steps": 2},
    "all": {"every_n_train_steps": 2, "save_top_k": -1},
    "weights": {"every_n_train_steps": 2, "save_weights_only": True},
    "error": {"every_n_train_steps": 2, "save_on_exception": True},
    "best": {"every_n_train_steps": 2, "monitor": "train/loss", "save_top_k": 2},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("step", "good"), [(1, None), (5, 4)])
@pytest.mark.parametrize("validations", [0, 1])
def test_weights_that_are_not_finite_are_never_written(
    run, tmp_path, writer, step, good, validations
):
    checkpoint = SaveCheckpoints(**WRITERS[writer])
    options = {"enable_checkpointing": True, "limit_val_batches": validations}
    with pytest.raises(
        NonFiniteError, match=r"the weights are not finite.*\(first: spare"
    ) as caught:
        run(Overflow(step), NonFinite(), checkpoint, val_check_interval=2, **options)
    path = tmp_path / "checkpoints" / "last.ckpt"
    named = f"The last good checkpoint is {path}." if good else "No checkpoint was written yet."
    assert named in str(caught.value)
    contents = [torch.load(file, weights_only=True) for file in path.parent.glob("*.ckpt")]
    assert bool(contents) == bool(good)
    for content in contents:
        assert content["global_step"] <= good
        assert all(value.isfinite().all() for value in content["state_dict"].values())


def test_the_end_of_training_writes_no_weights_that_are_not_finite(run, tmp_path):
    checkpoint = SaveCheckpoints()
    options = {"enable_checkpointing": True, "limit_val_batches": 0}
    with pytest.raises(NonFiniteError, match="the weights are not finite after step 6"):
        run(Overflow(6), NonFinite(), checkpoint, **options)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_skipping_steps_does_not_hide_broken_weights(run):
    with pytest.raises(NonFiniteError, match="the weights are not finite after step 2"):
        run(Overflow(2, shown=True), NonFinite("skip"), limit_val_batches=0)


def test_large_weights_are_finite(make_model, make_trainer, make_data):
    model = make_model()
    trainer = make_trainer(NonFinite(), max_steps=1, limit_val_batches=0)
    trainer.fit(model, make_data())
    for value, finite in ((1e38, True), (-1e38, True), (math.nan, False), (-math.inf, False)):
        with torch.no_grad():
            model.network.embedding.weight[0, :] = value
        assert weights_are_finite(trainer) == finite


def test_the_state_of_an_older_checkpoint_is_taken():
    callback = NonFinite()
    older = {"skipped": 2, "in_a_row": 1, "spikes": 3, "usual_loss": [70, 5.5, 0.01]}
    callback.load_state_dict(older)
    assert callback.state_dict() == {"skipped": 2, "in_a_row": 1}


# ---- gradient norms


def whole_gradient_norm(model, data, num_batches):
    """Norm of the gradient of the mean over all targets of the first batches, in one go."""
    data.prepare_data()
    data.setup()
    model.configure_model()
    batches = [batch for batch, _ in zip(data.train_dataloader(), range(num_batches), strict=False)]
    terms = [model.loss(batch).terms["nll"] for batch in batches]
    loss = sum(term.sum for term in terms) / sum(float(term.normaliser) for term in terms)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.stack([gradient.norm() for gradient in gradients]).norm().item()


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_norm_of_the_whole_step(clip, accumulate, make_model, make_data, make_trainer):
    recorder = Recorder()
    trainer = make_trainer(
        GradientNorm(),
        recorder,
        max_steps=1,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(make_model(), make_data())
    expected = whole_gradient_norm(make_model(), make_data(), accumulate)
    assert recorder.rows[-1]["train/grad_norm"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("every", "steps"), [(None, [2, 4]), (3, [3]), (0, [])])
def test_it_is_logged_every_n_steps(every, steps, make_model, make_data, make_trainer):
    recorder = Recorder()
    trainer = make_trainer(GradientNorm(every), recorder, max_steps=5, log_every_n_steps=2)
    trainer.fit(make_model(), make_data())
    values = [row.get("train/grad_norm") for row in recorder.rows]
    changes = [n + 1 for n, value in enumerate(values) if value != ([None, *values][n])]
    assert changes == steps


@pytest.mark.parametrize("order", [1, -1])
def test_the_norm_is_computed_once_a_step_where_it_is_logged(order, run, monkeypatch):
    """In whatever order the two come, the guard sees the gradient of its step."""
    from torch.nn.utils import get_total_norm

    calls = []

    def counted(tensors, *args, **options):
        calls.append(len(tensors))
        return get_total_norm(tensors, *args, **options)

    monkeypatch.setattr("torch.nn.utils.get_total_norm", counted)
    callbacks = [GradientNorm(), NonFinite()][::order]
    with pytest.raises(NonFiniteError, match="the gradient norm is .* batches 3"):
        run(*callbacks, bad=(3,), only_gradient=True, log_every_n_steps=1, limit_val_batches=0)
    steps, checked = 4, 1  # the weights are looked at before the step is refused
    guarded = steps if order == 1 else 2 * steps - 1  # it comes first, and logs nothing after
    assert len(calls) == guarded + checked


# ---- over ranks, and with a scaler


def test_losses_are_looked_at_without_the_factor_of_a_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler))
    loss = torch.tensor(2.5, requires_grad=True)
    assert unscaled(trainer, scaler.scale(loss)).item() == 2.5
    trainer.precision_plugin = SimpleNamespace()
    assert unscaled(trainer, loss).item() == 2.5


@pytest.mark.parametrize(
    ("refused", "signals", "agreed"),
    [
        (0.0, {}, (True, None)),
        (1.0, {}, (False, None)),
        (0.0, {signal.SIGTERM: 1.0}, (True, signal.SIGTERM)),
    ],
)
def test_two_ranks_exchange_all_they_ask_at_once(refused, signals, agreed, monkeypatch):
    """Whether losses and gradients are finite, and whether one rank is to end, are one sum."""
    exchanged = []

    def all_reduce(totals):
        theirs = [refused, *(signals.get(number, 0.0) for number in ENDING)]
        totals += torch.tensor(theirs)
        exchanged.append(len(theirs))

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    termination = Termination()
    strategy = SimpleNamespace(root_device=torch.device("cpu"))  # has no further reductions
    ready = SimpleNamespace(current=SimpleNamespace(ready=1))
    loop = SimpleNamespace(batch_progress=ready, _should_accumulate=lambda: False)
    trainer: Any = SimpleNamespace(
        world_size=2,
        callbacks=[NonFinite(), termination],
        strategy=strategy,
        global_step=7,
        fit_loop=SimpleNamespace(epoch_loop=loop),
        checkpoint_callbacks=[],
    )
    finite = _all_finite(trainer, [torch.tensor(1.0), torch.tensor(3.0), torch.tensor(0.5)])
    termination.on_train_batch_end(trainer, None, None, None, 0)
    assert (finite, termination._ending) == agreed
    assert exchanged == [1 + len(ENDING)]
