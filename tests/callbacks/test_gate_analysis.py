"""The analysis of memory within real trainings and validations."""

import csv
import math
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from callbacks import GateAnalysis, NonFinite
from callbacks.analysis import files
from callbacks.gate_analysis import callback as module
from callbacks.gate_analysis.history import gates
from lightning_models import (
    OptimizerConfig,
    ThoughtGestaltConfig,
    ThoughtGestaltLM,
    TransformerConfig,
    TransformerLM,
)
from tests.callbacks.written import check_training_is_the_same
from tests.thought_gestalt.cases import SIZES, streams

M = SIZES["memory_size"]
OF_RUN = {
    *("gates.csv", "gates.png", "gradient_norms.csv"),
    *("gradient_share.csv", "gradient_share.png"),
}
OF_VALIDATION = {"scalars.csv", "reach.csv", "reach.png", "attention.csv", "attention.png"}
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="constant", warmup=0)


def build(**changes):
    torch.manual_seed(0)
    model = ThoughtGestaltLM(ThoughtGestaltConfig(**{**SIZES, **changes}), OPTIMIZER)
    model.configure_model()
    return model


def plain():
    config = {key: SIZES[key] for key in ("vocab_size", "block_size", "dim", "num_heads")}
    return TransformerLM(TransformerConfig(num_layers=1, **config), OPTIMIZER)


def batches(number, seed=0):
    """Batches of three streams, the longest of 2 M + 2 sentences."""
    shape = [[3, 1, 2, 2, 3, 1, 2, 4], [2, 5], [4, 4, 1, 1, 2, 3]]
    made = [streams(shape, seed=seed + i) for i in range(number)]
    return DataLoader(made, batch_size=None, shuffle=False)


def windows(number):
    made = [
        {key: batch[key][:, 0] for key in ("tokens", "targets", "mask")}
        for batch in batches(number)
    ]
    return DataLoader(made, batch_size=None)


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def names(folder, prefix=""):
    """The files of a run, or those of an analysis."""
    found = {path.name for path in folder.iterdir()}
    if not prefix:
        return {name for name in found if not name.startswith("val-step=")}
    return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(files, "as_png", lambda figure: b"")
    monkeypatch.setattr(module, "pictures", lambda *_: {})
    monkeypatch.setattr(
        module, "run_pictures", lambda gates, norms: {"gates": 0} if gates.rows else {}
    )


# ---- what is written


def test_everything_is_written(make_trainer, tmp_path):
    trainer = make_trainer(
        GateAnalysis(every_n_steps=2, num_batches=1, every_n_validations=2),
        logger=TensorBoardLogger(tmp_path),
        max_steps=3,
        val_check_interval=1,
    )
    trainer.fit(build(), batches(3), batches(2, seed=9))
    log = tmp_path / "lightning_logs" / "version_0"
    folder = log / "gate_analysis"
    assert names(folder) == OF_RUN
    assert names(folder, "val-step=2-") == OF_VALIDATION
    assert len(list(folder.iterdir())) == len(OF_RUN) + len(OF_VALIDATION)
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(log)).Reload()
    tags = events.Tags()
    pictures = {
        f"gate_analysis/{name}" for name in ("gates", "gradient_share", "reach", "attention")
    }
    assert set(tags["images"]) == pictures
    for tag in ("gate/layer_2", "gate/layer_4", "gradient_share/memory_attention"):
        assert [event.step for event in events.Scalars(tag)] == [1]  # of Lightning's own scalars
    for line in table(folder / "val-step=2-scalars.csv"):
        (event,) = events.Scalars(line["name"])
        assert event.step == 1
        assert event.value == pytest.approx(float(line["value"]), rel=1e-4)


def test_the_rows_of_a_training(make_trainer, tmp_path, undrawn):
    model = build()
    trainer = make_trainer(GateAnalysis(every_n_steps=2), max_steps=5, limit_val_batches=0)
    trainer.fit(model, batches(5))
    rows = table(tmp_path / "gate_analysis" / "gates.csv")
    assert [int(row["step"]) for row in rows] == [0, 0, 2, 2, 4, 4]
    assert [int(row["sentence_steps"]) for row in rows] == [0, 0, 16, 16, 32, 32]  # 8 a batch
    assert [int(row["layer"]) for row in rows] == 3 * [2, 4]
    assert {float(row["gate"]) for row in rows[:2]} == {1.0}
    assert 1.0 not in {float(row["gate"]) for row in rows[2:]}
    for row in table(tmp_path / "gate_analysis" / "gradient_share.csv"):
        parts = [
            float(row[name]) for name in ("self_attention", "memory_attention", "feed_forward")
        ]
        assert sum(parts) == pytest.approx(1, abs=1e-5)
        assert min(parts) > 0
    norms = table(tmp_path / "gate_analysis" / "gradient_norms.csv")
    assert len(norms) == 2 * (2 + 2 + 4)  # two layers of each attention, four feed-forward ones


