"""The score is a lower bound, against a likelihood whose integral over z can be computed.

What is seen here was seen with other weights and lengths too: scores of the inner noise are higher
than those of fresh noise, on average, and often above the likelihood; those of fresh noise never.
"""

import math

import pytest
import torch

from lightning_models.layers import recording
from tests.latent_thought.cases import build, log_probs, posterior_of, rows_of
from tests.reference.latent_thought import divergence as slow_divergence

TINY = {
    "vocab_size": 4,
    "block_size": 12,
    "num_layers": 1,
    "dim": 2,
    "num_heads": 1,
    "ffn_dim": 4,
    "window": 2,
    "latents_per_layer": 1,
    "inner_lr": (0.3, 0.3),
}
EDGE, STEP = 6.0, 0.15
ROWS = 400


def tiny(**changes):
    """A model of one latent vector of two numbers, on which its predictions depend a lot."""
    return build(seed=1, scale=1.0, **{**TINY, **changes})


def sequence():
    return rows_of([12], seed=4, words=4)


def grid():
    """Values (N, 1, 2) of z around the prior's mass."""
    line = torch.arange(-EDGE, EDGE + STEP / 2, STEP, dtype=torch.float64)
    return torch.cartesian_prod(line, line)[:, None]


def log_normal(z, mean=0.0, log_variance=0.0):
    """log N(z; mean, variance) of vectors (N, 1, 2)."""
    variance = math.exp(log_variance) if isinstance(log_variance, float) else log_variance.exp()
    each = -((z - mean) ** 2) / (2 * variance) - log_variance / 2 - math.log(2 * math.pi) / 2
    return each.sum(dim=(1, 2))


def log_likelihoods(model, batch, z):
    """log p(x | z) of the one sequence under each of ``z`` (N, 1, 2), float64 (N,)."""
    tokens, targets = (batch[key].expand(len(z), -1) for key in ("tokens", "targets"))
    with torch.no_grad():
        rows = log_probs(model, tokens, z)
    return rows.gather(2, targets[..., None]).sum(dim=(1, 2))


def exact_log_likelihood(model, batch):
    """log of the integral of p(x | z) N(z; 0, I), eq. 2."""
    z = grid()
    joint = log_likelihoods(model, batch, z) + log_normal(z)
    return (joint.logsumexp(dim=0) + 2 * math.log(STEP)).item()


def test_the_divergence_of_a_model_in_float64_is_float64():
    """Minus KL(q || N(0, I)), from mean and log-variance as they were inferred."""
    model, batch, seen = build().double(), rows_of([8, 5, 2]), {}
    with recording(posterior=seen.update), torch.no_grad():
        term = model.score(batch).sequence_term
    mean, log_variance = seen["mean"], seen["log_variance"]
    kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(dim=(1, 2))
    assert term.dtype == torch.float64
    torch.testing.assert_close(term, -kl, atol=1e-12, rtol=1e-12)


def copies(batch, count=ROWS):
    """The sequence under many numbers: so many draws of all noise."""
    many = {key: value.expand(count, *value.shape[1:]) for key, value in batch.items()}
    return {**many, "sequence_id": torch.arange(count)}


def bounds(model, batch):
    scores = model.score(copies(batch))
    return scores.log_prob.double().sum(dim=1) + scores.sequence_term.double()


def mean_of(each):
    return each.mean().item(), each.std().item() / math.sqrt(len(each))


def mean_bound(model, batch):
    return mean_of(bounds(model, batch))


@pytest.fixture
def case(exact):
    model, batch = tiny(), sequence()
    return batch, exact_log_likelihood(model, batch)


@pytest.mark.usefixtures("exact")
def test_the_quadrature():
    """The prior has mass 1, and the integrand is not a constant in z."""
    mass = log_normal(grid()).logsumexp(dim=0) + 2 * math.log(STEP)
    assert mass.item() == pytest.approx(0, abs=1e-7)
    model, batch = tiny(), sequence()
    each = log_likelihoods(model, batch, grid())
    assert each.max() - each.min() > 2
    generator = torch.Generator().manual_seed(0)
    sampled = log_likelihoods(model, batch, torch.randn(8000, 1, 2, generator=generator))
    estimate = (sampled.logsumexp(dim=0) - math.log(8000)).item()
    assert exact_log_likelihood(model, batch) == pytest.approx(estimate, abs=0.1)


