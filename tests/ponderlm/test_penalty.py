"""The minimum-ponder penalty against the slow version."""

import math

import pytest
import torch

from lightning_models.ponderlm.router import (
    FLOOR,
    minimum_ponder_penalty,
    penalised_tail,
    step_distribution,
)
from tests.ponderlm.cases import (
    EXACT,
    believed,
    build,
    config_of,
    row_of,
    rows_of,
    weights_of,
)
from tests.reference import ponderlm as reference

CASES = {
    "ours": {"penalty": "ours"},
    "ours-flat": {"penalty": "ours", "penalty_beta": 3.0},
    "ours-far": {"penalty": "ours", "penalty_theta": 0.4, "penalty_beta": 5.0},
    "paper": {"penalty": "paper"},
    "paper-shifted": {"penalty": "paper", "penalty_theta": 2.0, "penalty_beta": 4.0},
    "expected-steps": {"penalty": "expected_steps"},
    "ours-log": {"penalty": "ours", "penalty_beta": 3.0, "penalty_scale": "log", "tau": 0.05},
    "expected-log": {"penalty": "expected_steps", "penalty_scale": "log", "tau": 0.05},
}
LOSSES = ([2.0, 1.02, 1.01, 1.0], [1.9, 1.2, 0.6, 0.4], [1.0, 1.04, 1.3, 1.1], [9.0, 5.0, 4.0, 3.0])


def some_tails(number, seed=0):
    """log w (N, 4) that takes gradients."""
    generator = torch.Generator().manual_seed(seed)
    g = 2 * torch.randn(number, 4, generator=generator, dtype=torch.float64)
    return torch.stack([reference.tail_log(row) for row in g]).requires_grad_()


def slow_penalty(log_tail, losses, config):
    w = [reference.penalised(row, config) for row in log_tail]
    if config.penalty == "expected_steps":
        return sum(sum(own[1:]) for own in w) / len(w)
    counts = [math.floor(f * len(w)) for f in reference.fractions(config, losses)]
    return reference.bottom(w, counts)


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient(case, losses):
    """lambda times the sum of means, and its slope in log w, from none of the tokens to all."""
    config = config_of(thinking_steps=3, penalty_weight=0.3, **CASES[case])
    fast, slow = some_tails(11), some_tails(11)
    measured = torch.tensor(losses, dtype=torch.float64, requires_grad=True)
    found = minimum_ponder_penalty(fast, measured, config)
    expected = 0.3 * slow_penalty(slow, losses, config)
    torch.testing.assert_close(found.value, expected, **EXACT)
    found.value.backward()
    assert measured.grad is None, "the losses only count"
    if expected.requires_grad:
        expected.backward()
    slope = torch.zeros_like(slow) if slow.grad is None else slow.grad
    torch.testing.assert_close(fast.grad, slope, **EXACT)
    if config.penalty == "expected_steps":
        assert found.ratios is found.fractions is found.counts is None
        return
    f = reference.fractions(config, losses)
    torch.testing.assert_close(found.fractions, torch.tensor(f, dtype=torch.float64), **EXACT)
    assert found.counts.tolist() == [math.floor(value * 11) for value in f]


@pytest.mark.parametrize("w", [0.5, 1e-3, 2e-4, 5e-5])
def test_the_log_scale_pushes_until_steps_are_skipped(w):
    """One token, K = 1: slopes in the logit of the step are w (1 - w), and (1 - w) / ln 1e4."""
    slopes = {}
    for scale in ("linear", "log"):
        logits = torch.tensor([[0.0, math.log(w / (1 - w))]], dtype=torch.float64).requires_grad_()
        config = config_of(
            thinking_steps=1, penalty="expected_steps", penalty_weight=1.0, penalty_scale=scale
        )
        minimum_ponder_penalty(step_distribution(logits)[1], None, config).value.backward()
        slopes[scale] = logits.grad[0, 1].item()
    assert slopes["linear"] == pytest.approx(w * (1 - w))
    skipped = w < config.tau
    assert slopes["log"] == pytest.approx(0 if skipped else (1 - w) / math.log(1e4))


def test_without_a_threshold_the_log_scale_ends_where_bias_does():
    config = config_of(thinking_steps=1, penalty_scale="log", tau=0.0)
    tails = torch.tensor([0.0, FLOOR / 4, FLOOR, 2 * FLOOR])
    assert penalised_tail(tails, config).tolist() == [1, 0.75, 0, 0]


