"""The literal Qwen2 is that of ``transformers``."""

import math

import pytest
import torch
from torch.nn import functional as F

from tests.reference import qwen2
from tests.reference import tiny_thinking_states as tiny
from tests.reference.double import in_double


@pytest.fixture
def double():
    from transformers.models.qwen2 import modeling_qwen2

    with in_double(modeling_qwen2):
        yield


@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1}, {"head_dim": 6}]
)
def test_qwen2_is_that_of_transformers(double, options):
    model = tiny.transformers_model(**options)
    weights, shape = qwen2.leaves(model.state_dict()), qwen2.shape_of(model.config)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    logits = model(torch.tensor([tokens])).logits[0]
    found = qwen2.causal_lm(weights, shape, tokens)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-10)
    mixed = torch.randn_like(logits)
    (logits * mixed).sum().backward()
    (found * mixed).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name].grad, parameter.grad, rtol=0, atol=1e-10)


def test_label_log_probs_are_minus_cross_entropy():
    logits, labels = torch.randn(4, 7, dtype=torch.float64) * 9, [3, -100, 0, 6]
    expected = -F.cross_entropy(logits, torch.tensor(labels), reduction="none")
    found = qwen2.label_log_probs(logits, labels)
    torch.testing.assert_close(found, expected[[0, 2, 3]])
    barred = qwen2.label_log_probs(qwen2.bar(logits, [6]), labels)
    torch.testing.assert_close(barred[0], F.log_softmax(logits[0, :6], dim=0)[3])
    assert barred[2] == -math.inf
