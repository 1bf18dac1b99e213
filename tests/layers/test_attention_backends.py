"""Which kernel attend() takes, and what each says of requests it cannot serve."""

import pytest
import torch

from lightning_models.layers import attend
from lightning_models.layers import attention as module
from tests.layers.cases import key_biases, qkv, random_mask


def test_window_without_causality_is_refused():
    with pytest.raises(ValueError, match=r"window \(3\) needs causal=True"):
        attend(*qkv(4, 4), window=3)


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="nonsense"):
        attend(*qkv(4, 4), backend="nonsense")


def test_flex_has_no_dropout():
    with pytest.raises(ValueError, match=r"flex has no dropout \(0\.1\).*attention_dropout=0"):
        attend(*qkv(4, 4), dropout=0.1, backend="flex")


@pytest.mark.parametrize("asks", ["q", "k", "v", "key_bias"])
def test_flex_has_no_backward_on_cpu(asks):
    q, k, v = qkv(4, 4, dtype=torch.float32)
    inputs = {"q": q, "k": k, "v": v, "key_bias": key_biases(4).float()}
    inputs[asks].requires_grad_()
    with pytest.raises(ValueError, match="no backward pass on CPU; use sdpa or math"):
        attend(**inputs, backend="flex")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_runs_on_cpu_where_no_gradient_is_asked():
    parameter = torch.ones((), requires_grad=True)
    with torch.no_grad():
        q, k, v = (x * parameter for x in qkv(4, 4, dtype=torch.float32))
        out = attend(q, k, v, causal=True, backend="flex")
        torch.testing.assert_close(out, attend(q, k, v, causal=True, backend="math"))


def test_flex_masks_made_in_validation_can_be_saved_for_backward(monkeypatch):
    """Autograd refuses tensors made in inference mode, and flex saves its mask for backward."""
    masks = []

    def spy(q, k, v, *, block_mask, scale):
        masks.append(block_mask)
        return q

    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", spy)
    q, k, v = qkv(37, 37, dtype=torch.float32)  # a length that no other test has cached
    with torch.inference_mode():
        attend(q, k, v, causal=True, backend="flex")
    attend(q, k, v, causal=True, backend="flex")
    assert len(masks) == 2
    assert not masks[1].kv_num_blocks.is_inference()
    assert not masks[1].kv_indices.is_inference()


def test_flash_without_its_package(monkeypatch):
    monkeypatch.setattr(module, "_flash_function", lambda: None)
    with pytest.raises(ValueError, match=r"needs the package flash-attn; install it or use sdpa"):
        attend(*qkv(4, 4), backend="flash_attn")


@pytest.fixture
def flash(monkeypatch):
    """A stand-in for the package's function that must not be reached."""

    def never(*args, **kwargs):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(module, "_flash_function", lambda: never)


@pytest.mark.usefixtures("flash")
def test_flash_takes_no_mask():
    with pytest.raises(ValueError, match=r"flash_attn takes no mask; use sdpa or flex"):
        attend(*qkv(4, 4), mask=random_mask((4, 4)), backend="flash_attn")


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flash_needs_half_precision_on_a_gpu(dtype):
    with pytest.raises(ValueError, match=rf"half precision on a GPU, not {dtype} on cpu; .*sdpa"):
        attend(*qkv(4, 4, dtype=dtype), backend="flash_attn")


@pytest.fixture
def on_gpu(monkeypatch):
    """Has attend() choose as for tensors on a GPU; returns the kernels that it has taken."""
    taken = []

    def watch(name, kernel):
        def watched(*args):
            taken.append(name)
            return kernel(*args)

        return watched

    for name in ("_sdpa", "_flex", "_flash"):
        monkeypatch.setattr(module, name, watch(name, getattr(module, name)))
    monkeypatch.setattr(module, "_on_gpu", lambda x: True)
    compiled = torch.nn.attention.flex_attention.flex_attention
    monkeypatch.setattr(module, "_compiled_flex", lambda: compiled)
    return taken


WINDOWED = {"causal": True, "window": 2}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("channels", "queries", "options", "kernel"),
    [
        (16, 6, WINDOWED, "_flex"),
        (16, 6, {"causal": True}, "_sdpa"),
        (8, 6, WINDOWED, "_sdpa"),  # FlexAttention refuses such heads on a GPU
        (16, 1, WINDOWED, "_sdpa"),  # decoding: another mask and graph for each length
        (16, 6, {**WINDOWED, "dropout": 0.1}, "_sdpa"),
    ],
)
def test_auto_takes_flex_on_a_gpu_where_it_suits(on_gpu, channels, queries, options, kernel):
    q, k, v = qkv(queries, 6, C=channels, dtype=torch.float32)
    out = attend(q, k, v, **options)
    assert on_gpu == [kernel]
    if "dropout" not in options:
        torch.testing.assert_close(out, attend(q, k, v, backend="math", **options))


@pytest.mark.usefixtures("on_gpu")
def test_flex_refuses_narrow_heads_on_a_gpu():
    with pytest.raises(ValueError, match=r"16 channels on a GPU, not 8; use sdpa"):
        attend(*qkv(4, 4, C=8, dtype=torch.float32), **WINDOWED, backend="flex")


def test_auto_is_sdpa_on_cpu():
    q, k, v = qkv(6, 6, dtype=torch.float32)
    for options in ({}, {"causal": True}, {"causal": True, "window": 2}):
        mine = attend(q, k, v, **options)
        assert torch.equal(mine, attend(q, k, v, backend="sdpa", **options))


def test_the_plain_causal_case_reaches_the_kernel_without_a_mask(monkeypatch):
    """A float or bool mask would cost flash kernels; a key bias must not bring one."""
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **options):
        seen.append(options)
        return real(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    q, k, v = qkv(6, 6, dtype=torch.float32)
    attend(q, k, v, causal=True, key_bias=key_biases(6).float())
    attend(q[:, :, -1:], k, v, causal=True)
    assert seen[0]["is_causal"]
    assert seen[0].get("attn_mask") is None
    assert seen[1].get("attn_mask") is None