@pytest.mark.parametrize("noise", ["fixed", "resampled"])
@pytest.mark.parametrize("steps", [0, 1, 4, 16])
def test_the_mean_score_is_below_the_likelihood(case, steps, noise):
    batch, exact_value = case
    mean, error = mean_bound(tiny(inner_steps=steps, noise=noise), batch)
    assert mean + 4 * error < exact_value


@pytest.mark.parametrize("steps", [0, 3, 16])
def test_the_bound_of_an_inferred_posterior_by_quadrature(case, steps):
    """Eq. 5 without sampling, for the posteriors that three draws of inner noise lead to."""
    batch, exact_value = case
    model, z = tiny(inner_steps=steps), grid()
    posterior, _ = posterior_of(model, copies(batch, 3))
    each = log_likelihoods(model, batch, z)
    for mean, log_variance in zip(posterior.mean, posterior.log_variance, strict=True):
        density = log_normal(z, mean, log_variance).exp() * STEP**2
        assert density.sum().item() == pytest.approx(1, abs=1e-3)
        bound = (density * each).sum() - slow_divergence(mean, log_variance)
        assert bound.item() < exact_value


def test_fresh_noise_is_unbiased_for_the_posterior_it_is_drawn_from(case):
    """The mean over draws is what quadrature over q gives."""
    batch, _ = case
    model, z = tiny(inner_steps=0), grid()
    expected = (log_normal(z).exp() * STEP**2 * log_likelihoods(model, batch, z)).sum().item()
    mean, error = mean_bound(model, batch)
    assert mean == pytest.approx(expected, abs=4 * error)


@pytest.mark.usefixtures("exact")
def test_it_is_the_likelihood_where_z_has_no_effect():
    model, batch = tiny(inner_steps=0), sequence()
    with torch.no_grad():
        model.network.layers[0].latent_attention.out.weight.zero_()
    mean, error = mean_bound(model, batch)
    assert mean == pytest.approx(exact_log_likelihood(model, batch), abs=1e-5)
    assert error < 1e-6


# ---- noise that inference has adapted to


@pytest.mark.parametrize("steps", [16, 32])
def test_scores_of_the_inner_noise_are_higher(case, steps):
    """Of the very same posteriors; few steps have adapted to nothing yet."""
    batch, _ = case
    fresh = bounds(tiny(inner_steps=steps), batch)
    inner = bounds(tiny(inner_steps=steps, bound_noise="inner"), batch)
    gain, error = mean_of(inner - fresh)
    assert gain > 4 * error


def test_scores_of_the_inner_noise_are_no_bound(case):
    batch, exact_value = case
    model = tiny(inner_steps=16, bound_noise="inner", init_log_variance=0.0)
    mean, error = mean_bound(model, batch)
    assert mean - 4 * error > exact_value
    fresh, error = mean_bound(tiny(inner_steps=16, init_log_variance=0.0), batch)
    assert fresh + 4 * error < exact_value


@pytest.mark.parametrize("steps", [0, 8])
def test_inner_noise_that_inference_has_not_seen_is_fresh(case, steps):
    """Of no step, or of one that is resampled: nothing has adapted to it."""
    batch, exact_value = case
    changes = {"inner_steps": steps, "noise": "resampled"}
    fresh, error = mean_bound(tiny(**changes), batch)
    inner, other_error = mean_bound(tiny(**changes, bound_noise="inner"), batch)
    assert inner == pytest.approx(fresh, abs=4 * (error + other_error))
    assert inner < exact_value


# ---- the KL divergence


def test_only_fresh_noise_is_called_a_bound():
    for bound_noise, kind in (("fresh", "lower_bound"), ("inner", "estimate")):
        model = build(bound_noise=bound_noise)
        assert model.likelihood == kind
        assert model.score(rows_of([5])).kind == kind


def test_a_sample_without_a_density_is_no_bound():
    model, batch = build(inference="langevin"), rows_of([6, 4])
    posterior, scores = posterior_of(model, batch)
    assert posterior.log_variance is None
    assert not scores.sequence_term.any()
    assert scores.kind == model.likelihood == "noncausal"
