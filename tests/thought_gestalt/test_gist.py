"""GPT-2 with gist masking against a loop over tokens, and its decoding against its scores."""

import pytest
import torch

from lightning_models import TransformerConfig, TransformerLM
from lightning_models.thought_gestalt.baselines import GistConfig, GistLM, gist_mask
from tests.reference.gist import LiteralGist, visible

VOCAB, LENGTH = 20, 24
BOS, EOS, EOD = 17, 18, 19


def build(kind=GistLM, config=GistConfig, **changes):
    """A model in evaluation mode whose biases and norms are random too."""
    sizes = {"vocab_size": VOCAB, "block_size": LENGTH, "num_layers": 3, "dim": 16, "num_heads": 2}
    torch.manual_seed(0)
    model = kind(config(**{**sizes, **changes}))
    model.configure_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def window(rows=3, seed=0):
    """Marked sentences, cut anywhere; the rows' sentences differ in length."""
    generator = torch.Generator().manual_seed(seed)
    stream = []
    while len(stream) <= rows * LENGTH:
        count = int(torch.randint(1, 7, (), generator=generator))
        words = torch.randint(0, 17, (count,), generator=generator).tolist()
        stream += [BOS, *words, *([EOD] if count == 3 else []), EOS]
    tokens = torch.tensor(stream[: rows * LENGTH]).view(rows, LENGTH)
    targets = torch.tensor(stream[1 : rows * LENGTH + 1]).view(rows, LENGTH)
    return {"tokens": tokens, "targets": targets}


def all_log_probs(model, tokens):
    with torch.no_grad():
        return (model.network(tokens) @ model.network.output_matrix.t()).log_softmax(-1)


def test_own_sentence_and_earlier_ends():
    tokens = [5, EOS, BOS, 1, EOD, EOS, BOS, 2, 3]
    (mask,) = gist_mask(torch.tensor([tokens]) == EOS, torch.arange(len(tokens)))[0]
    seen = [row.nonzero()[:, 0].tolist() for row in mask]
    assert seen[0] == [0]
    assert seen[1] == [0, 1]
    assert seen[4] == [1, 2, 3, 4]
    assert seen[8] == [1, 5, 6, 7, 8]
    assert seen == [visible(tokens, place, EOS) for place in range(len(tokens))]


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_losses_and_gradients_of_the_loop_over_tokens(backend):
    model, batch = build(attention_backend=backend).double(), window()
    parameters = list(model.network.parameters())
    output = model.loss(batch)
    assert output.terms["nll"].normaliser == batch["targets"].numel()
    literal = LiteralGist(model.network, EOS)
    rows = zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True)
    expected = torch.stack([literal.losses(*row) for row in rows])
    torch.testing.assert_close(output.terms["nll"].sum.double(), expected.sum())
    torch.testing.assert_close(-model.score(batch).log_prob.double(), expected, rtol=1e-6, atol=0)
    mine = torch.autograd.grad(output.terms["nll"].sum, parameters)
    theirs = torch.autograd.grad(expected.sum(), parameters)
    for ours, exact in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


def test_without_ends_it_is_the_plain_decoder():
    gist, plain = build(), build(TransformerLM, TransformerConfig)
    tokens = torch.randint(0, 17, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(all_log_probs(gist, tokens), all_log_probs(plain, tokens))
    tokens[:, 5] = EOS
    assert not torch.allclose(all_log_probs(gist, tokens), all_log_probs(plain, tokens))
    assert gist.flops_per_token(LENGTH) == plain.flops_per_token(LENGTH)
