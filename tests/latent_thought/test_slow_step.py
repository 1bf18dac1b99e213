"""What the decoder learns from: lines 14 and 15 of Algorithm 1, and the public code's sum."""

from types import SimpleNamespace

import pytest
import torch

from lightning_models import OptimizerConfig
from lightning_models.latent_thought.posterior import InnerLoop, Purpose, divergence_floor
from tests.latent_thought.cases import (
    TRAINING,
    alone,
    build,
    fast_learning,
    inner_draws,
    noise_of,
    reference_of,
    row_of,
    rows_of,
)
from tests.reference import latent_thought as reference

EXACT = {"atol": 1e-9, "rtol": 1e-8}
CASES = {
    "final": {},
    "final-resampled": {"noise": "resampled"},
    "final-cosine": {"inner_schedule": "cosine", "latents": "shared"},
    "final-no-steps": {"inner_steps": 0},
    "final-untied": {"tie_head": False},
    "final-transport": {"prior": "transport"},
    "trajectory": {"slow_gradient": "trajectory"},
    "trajectory-resampled": {"slow_gradient": "trajectory", "noise": "resampled"},
    "trajectory-untied": {"slow_gradient": "trajectory", "tie_head": False},
    "trajectory-transport": {"slow_gradient": "trajectory", "prior": "transport"},
}


def trainer(**values):
    """As much of a run as a model looks at."""
    return SimpleNamespace(**{"global_step": 0, "estimated_stepping_batches": 10} | values)


def objective(output):
    return sum(term.sum / term.normaliser for term in output.terms.values())


def gradients_of(model, output):
    """Gradients of the objective by parameter, zeros where there are none; ``.grad`` is emptied."""
    objective(output).backward()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.network.named_parameters()
    }
    model.zero_grad()
    return found


def summed(slow, batch, latents):
    """-log p(x | z) of all rows."""
    rows = [-slow.log_likelihood(*row_of(batch, row), z) for row, z in enumerate(latents)]
    return sum(rows)


def slow_version(model):
    """The reference, with the model's own prior among its weights."""
    slow = reference_of(model)
    if model.network.prior is not None:
        prior = model.network.prior.named_parameters()
        slow.weights |= {f"prior.{name}": p for name, p in prior}
    return slow


def assert_gradients(found, expected, names):
    for name, value in zip(names, expected, strict=True):
        value = torch.zeros_like(found[name]) if value is None else value
        torch.testing.assert_close(found[name], value, **EXACT, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", CASES)
def test_loss_and_all_gradients(case):
    """Of the mean final loss; with ``trajectory`` those of all inner steps, also token means."""
    model, batch = build(**CASES[case]), rows_of([4, 2])
    output, slow = model.loss(batch), slow_version(model)
    found = gradients_of(model, output)
    fast = fast_learning(model, slow, batch, TRAINING)
    draws = inner_draws(model, noise_of(model, batch, TRAINING))
    q = [one.path[-1] for one in fast]
    if model.config.inner_steps == 0:
        q = [(torch.zeros(4, 8), torch.zeros(4, 8))] * 2
    latents = [reference.sample(*own, draws[-1][row]).detach() for row, own in enumerate(q)]
    nll = summed(slow, batch, latents)
    torch.testing.assert_close(output.terms["nll"].sum, nll, **EXACT)
    assert output.terms["nll"].normaliser == 6
    expected = torch.autograd.grad(nll / 6, list(slow.weights.values()), allow_unused=True)
    expected = [torch.zeros(()) if gradient is None else gradient for gradient in expected]
    if model.config.slow_gradient == "trajectory":
        assert objective(output).item() == pytest.approx(nll.item() / 6, rel=1e-9), "a zero"
        for one in fast:
            parts = zip(expected, one.gradients.values(), strict=True)
            expected = [total + gradient / 6 for total, gradient in parts]
    assert_gradients(found, expected, slow.weights)


@pytest.mark.usefixtures("exact")
def test_loss_and_gradients_of_a_langevin_sample():
    model = build(inference="langevin", langevin_step_size=0.05)
    batch, slow = rows_of([4, 2]), reference_of(model)
    output = model.loss(batch)
    found = gradients_of(model, output)
    noise = noise_of(model, batch, TRAINING)
    start, draws = noise.draw(Purpose.START), [noise.draw(Purpose.INNER, n) for n in range(3)]
    latents = []
    for row in range(2):
        own = [draw[row] for draw in draws]
        chain = reference.langevin(slow, *row_of(batch, row), start[row], own)
        latents.append(chain[-1])
    nll = summed(slow, batch, latents)
    torch.testing.assert_close(output.terms["nll"].sum, nll, **EXACT)
    expected = torch.autograd.grad(nll / 6, list(slow.weights.values()))
    assert_gradients(found, expected, slow.weights)
    assert output.sequence_nats == 0


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("step", "weight"), [(None, 1.0), (0, 0.0), (2, 0.4), (5, 1.0), (9, 1.0)])
def test_loss_and_gradients_of_an_encoder(step, weight):
    """Its KL divergence is part of the objective, annealed over half of the run."""
    model = build(inference="amortised", kl_annealing=0.5)
    model._trainer = None if step is None else trainer(global_step=step)
    batch, slow = rows_of([4, 2, 3]), reference_of(model)
    batch["targets"][2] = -100
    output = model.loss(batch)
    found = gradients_of(model, output)
    draw = noise_of(model, batch, TRAINING, step or 0).draw(Purpose.INNER)
    network, nll, kl = model.network, 0.0, 0.0
    for row in range(2):
        one = alone(batch, row)
        mean, log_variance = network.encoder(network.embedding(one["tokens"]), one["mask"])
        z = reference.sample(mean[0], log_variance[0], draw[row])
        nll = nll - slow.log_likelihood(*row_of(batch, row), z)
        kl = kl + reference.divergence(mean[0], log_variance[0])
    torch.testing.assert_close(output.terms["nll"].sum, nll, **EXACT)
    torch.testing.assert_close(output.terms["kl_loss"].sum, weight * kl, **EXACT)
    torch.testing.assert_close(output.sequence_nats, kl.detach(), **EXACT)
    assert output.terms["kl_loss"].over == output.terms["nll"].over == "targets"
    ((nll + weight * kl) / 6).backward()
    for name, p in network.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        if name in slow.weights:
            expected = expected + slow.weights[name].grad
        assert_gradients(found, [expected], [name])


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("step", "horizon"), [(0, None), (3, None), (10, None), (3, 20), (30, 20)])
def test_rate_and_noise_follow_the_run(step, horizon):
    """eta_fast grows linearly (section 3.1), over the run or the schedule's horizon."""
    model, batch = build(inner_lr=(0.1, 0.5)), rows_of([4])
    model.optimizer_config = OptimizerConfig(horizon=horizon)
    model._trainer = trainer(global_step=step)
    slow, noise = reference_of(model), noise_of(model, batch, TRAINING, step)
    start, draws = noise.draw(Purpose.START)[0], [d[0] for d in inner_draws(model, noise)]
    rate = 0.1 + 0.4 * min(1, step / (horizon or 10))
    fast = reference.FastLearning(slow, *row_of(batch, 0), start, draws, rate)
    z = reference.sample(*fast.path[-1], draws[-1]).detach()
    output = model.loss(batch)
    torch.testing.assert_close(output.terms["nll"].sum, summed(slow, batch, [z]), **EXACT)
    expected = divergence_floor(InnerLoop(model.config, rate)) * 4 * 8 / 8
    assert output.stats["kl_floor/token"].item() == pytest.approx(expected, rel=1e-6)


