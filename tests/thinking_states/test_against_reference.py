"""Thinking States against the equations in float64: losses, gradients, thoughts and answers."""

import pytest
import torch

from lightning_models.generation import SamplingConfig, generate
from lightning_models.layers import recording
from lightning_models.outputs import objective
from lightning_models.thinking_states.config import ThinkingStatesConfig
from lightning_models.thinking_states.module import ThinkingStatesLM
from tests.reference import thinking_states as ts
from tests.reference import thinking_states_grid as grid
from tests.reference import thinking_states_inference as inference
from tests.thinking_states.literal import (
    LOSS,
    assert_same_gradients,
    batch_of,
    draw,
    in_float64,
    moved,
    setup_of,
    weights_of,
)

V, ROWS = 16, 24
"""Tokens of the tokenizer; rows of embedding and head, of which the last five mean nothing."""
SIZES = {
    "vocab_size": V,
    "vocab_multiple": 8,
    "block_size": 64,
    "num_layers": 3,
    "dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 24,
    "rope_base": 500.0,
    "tie_head": False,
    "answer_prefix": (5, 6),
    "max_thought_tokens": 4,
    "thought_weight": 0.75,
    "init_std": 0.2,
}
QUESTIONS = [
    (7, [(0, 1), (5, 2), (6, 1)], 3),
    (4, [], 2),
    (9, [(1, 1), (6, 2), (7, 4)], 4),
    (1, [(0, 3)], 1),
    (3, [(2, 1), (2, 3)], 2),
]
"""Query, steps (place, tokens), answer. In all chunk sizes steps share a chunk, some thoughts are
longer than a chunk, and lengths are and are not multiples of it."""
TRAINING = [
    {"grid": "left_align", "chunk_size": 3},
    {
        "grid": "left_align",
        "chunk_size": 4,
        "think_in_decode": True,
        "tie_head": True,
        "tie_thinking_head": True,
    },
    {"grid": "left_align", "chunk_size": 2, "lm_on_query": True, "trivial_weight": 0.25},
    {"grid": "partial", "chunk_size": 3, "tie_thinking_head": True, "num_kv_heads": 1},
    {"grid": "partial", "chunk_size": 2, "think_in_decode": True, "thought_loss": "chunk_sum"},
    {"grid": "partial", "chunk_size": 4, "tie_head": True, "input_layer": 0, "output_layer": 3},
    {
        "grid": "absolute",
        "chunk_size": 3,
        "think_in_decode": True,
        "lm_on_query": True,
        "trivial_weight": 0.25,
    },
    {
        "grid": "absolute",
        "chunk_size": 4,
        "thought_loss": "chunk_sum",
        "trivial_weight": 0.5,
        "tie_head": True,
    },
    {"grid": "absolute", "chunk_size": 2, "input_layer": 1, "output_layer": 3},
    {"grid": "left_align", "chunk_size": 1, "answer_prefix": ()},
    {"grid": "left_align", "chunk_size": 2, "trivial_weight": 0.0},
    {"grid": "left_align", "chunk_size": 16, "think_in_decode": True},
    {"grid": "left_align", "chunk_size": 3, "window": 4, "lm_on_query": True},
    {"grid": "partial", "chunk_size": 4, "window": 2, "think_in_decode": True},
]
THINKING = [
    {"grid": kind, "chunk_size": c, "think_in_decode": decode, "prefill": prefill}
    for kind, c, decode, prefill in [
        ("left_align", 3, False, "speculative"),
        ("left_align", 2, True, "sequential"),
        ("partial", 2, False, "speculative"),
        ("partial", 3, True, "speculative"),
        ("absolute", 3, False, "speculative"),
        ("absolute", 2, True, "speculative"),
        ("absolute", 4, False, "sequential"),
        ("left_align", 3, False, "speculative"),
        ("partial", 2, True, "sequential"),
    ]
]
TIED = {"tie_head": True, "tie_thinking_head": True}
THINKING[1] |= TIED
THINKING[4] |= TIED | {"input_layer": 0, "output_layer": 3}
TRAINING[2] |= {"answer_prefix": (5,)}
THINKING[0] |= {"answer_prefix": (5,), "max_thought_tokens": 1}
THINKING[3] |= {"answer_prefix": (5, 6, 7)}
THINKING[6] |= {"answer_prefix": ()}
THINKING[7] |= {"window": 2}
THINKING[8] |= {"window": 4}


def called(options):
    return "-".join(str(value) for value in options.values())


@pytest.fixture(autouse=True)
def double():
    with in_float64():
        yield


@pytest.fixture
def parallel(monkeypatch):
    """The reference's one pass with gold thoughts: of its numbers, a few times as fast."""
    monkeypatch.setattr(ts, "sequential", ts.forward)


def build(seed=0, **options):
    torch.manual_seed(seed)
    model = ThinkingStatesLM(ThinkingStatesConfig(**{**SIZES, **options}))
    model.configure_model()
    return moved(model, seed)


def undecided(seed=0, strength=12.0, **options):
    """A model about half of whose thoughts are trivial: a direction of T's states decides."""
    model = build(seed, **options)
    with torch.no_grad():
        way = torch.randn(model.network.backbone.dim, dtype=torch.float64)
        model.network.thinking_matrix[V] = strength * way / way.norm()
    return model


