"""Training's parallel pass against reading token by token, and T and C by themselves."""

import pytest
import torch
from torch.nn import functional as F

from lightning_models.thinking_states.backbone import causal_mask, new_cache
from lightning_models.thinking_states.config import ThinkingStatesConfig
from lightning_models.thinking_states.network import ThinkingStatesNetwork
from tests.thinking_states.cases import (
    GRIDS,
    PREFIX,
    SIZES,
    V,
    build,
    chunks_of,
    exact,
    gold_of,
    place_of,
    ragged,
    reasoning_batch,
    row_of,
    rows_of,
    without_steps,
)

EXACT = {"atol": 1e-9, "rtol": 0}


@torch.no_grad()
def compressed(network, thought):
    """S (c, D) of one thought, alone."""
    c, (end, _, pad) = network.config.chunk_size, range(V, V + 3)
    tokens = [*thought, end]
    padded = torch.tensor([tokens + [pad] * (c - len(tokens))])
    h = network.backbone.embed(padded)
    tables = network.backbone.rotary(h, torch.arange(padded.shape[1])[None])
    layer = network.compression.layer
    return layer(h, attention_mask=None, position_embeddings=tables)[0, -c:]


@torch.no_grad()
def spoken(network, tapped, thought):
    """T's states after a chunk's last token and after each token of a thought, alone."""
    c = network.config.chunk_size
    h = torch.cat((tapped, network.backbone.embed(torch.tensor(thought, dtype=torch.int64))))[None]
    positions = c - len(tapped) + torch.arange(h.shape[1])[None]
    states = network.thinking(h, network.backbone.rotary(h, positions))
    return states[0, len(tapped) - 1 :]


@torch.no_grad()
def step_by_step(model, batch, row):
    """What predicts the answer of a row, and its thoughts, read token by token with a cache."""
    network, layout, cache = model.network, model.layout, new_cache()
    tokens, q = row_of(batch, row, layout), int(batch["query_lengths"][row])
    gold, thinks = gold_of(batch, row, layout), chunks_of(q, len(tokens), layout.grid)
    last, tapped, thoughts = [], [], {}
    for t, token in enumerate(tokens):
        h = network.backbone.embed(torch.tensor([[token]]))
        chunk, place = place_of(t, q, layout.grid)
        state = torch.zeros_like(h)
        if gold.get(chunk - 1):
            state = compressed(network, gold[chunk - 1])[None, place : place + 1]
        hidden = network.backbone(
            h,
            torch.tensor([[t]]),
            cache=cache,
            state=state,
            state_layer=network.input_layer,
            tap_layer=network.output_layer,
        )
        last.append(hidden.last[0, 0])
        tapped.append(hidden.tapped[0, 0])
        if chunk in thinks and thinks[chunk][-1] == t:
            heard = torch.stack([tapped[i] for i in thinks[chunk]])
            thoughts[chunk] = spoken(network, heard, gold[chunk])
    return torch.stack(last[q + len(PREFIX) - 1 :]), thoughts


