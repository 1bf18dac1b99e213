"""attend() and its kernels against attention written as loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_models.layers import attend
from tests.layers.cases import CASES, key_biases, largest_error, qkv, random_mask
from tests.layers.cases import values_and_gradients as run
from tests.reference.attention import attend_by_loops

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CPU_BACKENDS = ("math", "sdpa", "flex")
B, H, T, N = 2, 3, 4, 5
MASK_SHAPES = [
    (N,),
    (T, N),
    (1, N),
    (1, T, N),
    (H, T, N),
    (H, 1, 1),
    (B, 1, 1, N),
    (B, 1, T, N),
    (B, 1, T, 1),
    (1, H, 1, N),
    (B, H, 1, 1),
    (B, H, T, N),
]


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "key_bias"])
def test_values_and_gradients_are_those_of_the_loops(case, backend, biased):
    num_queries, num_keys, options = case
    inputs = qkv(num_queries, num_keys)
    if biased:
        inputs.append(key_biases(num_keys))

    def call(attention, **extra):
        def function(q, k, v, key_bias=None):
            return attention(q, k, v, key_bias=key_bias, **options, **extra)

        return run(function, *inputs)

    expected = call(attend_by_loops)
    assert largest_error(call(attend, backend=backend), expected) < 1e-12


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "key_bias"])
def test_flex_computes_the_same_values(case, biased):
    num_queries, num_keys, options = case
    q, k, v = qkv(num_queries, num_keys, dtype=torch.float32)
    bias = key_biases(num_keys).float() if biased else None
    mine = attend(q, k, v, key_bias=bias, backend="flex", **options)
    expected = attend_by_loops(q, k, v, key_bias=bias, **options)
    assert largest_error([mine], [expected]) < 1e-6


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_of_every_broadcast_shape(backend, shape):
    q, k, v = qkv(T, N, B=B, H=H, dtype=torch.float32)
    mask = random_mask(shape)
    assert not mask.all()
    expected = attend_by_loops(q, k, v, mask=mask)
    assert largest_error([attend(q, k, v, mask=mask, backend=backend)], [expected]) < 1e-6


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_mask_bias_and_window_together(backend):
    q, k, v = qkv(4, 6, dtype=torch.float32)
    options = {"causal": True, "window": 4, "mask": random_mask((2, 1, 4, 6))}
    bias = key_biases(6).float()
    expected = attend_by_loops(q, k, v, key_bias=bias, **options)
    mine = attend(q, k, v, key_bias=bias, backend=backend, **options)
    assert largest_error([mine], [expected]) < 1e-6


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    queries=st.integers(1, 6),
    keys=st.integers(1, 6),
    channels=st.integers(1, 9),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 7),
    biased=st.booleans(),
    masked=st.booleans(),
)
def test_all_shapes(rows, heads, queries, keys, channels, causal, window, biased, masked):
    q, k, v = qkv(queries, keys, B=rows, H=heads, C=channels)
    options = {
        "causal": causal,
        "window": window if causal else None,
        "key_bias": key_biases(keys, B=rows, low=-30.0) if biased else None,
        "mask": random_mask((rows, 1, queries, keys)) if masked else None,
    }
    expected = attend_by_loops(q, k, v, **options)
    for backend in ("math", "sdpa"):
        mine = attend(q, k, v, backend=backend, **options)
        assert mine.shape == q.shape
        assert largest_error([mine], [expected]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "key_bias"])
def test_queries_that_see_nothing_get_zeros_and_finite_gradients(dtype, backend, biased):
    inputs = qkv(4, 5, dtype=dtype)
    if biased:
        inputs.append(key_biases(5).to(dtype))
    mask = random_mask((2, 1, 4, 5))
    mask[0, :, 2] = False
    mask[1] = False

    def function(q, k, v, key_bias=None):
        return attend(q, k, v, key_bias=key_bias, mask=mask, backend=backend)

    out, *gradients = run(function, *inputs)
    assert (out[0, :, 2] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, :, 0] != 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][0, :, 2] == 0).all()
    assert all((gradient[1] == 0).all() for gradient in gradients)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "key_bias"])
def test_no_keys_at_all_give_zeros(backend, biased):
    q, k, v = qkv(4, 0, dtype=torch.float32)
    bias = torch.zeros(2, 0) if biased else None
    out = attend(q, k, v, key_bias=bias, backend=backend)
    assert torch.equal(out, torch.zeros_like(q))


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_no_keys_at_all_still_reach_every_input_with_a_zero_gradient(backend):
    """Data-parallel training waits for a gradient of every parameter, of empty memories too."""
    inputs = [*qkv(4, 0), torch.zeros(2, 0, dtype=torch.float64)]

    def function(q, k, v, key_bias):
        return attend(q, k, v, key_bias=key_bias, backend=backend)

    _, *gradients = run(function, *inputs)
    for gradient, entered in zip(gradients, inputs, strict=True):
        assert torch.equal(gradient, torch.zeros_like(entered))


def test_values_are_a_mean_of_what_is_seen_and_of_nothing_else():
    q, k, v = qkv(5, 5)
    changed = v.clone()
    changed[:, :, 3:] = math.nan
    for backend in ("math", "sdpa"):
        plain = attend(q[:, :, :3], k[:, :, :3], v[:, :, :3], causal=True, backend=backend)
        torch.testing.assert_close(attend(q, k, v, causal=True, backend=backend)[:, :, :3], plain)
    ones = attend(q, k, torch.ones_like(v), causal=True)
    torch.testing.assert_close(ones, torch.ones_like(v))


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_dropout_drops_weights_and_scales_the_rest(backend):
    torch.manual_seed(0)
    q, k, _ = qkv(16, 16, C=16, dtype=torch.float32)
    v = torch.eye(16).expand(2, 2, 16, 16)  # the output is the weights
    weights = attend(q, k, v, backend=backend)
    dropped = attend(q, k, v, dropout=0.25, backend=backend)
    kept = dropped != 0
    assert torch.allclose(dropped[kept], weights[kept] / 0.75, atol=1e-6)
    assert 0.65 < kept.float().mean() < 0.85  # 1024 draws: 7 standard deviations either side


def test_the_reference_is_not_less_exact_than_the_kernels_in_half_precision():
    """Scores near 32, apart by less than bfloat16 resolves there: they must not be rounded."""
    q = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16)
    k = torch.full((1, 1, 8, 64), 4.0, dtype=torch.bfloat16)  # q k / sqrt(64) = 32
    k[0, 0, :, 0] += torch.linspace(0, 1, 8).bfloat16()
    v = torch.eye(8, 64, dtype=torch.bfloat16)[None, None]
    expected = attend_by_loops(q, k, v)
    for backend in ("sdpa", "math"):
        error = largest_error([attend(q, k, v, backend=backend)], [expected])
        assert error < 2 * 2**-8 * 0.15, backend  # weights, near 1/8, and outputs are rounded
