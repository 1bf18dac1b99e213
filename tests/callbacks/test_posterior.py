"""What the analysis of posteriors finds: in validations, against direct computations, by hand."""

import logging
import math

import numpy as np
import pytest
import torch
from methods import METHODS
from torch.distributions import Normal, kl_divergence

from callbacks import PosteriorAnalysis
from callbacks.analysis.base import Findings
from callbacks.analysis.posterior import (
    PosteriorRecorder,
    collect_posterior,
    inner_steps,
    layers,
    posterior_report,
)
from lightning_models.latent_thought.posterior import InnerLoop, divergence_floor
from lightning_models.layers import record, recording
from tests.callbacks.written import column, names, scalars

BY_NAME = {method.name: method for method in METHODS}
NAN = pytest.approx(math.nan, nan_ok=True)


def build(name="latent-thought", **changes):
    return BY_NAME[name].build(num_layers=3, dim=16, num_heads=2, **changes)


@pytest.fixture
def analyse(make_data, make_trainer, tmp_path, undrawn):
    """Validates a model with the analysis and returns the folder and what was logged."""

    def run(model=None, trainer=None, **options):
        analysis = PosteriorAnalysis(**{"num_batches": 1, "steps": (0, 2), **options})
        trainer = make_trainer(analysis, **(trainer or {}))
        trainer.validate(model or build(), make_data(), verbose=False)
        return tmp_path / "posterior_analysis", trainer.callback_metrics

    return run


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
    found = {"posterior/nll", "posterior/nll_other", "posterior/last_step/mean_gradient"}
    assert set(scalars(folder)) == found | {f"posterior/sweep/steps_{n}" for n in (0, 2)}


def test_an_encoder_has_no_steps(analyse, caplog):
    with caplog.at_level(logging.INFO):
        options = {"num_batches": 2, "trainer": {"limit_val_batches": 2}}
        folder, _ = analyse(build("latent-thought-amortised"), **options)
    assert names(folder) == {"scalars.csv", "layers.csv"}
    (line,) = [line for line in caplog.messages if "posterior analysis" in line]
    assert "LatentThoughtLM takes no inner steps" in line
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


# ---- against direct computations


def noisy():
    model = build()
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


def batch(rows=3, seed=0):
    return BY_NAME["latent-thought"].batch(rows, 24, seed)


def found(model, *batches):
    findings = Findings()
    for each in batches:
        recorder = PosteriorRecorder()
        model.recorded(each, **recorder.consumers())
        collect_posterior(findings, recorder)
    return findings


def lines_of(frame):
    return frame.to_dict("records")


def values_of(findings):
    """The scalars of a report."""
    return posterior_report(findings).finite


def recorded(model, data):
    """All that a model records, by name; inner steps as a list."""
    steps, posterior = [], {}
    model.recorded(
        data, inner_step=lambda **values: steps.append(values), posterior=posterior.update
    )
    return steps, posterior


def test_the_scored_sample_is_that_of_the_score():
    model, data = noisy(), batch()
    scores = model.score(data)
    values = values_of(found(model, data))
    tokens = int((data["targets"] >= 0).sum())
    assert values["posterior/nll"] == pytest.approx(-scores.log_prob.sum().item() / tokens)
    kl = -scores.sequence_term.sum().item() / tokens
    assert values["posterior/kl"] == pytest.approx(kl, rel=1e-5)  # scores are float32
    assert values["posterior/elbo"] == pytest.approx(scores.total().item() / tokens, rel=1e-5)


def test_curves_are_means_over_tokens_and_sequences():
    model, data = noisy(), batch()
    steps, posterior = recorded(model, data)
    tokens = int(posterior["targets"].sum())
    lines = lines_of(inner_steps(found(model, data)))
    assert [line["sample"] for line in lines] == ["inner", "inner", "scored"]
    for line, step in zip(lines[:-1], steps, strict=True):
        nll, kl = step["nll"].sum().item() / tokens, step["kl"].sum().item() / tokens
        assert (line["nll"], line["kl"]) == pytest.approx((nll, kl))
        assert line["elbo"] == pytest.approx(-nll - kl)
        for name in ("mean_gradient", "log_variance_gradient"):
            norms = [math.hypot(*row) for row in step[name].tolist()]
            assert line[name] == pytest.approx(sum(norms) / len(norms))
    assert lines[-1]["nll"] == pytest.approx(posterior["nll"].sum().item() / tokens)


def test_latents_of_another_text():
    """Each row under z of the one before it; a filling row lends none, a single one has none."""
    model, data = noisy(), batch(4)
    data["targets"][1] = -100
    kept, read = [], model.network.remember
    model.network.remember = lambda z: kept.append(z) or read(z)
    values = values_of(found(model, data))
    model.network.remember = read
    own, others = kept[-2:]  # what is scored comes last
    assert torch.equal(others, own[[3, 1, 0, 2]])
    with torch.no_grad():
        h = model.network(model.network.begin(data["tokens"]), others)
        rows = h @ model.network.output_matrix.t()
    targets = data["targets"]
    each = torch.nn.functional.cross_entropy(rows.transpose(1, 2), targets, reduction="none")
    tokens = int((targets >= 0).sum())
    assert values["posterior/nll_other"] == pytest.approx(each.sum().item() / tokens, rel=1e-5)
    assert abs(values["posterior/nll_other"] - values["posterior/nll"]) > 1e-3
    floor = divergence_floor(InnerLoop(model.config, model.config.inner_lr[1]))
    nats = floor * model.config.num_latents * model.config.dim * 3 / tokens
    assert values["posterior/kl_floor"] == pytest.approx(nats)
    assert "posterior/nll_other" not in values_of(found(model, batch(1)))


