"""The packed computation against the paper's 67 slots, and the graph through memory."""

import pytest
import torch
from torch.nn import functional as F

from lightning_models.thought_gestalt.memory import SentenceMemory
from lightning_models.thought_gestalt.packing import EOD, EOS, LEXICAL, pack
from tests.reference.thought_gestalt import Literal
from tests.thought_gestalt.cases import SLOTS, VARIANTS, build, streams

SHAPE = [[3, 1, 6, 2], [2, 5], [4, 4, 1, 1, 2, 3]]


def packed_losses(network, batch):
    steps, _ = pack(batch["tokens"], batch["lengths"], batch["is_last"], SLOTS)
    logits = network(steps) @ network.output_matrix.t()
    targets = torch.cat([step.targets for step in steps])
    losses = F.cross_entropy(logits, targets, reduction="none")
    places = torch.cat([step.source for step in steps]).tolist()
    most = batch["tokens"].shape[1]
    return {
        (place // (most * SLOTS), place // SLOTS % most, place % SLOTS): loss
        for place, target, loss in zip(places, targets.tolist(), losses, strict=True)
        if target >= 0
    }


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_losses_and_gradients_of_the_literal_computation(changes):
    network, batch = build(**changes), streams(SHAPE)
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    results = []
    sentences = (batch[key] for key in ("tokens", "lengths", "is_last"))
    for losses in (packed_losses(network, batch), Literal(network).losses(*sentences)):
        weighted = [(1 + slot) * loss for (_, _, slot), loss in sorted(losses.items())]
        total = torch.stack([w.reshape(()) for w in weighted]).sum()
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        results.append((sorted(losses), total, gradients))
    (mine, total, gradients), (theirs, expected, literal) = results
    assert mine == theirs
    torch.testing.assert_close(total, expected, atol=1e-6, rtol=1e-7)
    for name, ours, exact in zip(parameters, gradients, literal, strict=True):
        if exact is None:
            assert ours is None or not ours.any(), name
        else:
            torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5, msg=name)


def test_padding_and_finished_streams_are_never_computed():
    batch = streams(SHAPE)
    steps, order = pack(batch["tokens"], batch["lengths"], batch["is_last"], SLOTS)
    assert order.tolist() == [2, 0, 1]
    assert [step.packing.rows for step in steps] == [3, 3, 2, 2, 1, 1]
    assert sum(len(step.tokens) for step in steps) == batch["lengths"].sum()
    assert steps[0].packing.width == max(batch["lengths"][:, 0])


def test_targets_have_kinds_and_boundaries_have_their_slots():
    batch = streams([[2]])
    (step,), _ = pack(batch["tokens"], batch["lengths"], batch["is_last"], SLOTS)
    assert step.positions.tolist() == [0, 1, 2, SLOTS - 2, SLOTS - 1]
    assert step.targets.tolist() == [*step.tokens.tolist()[1:], -100]
    assert step.target_kind[:-1].tolist() == [LEXICAL, LEXICAL, EOD, EOS]
    assert step.content.tolist() == [False, True, True, False, False]


def reached(network, sentences):
    """The gradient that the last sentence's loss has for a token of the first sentence only."""
    batch = streams([[2] * sentences])
    first = int(batch["tokens"][0, 0, 1])
    batch["tokens"][:, 1:][batch["tokens"][:, 1:] == first] = (first + 1) % 37
    losses = packed_losses(network, batch)
    last = sum(loss for (_, t, _), loss in losses.items() if t == sentences - 1)
    (gradient,) = torch.autograd.grad(last, network.embedding.weight)
    return gradient[first].abs().sum().item()


@pytest.mark.parametrize(("memory", "expected"), [("differentiable", True), ("detached", False)])
def test_gradients_reach_a_sentence_that_memory_has_forgotten(memory, expected):
    """With M = 3, s_1 is evicted before sentence 5 (step M + 2) and still reached through s_2."""
    network = build(memory=memory, tie_head=False)
    assert (reached(network, network.config.memory_size + 2) > 0) is expected


def test_an_empty_memory_adds_nothing():
    """The first sentence is read as by a stack whose cross-attentions have nothing to say."""
    network, batch = build(), streams([[4], [2]])
    before = packed_losses(network, batch)
    with torch.no_grad():
        for block in network.blocks:
            if block.memory_attention is not None:
                block.memory_attention.gate.zero_()
    after = packed_losses(network, batch)
    assert all(torch.equal(before[key], after[key]) for key in before)
    later = streams([[4, 3]])
    changed = packed_losses(network, later)
    with torch.no_grad():
        network.blocks[1].memory_attention.gate.fill_(1.0)
    assert not torch.equal(changed[0, 1, 0], packed_losses(network, later)[0, 1, 0])


def test_dropouts_follow_their_share_and_spare_boundaries():
    network, batch = build(token_dropout=0.9, attention_dropout=0.0).train(), streams([[6] * 6] * 8)
    steps, _ = pack(batch["tokens"], batch["lengths"], batch["is_last"], SLOTS)
    memory = SentenceMemory([], 3, network.slots)
    network.position.weight.data.zero_()
    words = network._embed(steps[0], memory, 1.0)
    zero = ~words.any(dim=1)
    assert 0.7 < zero[steps[0].content].double().mean() <= 1.0
    assert not zero[~steps[0].content].any()
    assert network._embed(steps[0], memory, 0.0).any(dim=1).all()


def test_words_are_dropped_without_a_scale():
    network, batch = build(token_dropout=0.5, attention_dropout=0.0).train(), streams([[6] * 3] * 8)
    (step, *_), _ = pack(batch["tokens"], batch["lengths"], batch["is_last"], SLOTS)
    memory = SentenceMemory([], 3, network.slots)
    words, exact = (network._embed(step, memory, share) for share in (1.0, 0.0))
    kept = network.embedding(step.tokens).any(dim=1) & (words == exact).all(dim=1)
    assert 0.3 < kept[step.content].double().mean() < 0.7
    torch.testing.assert_close(words[~kept], network.position(step.positions[~kept]))


@pytest.mark.parametrize("layer", [1, 2])
def test_attention_dropout_reaches_both_attentions(layer):
    """Layer 1 looks within the sentence, layer 2 into memory."""
    network, batch = build(attention_dropout=0.5), streams([[5] * 4])
    block = network.blocks[layer - 1]
    attention = block.memory_attention if layer == 2 else block.attention
    still = packed_losses(network, batch)
    attention.train()
    assert packed_losses(network, batch) != still
    attention.dropout = 0.0
    assert packed_losses(network, batch) == still


def test_sentence_dropout_is_in_front_of_the_head():
    """At a rate near 1 nothing is left of the state, and its bias is what a deep head adds."""
    head = build(sentence_head_depth=2).sentence_head.train()
    head.layers[2].eval()
    x = torch.randn(5, 16, dtype=torch.float64)
    nothing = head(x, 1.0)
    assert nothing.any()
    torch.testing.assert_close(nothing, head.layers(torch.zeros_like(x)))
