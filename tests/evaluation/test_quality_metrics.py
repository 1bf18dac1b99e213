"""Token entropy on samples made by hand, and MAUVE as its library computes it."""

import math

import pytest
import torch

from evaluation.load import Pretrained
from evaluation.quality.measures import mauve_scores, text_features, token_entropy

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([[7, 7, 7, 7]], 0.0),
        ([[1, 2, 3, 4]], math.log(4)),
        ([[5, 5, 9]], -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3)),
        ([[7, 7], [1, 2], [3, 3]], math.log(2) / 3),  # averaged over samples, not pooled
    ],
)
def test_entropy_of_token_frequencies_in_nats(samples, expected):
    assert token_entropy(samples) == pytest.approx(expected, abs=1e-12)


def test_features_are_the_last_states_of_each_text(tiny_gpt2):
    pytest.importorskip("mauve")
    model, words, folder = tiny_gpt2
    featurizer = Pretrained(str(folder), CPU, head="none", key="featurizer")
    texts = [["the thought"], [], ["memory", "state and memory"], ["a"], ["latent " * 100]]
    expected = []
    for text in texts:
        ids = [*words.encode(text[0]), words.eos_id, *words.encode(text[1])] if text[1:] else None
        ids = (words.encode(text[0]) if ids is None else ids) if text else []
        if ids:
            with torch.no_grad():
                out = model(torch.tensor([ids[:64]]), output_hidden_states=True)
            expected.append(out.hidden_states[-1][0, -1])
    for batch_size in (1, 3):
        found = text_features(featurizer, texts, batch_size)
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="every text is empty"):
        text_features(featurizer, [[], []])


def test_mauve_is_that_of_the_library(tiny_gpt2):
    mauve = pytest.importorskip("mauve")
    _, _, folder = tiny_gpt2
    words = ("thought", "reads", "latent", "memory", "state", "writes")
    human = [f"the {a} {b}" for a in words for b in words]
    written = [f"{a} {a} {b}" for a in words for b in words]
    featurizer = Pretrained(str(folder), CPU, head="none", key="featurizer")
    sides = [text_features(featurizer, [[text] for text in side]) for side in (human, written)]
    found = mauve_scores(*sides, seeds=2)
    library = mauve.compute_mauve(
        p_text=human, q_text=written, featurize_model_name=str(folder), verbose=False
    )
    assert found[0] == pytest.approx(library.mauve, abs=1e-6)
    assert len(found) == 2
    assert 0 < found[0] < 1
    assert mauve_scores(sides[0], sides[0], seeds=1)[0] == pytest.approx(1.0, abs=1e-6)
