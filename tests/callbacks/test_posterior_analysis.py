"""The analysis of posteriors within real trainings and validations."""

import logging
import warnings

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from methods import METHODS

from callbacks import PosteriorAnalysis
from callbacks.analysis import files
from callbacks.posterior_analysis import callback as module
from tests.callbacks.written import (
    check_second_validation,
    check_training_is_the_same,
    names,
    scalars,
    table,
)

BY_NAME = {method.name: method for method in METHODS}
OF_STEPS = {"inner_steps.csv", "inner_steps.png"}
OF_POSTERIOR = {"layers.csv", "layers.png", "variance.csv", "variance.png"}
OF_SWEEP = {"sweep.csv", "sweep.png"}
FILES = {"scalars.csv", *OF_STEPS, *OF_POSTERIOR}


def build(name="latent-thought", **changes):
    return BY_NAME[name].build(num_layers=3, dim=16, num_heads=2, **changes)


def column(folder, name, key):
    """A column of a table of a validation without a checkpoint."""
    return [float(line[key] or "nan") for line in table(folder, name)]


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(files, "as_png", lambda figure: b"")
    monkeypatch.setattr(module, "pictures", lambda findings: {})


@pytest.fixture
def analyse(make_data, make_trainer, tmp_path, undrawn):
    """Validates a model with the analysis and returns the folder and what was logged."""

    def run(model=None, trainer=None, **options):
        analysis = PosteriorAnalysis(**{"num_batches": 1, "steps": (0, 2), **options})
        trainer = make_trainer(analysis, **(trainer or {}))
        trainer.validate(model or build(), make_data(), verbose=False)
        return tmp_path / "posterior_analysis", trainer.callback_metrics

    return run


# ---- what is written


def test_everything_is_written_behind_every_nth_validation(make_data, make_trainer, tmp_path):
    trainer = make_trainer(
        PosteriorAnalysis(num_batches=1, every_n_validations=2),
        logger=TensorBoardLogger(tmp_path),
        max_steps=3,
        val_check_interval=1,
    )
    trainer.fit(build(), make_data())
    log = tmp_path / "lightning_logs" / "version_0"  # the sweep is left to the verb validate
    check_second_validation(log, "posterior_analysis", "posterior/", FILES)


def test_a_validation_alone_is_swept(make_data, make_trainer, tmp_path):
    trainer = make_trainer(PosteriorAnalysis(num_batches=1, steps=(4, 0, 4)))
    model = build()
    trainer.validate(model, make_data(), verbose=False)
    folder = tmp_path / "posterior_analysis"
    assert names(folder) == FILES | OF_SWEEP
    assert column(folder, "sweep", "steps") == [0, 4]
    flops = column(folder, "sweep", "flops_per_token")
    assert flops[1] > flops[0]
    assert column(folder, "sweep", "kl")[0] == 0  # of the prior
    assert model.config.inner_steps == model.network.config.inner_steps == 2
    assert {line["sample"] for line in table(folder, "inner_steps")[:-1]} == {"inner"}


def test_numbers_are_those_of_the_validation(analyse):
    """Of all its batches: what the analysis says of the T_fast in use is what is logged."""
    folder, logged = analyse(num_batches=2, trainer={"limit_val_batches": 2})
    found, loss = scalars(folder), float(logged["val/loss"])
    assert found["posterior/elbo"] == pytest.approx(-loss, rel=1e-4)
    assert found["posterior/sweep/steps_2"] == pytest.approx(loss, rel=1e-4)
    assert found["posterior/nll"] + found["posterior/kl"] == pytest.approx(loss, rel=1e-4)


def test_an_inner_step_is_where_fewer_steps_end(analyse):
    """The state before step t is that after t steps: the sweep sees the curve from its ends."""
    model = build(inner_steps=3, bound_noise="inner")
    folder, _ = analyse(model, steps=(1, 2, 3))
    for name in ("nll", "kl"):
        inner, swept = column(folder, "inner_steps", name), column(folder, "sweep", name)
        assert len(inner) == 4
        assert inner[1:] == pytest.approx(swept, rel=1e-4)
    (first, *_), found = column(folder, "inner_steps", "elbo"), scalars(folder)
    assert found["posterior/elbo"] == pytest.approx(-column(folder, "sweep", "loss")[-1], rel=1e-4)
    assert found["posterior/elbo"] > first  # inference has climbed


def test_layers_and_variances_add_up(analyse):
    folder, _ = analyse()
    found = scalars(folder)
    assert column(folder, "layers", "layer") == [1, 2, 3]
    assert column(folder, "layers", "vectors") == [2, 2, 2]
    assert column(folder, "layers", "coordinates") == [32, 32, 32]
    assert sum(column(folder, "layers", "kl")) == pytest.approx(found["posterior/kl"], rel=1e-4)
    for name in ("active_vectors", "active_coordinates"):
        assert sum(column(folder, "layers", name)) == found[f"posterior/{name}"]
    assert found["posterior/active_vectors"] == 6  # inference starts far from the prior
    assert sum(column(folder, "variance", "coordinates")) == 6 * 16
    low, median, high = (found[f"posterior/variance/{name}"] for name in ("q05", "median", "q95"))
    # log-variances start at -5, noise of 0.1 aside, and two steps of 0.12 lead upwards
    assert np.exp(-5) < low < median < high < np.exp(-4)


