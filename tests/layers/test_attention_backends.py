"""Which kernel attend() takes, and what each says of requests it cannot serve."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from lightning_models.layers import attend
from lightning_models.layers import attention as module
from tests.layers.cases import key_biases, qkv, random_mask


def never(*args, **kwargs):
    raise AssertionError("the kernel was called")


FLASH = {"backend": "flash_attn"}
REFUSED = {
    "window": (None, {"window": 3}),
    "nonsense": (None, {"backend": "nonsense"}),
    "dropout": (None, {"dropout": 0.1, "backend": "flex"}),
    "flash-attn": (lambda: None, FLASH),
    "mask": (lambda: never, {**FLASH, "mask": random_mask((4, 4))}),
    "float32": (lambda: never, {**FLASH, "dtype": torch.float32}),
    "cpu": (lambda: never, {**FLASH, "dtype": torch.bfloat16}),
}
"""What the message names: the package's function, as it is installed, and what is asked."""


@pytest.mark.parametrize("word", REFUSED)
def test_what_a_kernel_cannot_do_is_named(word, monkeypatch):
    package, options = REFUSED[word]
    dtype = options.get("dtype", torch.float64)
    monkeypatch.setattr(module, "_flash_function", package)
    with pytest.raises(ValueError, match=word):
        attend(*qkv(4, 4, dtype=dtype), **{k: v for k, v in options.items() if k != "dtype"})


@pytest.mark.parametrize("asks", ["q", "k", "v", "key_bias"])
def test_flex_has_no_backward_on_cpu(asks):
    q, k, v = qkv(4, 4, dtype=torch.float32)
    inputs = {"q": q, "k": k, "v": v, "key_bias": key_biases(4).float()}
    inputs[asks].requires_grad_()
    with pytest.raises(ValueError, match="sdpa or math"):
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
    monkeypatch.setattr(module, "_compiled_flex", lambda: flex_attention)
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
    with pytest.raises(ValueError, match="16 .*sdpa"):
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
