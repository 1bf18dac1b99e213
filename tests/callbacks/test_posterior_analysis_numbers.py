"""What the analysis of posteriors measures, by hand and against direct computations."""

import math

import numpy as np
import pytest
import torch
from methods import METHODS
from torch.distributions import Normal, kl_divergence

from callbacks.hooks import dialled
from callbacks.posterior_analysis import report
from callbacks.posterior_analysis.findings import Findings
from callbacks.posterior_analysis.passes import Pass
from lightning_models.layers import record, recording

BY_NAME = {method.name: method for method in METHODS}
NAN = pytest.approx(math.nan, nan_ok=True)


def build(name="latent-thought", **changes):
    model = BY_NAME[name].build(num_layers=3, dim=16, num_heads=2, **changes)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


def batch(rows=3, seed=0):
    return BY_NAME["latent-thought"].batch(rows, 24, seed)


def found(model, *batches):
    findings = Findings()
    for each in batches:
        seen = Pass()
        model.recorded(each, **seen.consumers())
        findings.add(seen)
    return findings


def recorded(model, data):
    """All that a model records, by name; inner steps as a list."""
    steps, posterior = [], {}
    model.recorded(
        data, inner_step=lambda **values: steps.append(values), posterior=posterior.update
    )
    return steps, posterior


# ---- against direct computations


def test_the_scored_sample_is_that_of_the_score():
    model, data = build(), batch()
    scores = model.score(data)
    values = report.scalars(found(model, data))
    tokens = int((data["targets"] >= 0).sum())
    assert values["posterior/nll"] == pytest.approx(-scores.log_prob.sum().item() / tokens)
    kl = -scores.sequence_term.sum().item() / tokens
    assert values["posterior/kl"] == pytest.approx(kl, rel=1e-5)  # scores are float32
    assert values["posterior/elbo"] == pytest.approx(scores.total().item() / tokens, rel=1e-5)


def test_curves_are_means_over_tokens_and_sequences():
    model, data = build(), batch()
    steps, posterior = recorded(model, data)
    tokens = int(posterior["targets"].sum())
    lines = report.inner_steps(found(model, data))
    assert [line["sample"] for line in lines] == ["inner", "inner", "scored"]
    for line, step in zip(lines[:-1], steps, strict=True):
        nll, kl = step["nll"].sum().item() / tokens, step["kl"].sum().item() / tokens
        assert (line["nll"], line["kl"]) == pytest.approx((nll, kl))
        assert line["elbo"] == pytest.approx(-nll - kl)
        for name in ("mean_gradient", "log_variance_gradient"):
            norms = [math.hypot(*row) for row in step[name].tolist()]
            assert line[name] == pytest.approx(sum(norms) / len(norms))
    assert lines[-1]["nll"] == pytest.approx(posterior["nll"].sum().item() / tokens)


def test_layers_have_the_divergences_of_their_vectors():
    model, data = build(), batch()
    _, posterior = recorded(model, data)
    tokens = int(posterior["targets"].sum())
    q = Normal(posterior["mean"], (0.5 * posterior["log_variance"]).exp())
    each = kl_divergence(q, Normal(0.0, 1.0))  # (B, Z, D), Z = 3 layers of 2
    spread = posterior["mean"].var(dim=0, unbiased=True)
    for layer, line in enumerate(report.layers(found(model, data))):
        own = slice(2 * layer, 2 * layer + 2)
        assert line["kl"] == pytest.approx(each[:, own].sum().item() / tokens)
        active = each[:, own].sum(dim=2).mean(dim=0) > 0.01
        assert line["active_vectors"] == int(active.sum())
        assert line["active_coordinates"] == int((spread[own] > 0.01).sum())
    assert line["layer"] == 3


def test_variances_are_those_of_coordinates():
    model, data = build(), batch()
    _, posterior = recorded(model, data)
    by_hand = posterior["log_variance"].exp().mean(dim=0).flatten().numpy()
    findings = found(model, data)
    values = report.variances(findings)
    assert values["mean"] == pytest.approx(by_hand.mean())
    for name, part in (("q05", 0.05), ("median", 0.5), ("q95", 0.95)):
        assert values[name] == pytest.approx(np.quantile(by_hand, part))
    lines = report.variance_histogram(findings)
    counts = np.histogram(by_hand[:32], [line["from"] for line in lines[:40]] + [lines[39]["to"]])
    assert [line["coordinates"] for line in lines[:40]] == counts[0].tolist()
    assert sum(line["coordinates"] for line in lines) == len(by_hand)


def test_batches_and_ranks_are_merged():
    model, one, two = build(), batch(3), batch(2, seed=1)
    together, merged = found(model, one, two), Findings()
    for findings in (found(model, one), Findings(), found(model, two)):
        merged.merge(findings)
    assert report.tables(merged) == report.tables(together)
    whole = {key: torch.cat((one[key], two[key])) for key in one}
    assert report.scalars(found(model, whole)) == pytest.approx(report.scalars(together))


