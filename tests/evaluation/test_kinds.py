"""A number is named by the kind of likelihood it comes from."""

import math

import pytest
import torch

from datamodules import LocalText
from lightning_models import Scores, TransformerLM
from lightning_models.runtime import gradients_on, ordinary


class BoundLM(TransformerLM):
    """A bound: every sequence costs half a nat more than its tokens."""

    likelihood = "lower_bound"

    def score(self, batch):
        scores = super().score(batch)
        term = torch.full_like(scores.sequence_term, -0.5)
        return Scores(scores.log_prob, term, scores.num_targets, self.likelihood)


class EstimateLM(BoundLM):
    likelihood = "estimate"


class NoncausalLM(BoundLM):
    likelihood = "noncausal"
    causal = False


class GradientLM(TransformerLM):
    """Scores with a backward pass, as inference by gradient does."""

    def score(self, batch):
        with gradients_on():
            shift = torch.zeros((), requires_grad=True)
            loss = ((self.network(ordinary(batch)["tokens"]) + shift) ** 2).mean()
            (gradient,) = torch.autograd.grad(loss, shift)
        assert gradient.item() != 0
        return super().score(batch)


KINDS = {
    "ppl_bound": BoundLM,
    "ppl_estimate": EstimateLM,
    "ppl_noncausal": NoncausalLM,
}


@pytest.fixture
def score(corpus, train_checkpoint, reports, tmp_path):
    def run(kind, *options):
        path = train_checkpoint(tmp_path / "kind.ckpt", LocalText(**corpus), kind)
        return reports("perplexity", "--ckpt", path, "--packages", __name__, *options)

    return run


@pytest.mark.parametrize("key", KINDS)
def test_only_an_exact_likelihood_is_called_perplexity(score, key):
    result, table = score(KINDS[key])
    assert result["likelihood"] == KINDS[key].likelihood
    assert result["causal"] is (KINDS[key] is not NoncausalLM)
    assert "perplexity" not in result
    assert "perplexity" not in table
    assert sum(name.startswith("ppl") for name in result) == 1
    assert result[key] == pytest.approx(math.exp(result["nats_per_token"]))
    assert key.replace("_", " ") in table


@pytest.mark.parametrize("key", ["ppl_bound", "ppl_estimate"])
def test_after_prefixes_bounds_and_estimates_stay_what_they_are(score, key):
    result, table = score(KINDS[key], "--mode", "autoregressive", "--positions", 40)
    assert (result["likelihood"], result["causal"]) == (KINDS[key].likelihood, True)
    assert result[key] == pytest.approx(math.exp(result["nats_per_token"]))
    assert "perplexity" not in result
    # half a nat of a window belongs to no target of it
    assert result["blockwise"] is result["difference"] is None
    assert table.count("none (a part belongs to whole windows)") == 2
    assert "difference             unknown" not in table


def test_sequence_terms_are_counted_once_a_window(score):
    exact, _ = score(TransformerLM)
    bound, _ = score(BoundLM)
    windows = math.ceil(exact["tokens"] / 32)
    assert windows % bound["settings"]["batch_size"]  # rows without targets fill the last batch
    extra = (bound["nats_per_token"] - exact["nats_per_token"]) * exact["tokens"]
    assert extra == pytest.approx(0.5 * windows, rel=1e-6)


def test_a_method_may_run_backward_passes(score):
    expected, _ = score(TransformerLM)
    result, _ = score(GradientLM)
    assert result["nats_per_token"] == expected["nats_per_token"]