def test_the_printed_penalty_is_inert():
    """T7: exactly 0, not nan, at losses of 2 nats and more."""
    config, log_tail = config_of(thinking_steps=3, penalty="paper"), some_tails(100)
    losses = torch.tensor([5.0, 4.0, 3.0, 2.0], dtype=torch.float64)
    found = minimum_ponder_penalty(log_tail, losses, config)
    found.value.backward()
    assert found.value == 0
    assert (log_tail.grad == 0).all()


@pytest.mark.parametrize("case", CASES)
def test_nothing_to_penalise(case):
    """T7: rows without a target, and no steps to take, are 0 with finite gradients."""
    for steps, masked in ((2, True), (0, False)):
        model, batch = build(thinking_steps=steps, **CASES[case]), rows_of([3])
        if masked:
            batch["targets"] = torch.full_like(batch["targets"], -100)
        term = model.train().loss(batch).terms["penalty"]
        assert term.sum == 0
        assert term.normaliser == 1
        term.sum.backward()
        for name, parameter in model.network.named_parameters():
            assert parameter.grad is None or (parameter.grad == 0).all(), name


def slow_rows(model, batch, iterations):
    """Final passes of all rows with their targets."""
    weights, rows = weights_of(model), []
    for row in range(len(batch["tokens"])):
        tokens, targets = row_of(batch, row)
        passes = reference.jacobi(weights, model.config, tokens, iterations)
        rows.append((passes[-1], targets))
    return weights, rows


@pytest.mark.usefixtures("exact_tables")
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("penalty", ["ours", "paper"])
def test_statistics_of_training(penalty, every):
    """What steps the tokens take, losses after each depth, and what comes of them."""
    beta, theta = (10.0, 1.5) if penalty == "paper" else (3.0, 0.1)
    options = {"penalty": penalty, "penalty_beta": beta, "penalty_theta": theta}
    model = build(depth_losses_every=every, jacobi_iterations=(1, 1), router=1.5, **options)
    batch = believed(model, rows_of([4, 3]))
    batch["targets"][0, 1] = -100
    output = model.train().loss(batch)
    weights, rows = slow_rows(model, batch, 1)
    stats = {
        name: (value.sum / value.normaliser).item() if isinstance(value, tuple) else value.item()
        for name, value in output.stats.items()
    }
    w = torch.cat([done.log_tail[torch.tensor(targets) >= 0].exp() for done, targets in rows])
    assert stats.pop("expected_steps") == pytest.approx(w[:, 1:].sum(dim=1).mean().item())
    executed = (w >= model.config.tau).sum(dim=1) - 1.0
    assert stats.pop("executed_steps") == pytest.approx(executed.mean().item())
    c, found = reference.mean_losses(weights, model.config, rows), []
    for depth, value in enumerate(c):
        assert stats.pop(f"depth_{depth}/nll") == pytest.approx(value, rel=1e-5)
        found.append(stats.pop(f"depth_{depth}/rho"))
    u = [value - c[-1] * (penalty == "ours") for value in c]
    rho = [1 - 1 / (1 + math.exp(-beta * (value - theta))) for value in u]
    assert found == pytest.approx(rho, rel=1e-4)
    for k, f in enumerate(reference.fractions(model.config, c), start=1):
        assert stats.pop(f"depth_{k}/fraction") == pytest.approx(f, rel=1e-4)
        assert stats.pop(f"depth_{k}/penalised") == math.floor(6 * f)
    assert not stats


def test_so_many_targets_measured():
    """``depth_losses_every``: the first of each group, over rows, counting targets only."""
    batch, numbers = rows_of([3, 2]), {}
    batch["targets"][0, 0] = -100
    for every in (1, 2, 3, 9):
        output = build(depth_losses_every=every).train().loss(batch)
        numbers[every] = int(output.stats["depth_0/nll"].normaliser)
    assert numbers == {1: 4, 2: 2, 3: 2, 9: 1}


def test_no_penalty():
    """Weight 0: no such term; the losses after each depth are logged only if asked for."""
    batch = rows_of([3])
    for asked in (False, True):
        model = build(penalty_weight=0.0, log_depth_losses=asked)
        output = model.train().loss(batch)
        assert set(output.terms) == {"nll"}
        assert ("depth_0/nll" in output.stats) is asked
        assert not any("rho" in name for name in output.stats)