def test_rows_that_fill_a_batch_do_not_count():
    model, data = build(), batch(3)
    filled = {key: torch.cat((value, value[:1])) for key, value in data.items()}
    filled["targets"][3] = -100
    assert report.scalars(found(model, filled)) == pytest.approx(report.scalars(found(model, data)))
    filled["targets"][:] = -100
    assert not found(model, filled)


# ---- by hand


def handed(log_variance=((0.0, 0.0),), kl=(3.0,), **changes):
    """A pass of two sequences with one latent vector of two coordinates, and a filling row."""
    seen = Pass()
    rows = len(changes.get("mean", (0, 0, 0)))
    values = {
        "mean": torch.tensor([[[1.0, 0.5]], [[1.2, 0.5]], [[9.0, 9.0]]]),
        "log_variance": None if log_variance is None else torch.tensor([log_variance] * rows),
        "kl": torch.tensor([kl] * rows),
        "nll": torch.tensor([10.0, 6.0, 99.0]),
        "targets": torch.tensor([3, 5, 0]),
        "informed": torch.tensor([True, True, False]),
    }
    with recording(**seen.consumers()):
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
    findings.add(seen)
    return findings


def test_numbers_by_hand():
    findings = handed()
    lines = report.inner_steps(findings)
    assert [line["nll"] for line in lines] == [4.0, 2.0, 2.0]
    assert [line["kl"] for line in lines] == [0.5, 0.5, 0.75]
    assert [line["elbo"] for line in lines] == [-4.5, -2.5, -2.75]
    assert [line["mean_gradient"] for line in lines] == [2.0, 1.5, NAN]
    assert [line["log_variance_gradient"] for line in lines] == [4.0, 3.0, NAN]
    (layer,) = report.layers(findings)
    # Var_x of the means 1.0 and 1.2 is 0.02, that of 0.5 and 0.5 is 0
    assert (layer["active_coordinates"], layer["active_vectors"]) == (1, 1)
    assert report.scalars(findings)["posterior/variance/mean"] == 1


def test_a_collapsed_posterior_has_nothing_active():
    findings = handed(kl=(0.005,), mean=torch.full((3, 1, 2), 0.3))
    values = report.scalars(findings)
    assert values["posterior/active_vectors"] == values["posterior/active_coordinates"] == 0


def test_one_sequence_has_no_spread():
    findings = handed(informed=torch.tensor([True, False, False]))
    assert [line["active_coordinates"] for line in report.layers(findings)] == [NAN]
    values = report.scalars(findings)
    assert "posterior/active_coordinates" not in values
    assert values["posterior/active_vectors"] == 1


def test_a_sample_without_density_has_only_a_likelihood():
    findings = handed(log_variance=None, kl=(0.0,))
    assert not findings.has_density
    assert findings.scored.loss() == 2.0
    assert [line["elbo"] for line in report.inner_steps(findings)] == [NAN] * 3
    assert report.layers(findings) == report.variance_histogram(findings) == []
    assert set(report.tables(findings)) == {"scalars.csv", "inner_steps.csv"}


def test_numbers_that_are_not_finite_are_left_out():
    findings = handed(log_variance=((math.nan, -math.inf),), kl=(math.inf,))
    assert report.variances(findings) == {}
    values = report.scalars(findings)
    assert values["posterior/nll"] == 2.0
    assert "posterior/kl" not in values


def test_a_record_may_say_how_many_vectors_a_layer_has():
    wide = {"log_variance": ((0.0, 0.0),) * 4, "kl": (1.0,) * 4, "mean": torch.zeros(3, 4, 2)}
    assert len(report.layers(handed(**wide))) == 1
    assert len(report.layers(handed(**wide, latents_per_layer=2))) == 2


# ---- what it leaves alone


def test_flops_follow_the_dial():
    model = build()
    flops = []
    for steps in (0, 1, 2):
        with dialled(model, "inner_steps", steps):
            flops.append(model.flops_per_token(32))
    assert flops[2] == model.flops_per_token(32)
    assert flops[2] - flops[1] == pytest.approx(flops[1] - flops[0])
    assert flops[0] < flops[1]


def test_what_the_analysis_leaves_alone():
    model, data = build().train(), batch()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, state = {key: value.clone() for key, value in data.items()}, torch.get_rng_state()
    with torch.inference_mode():
        inside = {key: value.clone() for key, value in data.items()}
        first = report.scalars(found(model, inside))
    assert report.scalars(found(model, data)) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
    assert all(torch.equal(data[key], value) for key, value in before.items())
