"""PonderLM-1 against its equations, and against the plain decoder where it does not ponder."""

import pytest
import torch

from lightning_models import output_layer
from lightning_models.ponderlm.baselines.simple import PonderLM1, PonderLM1Config
from tests.largest import Largest
from tests.ponderlm.baseline_cases import (
    SIZES,
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
from tests.reference import ponderlm as reference

VARIANTS = [
    {},
    {"accumulate": False},
    {"multiply_embedding": True},
    {"multiply_embedding": True, "accumulate": False},
    {"tie_head": True},
    {"init": "gpt2"},
    {"vocab_multiple": 4},  # one row that fills up
    {"thinking_steps": 0},
    {"thinking_steps": 1},
]


@pytest.fixture
def exact(monkeypatch):
    yield from exactly(monkeypatch)


def by_depth(weights, config, tokens, targets):
    """H_s = model(X_s), I_s = softmax(head H_s) E, X_(s+1) = X_s + I_s: losses of every pass."""
    scale = (2.5 * config.dim) ** 0.5 if config.init == "ponderlm" else 1.0
    times = config.thinking_steps if config.multiply_embedding else 1
    first = times * embedded(weights, config, tokens)
    x, losses = first, []
    for _ in range(config.thinking_steps + 1):
        h = blocks(weights, config, x, list(range(len(tokens))))
        h = reference.norm(weights, config, h, "norm")
        losses.append(cross_entropies(weights, config, h, targets, normed=True))
        odds = [reference.logits(weights, state).softmax(dim=-1) for state in h]
        mean = torch.stack([(scale * weights["embedding.weight"]).T @ p for p in odds])
        x = (x if config.accumulate else first) + mean
    return losses


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_loss_and_gradients(changes, monkeypatch):
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", 5)
    model = build(PonderLM1, PonderLM1Config, **changes)
    check_loss_and_gradients(model, by_depth, rows_of([6, 4]))


def test_every_pass_is_recorded():
    model = build(PonderLM1, PonderLM1Config, thinking_steps=3)
    steps = check_depths(model, by_depth, rows_of([6, 4]))
    assert steps["most"] == 3
    assert torch.equal(steps["executed"], torch.full((2, 6), 3))


def test_without_pondering_it_is_the_plain_decoder_to_the_bit():
    plain, ponder = plain_decoder(), initialised(PonderLM1, PonderLM1Config, steps=0)
    batch = rows_of([6, 4])
    assert torch.equal(ponder.score(batch).log_prob, plain.score(batch).log_prob)
    assert ponder.flops_per_token(6, training=True) == plain.flops_per_token(6, training=True)


@pytest.mark.parametrize("changes", [{}, {"accumulate": False, "multiply_embedding": True}])
def test_steps_are_the_whole_row(changes):
    model = build(PonderLM1, PonderLM1Config, thinking_steps=2, **changes)
    cache = check_decoding(model, rows_of([8, 8, 8])["tokens"])
    assert len(cache.layers) == 3 * model.config.num_layers


def test_nothing_is_left_of_embeddings_times_zero():
    with pytest.raises(ValueError, match=r"multiply_embedding \(True\).*thinking_steps \(0\)"):
        PonderLM1Config(**{**SIZES, "thinking_steps": 0}, multiply_embedding=True)


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_of_a_batch_are_never_held(autocast, monkeypatch):
    words, limit = 2000, 16
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", limit)
    model = build(PonderLM1, PonderLM1Config, vocab_size=words, block_size=24).train()
    batch = rows_of([24, 24], vocab=words)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Largest() as step:
        model.loss(batch).terms["nll"].sum.backward()
        model.score(batch)
    assert step.numel == limit * words < 24 * words


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("training", [False, True])
def test_flops(steps, training):
    """A training step computes the logits of each feedback once more."""
    model = build(PonderLM1, PonderLM1Config, thinking_steps=steps, attention_backend="math")
    counted = counted_flops(model, rows_of([8, 8]), [8] * (steps + 1), training)
    assert model.flops_per_token(8, training) * 16 == counted
    assert model.generation_flops(8) == model.flops_per_token(8)
    assert model.generation_flops(8, 0) == sum(model.plain_flops(8).values())
