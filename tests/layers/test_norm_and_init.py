"""Norms, and the first weights."""

import math

import pytest
import torch
from torch import nn

from lightning_models.layers import Block, DecoderConfig, OutputProjection, initialise, make_norm
from lightning_models.layers.blocks import embedding_scale

SIZES = {"vocab_size": 256, "block_size": 8, "num_layers": 8, "dim": 64, "num_heads": 4}


def config(**changes):
    return DecoderConfig(**{**SIZES, **changes})


@pytest.fixture
def x():
    return torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)) * 3 + 1


def test_layer_norm(x):
    norm = make_norm(config(norm_eps=0.1))
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 1, 64))
        norm.bias.copy_(torch.linspace(0, 2, 64))
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
    expected = expected * norm.weight.double() + norm.bias.double()
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_rms_norm(x):
    norm = make_norm(config(norm="rms", norm_eps=0.1))
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 1, 64))
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_only_a_layer_norm_with_biases_has_one():
    assert make_norm(config()).bias is not None
    assert make_norm(config(bias=False)).bias is None
    assert [name for name, _ in make_norm(config(norm="rms")).named_parameters()] == ["weight"]


def network(options):
    """Blocks and an embedding with weights far from any initial value, then initialised."""
    torch.manual_seed(0)
    settings = config(**options)
    model = nn.Module()
    model.blocks = nn.ModuleList(Block(settings) for _ in range(2))
    model.embedding = nn.Embedding(settings.padded_vocab_size, settings.dim)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                for parameter in layer.parameters():
                    parameter.fill_(9.0)
    initialise(model, settings)
    return model, settings


def spread(weights):
    return torch.cat([weight.flatten() for weight in weights]).square().mean().sqrt().item()


def matrices(model):
    """The weights of plain layers, and of those that write into the residual stream."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    plain = [layer.weight for layer in linear if not isinstance(layer, OutputProjection)]
    into_stream = [layer.weight for layer in linear if isinstance(layer, OutputProjection)]
    assert len(plain) == len(into_stream) == 4
    return plain, into_stream


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_gpt2(std):
    model, _ = network({"init_std": std})
    plain, into_stream = matrices(model)
    assert spread(plain) == pytest.approx(std, rel=0.02)
    assert spread([model.embedding.weight]) == pytest.approx(std, rel=0.02)
    assert spread(into_stream) == pytest.approx(std / math.sqrt(2 * 8), rel=0.02)


def test_ponderlm():
    model, settings = network({"init": "ponderlm"})
    plain, into_stream = matrices(model)
    std = math.sqrt(2 / (5 * 64))
    cut = 0.9866  # standard deviation of a standard normal cut at three
    assert spread(plain) == pytest.approx(std * cut, rel=0.01)
    assert spread([model.embedding.weight]) == pytest.approx(std * cut, rel=0.01)
    assert spread(into_stream) == pytest.approx(std * cut / math.sqrt(2 * 8), rel=0.01)
    for weights, widest in ((plain, 3 * std), (into_stream, 3 * std / 4)):
        largest = max(weight.abs().max().item() for weight in weights)
        assert 0.9 * widest < largest <= widest * (1 + 1e-6)
    scaled = model.embedding.weight * embedding_scale(settings)
    assert spread([scaled]) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("init", ["gpt2", "ponderlm"])
def test_biases_start_at_zero_and_norms_are_left_alone(init):
    model, settings = network({"init": init})
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert (parameter != 9).all(), name
    assert embedding_scale(settings) == (1.0 if init == "gpt2" else math.sqrt(160))
