"""LoopedLM, pause tokens and PonderLM-1 against their equations, and against the plain decoder."""

import dataclasses
import math

import pytest
import torch

from lightning_models import LoopedConfig, LoopedLM, output_layer
from lightning_models.ponderlm.baselines.simple import (
    PauseConfig,
    PauseLM,
    PonderLM1,
    PonderLM1Config,
)
from lightning_models.ponderlm.config import PonderLM2Config
from lightning_models.ponderlm.network import SlotNetwork
from tests.ponderlm.baseline_cases import (
    SIZES,
    blocks,
    build,
    check_depths,
    check_loss_and_gradients,
    counted_flops,
    cross_entropies,
    embedded,
    initialised,
    plain_decoder,
    rows_of,
)
from tests.reference import ponderlm as reference


def looped_by_depth(weights, config, tokens, targets):
    """H <- blocks(H) from the embeddings on; the losses after each loop."""
    x, losses = embedded(weights, config, tokens), []
    for _ in range(config.thinking_steps + 1):
        x = blocks(weights, config, x, list(range(len(tokens))))
        losses.append(cross_entropies(weights, config, x, targets))
    return losses


def scale_of(config):
    """Factor on embeddings."""
    return (2.5 * config.dim) ** 0.5 if config.init == "ponderlm" else 1.0


def pause_by_depth(weights, config, tokens, targets):
    """x_1, pause, .., pause, x_2, pause, ..: the losses after the tokens and after each pause."""
    inputs, positions = [], []
    for place, token in enumerate(tokens):
        inputs.append(reference.embed(weights, config, token))
        pause = scale_of(config) * weights["pause.weight"][0] if config.thinking_steps else None
        inputs += [pause] * config.thinking_steps
        positions += [place] * (config.thinking_steps + 1)
    out = blocks(weights, config, torch.stack(inputs), positions)
    slots = config.thinking_steps + 1
    return [cross_entropies(weights, config, out[k::slots], targets) for k in range(slots)]


def ponderlm1_by_depth(weights, config, tokens, targets):
    """H_s = model(X_s), I_s = softmax(head H_s) E, X_(s+1) = X_s + I_s: losses of every pass."""
    times = config.thinking_steps if config.multiply_embedding else 1
    first = times * embedded(weights, config, tokens)
    x, losses = first, []
    for _ in range(config.thinking_steps + 1):
        h = blocks(weights, config, x, list(range(len(tokens))))
        h = reference.norm(weights, config, h, "norm")
        losses.append(cross_entropies(weights, config, h, targets, normed=True))
        odds = [reference.logits(weights, state).softmax(dim=-1) for state in h]
        mean = torch.stack([(scale_of(config) * weights["embedding.weight"]).T @ p for p in odds])
        x = (x if config.accumulate else first) + mean
    return losses


LOOPED = LoopedLM, LoopedConfig, looped_by_depth
PAUSE = PauseLM, PauseConfig, pause_by_depth
PONDERLM1 = PonderLM1, PonderLM1Config, ponderlm1_by_depth
ALL = pytest.mark.parametrize("case", [LOOPED, PAUSE, PONDERLM1], ids=["looped", "pause", "one"])
VARIANTS = [
    *((LOOPED, {"thinking_steps": steps}) for steps in (0, 1, 3)),
    (PAUSE, {"thinking_steps": 0}),
    (PAUSE, {"thinking_steps": 1, "init": "gpt2"}),
    (PAUSE, {"thinking_steps": 3}),
    (PONDERLM1, {}),
    (PONDERLM1, {"accumulate": False}),
    (PONDERLM1, {"multiply_embedding": True}),
    (PONDERLM1, {"multiply_embedding": True, "accumulate": False}),
    (PONDERLM1, {"tie_head": True}),
    (PONDERLM1, {"init": "gpt2"}),
    (PONDERLM1, {"vocab_multiple": 4}),  # one row that fills up
    (PONDERLM1, {"thinking_steps": 0}),
    (PONDERLM1, {"thinking_steps": 1}),
]


def named(value):
    return value[0].__name__ if isinstance(value, tuple) else str(value)


# ---- all three


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("case", "changes"), VARIANTS, ids=named)
def test_loss_and_gradients(case, changes, monkeypatch):
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", 5)
    model, config, by_depth = case
    check_loss_and_gradients(build(model, config, **changes), by_depth, rows_of([6, 4]))


@ALL
def test_every_depth_is_recorded(case):
    model, config, by_depth = case
    steps = check_depths(build(model, config, thinking_steps=3), by_depth, rows_of([6, 4]))
    assert steps["most"] == 3
    assert torch.equal(steps["executed"], torch.full((2, 6), 3))


