"""The literal Coconut, iCoT and chain of thought."""

import math

import pytest
import torch

from tests.reference import chain, coconut, icot, qwen2
from tests.reference import tiny_thinking_states as tiny
from tests.reference.tiny_thinking_states import EOS


@pytest.fixture(scope="module")
def backbone():
    return tiny.backbone()


@pytest.mark.parametrize("steps", range(9))
def test_coconut_stages(steps):
    for stage, counts in enumerate([(0, 0), (1, 2), (2, 4), (3, 6), (steps, 6), (steps, 6)]):
        assert coconut.stage_counts(stage, steps, max_stage=3, c_thought=2) == counts
        latents = coconut.evaluation_latents(stage, steps, max_stage=3, c_thought=2)
        assert latents == min(2 * stage, 6)
        latents = coconut.evaluation_latents(stage, steps, 3, 2, pad_latent_to_max=False)
        assert latents == 2 * min(stage, 3, steps)
    found = coconut.stage_counts(4, steps, 3, 2, pad_latent_to_max=False)
    assert found == (steps, 2 * min(steps, 3))
    assert coconut.stage_counts(3, steps, 3, 2, pad_latent_to_max=False) == (3, 6)
    assert [coconut.stage_of(epoch, 3) for epoch in (0, 2, 3, 8, 9)] == [0, 0, 1, 2, 3]


def coconut_text(latents, markers=(17, 18), **options):
    left = coconut.remaining([[1, 2], [3]], 1, separator=[10])
    return coconut.text_of([0, 4], latents, left, [5, 6], [12, EOS], markers, **options)


def test_coconut_text_predicts_the_remaining_steps_and_the_answer():
    L, none = coconut.LATENT, -100
    pieces = [0, 4, 17, L, L, 18, 10, 3, 5, 6, 12]
    unscored = [none] * 5
    assert coconut_text(2) == (pieces, [*unscored, 10, 3, none, none, 12, EOS])
    scored = coconut_text(2, score_prefix=True)
    assert scored.labels == [*unscored, 10, 3, 5, 6, 12, EOS]
    plain = coconut_text(0, markers=None)
    assert plain.pieces == [0, 4, 10, 3, 5, 6, 12]
    assert plain == chain.cot_text([0, 4], [10, 3], [5, 6], [12, EOS], score_prefix=False)
    with pytest.raises(ValueError, match="2 latents"):
        coconut_text(2, markers=None)


def test_thoughts_are_the_states_in_front_of_them(backbone):
    weights, shape = backbone
    found = coconut.read(weights, shape, coconut_text(2).pieces)
    torch.testing.assert_close(found.inputs[3], found.last[2], rtol=0, atol=1e-12)
    torch.testing.assert_close(found.inputs[4], found.last[3], rtol=0, atol=1e-12)
    words = [0, 1, 2, *range(5, 11)]
    ids = [coconut_text(2).pieces[t] for t in words]
    torch.testing.assert_close(found.inputs[words], qwen2.embed(weights, ids))
    start = qwen2.causal_lm(weights, shape, [0, 4, 17])
    torch.testing.assert_close(found.logits[:3], start, rtol=0, atol=1e-12)


def test_coconut_backpropagates_through_all_thoughts(backbone):
    """A step of the weights changes the loss as the gradient says, thoughts included."""
    weights, shape = backbone
    text = coconut_text(2)
    names = [name for name in weights if name != "lm_head.weight"]
    loss = coconut.nll(weights, shape, [text])
    gradients = torch.autograd.grad(loss, [weights[name] for name in names])
    torch.manual_seed(2)
    steps = {name: 1e-5 * torch.randn_like(weights[name]) for name in names}
    with torch.no_grad():
        ahead = {**weights, **{name: weights[name] + steps[name] for name in names}}
        behind = {**weights, **{name: weights[name] - steps[name] for name in names}}
        change = coconut.nll(ahead, shape, [text]) - coconut.nll(behind, shape, [text])
    slope = sum(2 * (g * steps[name]).sum() for name, g in zip(names, gradients, strict=True))
    torch.testing.assert_close(change, slope, rtol=1e-6, atol=0)


def test_icot_removes_from_the_left():
    steps = [[1, 2], [3]]
    tokens = chain.chain_tokens(steps, [10, 11])
    assert tokens == [10, 11, 1, 2, 10, 11, 3]
    assert icot.left_chain(tokens, 0) == tokens
    assert icot.left_chain(tokens, 2, offset=1) == [2, 10, 11, 3]
    assert icot.left_chain(tokens, 7) == icot.left_chain(tokens, math.inf) == []
    assert icot.left_chain(tokens, 6, offset=99) == []
    assert icot.left_steps(steps, 1) == [[3]]
    assert icot.left_steps(steps, 5) == []


def test_icot_offsets_are_mostly_zero():
    odds = icot.offset_distribution()
    assert len(odds) == 100
    assert sum(odds) == pytest.approx(1)
    assert odds[0] == pytest.approx(0.9817, abs=1e-4)
    assert odds[3] / odds[2] == pytest.approx(math.exp(-4))
    assert icot.offset_distribution(math.inf)[:2] == [1, 0]
    short = icot.offset_distribution(0.1, size=3)
    assert short[-1] == pytest.approx(math.exp(-0.2))


def test_chain_of_thought_texts():
    text = chain.cot_text([0, 4], [10, 3], [5, 6], [12, EOS])
    assert text == ([0, 4, 10, 3, 5, 6, 12], [-100, 10, 3, 5, 6, 12, EOS])
    text = chain.no_cot_text([0, 4], [5, 6], [12, EOS])
    assert text == ([0, 4, 5, 6, 12], [-100, -100, -100, 12, EOS])
