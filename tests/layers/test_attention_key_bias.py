"""The bias per key, carried by appended channels instead of a mask of floats."""

import math

import pytest
import torch

from lightning_models.layers import attend
from lightning_models.layers.attention import append_bias_channels
from tests.layers.cases import key_biases, largest_error, qkv
from tests.layers.cases import values_and_gradients as run
from tests.reference.attention import attend_by_loops

TWO_CHANNELS = 2**-16  # relative error of a value rounded to bfloat16 plus its rounded rest
ONE_CHANNEL = 2**-8  # of the rounded value alone


def carried(key_bias, dtype, C):
    """The bias that the appended channels really add, in float64."""
    q, k, v = qkv(1, key_bias.shape[1], C=C, dtype=dtype)
    wide_q, wide_k, _ = append_bias_channels(q, k, v, key_bias)
    product = wide_q[..., C:].double() @ wide_k[..., C:].double().transpose(-1, -2)
    return product[:, 0, 0] / math.sqrt(C)


@pytest.mark.parametrize("channels", [1, 6, 7, 8, 14, 15, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_widths_are_multiples_of_eight_and_inputs_are_kept(channels, dtype):
    q, k, v = qkv(3, 5, C=channels, dtype=dtype)
    widened = append_bias_channels(q, k, v, key_biases(5))
    for before, after in zip((q, k, v), widened, strict=True):
        assert after.dtype == dtype
        assert after.shape[-1] % 8 == 0
        assert after.shape[-1] < channels + 10
        assert torch.equal(after[..., :channels], before)
    assert (widened[2][..., channels:] == 0).all()


@pytest.mark.parametrize(("low", "high"), [(-1.0, 0.0), (-20.0, 0.0), (-40.0, -20.0), (-1e4, 1e4)])
@pytest.mark.parametrize("channels", [16, 64])
def test_the_carried_bias(low, high, channels):
    bias = key_biases(500, low=low, high=high)

    def worst(mine):
        return ((mine - bias).abs() / bias.abs()).max().item()

    assert worst(carried(bias, torch.float64, channels)) < 1e-15
    assert worst(carried(bias, torch.float32, channels)) < 2e-7
    assert worst(carried(bias, torch.bfloat16, channels)) < TWO_CHANNELS
    one = (bias * math.sqrt(channels)).bfloat16().double() / math.sqrt(channels)
    assert 100 * TWO_CHANNELS < worst(one) < ONE_CHANNEL


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("low", "high"), [(-2.0, 0.0), (-40.0, -20.0), (-40.0, 0.0), (-3e3, 3e3)])
def test_values_and_gradients_equal_those_of_an_explicit_bias(dtype, causal, low, high):
    inputs = [*qkv(16, 16, C=16, dtype=dtype), key_biases(16, low=low, high=high).to(dtype)]

    def function(backend):
        return lambda q, k, v, b: attend(q, k, v, key_bias=b, causal=causal, backend=backend)

    expected = run(function("math"), *[x.double() for x in inputs])
    size = max(1.0, -low) if dtype == torch.float32 else 1.0
    bound = 1e-11 if dtype == torch.float64 else 3e-6 * size
    assert largest_error(run(function("sdpa"), *inputs), expected) < bound


def close_biases(C):
    """Biases near -40 that differ by less than one bfloat16 channel resolves; zero queries."""
    bias = -40 + torch.linspace(0, 0.9, 16, dtype=torch.float64).repeat(2, 1)
    q, k, _ = qkv(16, 16, C=C, dtype=torch.bfloat16)
    v = torch.eye(16, C, dtype=torch.bfloat16).expand(2, 2, 16, C)  # the output is the weights
    return torch.zeros_like(q), k, v, bias


def relative(mine, expected):
    return [
        ((m.double() - e).norm() / e.norm()).item() for m, e in zip(mine, expected, strict=True)
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("channels", [16, 64])
def test_bfloat16_needs_and_has_two_channels(causal, channels):
    q, k, v, bias = close_biases(channels)
    wide = [x.double() for x in (q, k, v)]

    def kernel(backend):
        return lambda b, v, q, k: attend(q, k, v, key_bias=b, causal=causal, backend=backend)

    def of(backend, bias, q, k, v):
        out, bias_gradient, v_gradient, _, _ = run(kernel(backend), bias, v, q, k)
        return out, bias_gradient, v_gradient

    expected = of("math", bias, *wide)
    one_channel = (bias * math.sqrt(channels)).bfloat16().double() / math.sqrt(channels)
    bound = 6e-3  # bfloat16 rounds weights and outputs, to 2^-8 at most
    assert max(relative(of("sdpa", bias.float(), q, k, v), expected)) < bound
    assert min(relative(of("math", one_channel, *wide), expected)) > 2 * bound


@pytest.mark.parametrize(("low", "high"), [(-4.0, 0.0), (-20.0, 0.0), (-40.0, -20.0)])
def test_bfloat16_values_and_gradients(low, high):
    """Against float64 on the same rounded inputs, the loss of precision is bfloat16's own."""
    inputs = [*qkv(32, 32, C=32, dtype=torch.bfloat16), key_biases(32, low=low, high=high).float()]

    def function(backend):
        return lambda q, k, v, b: attend(q, k, v, key_bias=b, causal=True, backend=backend)

    expected = run(function("math"), *[x.double() for x in inputs])
    assert max(relative(run(function("sdpa"), *inputs), expected)) < 1.2e-2


def test_float32_inputs_under_autocast_keep_both_channels():
    """Autocast turns the kernel's inputs to bfloat16, however wide queries and keys came in."""
    q, k, v, bias = close_biases(64)
    expected = attend(q.double(), k.double(), v.double(), key_bias=bias, backend="math")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = attend(q.float(), k.float(), v.float(), key_bias=bias.float())
    assert max(relative([mine], [expected])) < 6e-3


def test_a_key_of_very_low_bias_is_as_good_as_masked():
    q, k, v = qkv(5, 5, dtype=torch.float32)
    bias = torch.zeros(2, 5)
    bias[:, 2] = -1e4
    mask = torch.ones(5, dtype=torch.bool)
    mask[2] = False
    expected = attend_by_loops(q, k, v, mask=mask)
    for dtype in (torch.float32, torch.bfloat16):
        mine = attend(q.to(dtype), k.to(dtype), v.to(dtype), key_bias=bias)
        assert mine.isfinite().all()
        assert largest_error([mine], [expected]) < (1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_a_constant_bias_changes_nothing_and_gets_no_gradient(backend):
    inputs = qkv(6, 6)
    plain = attend(*inputs, causal=True)
    bias = torch.full((2, 6), -7.0, dtype=torch.float64)
    out, gradient = run(lambda b: attend(*inputs, key_bias=b, causal=True, backend=backend), bias)
    torch.testing.assert_close(out, plain)
    assert gradient.sum(-1).abs().max() < 1e-12
    assert gradient.abs().max() > 1e-3
