"""LoopedLM against its equation, and against the plain decoder where it loops once."""

import dataclasses

import pytest
import torch

from lightning_models.ponderlm.baselines.simple import LoopedConfig, LoopedLM
from tests.ponderlm.baseline_cases import (
    blocks,
    build,
    check_decoding,
    check_depths,
    check_loss_and_gradients,
    counted_flops,
    cross_entropies,
    embedded,
    exactly,
    initialised,
    plain_decoder,
    rows_of,
)


@pytest.fixture
def exact(monkeypatch):
    yield from exactly(monkeypatch)


def by_depth(weights, config, tokens, targets):
    """H <- blocks(H) from the embeddings on; the losses after each loop."""
    x, losses = embedded(weights, config, tokens), []
    for _ in range(config.thinking_steps + 1):
        x = blocks(weights, config, x, list(range(len(tokens))))
        losses.append(cross_entropies(weights, config, x, targets))
    return losses


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_loss_and_gradients(steps):
    model = build(LoopedLM, LoopedConfig, thinking_steps=steps)
    check_loss_and_gradients(model, by_depth, rows_of([6, 4]))


def test_every_depth_is_recorded():
    model = build(LoopedLM, LoopedConfig, thinking_steps=3)
    steps = check_depths(model, by_depth, rows_of([6, 4]))
    assert steps["most"] == 3
    assert torch.equal(steps["executed"], torch.full((2, 6), 3))


def test_no_further_loop_is_the_plain_decoder_to_the_bit():
    plain, looped = plain_decoder(), initialised(LoopedLM, LoopedConfig, steps=0)
    theirs = plain.network.state_dict()
    assert {name: value.shape for name, value in theirs.items()} == {
        name: value.shape for name, value in looped.network.state_dict().items()
    }
    for name, value in looped.network.state_dict().items():
        assert torch.equal(value, theirs[name])
    batch = rows_of([6, 4])
    assert torch.equal(looped.network(batch["tokens"]), plain.network(batch["tokens"]))
    assert torch.equal(looped.score(batch).log_prob, plain.score(batch).log_prob)
    looped.loss(batch).terms["nll"].sum.backward()
    plain.loss(batch).terms["nll"].sum.backward()
    for mine, other in zip(looped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert looped.flops_by_part(6) == plain.flops_by_part(6)


def test_a_trained_model_can_loop_more_or_less_often():
    two, four = (build(LoopedLM, LoopedConfig, thinking_steps=n) for n in (2, 4))
    batch = rows_of([6, 4])
    assert (two.score(batch).log_prob - four.score(batch).log_prob).abs().max() > 1e-3
    four.config = four.network.config = dataclasses.replace(four.config, thinking_steps=2)
    assert torch.equal(two.score(batch).log_prob, four.score(batch).log_prob)


def test_steps_are_the_whole_row():
    model = build(LoopedLM, LoopedConfig, thinking_steps=2)
    cache = check_decoding(model, rows_of([8, 8, 8])["tokens"])
    assert len(cache.layers) == 3 * model.config.num_layers


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("training", [False, True])
def test_flops(steps, training):
    model = build(LoopedLM, LoopedConfig, thinking_steps=steps, attention_backend="math")
    counted = counted_flops(model, rows_of([8, 8]), [8] * (steps + 1), training)
    assert model.flops_per_token(8, training) * 16 == counted


def test_flops_of_generating_grow_with_the_steps():
    model = build(LoopedLM, LoopedConfig, thinking_steps=3)
    assert model.generation_flops(8) == model.flops_per_token(8)
    none, one, two = (model.generation_flops(8, steps) for steps in (0, 1, 2))
    assert none == sum(model.plain_flops(8).values())
    assert two - one == one - none > 0