def thinking_setup(model):
    """Inference: thoughts hold no padding, answers are text and have no end (the tests cut)."""
    barred = {"barred_thoughts": tuple(range(V + 2, ROWS)), "barred_answers": tuple(range(V, ROWS))}
    return setup_of(model, eos=-1, **barred)


def spoken(setup, q, thoughts):
    """The reference's thoughts as (tokens, index of the chunk's last token) in their order."""
    kind, c = setup.kind, setup.chunk_size
    return [(list(z[:-1]), grid.end(kind, c, q, k)) for k, z in sorted(thoughts.items())]


def shown(row):
    return [(thought.tokens, thought.end) for thought in row]


@pytest.mark.parametrize("options", TRAINING, ids=called)
def test_losses_and_gradients(parallel, options):
    model, rows = build(**options), draw(QUESTIONS, V)
    weights, _ = weights_of(model)
    expected, batch = ts.losses(weights, setup_of(model), rows), batch_of(rows)
    output, counted = model.loss(batch), model.counter(batch)
    # weights of single losses are float32: 1/3 and the like, the means of eq. 6, have its precision
    rounded = {"rtol": 1e-7, "atol": 1e-7} if "thought_loss" in options else {}
    nll, thoughts = output.terms["nll"], output.terms["thoughts"]
    weight = model.config.thought_weight
    torch.testing.assert_close(nll.sum / nll.normaliser, expected.nll, **LOSS)
    found = thoughts.sum / thoughts.normaliser / weight
    torch.testing.assert_close(found, expected.thoughts, **{**LOSS, **rounded})
    (expected.nll + weight * expected.thoughts).backward()
    step = {"accumulate": 1, "world_size": 1, "device": torch.device("cpu")}
    objective(output, {**counted, "micro_batches": 1.0}, **step).backward()
    assert_same_gradients(model, weights, **rounded)


def test_the_answer_alone_reaches_C_and_not_T(parallel):
    """Gradients of each loss by itself."""
    model, rows = build(chunk_size=3), draw(QUESTIONS, V)
    weights, _ = weights_of(model)
    expected, output = ts.losses(weights, setup_of(model), rows), model.loss(batch_of(rows))
    expected.nll.backward()
    nll = output.terms["nll"]
    (nll.sum / nll.normaliser).backward()
    assert_same_gradients(model, weights)
    thinking = [p.grad for p in model.network.thinking.parameters()]
    assert all(g is None or not g.any() for g in thinking)
    assert model.network.compression.layer.mlp.up_proj.weight.grad.abs().max() > 1e-4


@pytest.mark.parametrize("options", THINKING, ids=called)
@torch.no_grad()
def test_scores_rest_on_the_models_own_thoughts(options):
    model, rows = undecided(**options), draw(QUESTIONS, V, seed=3)
    weights, _ = weights_of(model)
    setup, traces = setup_of(model, barred_thoughts=tuple(range(V + 2, ROWS))), {}
    with recording(
        thoughts=lambda trace: traces.update(own=trace),
        gold_thoughts=lambda trace: traces.update(gold=trace),
    ):
        scores = model.score(batch_of(rows, filling=True))
    kinds = set()
    for number, row in enumerate(rows):
        found = inference.score(weights, setup, row.query, row.answer)
        size, q = len(row.answer), len(row.query)
        torch.testing.assert_close(scores.log_prob[number, :size], found.log_probs, **LOSS)
        assert not scores.log_prob[number, size:].any()
        assert shown(traces["own"].rows[number]) == spoken(setup, q, found.thoughts)
        gold = ts.gold_of(setup, row)
        assert shown(traces["gold"].rows[number]) == spoken(setup, q, gold)
        if options["prefill"] == "speculative":
            rounds = inference.speculative_prefill(weights, setup, row.query).rounds
        else:
            rounds = grid.num_query_chunks(q, setup.chunk_size)
        assert traces["own"].rounds[number] == rounds
        kinds |= {len(z) > 1 for z in found.thoughts.values()}
    assert kinds >= {True, False}
    assert scores.num_targets.tolist() == [*(len(row.answer) for row in rows), 0]
    assert not scores.log_prob[-1].any()


@pytest.mark.parametrize("options", THINKING, ids=called)
@torch.no_grad()
def test_greedy_answers(options):
    model, rows = undecided(seed=2, **options), draw(QUESTIONS, V, seed=7)
    weights, _ = weights_of(model)
    setup, traces, most = thinking_setup(model), [], 5
    answers = [
        inference.answer_greedily(weights, setup, row.query, max_new_tokens=most) for row in rows
    ]
    stop = answers[2].tokens[2]  # rows end at different times
    with recording(thoughts=lambda trace: traces.append(trace)):
        found = generate(
            model,
            [row.query for row in rows],
            max_new_tokens=most,
            sampling=SamplingConfig(temperature=0),
            stop_ids=(stop,),
            vocab_size=V,
        )
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        tokens = answer.tokens
        if stop in tokens:
            tokens = tokens[: tokens.index(stop) + 1]
        assert found[number] == tokens
        q = len(row.query)
        seen = q + len(setup.prefix) + len(tokens) - 1
        expected = [one for one in spoken(setup, q, answer.thoughts) if one[1] < seen]
        assert shown(traces[0].rows[number]) == expected
