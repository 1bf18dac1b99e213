"""Scores of whole documents, and what they cost."""

import weakref

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.formats import marked_documents
from tests.thought_gestalt.cases import VARIANTS, gestalt, streams

SHAPE = [[3, 1, 6, 2], [2, 5], [4, 4, 1, 1, 2, 3]]


def test_a_batch_of_filling_rows_only():
    model, batch = gestalt(), streams([[2], [3]])
    batch["lengths"].zero_()
    batch["targets"].fill_(-100)
    batch["lexical"].zero_()
    scores = model.score(batch)
    assert not scores.log_prob.any()
    assert scores.reported(batch) == (0, 0)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("sentence", "slot"), [(0, 1), (1, 3), (2, 0)], ids=str)
def test_a_word_changes_nothing_before_it_and_all_sentences_behind_it(changes, sentence, slot):
    """Slot 0 is BOS: where a sentence vector takes its place, its embedding is not read."""
    model, batch = gestalt(**changes), streams([[4, 3, 5, 2]])
    changed = {key: value.clone() for key, value in batch.items()}
    changed["tokens"][0, sentence, slot] = (changed["tokens"][0, sentence, slot] + 1) % 37
    difference = (model.score(batch).log_prob != model.score(changed).log_prob)[0]
    real = batch["targets"][0] >= 0
    assert not difference[:sentence].any()
    assert not difference[sentence, :slot].any()
    seeded = slot == 0 and model.config.context_seeding and model.config.memory != "none"
    assert difference[sentence, slot:].any() != seeded
    later = difference[sentence + 1 :]
    if model.config.memory == "none" or seeded:
        assert not later.any()
    else:
        assert (later.any(dim=1) == real[sentence + 1 :].any(dim=1)).all()


def test_entropies_are_those_of_the_distributions():
    model, batch, found = gestalt(), streams(SHAPE), []
    model.recorded(batch, entropy=lambda entropy: found.append(entropy))
    (entropy,) = found
    assert torch.equal(entropy.isnan(), ~batch["mask"])
    steps = model._steps(batch)
    logits = model.network(steps) @ model.network.output_matrix.t()
    expected = torch.distributions.Categorical(logits=logits).entropy()
    source = torch.cat([step.source for step in steps])
    torch.testing.assert_close(entropy.flatten()[source], expected.float())


def test_states_of_a_document_are_not_held():
    model, alive, most = gestalt(), [], 0

    def consume(step, h):
        nonlocal most
        alive.append(weakref.ref(h))
        most = max(most, sum(ref() is not None for ref in alive))

    with torch.no_grad():
        for _ in model.network.run(model._steps(streams([[5] * 20])), (), consume):
            pass
    assert len(alive) == 20
    assert most == 1


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("sentences", [1, 3, 9])
def test_flops_are_those_that_torch_counts(changes, sentences):
    """Sentences of 27 slots, the last one with EOD: what the formula takes for the average."""
    model = gestalt(block_size=30, attention_backend="math", **changes)
    config = model.config
    batch = marked_documents([[25] * (sentences - 1) + [24]], 37, 40, 30)
    with FlopCounterMode(display=False) as counter:
        model.score(batch)
    hidden = 0.0  # keys after the query, which the math kernel counts
    for block in model.network.layers:
        for t in range(sentences * (block.attention is not None)):
            rows = 27 + min(t, config.memory_size) * (config.memory == "in_context")
            hidden += 4 * config.dim * rows * (rows - 1) / 2
    # once a batch, and too little to share out
    positions = 2 * config.memory_size * config.dim**2 * len(model.network.readers)
    slots = 27 * sentences
    unscored = sentences * 2 * model.network.output_matrix.numel()  # EOS has no logits
    expected = counter.get_total_flops() - hidden - positions + unscored
    assert model.flops_per_token(slots) * slots == pytest.approx(expected, rel=1e-12)


def test_flops_grow_until_memory_is_full():
    model = gestalt(block_size=67)
    costs = [model.flops_per_token(slots) for slots in (10, 27, 28, 54, 108, 270, 27000, 27000000)]
    assert costs[0] == costs[1], "less than a sentence costs like one"
    assert costs[1:] == sorted(set(costs[1:]))
    assert costs[-1] == pytest.approx(costs[-2], rel=1e-3)
    sentence_local = gestalt(block_size=67, memory="none")
    assert sentence_local.flops_per_token(27) == sentence_local.flops_per_token(270)


def test_recomputation_is_counted():
    plain, again = gestalt(), gestalt(checkpoint_sentences=True)
    assert plain.flops_per_token(100) == again.flops_per_token(100)
    assert plain.flops_per_token(100, training=True) == 3 * plain.flops_per_token(100)
    ratio = again.flops_per_token(100, training=True) / plain.flops_per_token(100, training=True)
    assert 4 / 3 < ratio < 2
