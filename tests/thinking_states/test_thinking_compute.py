"""FLOPs of thinking, as counted by hand and by what is executed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_models.thinking_states.backbone import causal_mask, layer_flops
from lightning_models.thinking_states.network import chunk_flops, thought_flops
from tests.methods import decoder
from tests.thinking_states.cases import build, reasoning_batch


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "qwen3"])
def test_the_work_of_T_and_C_is_what_is_executed(family):
    """Thoughts that are, with their ends, as long as chunks; attention is a small part of it."""
    sizes = decoder(family, vocab_size=500, hidden_size=64)
    model = build(chunk_size=8, vocab_size=500, architecture=sizes)
    batch = reasoning_batch((64,), (3,), steps=8, size=7)
    batch["step_lengths"] = torch.full((1, 8), 7)
    batch["step_places"] = torch.arange(8)[None] * 8
    network, rows = model.network, model.layout.rows(batch)
    h = torch.randn(1, rows.tokens.shape[1], 64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network._injected(rows.states, h)
        spoken = network._think(h, rows.speech)
        spoken[0, rows.thoughts.where[0, rows.thoughts.valid[0]]] @ network.thinking_matrix.t()
    counted = 64 * chunk_flops(network) + thought_flops(network, 64)
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.1)


def test_flops_count_thinking():
    model = build()
    plain = super(type(model), model)
    for training in (False, True):
        assert model.flops_per_token(16, training) > plain.flops_per_token(16, training)
    assert model.flops_per_token(16, training=True) == 3 * model.flops_per_token(16)
    again = build(gradient_checkpointing=True)
    assert again.flops_per_token(16, training=True) > model.flops_per_token(16, training=True)


def test_flops_count_the_keys_in_the_window():
    """Of 32 queries those before the eighth see less than eight keys."""
    model, narrow = build(), build(window=8)
    backbone = narrow.network.backbone
    key = layer_flops(backbone, 1.0) - layer_flops(backbone, 0.0)
    seen = causal_mask(torch.ones(1, 32, dtype=torch.bool), 32, 8).sum() / 32
    fewer = backbone.num_layers * key * (33 / 2 - float(seen))
    assert narrow.flops_per_token(32) == pytest.approx(model.flops_per_token(32) - fewer)
    assert narrow.flops_per_token(8, training=True) == model.flops_per_token(8, training=True)
    answering = model.generation_flops(32) - narrow.generation_flops(32)
    assert answering == backbone.num_layers * key * (32 - 8)


def test_answers_cost_thoughts_where_they_are_thought_about():
    model, thinking = build(), build(think_in_decode=True)
    assert thinking.generation_flops(16) > model.generation_flops(16)
    assert thinking.generation_flops(16, steps=0.0) > model.generation_flops(16)
    assert model.generation_flops(16, steps=2.0) > model.generation_flops(16)
    assert model.generation_flops(32) > model.generation_flops(16)
