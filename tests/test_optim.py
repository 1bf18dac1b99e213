"""Decay groups, schedules and the optimiser's arithmetic."""

import itertools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_models import TransformerConfig, TransformerLM
from lightning_models.optim import OptimizerConfig, build_optimizer, schedule_factor


class Small(nn.Module):
    """One parameter of each kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.embedding = nn.Embedding(4, 3)
        self.convolution = nn.Parameter(torch.randn(2, 3, 2))
        self.scale = nn.Parameter(torch.ones(()))
        self.gate = nn.Parameter(torch.randn(2, 2))
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.tied = self.embedding.weight  # one parameter under two names


def grouped(module, config, *exempt):
    """Names of the parameters in each group, by its weight decay."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = build_optimizer(module, config, no_decay=exempt).param_groups
    assert len({group["weight_decay"] for group in groups}) == len(groups)
    return {
        group["weight_decay"]: sorted(names[id(p)] for p in group["params"]) for group in groups
    }


def test_matrices_decay_and_vectors_and_exempt_parameters_do_not():
    module = Small()
    assert grouped(module, OptimizerConfig(weight_decay=0.3), module.gate) == {
        0.3: ["convolution", "linear.weight", "tied"],
        0.0: ["gate", "linear.bias", "norm.bias", "norm.weight", "scale"],
    }


def test_groups_that_would_be_empty_are_left_out():
    assert grouped(nn.Linear(2, 2, bias=False), OptimizerConfig()) == {0.1: ["weight"]}
    assert grouped(nn.LayerNorm(2), OptimizerConfig()) == {0.0: ["bias", "weight"]}


@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_those_of_plain_adamw(fused):
    """Against torch's own single-tensor loop, in float64, with decay given by hand."""
    torch.manual_seed(0)
    module, twin = Small().double(), Small().double()
    twin.load_state_dict(module.state_dict())
    config = OptimizerConfig(lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3)
    mine = build_optimizer(module, config, fused=fused)
    shared = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "foreach": False, "fused": False}
    decayed = [p for p in twin.parameters() if p.requires_grad and p.dim() >= 2]
    plain = [p for p in twin.parameters() if p.requires_grad and p.dim() < 2]
    theirs = [
        torch.optim.AdamW(decayed, weight_decay=0.3, **shared),
        torch.optim.AdamW(plain, weight_decay=0.0, **shared),
    ]
    for _ in range(7):
        for ours, other in zip(module.parameters(), twin.parameters(), strict=True):
            if ours.requires_grad:
                ours.grad = torch.randn_like(ours)
                other.grad = ours.grad.clone()
        mine.step()
        for optimizer in theirs:
            optimizer.step()
    for ours, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-13, rtol=1e-12)
    assert mine.param_groups[0]["fused"] == fused


# ---- schedules


def rates(total, **options):
    """The factor in each step of a run, the first step at index 0."""
    factor = schedule_factor(OptimizerConfig(**options), total)
    return [factor(step) for step in range(total)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [10, 0.1])
def test_warm_up_is_linear_and_starts_above_zero(schedule, warmup):
    factors = rates(100, schedule=schedule, warmup=warmup)
    assert factors[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert max(factors) == factors[9] == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_without_warm_up_the_first_step_is_at_full_rate(schedule):
    assert rates(10_000, schedule=schedule, warmup=0)[0] == pytest.approx(1, abs=1e-3)
    assert rates(10_000, schedule=schedule, warmup=1)[0] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("schedule", "steps", "floor", "expected"),
    [
        ("cosine", 110, 0.2, {9: 1.0, 34: 0.2 + 0.4 * (1 + math.cos(math.pi / 4)), 59: 0.6}),
        ("linear", 110, 0.2, {9: 1.0, 34: 0.8, 59: 0.6}),
        ("wsd", 200, 0.1, {9: 1.0, 159: 1.0, 160: 1 - 0.9 / 40, 179: 0.55}),
    ],
)
def test_landmarks(schedule, steps, floor, expected):
    factors = rates(steps, schedule=schedule, warmup=10, min_lr_ratio=floor, decay_fraction=0.2)
    assert {step: factors[step] for step in expected} == pytest.approx(expected)
    assert factors[-1] == pytest.approx(floor)


