"""Whether a target is what greedy decoding would choose: every method says so."""

import pytest
import torch
from methods import METHODS

from lightning_models.layers import recording
from lightning_models.output_layer import mixture_scores, token_scores

SCORING = [method for method in METHODS if method.format.__class__.__name__ != "Reasoning"]


def every_last_token(method, model):
    """One text once for each token of the vocabulary, which alone is its last target."""
    batch = {
        key: value[:1] if torch.is_tensor(value) and value.dim() else value
        for key, value in method.batch(rows=1, length=9).items()
    }
    size = model.config.vocab_size
    rows = {
        key: value.expand(size, *value.shape[1:]).clone()
        for key, value in batch.items()
        if torch.is_tensor(value) and value.dim()
    }
    places = (batch["targets"] >= 0).nonzero()
    place = tuple(places[-1, 1:].tolist())
    rows["targets"] = torch.full_like(rows["targets"], -100)
    rows["targets"][(slice(None), *place)] = torch.arange(size)
    if method.reads_windows:
        rows["context"] = torch.full((size,), place[0] + 1)
    return rows, place


@pytest.mark.parametrize("method", SCORING, ids=lambda method: method.name)
def test_the_greedy_target_is_the_likeliest_one(method):
    model = method.build().eval()
    rows, place = every_last_token(method, model)
    found = {}
    with torch.no_grad(), recording(greedy=lambda **values: found.update(values)):
        scores = model.score(rows)
    greedy = found["greedy"]
    assert greedy.shape == rows["targets"].shape
    assert greedy.sum() == 1
    best = scores.log_prob[(slice(None), *place)].argmax()
    assert greedy[(best, *place)]


def test_padding_of_the_vocabulary_is_never_chosen():
    h, weight = torch.eye(2)[:1], torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    targets = torch.tensor([1])
    assert token_scores(h, weight, targets, vocab_size=2).greedy.tolist() == [True]
    assert token_scores(h, weight, targets, vocab_size=3).greedy.tolist() == [False]


def test_no_targets_are_not_greedy():
    h, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    targets = torch.full((2, 3), -100)
    assert not token_scores(h, weight, targets, 5).greedy.any()


def test_mixtures_choose_by_the_mixed_distribution():
    torch.manual_seed(0)
    owner = torch.tensor([0, 0, 1, 2, 2, 2])
    h, weight, scores = torch.randn(6, 8) * 2, torch.randn(11, 8), torch.randn(6)
    table = torch.stack(
        [
            mixture_scores(h, weight, scores, owner, torch.full((3,), token)).log_prob
            for token in range(11)
        ]
    )
    best = table.argmax(dim=0)
    arguments = h, weight, scores, owner
    assert mixture_scores(*arguments, best, 11).greedy.tolist() == [True] * 3
    other = torch.tensor([(best[0] + 1) % 11, -100, best[2]])
    assert mixture_scores(*arguments, other, 11).greedy.tolist() == [False, False, True]
