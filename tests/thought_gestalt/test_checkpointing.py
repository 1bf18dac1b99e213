"""Sentence steps that are computed again in the backward pass."""

import pytest
import torch

from lightning_models.layers import recording
from tests.formats import marked_documents
from tests.thought_gestalt.cases import VARIANTS, gestalt, streams

SHAPE = [[3, 1, 6, 2], [2, 5], [4, 4, 1, 1, 2, 3]]
DROPOUTS = {"dropout": 0.1, "token_dropout": 0.3, "sentence_dropout": 0.3, "warm_in": (2, 4)}


def objective(model, batch):
    term = model.loss(batch).terms["nll"]
    return term.sum / term.normaliser


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_gradients_are_the_same(changes):
    """Dropout included: what is computed again draws the same, and reads the same memory."""
    batch, results = streams(SHAPE), []
    for checkpointed in (False, True):
        model = gestalt(checkpoint_sentences=checkpointed, **DROPOUTS, **changes).train()
        torch.manual_seed(3)
        value = objective(model, batch)
        trained = [p for p in model.network.parameters() if p.requires_grad]
        results.append([value, *torch.autograd.grad(value, trained)])
        assert model.sentence_steps == 6
    for plain, again in zip(*results, strict=True):
        torch.testing.assert_close(again, plain, atol=1e-10, rtol=1e-10)


def kept_bytes(words, sentences, **changes):
    """What autograd keeps of a training batch between its forward and its backward pass."""
    sizes = {"block_size": 67, "attention_backend": "math"}
    model = gestalt(**sizes, **changes).train()
    batch = marked_documents([[words] * sentences] * 2, 37, 40, 67)
    own = {p.untyped_storage().data_ptr() for p in model.network.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = objective(model, batch)
    assert value.requires_grad
    return sum(storages.values())


def test_what_is_kept_grows_with_sentences_and_not_with_tokens():
    checkpointed = {"checkpoint_sentences": True}
    assert kept_bytes(60, 4, **checkpointed) == kept_bytes(6, 4, **checkpointed)
    few, more, most = (kept_bytes(6, number, **checkpointed) for number in (4, 8, 12))
    assert most - more == pytest.approx(more - few, rel=0.2)
    assert kept_bytes(60, 4) > 5 * kept_bytes(6, 4) > 25 * few


def test_what_is_recorded_is_computed_once():
    model, batch, layers = gestalt(checkpoint_sentences=True).train(), streams(SHAPE), []
    with recording(memory_attention=lambda layer, **_: layers.append(layer)):
        objective(model, batch).backward()
    assert layers == [2, 4] * 5
    assert model.network.recomputes
    with torch.no_grad():
        assert not model.network.recomputes
