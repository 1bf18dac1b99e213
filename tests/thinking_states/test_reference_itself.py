"""The literal Thinking States: its blocks, teacher forcing and losses."""

import pytest
import torch

from tests.reference import qwen2
from tests.reference import thinking_states as ts
from tests.reference import tiny_thinking_states as tiny
from tests.reference.tiny_thinking_states import PAD, ROWS, THOUGHT_EOS, VOCAB


@pytest.fixture(scope="module")
def backbone():
    return tiny.backbone()


@pytest.fixture(scope="module")
def weights():
    return tiny.weights()


def test_thoughts_start_as_the_backbones_own_last_layer_and_head(backbone):
    weights = ts.with_blocks(*backbone)
    setup = tiny.setup(backbone[1], chunk_size=4)
    tokens = [3, 1, 4, 1]
    read = ts.forward(weights, setup, tokens, 4, {})
    found = ts.thought_logits(weights, setup, read.tapped, [THOUGHT_EOS])
    torch.testing.assert_close(found, qwen2.causal_lm(*backbone, tokens)[-1:])


def test_thought_logits_are_causal_and_teacher_forced(backbone, weights):
    setup = tiny.setup(backbone[1])
    hidden = torch.randn(2, 16, dtype=torch.float64)
    thought = [4, 5, 6, THOUGHT_EOS]
    logits = ts.thought_logits(weights, setup, hidden, thought)
    assert logits.shape == (4, VOCAB)
    for n in range(1, 5):  # the n-th token itself is not among its inputs
        shorter = ts.thought_logits(weights, setup, hidden, [*thought[: n - 1], PAD])
        torch.testing.assert_close(shorter, logits[:n])
    tied = {name: weights[name] for name in weights if name != "thinking.head.weight"}
    own = {**weights, "thinking.head.weight": weights["lm_head.weight"]}
    torch.testing.assert_close(
        ts.thought_logits(tied, setup, hidden, thought),
        ts.thought_logits(own, setup, hidden, thought),
    )


def test_states_are_the_last_outputs_and_zero_only_for_the_empty_thought(backbone, weights):
    setup = tiny.setup(backbone[1])
    assert ts.compress(weights, setup, [THOUGHT_EOS]).eq(0).all()
    for thought in ([THOUGHT_EOS, PAD, PAD], [4, THOUGHT_EOS], [4, 5, 6, 7, THOUGHT_EOS]):
        assert ts.compress(weights, setup, thought).ne(0).all()
    short = ts.compress(weights, setup, [4, THOUGHT_EOS])
    torch.testing.assert_close(short, ts.compress(weights, setup, [4, THOUGHT_EOS, PAD]))
    long = [4, 5, 6, 7, THOUGHT_EOS]
    whole = ts.compress(weights, tiny.setup(backbone[1], chunk_size=5), long)
    torch.testing.assert_close(ts.compress(weights, setup, long), whole[-3:])
    starts = ts.with_blocks(*backbone)
    first = qwen2.layers(*backbone, qwen2.embed(backbone[0], long), 0, 1)
    torch.testing.assert_close(ts.compress(starts, setup, long), first[-3:])