def test_gates_are_those_behind_the_step(make_trainer, undrawn):
    model, analysis = build(), GateAnalysis(every_n_steps=1)
    make_trainer(analysis, max_steps=3, limit_val_batches=0).fit(model, batches(3))
    last = dict(zip(analysis._gates.places, analysis._gates.rows[-1], strict=True))
    assert last == gates(model)


def test_the_gradient_of_an_accumulated_step_is_that_of_one_large_batch(make_trainer, undrawn):
    kept = []
    for accumulate, loader in ((1, [0]), (2, [0, 1])):
        analysis = GateAnalysis(every_n_steps=1)
        options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1e-3}
        trainer = make_trainer(analysis, max_steps=1, limit_val_batches=0, **options)
        model = build(attention_dropout=0, token_dropout=0, sentence_dropout=0)
        # the same batch twice: the mean over micro-batches is the batch's own
        trainer.fit(model, DataLoader([streams([[3, 2, 4, 1]])] * len(loader), batch_size=None))
        assert analysis._norms.steps == [1]
        kept.append(analysis._norms.values)
    assert kept[1] == pytest.approx(kept[0], rel=1e-5)
    assert kept[0].max() > 1e-2  # before clipping


class Spoil(L.Callback):
    """Makes every gradient infinite."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.network.blocks[0].attention.qkv.weight.grad[0] = math.inf


@pytest.mark.parametrize("place", [1, 2])
def test_a_step_that_is_skipped_has_no_share(make_trainer, undrawn, place):
    analysis = GateAnalysis(every_n_steps=1)
    callbacks = [Spoil(), NonFinite("skip")]
    callbacks.insert(place, analysis)
    trainer = make_trainer(*callbacks, max_steps=1, limit_val_batches=0)
    with pytest.warns(UserWarning, match="skipped"):
        trainer.fit(build(), batches(1))
    assert analysis._norms.steps == []
    assert analysis._gates.steps == [0, 1]


def test_a_validation_alone(make_trainer, tmp_path):
    trainer = make_trainer(GateAnalysis(num_batches=2), limit_val_batches=2)
    trainer.validate(build(), batches(2), verbose=False)
    folder = tmp_path / "gate_analysis"
    assert names(folder, "val-step=0-") == OF_VALIDATION
    assert names(folder) == set()  # there has been no training
    reach = table(folder / "val-step=0-reach.csv")
    assert [int(row["age"]) for row in reach] == list(range(1, 2 * M + 1))
    assert [row["in_memory"] for row in reach] == ["1"] * M + ["0"] * M
    assert all(float(row["gradient_norm"]) > 0 for row in reach)
    attention = table(folder / "val-step=0-attention.csv")
    for layer in ("2", "4"):
        weights = [float(row["weight"]) for row in attention if row["layer"] == layer]
        assert len(weights) == M
        assert sum(weights) == pytest.approx(1, abs=1e-5)


def test_detached_memory_is_drawn_too(make_trainer, tmp_path):
    trainer = make_trainer(GateAnalysis(num_batches=1))
    trainer.validate(build(memory="detached"), batches(1), verbose=False)
    folder = tmp_path / "gate_analysis"
    assert names(folder, "val-step=0-") == OF_VALIDATION
    assert {float(row["gradient_norm"]) for row in table(folder / "val-step=0-reach.csv")} == {0.0}


# ---- resuming


def test_a_resumed_run_has_the_rows_of_the_whole(make_trainer, tmp_path, undrawn):
    whole, first, second = (GateAnalysis(every_n_steps=1) for _ in range(3))
    options = {"limit_val_batches": 1, "val_check_interval": 2}
    make_trainer(whole, max_steps=4, **options).fit(build(), batches(4), batches(1))
    trainer = make_trainer(first, max_steps=2, **options)
    trainer.fit(build(), batches(4), batches(1))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    trainer = make_trainer(second, max_steps=4, **options)
    trainer.fit(build(), batches(4), batches(1), ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert second._gates.steps == whole._gates.steps == [0, 1, 2, 3, 4]
    assert second._norms.steps == whole._norms.steps == [1, 2, 3, 4]
    assert second._gates.sentence_steps == [0, 8, 16, 24, 32]
    assert (second._validations, first._validations) == (2, 1)
    assert len(table(tmp_path / "gate_analysis" / "gates.csv")) == 2 * 5


def test_a_checkpoint_is_validated_with_the_rows_up_to_it(make_trainer, tmp_path, undrawn):
    trainer = make_trainer(GateAnalysis(every_n_steps=1), max_steps=3, limit_val_batches=0)
    trainer.fit(build(), batches(3))
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    trainer = make_trainer(GateAnalysis(output=str(tmp_path / "later")))
    trainer.validate(build(), batches(1), ckpt_path=tmp_path / "three.ckpt", verbose=False)
    assert "reach.csv" in names(tmp_path / "later", "val-step=3-")
    steps = [int(row["step"]) for row in table(tmp_path / "later" / "gates.csv")]
    assert steps == [0, 0, 1, 1, 2, 2, 3, 3]


def test_another_training_of_the_process_begins_anew(make_trainer, undrawn):
    analysis = GateAnalysis(every_n_steps=1)
    for _ in range(2):
        model = build(gate_init=0.5)
        make_trainer(analysis, max_steps=2, limit_val_batches=0).fit(model, batches(2))
        assert analysis._gates.steps == [0, 1, 2]
        assert analysis._gates.rows[0] == [0.5, 0.5]


# ---- training is not touched


def test_training_is_the_same_with_and_without(make_trainer, undrawn):
    def train(added):
        model = build(dropout=0.2, warm_in=(0, 0))
        callbacks = [GateAnalysis(every_n_steps=1)] if added else []
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 1}
        trainer = make_trainer(*callbacks, max_steps=3, **options)  # validates within steps
        trainer.fit(model, batches(6), batches(1, seed=9))
        return trainer, model

    check_training_is_the_same(train)


def test_half_precision_and_checkpointed_sentences(make_trainer, tmp_path, undrawn):
    found = []
    for options, changes in (
        ({}, {}),
        ({"precision": "bf16-mixed"}, {"checkpoint_sentences": True}),
    ):
        trainer = make_trainer(GateAnalysis(), inference_mode=bool(options), **options)
        trainer.validate(build(**changes), batches(1), verbose=False)
        rows = table(tmp_path / "gate_analysis" / "val-step=0-reach.csv")
        found.append([float(row["gradient_norm"]) for row in rows])
    assert found[1][: M + 1] == pytest.approx(found[0][: M + 1], rel=0.15)


# ---- models and batches without what is looked for


@pytest.mark.parametrize("kind", ["transformer", "no memory"])
def test_a_model_without_a_memory_is_told_of_once(make_trainer, tmp_path, kind):
    model = plain() if kind == "transformer" else build(memory="none")
    data = windows if kind == "transformer" else batches
    trainer = make_trainer(GateAnalysis(every_n_steps=1), max_steps=2, val_check_interval=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, data(2), data(1))
    told = [str(warning.message) for warning in caught if "gate" in str(warning.message)]
    assert len(told) == 1
    assert f"{type(model).__name__} has no memory gates" in told[0]
    assert not (tmp_path / "gate_analysis").exists()


def test_reach_is_measured_without_gates(make_trainer, tmp_path):
    trainer = make_trainer(GateAnalysis())
    with pytest.warns(UserWarning, match="no memory gates"):
        trainer.validate(build(memory="in_context"), batches(1), verbose=False)
    found = names(tmp_path / "gate_analysis", "val-step=0-")
    assert found == {"scalars.csv", "reach.csv", "reach.png"}


def test_documents_of_one_sentence_show_nothing(make_trainer, tmp_path):
    loader = DataLoader([streams([[3], [2]])], batch_size=None)
    make_trainer(GateAnalysis()).validate(build(), loader, verbose=False)
    assert not (tmp_path / "gate_analysis").exists()


def test_what_does_not_fit_the_device_is_left_out(make_trainer, monkeypatch, tmp_path, undrawn):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "add_reach", fails)
    trainer = make_trainer(GateAnalysis(every_n_steps=1), max_steps=2, val_check_interval=1)
    model = build()
    with pytest.warns(UserWarning, match=r"lower max_streams \(4\)"):
        trainer.fit(model, batches(2), batches(1))
    assert trainer.global_step == 2
    assert model.training


def test_a_model_that_records_nothing_is_told_of_once(make_trainer, monkeypatch, tmp_path, undrawn):
    model = build()
    monkeypatch.setattr(model, "recorded_loss", lambda part, **consumers: model.loss(part))
    trainer = make_trainer(GateAnalysis(), limit_val_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(model, batches(2), verbose=False)
    told = [str(warning.message) for warning in caught if "gate" in str(warning.message)]
    assert len(told) == 1
    assert "ThoughtGestaltLM records nothing about its memory" in told[0]
    assert not (tmp_path / "gate_analysis").exists()


@pytest.mark.parametrize(("steps", "validations"), [(0, 1), (1, 0)])
def test_either_half_may_be_off(make_trainer, tmp_path, undrawn, steps, validations):
    analysis = GateAnalysis(every_n_steps=steps, every_n_validations=validations)
    trainer = make_trainer(analysis, max_steps=2, val_check_interval=2, num_sanity_val_steps=1)
    trainer.fit(build(), batches(2), batches(1))
    found = names(tmp_path / "gate_analysis") | names(tmp_path / "gate_analysis", "val-step=2-")
    assert ("gates.csv" in found) is bool(steps)
    assert ("reach.csv" in found) is bool(validations)
    assert not list((tmp_path / "gate_analysis").glob("val-step=0-*"))  # the sanity check


# ---- arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every_n_steps", -1),
        ("num_batches", 0),
        ("every_n_validations", -1),
        ("max_sentences", 1),
        ("max_streams", 0),
        ("probes", 0),
    ],
)
def test_values_are_checked(name, value):
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be at least"):
        GateAnalysis(**{name: value})
