"""Fast learning against Algorithm 1 and eq. 4, step by step."""

import pytest
import torch

from lightning_models.latent_thought.posterior import (
    InnerLoop,
    Noise,
    Purpose,
    divergence_floor,
    infer,
)
from lightning_models.latent_thought.reading import Reading
from lightning_models.runtime import gradients_on, seeded_generator
from tests.latent_thought.cases import (
    SCORING,
    alone,
    build,
    fast_learning,
    inner_draws,
    noise_of,
    posterior_of,
    reference_of,
    row_of,
    rows_of,
)
from tests.reference import latent_thought as reference

CASES = {
    "constant": {},
    "cosine": {"inner_schedule": "cosine"},
    "resampled": {"noise": "resampled"},
    "decay": {"inner_weight_decay": 0.3},
    "betas": {"inner_betas": (0.5, 0.999)},
    "no-momentum": {"inner_betas": (0.0, 0.95)},
    "vector": {"inner_scaling": "vector"},
    "vector-decay": {"inner_scaling": "vector", "inner_weight_decay": 0.3, "latents": "shared"},
    "from-the-prior": {"init_log_variance": 0.0},
    "means-off-zero": {"init_mean_std": 0.7},
    "shared": {"latents": "shared"},
    "transport": {"prior": "transport"},
    "public": {
        "inner_schedule": "cosine",
        "inner_betas": (0.9, 0.999),
        "inner_weight_decay": 0.01,
        "init_mean_std": 0.01,
    },
    "all-at-once": {"inner_schedule": "cosine", "noise": "resampled", "inner_weight_decay": 0.3},
}
EXACT = {"atol": 1e-9, "rtol": 1e-8}


class Watched(Reading):
    """Keeps what the gradients of each step are taken at."""

    def __init__(self, model, batch):
        super().__init__(model.network, batch["tokens"], batch["targets"], batch["mask"])
        self.path = []

    def gradients(self, objective, inputs):
        self.path.append([x.detach().clone() for x in inputs])
        return super().gradients(objective, inputs)


def inferred(model, batch, rate=0.3):
    """The posterior, and the parameters in front of each step."""
    problem = Watched(model, batch)
    with gradients_on():
        found = infer(problem, noise_of(model, batch, SCORING), InnerLoop(model.config, rate))
    return found, problem.path


def test_draws_are_a_function_of_row_purpose_and_number_alone():
    """Whatever is drawn with them: other numbers, other rows, in another order."""
    keys, shape, device = [(0, 1, 2, 5), (0, 1, 2, 9)], (2, 3), torch.device("cpu")
    whole = Noise(keys, shape, device).draws(Purpose.INNER, 4)
    assert whole.shape == (4, 2, 2, 3)
    for row, key in enumerate(keys):
        for number in range(4):
            generator = seeded_generator(*key, int(Purpose.INNER), number)
            expected = torch.randn(shape, generator=generator)
            assert torch.equal(whole[number, row], expected)
            alone = Noise([key], shape, device).draw(Purpose.INNER, number)
            assert torch.equal(alone[0], expected)
    assert not torch.equal(whole, Noise(keys, shape, device).draws(Purpose.SCORED, 4))
    assert Noise(keys, shape, device, torch.float64).draws(Purpose.INNER, 0).shape[0] == 0


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", CASES)
def test_mean_and_log_variance_behind_every_step(case):
    model, batch = build(inner_steps=4, **CASES[case]), rows_of([4, 2])
    found, path = inferred(model, batch)
    path = [*path, (found.mean, found.log_variance)]
    draws = inner_draws(model, noise_of(model, batch, SCORING))
    for row, slow in enumerate(fast_learning(model, reference_of(model), batch, SCORING, 0.3)):
        assert len(path) == len(slow.path) == 5
        for mine, expected in zip(path, slow.path, strict=True):
            torch.testing.assert_close(mine[0][row], expected[0], **EXACT)
            torch.testing.assert_close(mine[1][row], expected[1], **EXACT)
        z = reference.sample(*slow.path[-1], draws[-1][row])
        torch.testing.assert_close(found.inner[row], z, **EXACT)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("steps", range(6))
def test_any_number_of_steps(steps, schedule):
    """Through the module's scores, which infer at the rate of the end of training."""
    model = build(inner_steps=steps, inner_schedule=schedule, num_layers=1)
    batch = rows_of([3])
    posterior, scores = posterior_of(model, batch)
    if steps == 0:
        expected = torch.zeros(2, 8), torch.zeros(2, 8)
        assert scores.sequence_term.item() == 0
    else:
        (slow,) = fast_learning(model, reference_of(model), batch, SCORING)
        expected = slow.path[-1]
        assert scores.sequence_term.item() < 0
    torch.testing.assert_close(posterior.mean[0], expected[0], **EXACT)
    torch.testing.assert_close(posterior.log_variance[0], expected[1], **EXACT)