VARIANTS = {
    "left-align": {},
    "partial": {"grid": "partial"},
    "absolute": {"grid": "absolute"},
    "left-align-answers": {"think_in_decode": True},
    "partial-answers": {"grid": "partial", "think_in_decode": True},
    "absolute-answers": {"grid": "absolute", "think_in_decode": True},
    "one-token-chunks": {"chunk_size": 1},
    "one-chunk": {"chunk_size": 16},
    "from-the-input": {"input_layer": 0, "output_layer": 2},
    "to-the-output": {"input_layer": 2, "output_layer": 3},
    "tied": {"tie_head": True, "tie_thinking_head": True},
    "many-heads": {"num_kv_heads": 2, "chunk_size": 3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_parallel_pass_is_reading_token_by_token_with_gold_thoughts(name):
    model = exact(build(**VARIANTS[name]))
    batch = reasoning_batch((11, 4, 9), (6, 1, 2), seed=1)
    rows = model.layout.rows(batch)
    with torch.no_grad():
        forced = model.network(rows)
    for row in range(3):
        answers, thoughts = step_by_step(model, batch, row)
        there = rows.answers.tokens[row] >= 0
        torch.testing.assert_close(forced.answers[row, there], answers, **EXACT)
        ordered = [thoughts[chunk] for chunk in sorted(thoughts)]
        expected = torch.cat([o[:1] for o in ordered] + [o[1:] for o in ordered])
        found = forced.thoughts[row, rows.thoughts.valid[row]]
        torch.testing.assert_close(found, expected, **EXACT)
        assert len(expected) > len(thoughts) or not any(gold_of(batch, row, model.layout).values())


def test_T_begins_as_the_last_layer_with_norm_and_head():
    """At the end of a first chunk it predicts what the backbone predicts."""
    torch.manual_seed(0)
    config = ThinkingStatesConfig(**{**SIZES, "chunk_size": 8})
    network = exact_network(config)
    query, _ = ragged([8, 8])
    h = network.backbone.embed(query)
    positions = torch.arange(8).expand(2, -1)
    hidden = network.read(h, positions, state=torch.zeros_like(h))
    states = network.thinking(hidden.tapped, network.backbone.rotary(h, positions))
    torch.testing.assert_close(states, hidden.last, **EXACT)
    assert torch.equal(network.thinking_matrix, network.output_matrix)
    assert network.thinking_matrix.data_ptr() != network.output_matrix.data_ptr()


def test_C_begins_as_the_first_layer():
    torch.manual_seed(0)
    network = exact_network(ThinkingStatesConfig(**SIZES))
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


@pytest.mark.parametrize("grid", GRIDS)
def test_the_state_is_zero_exactly_where_no_thought_has_tokens(grid):
    model, batch = build(grid=grid), reasoning_batch(seed=1)
    rows = model.layout.rows(batch)
    with torch.no_grad():
        state = model.network._injected(rows.states, model.network.backbone.embed(rows.tokens))
    some = 0
    for row in range(3):
        q, gold = int(batch["query_lengths"][row]), gold_of(batch, row, model.layout)
        for t in range(len(row_of(batch, row, model.layout))):
            expected = bool(gold.get(place_of(t, q, model.layout.grid)[0] - 1))
            assert bool(state[row, t].any()) == expected
            some += expected
    assert some
    empty = model.layout.rows(without_steps(batch))
    with torch.no_grad():
        h = model.network.backbone.embed(empty.tokens)
        assert not model.network._injected(empty.states, h).any()


def test_thoughts_do_not_see_other_chunks():
    """What the backbone computed of a chunk, and its thought, matter to that chunk alone."""
    model, batch = build(), reasoning_batch((12,), (2,), seed=1)
    network, rows = model.network, model.layout.rows(batch)
    tapped = torch.randn(1, rows.tokens.shape[1], 16)
    changed = tapped.clone()
    changed[:, 4:8] += 1.0
    with torch.no_grad():
        before, after = (network._think(h, rows.speech) for h in (tapped, changed))
    gold, width = model.layout.gold(batch), 12
    own = (gold.chunk[0] == 1).nonzero()[:, 0] + width
    moved = (before != after).any(dim=-1)[0].nonzero()[:, 0].tolist()
    assert moved == [4, 5, 6, 7, *own.tolist()]


def test_padding_is_never_thought_about():
    """Rows alone are predicted as within a batch of longer ones."""
    model, batch = exact(build()), reasoning_batch((13, 5, 8), (4, 2, 1), seed=4)
    rows = model.layout.rows(batch)
    with torch.no_grad():
        whole = model.network(rows)
        for row in range(3):
            alone = rows_of(batch, [row])
            alone["query"] = alone["query"][:, : int(batch["query_lengths"][row])]
            own = model.layout.rows(alone)
            forced = model.network(own)
            for name in ("answers", "thoughts"):
                there = getattr(rows, name).tokens[row] >= 0
                expected = getattr(whole, name)[row, there]
                found = getattr(forced, name)[getattr(own, name).tokens >= 0]
                torch.testing.assert_close(found, expected, **EXACT)


def test_opening_a_thought_is_reading_its_chunk():
    model = exact(build())
    network, h = model.network, torch.randn(3, 4, 16, dtype=torch.float64)
    real = torch.tensor([[False, True, True, True], [True] * 4, [False, False, False, True]])
    tables, mask = network.backbone.rotary(h, torch.arange(4)[None]), causal_mask(real, 4)
    with torch.no_grad():
        short, long = new_cache(), new_cache()
        opened = network.thinking.opening(h, tables, mask, short)
        read = network.thinking(h, tables, mask, long)
    torch.testing.assert_close(opened, read[:, -1], **EXACT)
    assert torch.equal(short.layers[0].keys, long.layers[0].keys)
    assert torch.equal(short.layers[0].values, long.layers[0].values)


def total(model, batch):
    return sum(term.sum / term.normaliser for term in model.loss(batch).terms.values())


def test_checkpointing_the_backbone_changes_no_gradient():
    plain, batch = build().train(), reasoning_batch()
    again = build(gradient_checkpointing=True).train()
    again.network.load_state_dict(plain.network.state_dict())
    assert again.network.backbone.checkpointed
    for model in (plain, again):
        total(model, batch).backward()
    for mine, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_networks_are_built_on_the_meta_device():
    with torch.device("meta"):
        network = ThinkingStatesNetwork(ThinkingStatesConfig(**SIZES))
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
    shapes = {name: p.shape for name, p in build().network.named_parameters()}
    assert {name: p.shape for name, p in network.named_parameters()} == shapes


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


def test_states_are_the_last_outputs_of_long_thoughts():
    """C reads all of a thought longer than a chunk, and hands on what stands at its end."""
    model = exact(build())
    thought = torch.tensor([[1, 2, 3, 4, 5, 6]])
    layout = model.layout
    with torch.no_grad():
        padded = F.pad(layout.for_compression(thought, torch.tensor([6])), (0, 5), value=V + 2)
        state = model.network.compress(padded, torch.tensor([7]))[0]
        other = model.network.compress(
            layout.for_compression(thought.flip(1), torch.tensor([6])), torch.tensor([7])
        )[0]
    torch.testing.assert_close(state, compressed(model.network, thought[0].tolist()), **EXACT)
    assert not torch.allclose(state, other)