def test_layers_have_the_divergences_of_their_vectors():
    model, data = noisy(), batch()
    _, posterior = recorded(model, data)
    tokens = int(posterior["targets"].sum())
    q = Normal(posterior["mean"], (0.5 * posterior["log_variance"]).exp())
    each = kl_divergence(q, Normal(0.0, 1.0))  # (B, Z, D), Z = 3 layers of 2
    spread = posterior["mean"].var(dim=0, unbiased=True)
    for layer, line in enumerate(lines_of(layers(found(model, data)))):
        own = slice(2 * layer, 2 * layer + 2)
        assert line["kl"] == pytest.approx(each[:, own].sum().item() / tokens)
        active = each[:, own].sum(dim=2).mean(dim=0) > 0.01
        assert line["active_vectors"] == int(active.sum())
        assert line["active_coordinates"] == int((spread[own] > 0.01).sum())
    assert line["layer"] == 3


def test_variances_are_those_of_coordinates():
    model, data = noisy(), batch()
    _, posterior = recorded(model, data)
    by_hand = posterior["log_variance"].exp().mean(dim=0).flatten().numpy()
    findings = found(model, data)
    values = values_of(findings)
    assert values["posterior/variance/mean"] == pytest.approx(by_hand.mean())
    for name, part in (("q05", 0.05), ("median", 0.5), ("q95", 0.95)):
        assert values[f"posterior/variance/{name}"] == pytest.approx(np.quantile(by_hand, part))


def test_one_batch_of_all_rows_is_as_several():
    model, one, two = noisy(), batch(3), batch(2, seed=1)
    whole = {key: torch.cat((one[key], two[key])) for key in one}
    in_one, in_two = values_of(found(model, whole)), values_of(found(model, one, two))
    in_one["posterior/nll_other"] = in_two["posterior/nll_other"]  # depends on who is in a batch
    assert in_one == pytest.approx(in_two)


def test_rows_that_fill_a_batch_do_not_count():
    model, data = noisy(), batch(3)
    filled = {key: torch.cat((value, value[:1])) for key, value in data.items()}
    filled["targets"][3] = -100
    assert values_of(found(model, filled)) == pytest.approx(values_of(found(model, data)))
    filled["targets"][:] = -100
    assert not found(model, filled)


# ---- by hand


def handed(log_variance=((0.0, 0.0),), kl=(3.0,), **changes):
    """A pass of two sequences with one latent vector of two coordinates, and a filling row."""
    recorder = PosteriorRecorder()
    rows = len(changes.get("mean", (0, 0, 0)))
    values = {
        "mean": torch.tensor([[[1.0, 0.5]], [[1.2, 0.5]], [[9.0, 9.0]]]),
        "log_variance": None if log_variance is None else torch.tensor([log_variance] * rows),
        "kl": torch.tensor([kl] * rows),
        "nll": torch.tensor([10.0, 6.0, 99.0]),
        "targets": torch.tensor([3, 5, 0]),
        "informed": torch.tensor([True, True, False]),
    }
    with recording(**recorder.consumers()):
        for step, slope in enumerate((4.0, 3.0)):
            record(
                "inner_step",
                step=step,
                nll=torch.tensor([20.0, 12.0, 7.0]) - 8 * step,
                kl=None if log_variance is None else torch.tensor([[2.0], [2.0], [2.0]]),
                mean_gradient=torch.tensor([[slope], [0.0], [50.0]]),
                log_variance_gradient=None
                if log_variance is None
                else torch.tensor([[slope], [slope], [50.0]]),
            )
        record("posterior", **values | changes)
    findings = Findings()
    collect_posterior(findings, recorder)
    return findings


def test_a_collapsed_posterior_has_nothing_active():
    findings = handed(kl=(0.005,), mean=torch.full((3, 1, 2), 0.3))
    values = values_of(findings)
    assert values["posterior/active_vectors"] == values["posterior/active_coordinates"] == 0


def test_one_sequence_has_no_spread():
    findings = handed(informed=torch.tensor([True, False, False]))
    assert [line["active_coordinates"] for line in lines_of(layers(findings))] == [NAN]
    values = values_of(findings)
    assert "posterior/active_coordinates" not in values
    assert values["posterior/active_vectors"] == 1


def test_a_sample_without_density_has_only_a_likelihood():
    findings = handed(log_variance=None, kl=(0.0,))
    assert values_of(findings)["posterior/nll"] == 2.0
    assert inner_steps(findings)["elbo"].isna().all()
    assert set(posterior_report(findings).files()) == {"scalars.csv", "inner_steps.csv"}


def test_numbers_that_are_not_finite_are_left_out():
    findings = handed(log_variance=((math.nan, -math.inf),), kl=(math.inf,))
    values = values_of(findings)
    assert "posterior/variance/mean" not in values
    assert values["posterior/nll"] == 2.0
    assert "posterior/kl" not in values


def test_a_record_may_say_how_many_vectors_a_layer_has():
    wide = {"log_variance": ((0.0, 0.0),) * 4, "kl": (1.0,) * 4, "mean": torch.zeros(3, 4, 2)}
    assert len(layers(handed(**wide))) == 1
    assert len(layers(handed(**wide, latents_per_layer=2))) == 2
