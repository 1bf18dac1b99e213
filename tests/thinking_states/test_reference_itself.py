"""The literal Thinking States: its blocks, teacher forcing and losses."""

import pytest
import torch

from tests.reference import qwen2
from tests.reference import thinking_states as ts
from tests.reference import tiny_thinking_states as tiny
from tests.reference.tiny_thinking_states import PAD, ROWS, THOUGHT_EOS


@pytest.fixture(scope="module")
def backbone():
    return tiny.backbone()


@pytest.fixture(scope="module")
def weights():
    return tiny.weights()


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
