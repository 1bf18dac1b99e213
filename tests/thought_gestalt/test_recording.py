"""What analyses get: the weights of memory, sentence vectors and losses by sentence step."""

import pytest
import torch

from lightning_models.layers import recording
from tests.thought_gestalt.cases import gestalt, streams

SHAPE = [[3, 1, 6, 2, 4], [2, 5], [4, 4, 1, 1]]
SIZE, WIDTH = 3, 16


def memory_attention(model, batch):
    """Everything recorded as ``memory_attention`` while the batch is scored."""
    found = []
    model.recorded(batch, memory_attention=lambda **values: found.append(values))
    return found


def test_memory_is_read_by_every_second_layer_once_there_is_any():
    model = gestalt()
    found = memory_attention(model, streams(SHAPE))
    assert [values["layer"] for values in found] == [2, 4] * 4
    for index, values in enumerate(found):
        step = 1 + index // 2
        slots = sum(len(row) > step and row[step] + 2 for row in SHAPE)
        slots += sum(len(row) == step + 1 for row in SHAPE[::2])  # EOD
        assert values["weights"].shape == (slots, min(step, SIZE))
        torch.testing.assert_close(values["weights"].sum(dim=1), torch.ones(slots).double())
        gate = model.network.blocks[values["layer"] - 1].memory_attention.gate
        assert torch.equal(values["gate"], gate[0])


def test_weights_are_those_of_the_memory_that_is_read():
    """Values that name their slot: what is read is the weights themselves."""
    model = gestalt(num_heads=1, memory_size=2, layer_type="parallel")
    layer = model.network.blocks[1].memory_attention
    names = torch.eye(2, WIDTH, dtype=torch.float64)
    original, read = layer.forward, []

    def forward(x, packing, keys, values, *rest):
        weights = original(x, packing, keys, names[: keys.shape[1]].expand_as(values), *rest)
        read.append(weights[:, : keys.shape[1]])
        return original(x, packing, keys, values, *rest)

    layer.forward = forward
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(WIDTH))
        layer.out.bias.zero_()
        layer.gate.fill_(1.0)
    found = memory_attention(model, streams(SHAPE))
    packed = [values["weights"] for values in found if values["layer"] == 2]
    assert len(read) == 4
    for mine, expected in zip(packed[::2], read, strict=True):
        torch.testing.assert_close(mine, expected)


def sentences(model, batch):
    """What is recorded as ``sentences`` in the loss."""
    found = []
    output = model.recorded_loss(batch, sentences=lambda **values: found.append(values))
    (values,) = found
    return output, values["vectors"], values["nll"]


def test_sentences_have_vectors_and_losses():
    model, batch = gestalt(), streams(SHAPE)
    output, vectors, nll = sentences(model, batch)
    assert [len(vector) for vector in vectors] == [3, 3, 2, 2, 1]
    assert {vector.shape[1] for vector in vectors} == {WIDTH}
    by_step = -model.score(batch).log_prob.sum(dim=(0, 2))
    torch.testing.assert_close(torch.stack(nll), by_step.detach())
    torch.testing.assert_close(torch.stack(nll).sum(), output.terms["nll"].sum)


@pytest.mark.parametrize(("memory", "connected"), [("differentiable", True), ("detached", False)])
def test_later_losses_have_gradients_for_earlier_vectors(memory, connected):
    _, vectors, nll = sentences(gestalt(memory=memory), streams(SHAPE))
    (gradient,) = torch.autograd.grad(nll[4], vectors[0], allow_unused=True, retain_graph=True)
    assert (gradient is not None and bool(gradient.any())) is connected
    (own,) = torch.autograd.grad(nll[0], vectors[0], allow_unused=True)
    assert own is None
    assert vectors[0].requires_grad


def test_without_memory_there_are_no_vectors():
    _, vectors, nll = sentences(gestalt(memory="none"), streams(SHAPE))
    assert vectors == []
    assert len(nll) == 5


def test_nothing_is_recorded_unasked():
    model, batch = gestalt(), streams(SHAPE)
    with recording(entropy=lambda **_: None):
        plain = model.loss(batch).terms["nll"].sum
    torch.testing.assert_close(plain, sentences(model, batch)[0].terms["nll"].sum)
