"""The objective and all its gradients against the slow version's."""

from types import SimpleNamespace

import pytest
import torch

from lightning_models.layers import recording
from lightning_models.ponderlm import PonderLM, PonderLM2
from lightning_models.ponderlm.network import draw_iterations
from tests.ponderlm.cases import (
    ALL_STYLES,
    EXACT,
    STYLES,
    believed,
    build,
    row_of,
    rows_of,
    weights_of,
)
from tests.reference import ponderlm as reference

PENALISED = {"penalty_weight": 0.3, "penalty_beta": 1.0, "penalty_theta": 1.0}
PAPER = {"penalty": "paper", "penalty_weight": 0.7, "penalty_beta": 10.0, "penalty_theta": 1.5}
PASSES = {
    "all": {"grad_last_passes": 5},
    "three": {"grad_last_passes": 3},
    "two": {"grad_last_passes": 2},
    "one": {"grad_last_passes": 1},
    "more-than-there-are": {"grad_last_passes": 99},
    "checkpoints": {"checkpoint_passes": True},
    "checkpoints-of-three": {"checkpoint_passes": True, "grad_last_passes": 3},
}
PENALTIES = {
    "paper": PAPER,
    "ours": PENALISED,
    "ours-of-some": {**PENALISED, "depth_losses_every": 2},
    "ours-log": {**PENALISED, "penalty_scale": "log", "tau": 0.05},
    "expected-steps": {"penalty": "expected_steps", "penalty_weight": 0.3},
    "none": {"penalty_weight": 0.0},
}


def objective(output):
    return sum(term.sum / term.normaliser for term in output.terms.values())


def gradients_of(model, output):
    """Gradients of the objective by parameter, zeros where there are none."""
    objective(output).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.network.named_parameters()
    }


def assert_objective(model, batch, iterations):
    """Loss, its terms, and the gradient of every parameter; returns the slow version's parts."""
    output = model.train().loss(batch)
    found = gradients_of(model, output)
    weights = weights_of(model)
    rows = [row_of(batch, row) for row in range(len(batch["tokens"]))]
    expected = reference.objective(weights, model.config, rows, iterations)
    nll = output.terms["nll"]
    assert nll.normaliser == expected.number
    assert nll.over == "targets"
    torch.testing.assert_close(nll.sum / nll.normaliser, expected.nll, **EXACT)
    torch.testing.assert_close(objective(output), expected.total, **EXACT)
    expected.total.backward()
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        slope = torch.zeros_like(value) if value.grad is None else value.grad
        close = torch.testing.assert_close
        close(found[name], slope, **EXACT, msg=lambda m, name=name: f"{name}: {m}")
    return expected


@pytest.mark.usefixtures("exact_tables")
@pytest.mark.parametrize("iterations", [0, 2])
@pytest.mark.parametrize("style", ALL_STYLES)
def test_loss_and_all_gradients(style, iterations):
    kind, changes = ALL_STYLES[style]
    extra = PENALISED if kind is PonderLM else {}
    model = build(kind, **changes, **extra, jacobi_iterations=(iterations, iterations))
    batch = rows_of([3, 2])
    batch["targets"][0, 1] = -100
    found = assert_objective(model, batch, iterations)
    assert found.number == 4
    if kind is PonderLM and model.config.thinking_steps:
        assert found.penalty > 0


@pytest.mark.usefixtures("exact_tables")
@pytest.mark.parametrize("kind", [PonderLM, PonderLM2])
@pytest.mark.parametrize("passes", PASSES)
def test_gradients_of_some_passes(passes, kind):
    """Through the last passes only, or through passes computed again: K = 2, J = 2."""
    extra = PENALISED if kind is PonderLM else {}
    model = build(kind, **PASSES[passes], **extra, jacobi_iterations=(2, 2))
    assert_objective(model, rows_of([3, 2]), 2)


@pytest.mark.usefixtures("exact_tables")
@pytest.mark.parametrize("penalty", PENALTIES)
def test_gradients_of_every_penalty(penalty):
    model = build(**PENALTIES[penalty], router=1.5, jacobi_iterations=(1, 1))
    found = assert_objective(model, believed(model, rows_of([4, 3])), 1)
    assert found.penalty > 0 or penalty == "none"


@pytest.mark.usefixtures("exact_tables")
@pytest.mark.parametrize("style", ["k3", "literal-index"])
def test_truncation_and_alpha_are_not_of_training(style):
    changes = {**STYLES[style], **PENALISED, "alpha": 2.0, "tau": 0.3}
    model = build(**changes, router=1.5, jacobi_iterations=(1, 1))
    assert_objective(model, rows_of([3]), 1)


def saved_numbers(model, batch):
    """How many numbers the backward pass finds saved."""
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        objective(model.loss(batch)).backward()
    return total


def test_what_is_held_for_the_backward_pass():
    """Less with fewer passes; with checkpoints about that of one pass, however many there are."""
    batch, held = rows_of([6, 6]), {}
    for name, changes in {"all": {}, **PASSES}.items():
        model = build(**changes, penalty_weight=0.0, jacobi_iterations=(3, 3)).train()
        held[name] = saved_numbers(model, batch)
    assert held["one"] < held["two"] < held["three"] < held["all"]
    assert held["checkpoints"] < 1.5 * held["one"]


def passes_of(model, step):
    """J + 1 of a training step."""
    model._trainer = SimpleNamespace(global_step=step)
    count = 0

    def add(**_):
        nonlocal count
        count += 1

    with recording(states=add), torch.no_grad():
        model.loss(rows_of([2]))
    model._trainer = None
    return count


def test_iterations_of_training_are_drawn():
    """Evenly from the range, both ends included, by seed and step alone; else as configured."""
    small = {"num_layers": 1, "thinking_steps": 1, "jacobi_iterations": (1, 3)}
    draws = []
    for seed in (0, 0, 1):
        model = build(**small, jacobi_seed=seed).train()
        draws.append([passes_of(model, step) - 1 for step in range(12)])
        assert draws[-1] == [draw_iterations(model.config, step) for step in range(12)]
    assert draws[0] == draws[1] != draws[2]
    many = [draw_iterations(model.config, step) for step in range(300)]
    assert set(many) == {1, 2, 3}
    assert min(many.count(j) for j in (1, 2, 3)) > 70
    model = build(jacobi_iterations=(0, 0), eval_iterations=2)
    assert passes_of(model.train(), 0) == 1
    assert passes_of(model.eval(), 0) == 3


@pytest.mark.parametrize("kind", [PonderLM, PonderLM2])
def test_checkpoints_repeat_dropout(kind):
    found = []
    for checkpoint in (False, True):
        noise = {"dropout": 0.2, "attention_dropout": 0.2}
        model = build(kind, checkpoint_passes=checkpoint, **noise).train()
        torch.manual_seed(3)
        found.append(gradients_of(model, model.loss(rows_of([3, 2]))))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, **EXACT)
