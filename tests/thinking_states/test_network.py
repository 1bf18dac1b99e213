"""Training's parallel pass against reading token by token, and T and C by themselves."""

import pytest
import torch

from lightning_models.thinking_states.config import ThinkingStatesConfig
from lightning_models.thinking_states.network import ThinkingStatesNetwork
from tests.thinking_states.cases import (
    FAMILIES,
    SIZES,
    V,
    build,
    exact,
    on,
    ragged,
    reasoning_batch,
)

EXACT = {"atol": 1e-9, "rtol": 0}


@pytest.mark.parametrize("family", FAMILIES)
def test_T_begins_as_the_last_layer_with_norm_and_head(family):
    """At the end of a first chunk it predicts what the backbone predicts."""
    torch.manual_seed(0)
    config = ThinkingStatesConfig(**{**SIZES, "chunk_size": 8, **on(family)})
    network = exact_network(config)
    query, _ = ragged([8, 8])
    h = network.backbone.embed(query)
    positions = torch.arange(8).expand(2, -1)
    hidden = network.read(h, positions, state=torch.zeros_like(h))
    states = network.thinking(hidden.tapped, network.backbone.rotary(h, positions))
    torch.testing.assert_close(states, hidden.last, **EXACT)
    assert torch.equal(network.thinking_matrix, network.output_matrix)
    assert network.thinking_matrix.data_ptr() != network.output_matrix.data_ptr()


@pytest.mark.parametrize("family", FAMILIES)
def test_C_begins_as_the_first_layer(family):
    torch.manual_seed(0)
    network = exact_network(ThinkingStatesConfig(**SIZES, **on(family)))
    tokens = torch.randint(0, V, (2, 6))
    h, positions = network.backbone.embed(tokens), torch.arange(6)[None]
    behind = network.backbone(h, positions, tap_layer=1).tapped
    states = network.compress(tokens, torch.tensor([6, 6]))
    torch.testing.assert_close(states, behind[:, -4:], **EXACT)


def exact_network(config):
    model = build()
    model.network = ThinkingStatesNetwork(config)
    return exact(model).network.eval()


def test_copies_learn_by_themselves():
    network = build().network
    layers, copies = network.blocks, (network.thinking.layer, network.compression.layer)
    assert not {id(p) for p in layers.parameters()} & {
        id(p) for c in copies for p in c.parameters()
    }
    own = {id(p) for p in network.backbone.parameters()}
    assert id(network.thinking.head.weight) not in own
    tied = build(tie_thinking_head=True).network
    assert tied.thinking.head is None
    assert tied.thinking_matrix is tied.output_matrix


def test_copies_are_made_of_trained_weights(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    trained = Qwen2ForCausalLM(Qwen2Config(vocab_size=V, eos_token_id=4, **sizes, **heads))
    trained.save_pretrained(tmp_path)
    network = build(backbone=str(tmp_path)).network  # its copies are moved by 0.1 of a normal
    network = ThinkingStatesNetwork(network.config)
    for mine, theirs in (
        (network.thinking.layer, trained.model.layers[-1]),
        (network.compression.layer, trained.model.layers[0]),
        (network.thinking.norm, trained.model.norm),
    ):
        for own, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(own, other)
    assert torch.equal(network.thinking_matrix[:V], trained.lm_head.weight)
    assert torch.equal(network.thinking_matrix[V], trained.lm_head.weight[4]), (
        "the end begins as EOS"
    )


def test_a_window_as_long_as_the_rows_is_none():
    plain, batch = build(), reasoning_batch()
    longest = int(plain.layout.row_lengths(batch).max())
    for window, same in ((longest, True), (longest + 5, True), (longest - 1, False)):
        narrow = build(window=window)
        losses = [model.loss(batch).terms["nll"].sum for model in (plain, narrow)]
        assert torch.equal(*losses) == same
        scores = [model.score(batch).log_prob for model in (plain, narrow)]
        assert torch.equal(*scores) == same


@pytest.mark.parametrize("window", [1, 3, 5])
def test_what_is_outside_of_the_window_has_no_gradient(window):
    """Each layer reaches window - 1 tokens further back, and exactly so far."""
    network = build(window=window).network
    positions = torch.arange(20)[None]
    for layers in (1, 2, 3):
        h = torch.randn(1, 20, network.backbone.dim, requires_grad=True)
        tapped = network.backbone(h, positions, tap_layer=layers).tapped
        tapped[0, 15].square().sum().backward()
        reached = h.grad[0].abs().sum(dim=1).nonzero()[:, 0].tolist()
        assert reached == list(range(15 - layers * (window - 1), 16))


def total(model, batch):
    return sum(term.sum / term.normaliser for term in model.loss(batch).terms.values())


def test_the_work_of_training_does_not_grow_with_the_number_of_chunks():
    """A query of 128 tokens and 64 tokens of thoughts in 2 and in 16 chunks."""
    from torch.utils.flop_counter import FlopCounterMode

    work = {}
    for chunks in (2, 16):
        c, size = 128 // chunks, 64 // chunks
        model = build(chunk_size=c, block_size=256)
        batch = reasoning_batch((128,), (3,), steps=chunks, size=size)
        batch["step_lengths"] = torch.full((1, chunks), size)
        batch["step_places"] = torch.arange(chunks)[None] * c
        assert model.counter(batch)["thought_tokens"] == 64 + chunks
        with FlopCounterMode(display=False) as counter:
            total(model, batch).backward()
        work[chunks] = counter.get_total_flops()
    assert work[16] <= 1.1 * work[2]
