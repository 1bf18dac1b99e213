"""The chunked expected embedding against the formula in one line."""

import pytest
import torch

from lightning_models import output_layer
from lightning_models.ponderlm.baselines.simple import expected_embedding


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", 3)


def parts(shape=(2, 4), words=9, dim=5, dtype=torch.float64):
    """States and both matrices, with gradients."""
    generator = torch.Generator().manual_seed(0)
    sizes = (*shape, dim), (words, dim), (words, dim)
    drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [x.to(dtype).requires_grad_() for x in drawn]


def naive(h, output_matrix, input_matrix):
    return (h @ output_matrix.t()).softmax(dim=-1) @ input_matrix


@pytest.mark.parametrize("shape", [(2, 4), (1,), (7,), (0,)])
def test_value_and_gradients(shape):
    mine, theirs = parts(shape), parts(shape)
    out, expected = expected_embedding(*mine), naive(*theirs)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    (out * torch.arange(5.0)).sum().backward()
    (expected * torch.arange(5.0)).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=1e-12)


def test_autocast_multiplies_in_half_precision_and_keeps_gradients_whole():
    mine, theirs = parts(dtype=torch.float32), parts(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = expected_embedding(*mine)
    assert out.dtype == torch.bfloat16
    expected = naive(*theirs)
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)
    with torch.autocast("cpu", torch.bfloat16):  # whatever is around the backward pass
        out.float().square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() < 0.03 * b.grad.norm()


def test_words_that_fill_up_the_vocabulary_take_part():
    """They have a share of the loss's probability too."""
    h, output_matrix, input_matrix = parts()
    with torch.no_grad():
        output_matrix[-1] = 0.0
        all_words = expected_embedding(h, output_matrix, input_matrix)
        without = expected_embedding(h, output_matrix[:-1], input_matrix[:-1])
        share = (h @ output_matrix.t()).softmax(dim=-1)[..., -1:]
        torch.testing.assert_close(all_words, (1 - share) * without + share * input_matrix[-1])