@pytest.mark.parametrize("kind", ["left_align", "partial", "absolute"])
def test_gold_forced_sequential_is_parallel(backbone, weights, kind):
    setup = tiny.setup(backbone[1], kind=kind)
    for row in ROWS:
        tokens, gold = ts.inputs_of(setup, row), ts.gold_of(setup, row)
        parallel = ts.forward(weights, setup, tokens, len(row.query), gold)
        one_by_one = ts.sequential(weights, setup, tokens, len(row.query), gold)
        for found, expected in zip(one_by_one, parallel, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_states_enter_behind_the_first_layer_at_the_next_chunk(backbone, weights):
    setup = tiny.setup(backbone[1], tap_after=1)
    tokens = [0, 3, 4, 7, 9, 11, 2, 8, 5, 6]  # chunks of 2, 3, 3; after the query 2
    plain = qwen2.layers(*backbone, qwen2.embed(backbone[0], tokens), 0, 1)
    thoughts = {0: [4, THOUGHT_EOS], 1: [THOUGHT_EOS], 2: [9, 4, 1, 3, THOUGHT_EOS]}
    tapped = ts.forward(weights, setup, tokens, 8, thoughts).tapped
    first, last = (ts.compress(weights, setup, thoughts[k]) for k in (0, 2))
    torch.testing.assert_close(tapped[2:5] - plain[2:5], first)
    torch.testing.assert_close(tapped[8:] - plain[8:], last[:2])
    assert torch.equal(tapped[[0, 1, 5, 6, 7]], plain[[0, 1, 5, 6, 7]])


def test_a_short_chunk_receives_the_states_of_its_places(backbone, weights):
    setup = tiny.setup(backbone[1], kind="partial", tap_after=1)
    tokens = [0, 3, 4, 7, 9]  # the last chunk has places 0 and 1
    plain = qwen2.layers(*backbone, qwen2.embed(backbone[0], tokens), 0, 1)
    tapped = ts.forward(weights, setup, tokens, 5, {0: [4, THOUGHT_EOS]}).tapped
    added = ts.compress(weights, setup, [4, THOUGHT_EOS])
    torch.testing.assert_close(tapped[3:] - plain[3:], added[:2])


def test_losses_are_means_over_tokens(backbone, weights):
    setup = tiny.setup(backbone[1])
    found = [ts.terms(weights, setup, row) for row in ROWS]
    gold = [ts.gold_of(setup, row) for row in ROWS]
    assert [len(thought) for thought in gold[0].values()] == [3, 2, 5]
    assert gold[1] == {0: [THOUGHT_EOS], 1: [8, THOUGHT_EOS]}
    losses = ts.losses(weights, setup, ROWS)
    nll = sum(row.answer.sum() for row in found) / 5
    sums = [values.sum() for row in found for values in row.thoughts.values()]
    torch.testing.assert_close(losses.nll, nll)
    torch.testing.assert_close(losses.thoughts, sum(sums) / 13)
    torch.testing.assert_close(losses.total, nll + sum(sums) / 13)
    light = ts.losses(weights, tiny.setup(backbone[1], trivial_weight=0.5), ROWS)
    torch.testing.assert_close(light.thoughts, (sum(sums) - sums[3] / 2) / 12.5)
    asked = ts.losses(weights, tiny.setup(backbone[1], lm_on_query=True), ROWS)
    queries = sum(row.query.sum() for row in found)
    torch.testing.assert_close(asked.nll, (nll * 5 + queries) / (5 + 7 + 3))
    literal = ts.losses(weights, tiny.setup(backbone[1], chunk_sum=True), ROWS)
    torch.testing.assert_close(
        literal.thoughts, (sums[0] / 3 + sums[1] / 2 + sums[2] / 5 + sums[3] + sums[4] / 2) / 2
    )


def test_chunks_behind_the_query_are_trained_on_the_empty_thought(backbone):
    setup = tiny.setup(backbone[1], think_in_decode=True)
    assert ts.gold_of(setup, ROWS[0])[3] == [THOUGHT_EOS]  # two prefix tokens and one of two
    assert 4 not in ts.gold_of(setup, ROWS[0])
    unended = tiny.setup(backbone[1], kind="absolute", chunk_size=16)
    assert ts.gold_of(unended, ROWS[0]) == {}


def test_gradients_reach_what_they_should(backbone, weights):
    losses = ts.losses(weights, tiny.setup(backbone[1]), ROWS)
    names = sorted(weights)
    leaves = [weights[name] for name in names]
    nll = torch.autograd.grad(losses.nll, leaves, retain_graph=True, allow_unused=True)
    thoughts = torch.autograd.grad(losses.thoughts, leaves, allow_unused=True)
    for name, from_answer, from_thoughts in zip(names, nll, thoughts, strict=True):
        reached = from_answer is not None and bool(from_answer.ne(0).any())
        assert reached != name.startswith("thinking."), name
        reached = from_thoughts is not None and bool(from_thoughts.ne(0).any())
        above = name in ("model.norm.weight", "lm_head.weight") or "layers.2." in name
        assert reached != above, name
