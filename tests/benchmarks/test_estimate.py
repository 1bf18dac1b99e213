"""A traced step needs what a real one allocates, and spreads what FSDP2 spreads."""

import functools

import pytest
import torch
from methods import METHODS
from torch.profiler import ProfilerActivity, profile

from benchmarks import harness
from benchmarks.estimate import Transfer, estimate

CHEAP = (
    "gpt2",
    "llama",
    "thoughtbubbles",
    "thoughtbubbles-threshold",
    "thought-gestalt-none",
    "ponderlm1",
    "latent-thought-amortised",
    "no-cot",
    "icot",
)
"""One of each kind of step whose trace takes a second or two."""
BY_NAME = {method.name: method for method in METHODS}


def allocated(model, batch):
    """The most bytes that torch's allocator hands out in a step of a model that has moments."""
    loss = functools.partial(harness.objective, model, batch)
    step = harness.training_step(model.network, loss, "cpu", bf16=False)
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", CHEAP)
def test_memory_is_that_of_a_real_step(name):
    method = BY_NAME[name]
    found = estimate(method.build, method.batch(), on_gpu=False)
    model = method.build()
    assert found.parameters == sum(p.numel() for p in model.network.parameters())
    measured = allocated(model, method.batch())
    extra = found.peak - found.held
    if name == "thoughtbubbles-threshold":  # weights decide how many streams are kept
        assert found.at_most
        assert extra > 0.95 * measured
    else:
        assert extra == pytest.approx(measured, rel=0.15)


def test_sharded_steps_gather_blocks_or_everything():
    """Plain blocks are gathered in both passes, a looped model's parameters once for the step."""
    by_block, at_once = (BY_NAME[name] for name in ("gpt2", "looped"))
    for method in (by_block, at_once):
        found = estimate(method.build, method.batch(), on_gpu=False, mesh=(8,))
        size = 4 * found.parameters
        gathered = found.transfers[Transfer("all_gather", 8, True)]
        assert found.transfers[Transfer("reduce_scatter", 8, True)] == pytest.approx(size, rel=0.02)
        assert found.parts["weights"] == pytest.approx(size / 8, rel=0.1)
        if method is at_once:
            assert gathered == pytest.approx(size, rel=0.02)
            assert found.parts["gathered"] > 0.95 * size
        else:
            assert 1.5 * size < gathered < 2 * size


def test_hybrid_sharding_reduces_between_nodes():
    method = BY_NAME["gpt2"]
    found = estimate(method.build, method.batch(), on_gpu=False, mesh=(2, 8))
    shard = 4 * found.parameters / 8
    between = found.transfers[Transfer("all_reduce", 2, False)]
    assert between == pytest.approx(shard, rel=0.02)
    assert not torch.distributed.is_initialized()