@pytest.mark.usefixtures("exact")
def test_what_is_recorded_of_each_step():
    model, batch = build(noise="resampled"), rows_of([4])
    seen = []
    model.recorded(batch, inner_step=lambda **values: seen.append(values))
    slow = reference_of(model)
    (fast,) = fast_learning(model, slow, batch, SCORING)
    draws = inner_draws(model, noise_of(model, batch, SCORING))
    assert [values["step"] for values in seen] == [0, 1, 2]
    for step, values in enumerate(seen):
        mean, log_variance = (x.detach().requires_grad_() for x in fast.path[step])
        z = reference.sample(mean, log_variance, draws[step][0])
        nll = -slow.log_likelihood(*row_of(batch, 0), z)
        kl = [reference.divergence(m, v) for m, v in zip(mean, log_variance, strict=True)]
        slopes = torch.autograd.grad(nll + sum(kl), (mean, log_variance))
        torch.testing.assert_close(values["nll"][0], nll.detach(), **EXACT)
        torch.testing.assert_close(values["kl"][0], torch.stack(kl).detach(), **EXACT)
        for name, slope in zip(("mean", "log_variance"), slopes, strict=True):
            norms = slope.square().sum(dim=1).sqrt()
            torch.testing.assert_close(values[f"{name}_gradient"][0], norms, **EXACT)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_langevin_chain(steps):
    model = build(inference="langevin", inner_steps=steps, langevin_step_size=0.05)
    batch = rows_of([4, 2])
    found, path = inferred(model, batch)
    assert found.log_variance is None
    assert torch.equal(found.inner, found.mean)
    assert not found.divergence().any()
    noise, slow = noise_of(model, batch, SCORING), reference_of(model)
    start = noise.draw(Purpose.START)
    draws = [noise.draw(Purpose.INNER, step) for step in range(steps)]
    for row in range(2):
        own = [draw[row] for draw in draws]
        expected = reference.langevin(slow, *row_of(batch, row), start[row], own)
        mine = [*(z[row] for (z,) in path), found.mean[row]]
        torch.testing.assert_close(torch.stack(mine), torch.stack(expected), **EXACT)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("bound_noise", ["fresh", "inner"])
@pytest.mark.parametrize("case", ["constant", "resampled", "transport"])
def test_the_elbo_of_posterior_and_noise(case, bound_noise):
    """Eq. 5; scores are float32, whatever the model is."""
    model, batch = build(bound_noise=bound_noise, **CASES[case]), rows_of([5, 3])
    posterior, scores = posterior_of(model, batch)
    noise, slow = noise_of(model, batch, SCORING), reference_of(model)
    fresh = bound_noise == "fresh"
    draw = noise.draw(Purpose.SCORED) if fresh else inner_draws(model, noise)[-1]
    for row in range(2):
        q = posterior.mean[row], posterior.log_variance[row]
        expected = reference.elbo(slow, *row_of(batch, row), *q, draw[row])
        found = scores.log_prob[row].double().sum() + scores.sequence_term[row].double()
        torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=1e-6)


@pytest.mark.usefixtures("exact")
def test_the_encoders_posterior():
    """Its mean and variance as they come; its sample; the KL divergence of eq. 5."""
    model, batch = build(inference="amortised"), rows_of([5, 3])
    batch["targets"][1] = -100
    posterior, scores = posterior_of(model, batch)
    network, one = model.network, alone(batch, 0)
    mean, log_variance = network.encoder(network.embedding(one["tokens"]), one["mask"])
    torch.testing.assert_close(posterior.mean[0], mean[0].detach(), **EXACT)
    torch.testing.assert_close(posterior.log_variance[0].detach(), log_variance[0].detach())
    kl = reference.divergence(mean[0], log_variance[0])
    torch.testing.assert_close(posterior.kl[0].sum(), kl.detach(), **EXACT)
    assert posterior.kl[0].sum() > 0.1
    assert not posterior.mean[1].any(), "a row that tells nothing has the prior"
    assert scores.sequence_term[1] == 0
    draw = noise_of(model, batch, SCORING).draw(Purpose.SCORED)
    q = mean[0].detach(), log_variance[0].detach()
    bound = reference.elbo(reference_of(model), *row_of(batch, 0), *q, draw[0]).detach()
    found = (scores.log_prob[0].sum() + scores.sequence_term[0]).double()
    torch.testing.assert_close(found, bound, atol=1e-4, rtol=1e-6)


# ---- the floor under the KL divergence


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("steps", [0, 1, 16])
@pytest.mark.parametrize("deviation", [0.0, 0.01])
@pytest.mark.parametrize("scaling", ["coordinate", "vector"])
def test_the_floor_of_the_divergence(steps, schedule, deviation, scaling):
    """Where inference leads a posterior of which the decoder makes no use.

    Up to the noise that means and log-variances start with, which the floor leaves out.
    """
    model = build(
        inner_steps=steps,
        inner_schedule=schedule,
        inner_lr=(0.3, 0.3),
        init_mean_std=deviation,
        inner_scaling=scaling,
    )
    expected = reference.floor(model.config, 0.3)
    assert divergence_floor(InnerLoop(model.config, 0.3)) == pytest.approx(expected, rel=1e-9)
    with torch.no_grad():
        for block in model.network.layers:
            block.latent_attention.out.weight.zero_()
    posterior, _ = posterior_of(model, rows_of([4, 4]))
    assert posterior.kl.mean().item() / 8 == pytest.approx(expected, rel=0.2, abs=1e-6)


@pytest.mark.parametrize(
    ("rate", "schedule", "nats"),
    [
        (0.3, "constant", 0.185),
        (0.34, "constant", 0.29),
        (0.3, "cosine", 8.02),
        (0.34, "cosine", 6.1),
    ],
)
def test_the_cosine_leaves_variances_near_where_they_start(rate, schedule, nats):
    """Nats a token at 16 steps, for the published 24 x 512 latent numbers and 1024 tokens."""
    config = build(inner_schedule=schedule, inner_steps=16).config
    assert divergence_floor(InnerLoop(config, rate)) * 12 == pytest.approx(nats, rel=0.01)
