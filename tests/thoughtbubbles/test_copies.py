"""The copy-n control against loops, and against the plain decoder on repeated tokens."""

import pytest
import torch

from lightning_models import CopyLM, TransformerConfig, TransformerLM
from lightning_models.thoughtbubbles import CopyConfig
from tests.reference import thoughtbubbles as reference
from tests.thoughtbubbles.cases import V, enliven, rows_of

SIZES = {"vocab_size": V, "vocab_multiple": 1, "num_layers": 3, "dim": 8, "num_heads": 2}


def build(**changes):
    model = CopyLM(CopyConfig(**SIZES, block_size=6, **changes))
    model.configure_model()
    enliven(model.network)
    return model.eval()


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("copy_positions", ["fractional", "shared"])
@pytest.mark.parametrize("copies", [1, 2, 3, 5])
def test_loss_and_all_gradients_of_the_reference(copies, copy_positions):
    model = build(copies=copies, copy_positions=copy_positions)
    batch = rows_of([6, 4])
    slow = reference.CopyN(model.network.state_dict(), model.config)
    expected = 0.0
    for row, length in enumerate([6, 4]):
        log_prob = slow.log_probs(batch["tokens"][row, :length].tolist())
        expected = expected - log_prob[range(length), batch["targets"][row, :length]].sum()
    expected.backward()
    loss = model.loss(batch).terms["nll"].sum
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-9)
    for name, parameter in model.network.named_parameters():
        gradient = slow.weights[name].grad
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("copy_positions", ["fractional", "shared"])
def test_one_copy_is_the_plain_decoder_to_the_bit(copy_positions):
    models = []
    config = TransformerConfig(**SIZES, block_size=6, positions="rope")
    for make in (
        lambda: TransformerLM(config),
        lambda: CopyLM(CopyConfig(**SIZES, block_size=6, copies=1, copy_positions=copy_positions)),
    ):
        torch.manual_seed(3)
        models.append(make())
        models[-1].configure_model()
    plain, copying = models
    theirs = plain.network.state_dict()
    assert all(
        torch.equal(value, theirs[key]) for key, value in copying.network.state_dict().items()
    )
    for lively in (False, True):
        if lively:
            enliven(plain.network)
            enliven(copying.network)
        batch = rows_of([6, 4])
        assert torch.equal(copying.score(batch).log_prob, plain.score(batch).log_prob)
        assert torch.equal(copying.network(batch["tokens"]), plain.network(batch["tokens"]))
        assert copying.flops_per_token(6) == plain.flops_per_token(6)
