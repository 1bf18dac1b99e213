"""Pause tokens against their equation, and against PonderLM-2's slots."""

import pytest
import torch

from lightning_models.ponderlm.baselines.simple import PauseConfig, PauseLM
from lightning_models.ponderlm.config import PonderLM2Config
from lightning_models.ponderlm.network import SlotNetwork
from tests.ponderlm.baseline_cases import (
    SIZES,
    blocks,
    build,
    check_decoding,
    check_depths,
    check_loss_and_gradients,
    counted_flops,
    cross_entropies,
    exactly,
    initialised,
    plain_decoder,
    rows_of,
)
from tests.reference import ponderlm as reference


@pytest.fixture
def exact(monkeypatch):
    yield from exactly(monkeypatch)


def by_depth(weights, config, tokens, targets):
    """x_1, pause, .., pause, x_2, pause, ..: the losses after the tokens and after each pause."""
    scale = (2.5 * config.dim) ** 0.5 if config.init == "ponderlm" else 1.0
    inputs, positions = [], []
    for place, token in enumerate(tokens):
        inputs.append(reference.embed(weights, config, token))
        inputs += [scale * weights["pause.weight"][0] for _ in range(config.thinking_steps)]
        positions += [place] * (config.thinking_steps + 1)
    out = blocks(weights, config, torch.stack(inputs), positions)
    slots = config.thinking_steps + 1
    return [cross_entropies(weights, config, out[k::slots], targets) for k in range(slots)]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("steps", "init"), [(0, "ponderlm"), (1, "gpt2"), (3, "ponderlm")])
def test_loss_and_gradients(steps, init):
    model = build(PauseLM, PauseConfig, thinking_steps=steps, init=init)
    check_loss_and_gradients(model, by_depth, rows_of([6, 4]))


def test_every_depth_is_recorded():
    model = build(PauseLM, PauseConfig, thinking_steps=2)
    steps = check_depths(model, by_depth, rows_of([6, 4]))
    assert steps["most"] == 2
    assert torch.equal(steps["executed"], torch.full((2, 6), 2))


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
    """methods.md, T9: one pass of PonderLM-2 with constant feedback."""
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


def test_no_pause_is_the_plain_decoder_to_the_bit():
    plain, batch = plain_decoder(), rows_of([6, 4])
    none, one = (initialised(PauseLM, PauseConfig, steps=steps) for steps in (0, 1))
    assert plain.network.state_dict().keys() == none.network.state_dict().keys()
    for name, value in plain.network.state_dict().items():
        assert torch.equal(value, none.network.state_dict()[name])
        assert torch.equal(value, one.network.state_dict()[name])
    assert torch.equal(none.score(batch).log_prob, plain.score(batch).log_prob)
    assert none.flops_by_part(6) == plain.flops_by_part(6)


def test_steps_are_the_whole_row():
    check_decoding(build(PauseLM, PauseConfig, thinking_steps=2), rows_of([8, 8, 8])["tokens"])


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("training", [False, True])
def test_flops(steps, training):
    """All slots are computed; only the last one of a token is read out."""
    model = build(PauseLM, PauseConfig, thinking_steps=steps, attention_backend="math")
    counted = counted_flops(model, rows_of([8, 8]), [8 * (steps + 1)], training)
    assert model.flops_per_token(8, training) * 16 == counted
    assert model.generation_flops(8) == model.flops_per_token(8)
    assert model.generation_flops(8, 0) == sum(model.plain_flops(8).values())
