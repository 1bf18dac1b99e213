"""Blocks and their parts, written out by hand in float64."""

import math

import pytest
import torch

from lightning_models.layers import (
    Block,
    DecoderConfig,
    FeedForward,
    SelfAttention,
    apply_rope,
    attend,
    rope_tables,
)
from lightning_models.transformer import TransformerConfig
from tests.layers.cases import key_biases, qkv, random_mask
from tests.reference.attention import attend_by_loops
from tests.reference.rope import rotate

SIZES = {"vocab_size": 8, "block_size": 8, "num_layers": 2, "dim": 12, "num_heads": 3}


def config(**changes):
    return DecoderConfig(**{**SIZES, **changes})


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def attention_by_hand(layer, x, positions=None, **options):
    """Three separate projections, heads of consecutive channels, loops."""
    x = x.double()
    q, k, v = (
        (x @ weight.double().t() + bias.double()).view(*x.shape[:2], 3, 4).transpose(1, 2)
        for weight, bias in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True)
    )
    if positions is not None:
        q, k = rotate(q, positions), rotate(k, positions)
    heads = attend_by_loops(q, k, v, **options)
    joined = heads.transpose(1, 2).reshape(x.shape)
    return joined @ layer.out.weight.double().t() + layer.out.bias.double()


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "rope"])
def test_self_attention(window, turned):
    layer = SelfAttention(config(window=window))
    x = torch.randn(2, 5, 12)
    positions = torch.arange(5) if turned else None
    extra = {"key_bias": key_biases(5).float(), "mask": random_mask((2, 1, 5, 5))}
    for options in ({}, extra):
        mine = layer(x, rope=rope_tables(positions, 4) if turned else None, **options)
        expected = attention_by_hand(layer, x, positions, causal=True, window=window, **options)
        assert (mine - expected).abs().max() < 2e-6


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("backend", ["math", "sdpa", "flex"])
def test_shared_heads_are_repeated_ones(backend, biased):
    q, k, v = (x.float() for x in qkv(6, 6, H=4))
    k, v = k[:, :2], v[:, :2]
    options = {"causal": True, "key_bias": key_biases(6).float() if biased else None}
    mine = attend(q, k, v, backend=backend, **options)
    repeated = (x[:, [0, 0, 1, 1]] for x in (k, v))  # neighbouring queries read the same head
    expected = attend(q, *repeated, backend="math", **options)
    assert (mine - expected).abs().max() < 1e-6


def test_rotation_of_some_channels():
    x = torch.randn(2, 3, 5, 12)
    mine = apply_rope(x, rope_tables(torch.arange(5), 4))
    assert torch.equal(mine[..., :4], apply_rope(x[..., :4], rope_tables(torch.arange(5), 4)))
    assert torch.equal(mine[..., 4:], x[..., 4:])


def test_attention_dropout_only_in_training():
    layer = SelfAttention(config(attention_dropout=0.5))
    x = torch.randn(2, 5, 12)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    expected = attention_by_hand(layer, x, causal=True)
    assert (layer(x) - expected).abs().max() < 2e-6


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("function", [gelu, gelu_tanh])
def test_feed_forward(function):
    layer = FeedForward(config(activation=function.__name__)).double()
    x = torch.randn(2, 5, 12).double() * 3
    hidden = function(x @ layer.up.weight.t() + layer.up.bias)
    expected = hidden @ layer.down.weight.t() + layer.down.bias
    torch.testing.assert_close(layer(x), expected)


def test_swiglu_gates_with_the_first_half():
    layer = FeedForward(config(activation="swiglu", bias=False, ffn_dim=20)).double()
    x = torch.randn(2, 5, 12).double()
    gate, value = (x @ weight.t() for weight in layer.up.weight.split(20))
    expected = (gate / (1 + (-gate).exp()) * value) @ layer.down.weight.t()
    torch.testing.assert_close(layer(x), expected)
    assert layer.up.bias is None
    assert layer.down.bias is None


def test_the_block_adds_to_an_unnormed_stream():
    block = Block(config())
    x = torch.randn(2, 5, 12) * 4 + 1
    middle = x + block.attention(block.attention_norm(x))
    expected = middle + block.feed_forward(block.feed_forward_norm(middle))
    torch.testing.assert_close(block(x), expected)


def test_a_parallel_block_reads_one_stream():
    block = Block(TransformerConfig(**SIZES, parallel_residual=True))
    x = torch.randn(2, 5, 12) * 4 + 1
    both = block.attention(block.attention_norm(x)) + block.feed_forward(block.feed_forward_norm(x))
    torch.testing.assert_close(block(x), x + both)


def test_block_dropout_is_on_what_is_added():
    block = Block(config(dropout=0.9))
    x = torch.full((4, 5, 12), 7.0)
    untouched = (block(x) == x).float().mean()
    assert 0.7 < untouched < 0.92  # 0.81 expected: both additions dropped
    block.eval()
    assert (block(x) != x).all()