def test_a_run_without_end_has_no_schedules():
    for changes in ({"inner_lr": (0.1, 0.2)}, {"inference": "amortised", "kl_annealing": 0.5}):
        model = build(**changes)
        model._trainer = trainer(estimated_stepping_batches=float("inf"))
        with pytest.raises(ValueError, match="trainer.max_steps"):
            model.loss(rows_of([4]))
    model = build(inner_lr=(0.2, 0.2))
    model._trainer = trainer(estimated_stepping_batches=float("inf"))
    assert model.loss(rows_of([4])).terms["nll"].sum > 0


@pytest.mark.parametrize("inference", ["langevin", "amortised"])
def test_a_run_without_end_is_no_matter_to_who_has_no_rate(inference):
    """eta_fast is that of variational inference alone."""
    model = build(inference=inference, inner_lr=(0.1, 0.2))
    model._trainer = trainer(estimated_stepping_batches=float("inf"))
    assert model.loss(rows_of([4])).terms["nll"].sum > 0


@pytest.mark.parametrize("slow_gradient", ["final", "trajectory"])
def test_statistics_are_nats_per_token(slow_gradient):
    model, batch = build(slow_gradient=slow_gradient), rows_of([5, 3])
    output = model.loss(batch)
    nll, kl = output.terms["nll"].sum.detach(), output.sequence_nats
    assert kl > 0
    for name, value in (("nll", nll), ("kl", kl), ("elbo", -nll - kl)):
        statistic = output.stats[f"{name}/token"]
        torch.testing.assert_close(statistic.sum, value)
        assert statistic.normaliser == 8
        assert not statistic.sum.requires_grad


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("changes", [{}, {"inference": "amortised"}], ids=str)
def test_rows_without_targets_add_nothing(changes):
    model, batch = build(**changes), rows_of([5, 3, 4])
    batch["targets"][1:] = -100
    output, single = model.loss(batch), model.loss(alone(batch, 0))
    torch.testing.assert_close(objective(output), objective(single))
    torch.testing.assert_close(output.sequence_nats, single.sequence_nats)
    nothing = model.loss({**batch, "targets": torch.full_like(batch["targets"], -100)})
    assert nothing.terms["nll"].sum == nothing.terms["nll"].normaliser == 0
    assert nothing.sequence_nats == 0
