"""Corpus-level averages: ragged batches, many of them, over several processes."""

import math

import pytest
import torch

from lightning_models.outputs import PERPLEXITY_NAMES, Ratio, StageMetrics, bits

BATCHES = [(17.25, 3, 11), (0.5, 1, 1), (1234.5678, 257, 700), (9.0, 0, 4), (3.0, 40, 90)]
"""Nats, tokens and bytes of ragged batches."""


def test_ratio_of_sums_not_mean_of_ratios():
    ratio = Ratio()
    for nats, tokens, _ in BATCHES:
        ratio.update(torch.tensor(nats, dtype=torch.float64), tokens)
    expected = math.fsum(batch[0] for batch in BATCHES) / sum(batch[1] for batch in BATCHES)
    assert ratio.compute().item() == torch.tensor(expected).item()
    assert ratio.compute().dtype == torch.float32
    assert ratio.compute().shape == ()


def test_tensors_are_summed():
    ratio = Ratio()
    ratio.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([2, 3]))
    assert ratio.compute() == 2.0


def test_a_million_small_sums_are_not_lost():
    """float32 sums stop growing at 2^24; these must not."""
    ratio = Ratio()
    ratio.update(torch.tensor(2.0**30), torch.tensor(2**24))
    for _ in range(100):
        ratio.update(torch.tensor(2.0**-10), torch.tensor(1))
    assert ratio.numerator.item() == 2.0**30 + 100 * 2.0**-10
    assert ratio.denominator.item() == 2**24 + 100


@pytest.mark.parametrize("value", [0.1, 2.0**24 + 1, 123_456_789, 1e-3])
def test_plain_numbers_are_taken_exactly(value):
    ratio = Ratio()
    ratio.update(torch.ones(()), value)
    assert ratio.denominator.item() == value


def test_inputs_with_gradients_leave_no_graph():
    ratio = Ratio()
    ratio.update(torch.ones((), requires_grad=True) * 2, torch.ones((), requires_grad=True) * 4)
    assert not ratio.numerator.requires_grad
    assert not ratio.denominator.requires_grad
    assert ratio.compute() == 0.5


@pytest.mark.parametrize("convert", ["to", "half", "bfloat16", "float"])
def test_a_model_in_half_precision_keeps_its_sums_in_float64(convert):
    """Precision bf16-true turns the whole LightningModule, metrics included, to bfloat16."""
    holder = torch.nn.ModuleDict({"metrics": StageMetrics()})
    converted = holder.to(torch.bfloat16) if convert == "to" else getattr(holder, convert)()
    metrics = converted["metrics"]
    for _ in range(1000):
        metrics.add(torch.tensor(3.0), 1, torch.tensor([2, 2]))
    assert metrics.per_token.numerator.dtype == torch.float64
    assert metrics.per_token.denominator.item() == 1000
    assert metrics.values("exact")["bpb"].item() == pytest.approx(0.75 / math.log(2))
    metrics.reset()
    assert metrics.per_token.numerator.dtype == torch.float64


@pytest.mark.parametrize("kind", PERPLEXITY_NAMES)
def test_perplexity_has_its_honest_name(kind):
    metrics = StageMetrics()
    for nats, tokens, num_bytes in BATCHES:
        metrics.add(torch.tensor(nats, dtype=torch.float64), tokens, torch.tensor([num_bytes]))
    values = metrics.values(kind)
    parts = {name for name in values if name.endswith("/token")}
    assert set(values) - parts == {"loss", "bpb", PERPLEXITY_NAMES[kind]}
    of = {"lower_bound": ("elbo", "nll", "kl"), "estimate": ("nll", "kl")}.get(kind, ())
    assert parts == {f"{name}/token" for name in of}
    total = math.fsum(batch[0] for batch in BATCHES)
    assert values["loss"].item() == pytest.approx(total / 301, rel=1e-7)
    assert values[PERPLEXITY_NAMES[kind]].item() == pytest.approx(math.exp(total / 301), rel=1e-6)
    assert values["bpb"].item() == pytest.approx(total / 806 / math.log(2), rel=1e-6)


def test_a_bound_has_its_parts():
    metrics = StageMetrics()
    for nats, divergence in ((7.0, 2.0), (9.0, 4.0)):
        metrics.add(torch.tensor(nats), 4, None, sequence_nats=torch.tensor(divergence))
    values = {name: value.item() for name, value in metrics.values("lower_bound").items()}
    assert values["elbo/token"] == -values["loss"] == -2.0
    assert (values["nll/token"], values["kl/token"]) == (1.25, 0.75)


def test_only_exact_likelihoods_are_called_perplexity():
    assert [kind for kind, name in PERPLEXITY_NAMES.items() if name == "ppl"] == ["exact"]
    assert len(set(PERPLEXITY_NAMES.values())) == 4


def test_bits_per_byte_only_where_bytes_are_known():
    metrics = StageMetrics()
    metrics.add(torch.tensor(4.0), 2, None)
    assert set(metrics.values("exact")) == {"loss", "ppl"}
    assert bits(math.log(2)) == 1.0


def test_bits_per_byte_count_all_targets_and_the_loss_those_that_are_reported():
    metrics = StageMetrics()
    for nats, tokens, num_bytes in BATCHES:
        reported, whole = torch.tensor([nats, 1.5 * nats], dtype=torch.float64)
        metrics.add(reported, tokens, torch.tensor([num_bytes]), whole)
    values, total = metrics.values("exact"), math.fsum(batch[0] for batch in BATCHES)
    assert values["loss"].item() == pytest.approx(total / 301, rel=1e-7)
    assert values["ppl"].item() == pytest.approx(math.exp(total / 301), rel=1e-6)
    assert values["bpb"].item() == pytest.approx(1.5 * total / 806 / math.log(2), rel=1e-6)


def test_reset_starts_again():
    metrics = StageMetrics()
    metrics.add(torch.tensor(4.0), 2, torch.tensor([1]))
    metrics.reset()
    metrics.add(torch.tensor(9.0), 3, None)
    values = metrics.values("exact")
    assert values["loss"] == 3.0
    assert "bpb" not in values