@pytest.mark.parametrize("total", [3, 5, 9])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_short_runs_end_at_the_final_rate_too(schedule, total):
    factors = rates(total, schedule=schedule, warmup=0, min_lr_ratio=0.1, decay_fraction=0.1)
    assert factors[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_steps_behind_the_end_keep_the_last_rate(schedule):
    factor = schedule_factor(OptimizerConfig(schedule=schedule, min_lr_ratio=0.1), 50)
    assert factor(49) == factor(50) == factor(1000)
    assert factor(1000) == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [7, 0.1])
def test_a_horizon_is_the_run_that_the_schedule_is_of(schedule, warmup):
    whole = rates(200, schedule=schedule, warmup=warmup)
    for total in (30, 200, 250):
        factors = rates(total, schedule=schedule, warmup=warmup, horizon=200)
        assert factors == [*whole, *[whole[-1]] * 50][:total]
    options = {"schedule": schedule, "warmup": warmup, "horizon": 200}
    assert schedule_factor(OptimizerConfig(**options), math.inf)(9) == whole[9]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    total=st.integers(1, 300),
    warmup=st.floats(0, 0.5) | st.integers(1, 100),
    floor=st.floats(0, 1),
    share=st.floats(0, 0.5),
)
def test_rates_rise_to_the_peak_and_then_never_again(schedule, total, warmup, floor, share):
    factors = rates(
        total, schedule=schedule, warmup=warmup, min_lr_ratio=floor, decay_fraction=share
    )
    steps = warmup if warmup >= 1 else warmup * total
    assert all(0 <= factor <= 1 for factor in factors)
    for step, (now, following) in enumerate(itertools.pairwise(factors), start=1):
        if step + 1 < steps:
            assert now < following
        elif step >= steps:
            assert now >= following - 1e-12
            assert following >= floor - 1e-12


def test_a_run_without_an_end():
    constant = schedule_factor(OptimizerConfig(schedule="constant", warmup=4), math.inf)
    assert [constant(step) for step in (0, 1, 3, 4, 10**9)] == [0.25, 0.5, 1, 1, 1]
    assert schedule_factor(OptimizerConfig(schedule="constant", warmup=0), math.inf)(0) == 1
    for options in (
        {"schedule": "cosine", "warmup": 4},
        {"schedule": "linear", "warmup": 4},
        {"schedule": "wsd", "warmup": 4},
        {"schedule": "constant", "warmup": 0.02},
    ):
        with pytest.raises(ValueError, match=r"trainer\.max_steps or trainer\.max_epochs, or"):
            schedule_factor(OptimizerConfig(**options), math.inf)


def test_embeddings_can_be_exempt_from_decay():
    module = torch.nn.ModuleDict({"e": torch.nn.Embedding(4, 3), "l": torch.nn.Linear(3, 2)})
    for decay in (True, False):
        groups = build_optimizer(module, OptimizerConfig(decay_embeddings=decay)).param_groups
        decayed = [id(p) for group in groups if group["weight_decay"] for p in group["params"]]
        assert (id(module["e"].weight) in decayed) == decay
        assert id(module["l"].weight) in decayed


@pytest.mark.parametrize(("warmup", "warns"), [(1e9, True), (20, True), (19, False), (0.5, False)])
def test_a_warmup_as_long_as_the_run_is_reported(warmup, warns, monkeypatch):
    sizes = {"vocab_size": 40, "block_size": 8, "num_layers": 1, "dim": 16, "num_heads": 2}
    model = TransformerLM(TransformerConfig(**sizes), OptimizerConfig(warmup=warmup))
    model.configure_model()
    steps = SimpleNamespace(estimated_stepping_batches=20, precision_plugin=None)
    monkeypatch.setattr(TransformerLM, "trainer", steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.configure_optimizers()
    assert [str(w.message).startswith("optimizer.warmup (") for w in caught] == [True] * warns
