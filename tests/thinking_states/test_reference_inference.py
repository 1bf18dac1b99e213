"""The literal Thinking States while it thinks for itself."""

import pytest
import torch

from tests.reference import thinking_states as ts
from tests.reference import thinking_states_grid as grid
from tests.reference import thinking_states_inference as inference
from tests.reference import tiny_thinking_states as tiny
from tests.reference.tiny_thinking_states import EOS, SEPARATOR, THOUGHT_EOS, VOCAB

KINDS = ("left_align", "partial", "absolute")


@pytest.fixture(scope="module")
def backbone():
    return tiny.backbone()


@pytest.fixture(scope="module")
def weights():
    return tiny.weights()


def talkative(backbone, **changes):
    """A setup under which about half of the thoughts are empty: T has two ids and the EOS."""
    barred = tuple(id for id in range(VOCAB) if id not in (4, 9, THOUGHT_EOS))
    return tiny.setup(backbone[1], barred_thoughts=barred, **changes)


def queries(count):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 16, (count,), generator=generator).tolist()
    return [
        [0, *torch.randint(1, 16, (length,), generator=generator).tolist()] for length in lengths
    ]


def test_thoughts_are_cut_and_ended(backbone, weights):
    hidden = torch.randn(3, 16, dtype=torch.float64)
    silent = tiny.setup(
        backbone[1], barred_thoughts=tuple(i for i in range(VOCAB) if i != THOUGHT_EOS)
    )
    assert inference.think(weights, silent, hidden) == [THOUGHT_EOS]
    endless = tiny.setup(backbone[1], barred_thoughts=(THOUGHT_EOS,))
    thought = inference.think(weights, endless, hidden)
    assert len(thought) == 5
    assert thought[-1] == THOUGHT_EOS
    logits = ts.thought_logits(weights, endless, hidden, thought)
    assert logits.argmax(dim=-1).tolist()[:4] == thought[:4]


@pytest.mark.parametrize("kind", KINDS)
def test_speculative_prefill_is_sequential_prefill(backbone, weights, kind):
    setup, kinds = talkative(backbone, kind=kind, chunk_size=2), set()
    with torch.no_grad():
        for query in queries(6):
            slow = inference.sequential_prefill(weights, setup, query)
            fast = inference.speculative_prefill(weights, setup, query)
            assert fast.thoughts == slow.thoughts
            torch.testing.assert_close(fast.state, slow.state, rtol=0, atol=1e-12)
            for found, expected in zip(fast.read, slow.read, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            full = [k for k, thought in slow.thoughts.items() if thought != [THOUGHT_EOS]]
            ends_full = bool(full) and full[-1] == slow.rounds - 1
            assert fast.rounds == len(full) + (not ends_full)
            kinds |= {thought == [THOUGHT_EOS] for thought in slow.thoughts.values()}
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("kind", "think_in_decode"), [("left_align", False), ("partial", True), ("absolute", False)]
)
def test_greedy_answers_are_the_most_likely_tokens(backbone, weights, kind, think_in_decode):
    setup = talkative(backbone, kind=kind, think_in_decode=think_in_decode)
    query = queries(1)[0]
    with torch.no_grad():
        answered = inference.answer_greedily(weights, setup, query, max_new_tokens=3)
        scored = inference.score(weights, setup, query, answered.tokens)
        assert scored.thoughts == answered.thoughts
        for n, value in enumerate(scored.log_probs):
            for token in (2, 14):
                other = [*answered.tokens[:n], token]
                below = inference.score(weights, setup, query, other).log_probs[n]
                assert below < value or token == answered.tokens[n]


def test_own_thoughts_given_as_gold_give_the_same_answer(backbone, weights):
    setup = talkative(backbone)
    query, answer = queries(1)[0], [12, 13, EOS]
    with torch.no_grad():
        scored = inference.score(weights, setup, query, answer)
        n = len(grid.gold_targets("left_align", 3, len(query), [], [], SEPARATOR, THOUGHT_EOS))
        steps = [scored.thoughts[k][:-1] for k in range(n)]
        said = [k for k in range(n) if steps[k]]
        places = [grid.end("left_align", 3, len(query), k) for k in said]
        row = ts.Row(query, [steps[k] for k in said], places, answer)
        found = ts.terms(weights, setup, row).answer
    assert said
    torch.testing.assert_close(-found, scored.log_probs, rtol=0, atol=1e-12)