# ---- other ways of inference


def test_a_chain_has_no_density(analyse):
    folder, logged = analyse(build("latent-thought-langevin"))
    assert names(folder) == {"scalars.csv", "inner_steps.csv", "sweep.csv"}
    nll, loss = column(folder, "inner_steps", "nll"), float(logged["val/loss"])
    assert len(nll) == 3
    assert nll[-1] == pytest.approx(loss, rel=1e-4)
    for name in ("elbo", "kl", "log_variance_gradient"):
        assert np.isnan(column(folder, "inner_steps", name)).all()
    assert min(column(folder, "inner_steps", "mean_gradient")[:-1]) > 0
    assert column(folder, "sweep", "loss")[1] == pytest.approx(loss, rel=1e-4)
    found = {"posterior/nll", "posterior/last_step/mean_gradient"}
    assert set(scalars(folder)) == found | {f"posterior/sweep/steps_{n}" for n in (0, 2)}


def test_an_encoder_has_no_steps(analyse, caplog):
    with caplog.at_level(logging.INFO):
        folder, _ = analyse(build("latent-thought-amortised"), num_batches=2)
    assert names(folder) == {"scalars.csv", "layers.csv", "variance.csv"}
    told = [line for line in caplog.messages if "posterior analysis" in line]
    assert len(told) == 1
    assert "LatentThoughtLM takes no inner steps" in told[0]
    assert "posterior/layer_3/kl" in scalars(folder)


def test_without_inner_steps_the_posterior_is_the_prior(analyse):
    folder, _ = analyse(build(inner_steps=0), steps=(0, 3))
    assert "inner_steps.csv" not in names(folder)
    found = scalars(folder)
    assert found["posterior/kl"] == found["posterior/active_coordinates"] == 0
    assert found["posterior/variance/q05"] == found["posterior/variance/q95"] == 1
    assert column(folder, "sweep", "kl")[1] > 0


def test_shared_latents_are_one_layer(analyse):
    folder, _ = analyse(build("latent-thought-shared"), steps=())
    assert column(folder, "layers", "vectors") == [2]
    assert "sweep.csv" not in names(folder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latent-thought-langevin", {"inner_steps.png", "sweep.png"}),
        ("latent-thought-amortised", {"layers.png", "variance.png"}),
    ],
)
def test_figures_show_what_there_is(make_data, make_trainer, tmp_path, name, expected):
    trainer = make_trainer(PosteriorAnalysis(num_batches=1, steps=(0, 1)))
    trainer.validate(build(name), make_data(), verbose=False)
    found = {path for path in names(tmp_path / "posterior_analysis") if path.endswith(".png")}
    assert found == expected


def test_a_model_without_posteriors_is_told_of_once(make_data, make_trainer, tmp_path):
    trainer = make_trainer(PosteriorAnalysis(), max_steps=2, val_check_interval=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(build("gpt2"), make_data())
    told = [str(warning.message) for warning in caught if "posterior" in str(warning.message)]
    assert len(told) == 1
    assert "TransformerLM records no posterior" in told[0]
    assert not (tmp_path / "posterior_analysis").exists()


# ---- training is not touched


def test_training_is_the_same_with_and_without(make_data, make_trainer, undrawn):
    def train(added):
        analysis = PosteriorAnalysis(num_batches=1, steps=(0, 3), sweep_every_n_validations=1)
        model = build(dropout=0.2, slow_gradient="trajectory")
        options = {"accumulate_grad_batches": 2, "val_check_interval": 1}  # also within steps
        trainer = make_trainer(*([analysis] if added else []), max_steps=2, **options)
        trainer.fit(model, make_data())
        return trainer, model

    check_training_is_the_same(train)


def test_a_sweep_that_fails_leaves_the_configuration(make_data, make_trainer, monkeypatch):
    model = build()
    configs = model.config, model.network.config

    def fails(context, training=False):
        assert model.config.inner_steps == model.network.config.inner_steps == 7
        raise RuntimeError("no count")

    monkeypatch.setattr(model, "flops_per_token", fails)
    trainer = make_trainer(PosteriorAnalysis(steps=(7,)))
    with pytest.raises(RuntimeError, match="no count"):
        trainer.validate(model, make_data(), verbose=False)
    assert model.config is configs[0]
    assert model.network.config is configs[1]


@pytest.mark.slow
def test_a_compiled_network(analyse):
    folder, _ = analyse()
    full = scalars(folder)
    model, graphs = build(), []
    model.network.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    analyse(model)
    assert scalars(folder) == pytest.approx(full, rel=1e-4)
    assert graphs  # the validation itself ran compiled


def test_half_precision(analyse):
    folder, _ = analyse()
    full = scalars(folder)
    analyse(trainer={"precision": "bf16-mixed"})
    for name in ("nll", "kl", "sweep/steps_2", "variance/mean"):
        value = scalars(folder)[f"posterior/{name}"]
        assert value == pytest.approx(full[f"posterior/{name}"], rel=0.02)


# ---- arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_batches", 0), ("every_n_validations", -1), ("sweep_every_n_validations", -1)],
)
def test_values_are_checked(name, value):
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be at least"):
        PosteriorAnalysis(**{name: value})


def test_numbers_of_steps_are_checked():
    with pytest.raises(ValueError, match=r"steps \(-2\) must be at least 0"):
        PosteriorAnalysis(steps=(4, -2))