@ALL
def test_without_steps_it_is_the_plain_decoder_to_the_bit(case):
    plain, mine, batch = plain_decoder(), initialised(*case[:2], steps=0), rows_of([6, 4])
    theirs = plain.network.state_dict()
    assert theirs.keys() == mine.network.state_dict().keys()
    for step in (0, 1):  # further parameters are drawn after the decoder's
        own = initialised(*case[:2], steps=step).network.state_dict()
        assert all(torch.equal(own[name], value) for name, value in theirs.items())
    assert torch.equal(mine.network(batch["tokens"]), plain.network(batch["tokens"]))
    assert torch.equal(mine.score(batch).log_prob, plain.score(batch).log_prob)
    for model in (mine, plain):
        model.loss(batch).terms["nll"].sum.backward()
    for own, other in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    assert mine.flops_by_part(6).items() >= plain.flops_by_part(6).items()
    assert mine.flops_per_token(6, training=True) == plain.flops_per_token(6, training=True)


@ALL
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("training", [False, True])
def test_flops(case, steps, training):
    """Of pauses all slots are computed and the last ones read out; PonderLM-1 computes the logits
    of each feedback once more in training."""
    model = build(*case[:2], thinking_steps=steps, attention_backend="math")
    passes = [8 * (steps + 1)] if case is PAUSE else [8] * (steps + 1)
    counted = counted_flops(model, rows_of([8, 8]), passes, training)
    assert model.flops_per_token(8, training) * 16 == counted
    assert model.generation_flops(8) == model.flops_per_token(8)
    assert model.generation_flops(8, 0) == sum(model.plain_flops(8).values())


# ---- single ones


def test_a_trained_model_can_loop_more_or_less_often():
    two, four = (build(LoopedLM, LoopedConfig, thinking_steps=n) for n in (2, 4))
    batch = rows_of([6, 4])
    assert (two.score(batch).log_prob - four.score(batch).log_prob).abs().max() > 1e-3
    four.config = four.network.config = dataclasses.replace(four.config, thinking_steps=2)
    assert torch.equal(two.score(batch).log_prob, four.score(batch).log_prob)


def test_older_checkpoints_of_loops_load():
    """Names, shapes and scores are from commit 1ce63f94, before recurrent depth."""
    block = {
        "attention_norm": (8,),
        "attention.qkv": (24, 8),
        "attention.out": (8, 8),
        "feed_forward_norm": (8,),
        "feed_forward.up": (24, 8),
        "feed_forward.down": (8, 12),
    }
    shapes = {f"blocks.0.{name}": shape for name, shape in block.items()}
    shapes |= {"embedding": (11, 8), "norm": (8,), "head": (11, 8)}
    older = {
        f"network.{name}.weight": torch.arange(float(math.prod(shape))).sin().view(shape)
        for name, shape in shapes.items()
    }
    model = build(LoopedLM, LoopedConfig, num_layers=1)
    model.load_state_dict(older)
    text = torch.tensor([[3, 1, 4, 1, 5]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    scores = model.score({"tokens": text[:, :-1], "targets": text[:, 1:], "mask": mask})
    expected = torch.tensor([[-2.799834, -2.024214, -1.807043, -2.112697]])
    torch.testing.assert_close(scores.log_prob.float(), expected, rtol=1e-5, atol=0)


def test_a_pause_is_drawn_like_a_token():
    model = PauseLM(PauseConfig(**{**SIZES, "dim": 512, "num_heads": 8}))
    model.configure_model()
    network, token = model.network, torch.zeros(1, 1, dtype=torch.int64)
    first, *pauses = network.embed_slots(token)[0, 0]
    assert len(pauses) == model.config.thinking_steps
    assert all(torch.equal(pause, pauses[0]) for pause in pauses)
    assert pauses[0].std().item() == pytest.approx(1.0, abs=0.15)
    assert first.std().item() == pytest.approx(1.0, abs=0.15)


def test_pauses_are_slots_with_a_constant_in_place_of_thoughts():
    """One pass of PonderLM-2 with constant feedback."""
    model = build(PauseLM, PauseConfig, thinking_steps=3)
    slots = SlotNetwork(PonderLM2Config(**{**SIZES, "thinking_steps": 3}))
    weights = model.network.state_dict()
    pause = weights.pop("pause.weight")[0] * model.network.embedding_scale
    slots.load_state_dict(weights)
    tokens = rows_of([6, 6])["tokens"]
    x = slots.embed(tokens, tokens)
    states = slots.one_pass(x, pause.expand(2, 6, 3, -1), None)
    torch.testing.assert_close(
        states, model.network(tokens, every_depth=True), atol=1e-6, rtol=1e-6
    )
