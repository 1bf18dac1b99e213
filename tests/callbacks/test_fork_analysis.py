"""The analysis of forks within real trainings, validations and tests."""

import csv
import math
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from methods import METHODS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import ForkAnalysis
from callbacks.analysis import files
from callbacks.analysis.batch_parts import rows_of
from callbacks.fork_analysis import callback as module
from tests.callbacks.written import check_training_is_the_same

BY_NAME = {method.name: method for method in METHODS}
FILES = {
    *("scalars.csv", "windows.csv", "tokens.csv", "text.html"),
    *("layers.png", "entropy.png", "tokens.png"),
}


def build(name="thoughtbubbles", **changes):
    model = BY_NAME[name].build(num_layers=3, dim=16, num_heads=2, **changes)
    with torch.no_grad():  # entropies that differ by more than rounding
        model.network.embedding.weight.mul_(15)
    return model


def written(folder, stage="val", step=1):
    """Names of the files of an analysis, and its scalars."""
    prefix = f"{stage}-step={step}-"
    names = {path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*")}
    return names, scalars(folder / f"{prefix}scalars.csv")


def scalars(path):
    with path.open(newline="") as file:
        return {line["name"]: float(line["value"]) for line in csv.DictReader(file)}


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(files, "as_png", lambda figure: b"")


@pytest.fixture
def analyse(make_data, make_trainer, tmp_path, undrawn):
    """Validates a model with the analysis and returns what it wrote."""

    def run(model=None, data=None, trainer=None, **options):
        analysis = ForkAnalysis(**{"num_batches": 1, **options})
        trainer = make_trainer(analysis, **(trainer or {}))
        trainer.validate(model or build(), data or make_data(), verbose=False)
        return written(tmp_path / "fork_analysis", step=0)

    return run


@pytest.fixture
def save_checkpoint(make_trainer, make_data, tmp_path):
    """Writes a checkpoint of a method that has been trained for a step."""

    def save(name, **changes):
        trainer = make_trainer(max_steps=1, limit_val_batches=0)
        trainer.fit(build(name, **changes), make_data())
        trainer.save_checkpoint(tmp_path / "reference.ckpt")
        return str(tmp_path / "reference.ckpt")

    return save


# ---- what is written


def test_everything_is_written(make_data, make_trainer, tmp_path):
    trainer = make_trainer(
        ForkAnalysis(num_batches=1),
        logger=TensorBoardLogger(tmp_path),
        max_steps=2,
        val_check_interval=2,
    )
    trainer.fit(build(), make_data())
    folder = tmp_path / "lightning_logs" / "version_0" / "fork_analysis"
    names, values = written(folder, step=2)
    assert names == FILES
    assert len(list(folder.iterdir())) == len(FILES)
    events = EventAccumulator(str(folder.parent)).Reload()
    tags = events.Tags()
    assert {"forks/entropy", "forks/layers", "forks/tokens"} <= set(tags["images"])
    assert {"forks/layer1/streams", "forks/layer2/streams"} <= set(tags["histograms"])
    assert {tag for tag in tags["scalars"] if tag.startswith("forks/")} == set(values)
    for tag, value in values.items():
        (event,) = events.Scalars(tag)
        assert event.step == 1  # that of the validation's own scalars
        assert event.value == pytest.approx(value, rel=1e-4)


def test_numbers_of_a_real_model(analyse, tmp_path):
    """At kappa = 2L all fork at the first fork layer and the second has to delete half."""
    names, found = analyse()
    assert names == FILES
    assert found["forks/layer1/per_token"] == found["forks/layer1/created"] == 1
    assert found["forks/layer1/orphans"] == 0
    assert found["forks/layer2/per_token"] == found["forks/per_token"] == 1
    assert found["forks/layer2/created"] + found["forks/layer2/kept"] == pytest.approx(1)
    assert found["forks/layer2/survival"] + found["forks/layer2/deletion"] == pytest.approx(1)
    # scores start at about one half an action
    assert found["forks/layer1/score_forks"] == pytest.approx(0.5, abs=0.1)
    assert 0 < found["forks/entropy/mean"] < math.log(320)  # V, padded
    with (tmp_path / "fork_analysis" / "val-step=0-windows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4 * 32 // 4
    with (tmp_path / "fork_analysis" / "val-step=0-tokens.csv").open(newline="") as file:
        tokens = list(csv.DictReader(file))
    assert len(tokens) == 4 * 32
    assert sum(int(token["streams_layer2"]) for token in tokens) == 2 * len(tokens)
    assert {int(token["streams_layer1"]) for token in tokens} == {2}


def test_attention_is_that_of_the_weights(analyse):
    """Queries and keys of zero attend evenly, but for the scores of the keys."""
    model = build(bias_scale="inv_sqrt_dmodel")
    with torch.no_grad():
        for block in model.network.blocks:
            block.attention.qkv.weight[:32] = 0
            block.attention.qkv.bias[:32] = 0
        for fork in model.network.forks:
            fork.score.weight.zero_()  # all scores are a half
    _, found = analyse(model)
    at_first = found["forks/layer1/attention_self"]
    assert found["forks/layer1/attention_own_forks"] == pytest.approx(at_first)
    # a query at stream n gives each of its n + 1 keys 1 / (n + 1): n = 1, 3, ..., 63
    assert at_first == pytest.approx(np.mean([1 / (n + 1) for n in range(1, 64, 2)]), rel=1e-4)
    others = np.mean([1 / (n + 1) for n in range(3, 64, 2)])
    assert found["forks/layer1/attention_others"] == pytest.approx(others, rel=1e-4)


def test_rows_may_be_scored_one_by_one(analyse, monkeypatch):
    _, together = analyse()
    monkeypatch.setattr(module, "MOST_WEIGHTS", 1)
    _, alone = analyse()
    assert alone == pytest.approx(together, rel=1e-4)


def test_without_attention_nothing_else_changes(analyse):
    _, all_of_it = analyse()
    names, found = analyse(attention=False)
    assert names == FILES
    assert found == pytest.approx(
        {k: v for k, v in all_of_it.items() if "attention" not in k}, rel=1e-4
    )


@pytest.mark.parametrize("name", ["thoughtbubbles-threshold", "thoughtbubbles-window"])
def test_rows_of_different_widths(analyse, name):
    names, found = analyse(build(name))
    assert names == FILES
    assert found["forks/layer1/per_token"] >= 0


@pytest.mark.parametrize("rows", [0, 2])
def test_only_some_rows_are_written_out(analyse, tmp_path, rows):
    names, _ = analyse(html_rows=rows)
    assert names == (FILES if rows else FILES - {"tokens.png"})
    page = (tmp_path / "fork_analysis" / "val-step=0-text.html").read_text()
    assert page.count("<div class='text'>") == rows


def test_tests_are_analysed(make_data, make_trainer, tmp_path, undrawn):
    data = make_data(test_fraction=0.2)
    trainer = make_trainer(ForkAnalysis(), limit_test_batches=1)
    trainer.test(build(), data, verbose=False)
    assert written(tmp_path / "fork_analysis", "test", 0)[0] == FILES


# ---- a reference


@pytest.mark.parametrize("name", ["gpt2", "thoughtbubbles-residual"])
def test_entropies_of_another_checkpoint(analyse, save_checkpoint, name):
    _, alone = analyse()
    names, found = analyse(reference_ckpt=save_checkpoint(name))
    assert names == FILES
    own = {k: v for k, v in found.items() if "reference" not in k}
    assert own == pytest.approx(alone)
    assert found["forks/reference_entropy/mean"] != found["forks/entropy/mean"]
    assert 0 < found["forks/reference_entropy/mean"] < math.log(320)  # V, padded


def test_a_model_is_its_own_reference(analyse, save_checkpoint):
    path = save_checkpoint("thoughtbubbles")
    model = build()
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    _, found = analyse(model, reference_ckpt=path)
    for name in ("mean", "curvature", "r2"):
        own = found[f"forks/entropy/{name}"]
        assert found[f"forks/reference_entropy/{name}"] == pytest.approx(own, rel=1e-3)


def test_a_reference_of_another_vocabulary_is_refused(analyse, save_checkpoint):
    path = save_checkpoint("gpt2", vocab_size=300)
    with pytest.raises(ValueError, match="vocabulary of 300, the model one of 257"):
        analyse(reference_ckpt=path)


def test_a_reference_that_is_missing_is_told(analyse):
    with pytest.raises(ValueError, match="there is no checkpoint at nowhere.ckpt"):
        analyse(reference_ckpt="nowhere.ckpt")


def test_a_reference_of_an_unknown_method_is_refused(analyse, save_checkpoint):
    path = save_checkpoint("gpt2")
    content = torch.load(path, weights_only=True)
    content["recipe"]["model"]["class_path"] = "elsewhere.OtherLM"
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"elsewhere\.OtherLM .*--packages elsewhere"):
        analyse(reference_ckpt=path)


# ---- training is not touched


def test_training_is_the_same_with_and_without(make_data, make_trainer, save_checkpoint, undrawn):
    reference = save_checkpoint("gpt2")

    def train(added):
        model, callbacks = build(dropout=0.2), [ForkAnalysis(reference_ckpt=reference)]
        callbacks = callbacks if added else []
        trainer = make_trainer(*callbacks, max_steps=2, val_check_interval=1)
        trainer.fit(model, make_data())
        return trainer, model

    check_training_is_the_same(train)


def test_half_precision(analyse):
    _, full = analyse()
    names, half = analyse(trainer={"precision": "bf16-mixed"})
    assert names == FILES
    assert half["forks/entropy/mean"] == pytest.approx(full["forks/entropy/mean"], rel=0.02)
    assert half["forks/per_token"] == 1


def test_a_compiled_network(analyse):
    _, plain = analyse()
    model, graphs = build(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model.network.compile(backend=backend)
    names, found = analyse(model)
    assert names == FILES
    assert found == pytest.approx(plain, rel=1e-4)
    assert graphs  # the validation itself ran compiled


# ---- models without forks


def test_a_model_without_forks_is_told_of_once(make_data, make_trainer, tmp_path):
    trainer = make_trainer(ForkAnalysis(), max_steps=3, val_check_interval=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(build("gpt2"), make_data())
    told = [str(warning.message) for warning in caught if "fork" in str(warning.message)]
    assert len(told) == 1
    assert "TransformerLM records no forks" in told[0]
    assert not (tmp_path / "fork_analysis").exists()


# ---- arguments


@pytest.mark.parametrize(
    ("name", "value"), [("num_batches", 0), ("every_n_validations", -1), ("html_rows", -1)]
)
def test_values_are_checked(name, value):
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be at least"):
        ForkAnalysis(**{name: value})


def test_rows_of_a_batch():
    batch = {"tokens": torch.arange(6).view(3, 2), "prompt": ["a", "b", "c"], "total": 3.0}
    part = rows_of(batch, 1, 3)
    assert part["tokens"].tolist() == [[2, 3], [4, 5]]
    assert (part["prompt"], part["total"]) == (["b", "c"], 3.0)
