"""Configurations that cannot work are refused with key, value and a cure that works."""

import dataclasses
import re

import pytest

from lightning_models.layers import DecoderConfig
from lightning_models.transformer import TransformerConfig

SIZES = {"vocab_size": 100, "block_size": 8, "num_layers": 2, "dim": 12, "num_heads": 2}


def config(**changes):
    return DecoderConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(
    "key", ["vocab_size", "block_size", "num_layers", "dim", "num_heads", "vocab_multiple"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one(key, value):
    with pytest.raises(ValueError, match=rf"{key} \({value}\) must be at least 1"):
        config(**{key: value})


@pytest.mark.parametrize("key", ["dropout", "attention_dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5])
def test_dropout_out_of_range(key, value):
    with pytest.raises(ValueError, match=rf"{key} \({value}\) must be in \[0, 1\)"):
        config(**{key: value})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("init_std", float("nan"), r"\(nan\) must be a finite number"),
        ("rope_base", float("inf"), r"\(inf\) must be a finite number"),
        ("rope_base", 10**309, r"\(10+\) must be a finite number"),
        ("norm_eps", "small", r"\('small'\) must be a finite number"),
        ("dropout", True, r"\(True\) must be a finite number"),
        ("bias", 3, r"\(3\) must be true or false"),
        ("num_layers", 1.5, r"\(1.5\) must be a whole number"),
        ("ffn_dim", "wide", r"\('wide'\) must be a whole number"),
        ("norm", "batch", r"\(batch\) is none of layer, rms"),
    ],
)
def test_values_of_another_type_or_not_finite(key, value, words):
    with pytest.raises(ValueError, match=f"{key} {words}"):
        config(**{key: value})


@pytest.mark.parametrize("window", [0, -1])
def test_window_below_one(window):
    with pytest.raises(ValueError, match=rf"window \({window}\) must be at least 1, or null"):
        config(window=window)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ffn_dim", 0),
        ("ffn_dim", -4),
        ("norm_eps", -1e-5),
        ("rope_base", 0.0),
        ("rope_base", -1.0),
        ("init_std", -0.02),
    ],
)
def test_other_numbers_out_of_range(key, value):
    with pytest.raises(ValueError, match=rf"{key} \({re.escape(str(value))}\)"):
        config(**{key: value})


@pytest.mark.parametrize("key", ["norm", "activation", "positions", "init", "attention_backend"])
def test_unknown_choices_are_named_not_replaced(key):
    with pytest.raises(ValueError, match=f"{key}.*nonsense"):
        config(**{key: "nonsense"})


@pytest.mark.parametrize(("dim", "heads"), [(10, 4), (3, 4), (7, 2), (100, 12), (13, 13 * 2)])
def test_the_cure_for_heads_that_do_not_divide_works(dim, heads):
    with pytest.raises(ValueError, match=rf"num_heads \({heads}\) must divide dim \({dim}\)") as e:
        config(dim=dim, num_heads=heads)
    cure = int(re.search(r"try dim=(\d+)", str(e.value)).group(1))
    assert config(dim=cure, num_heads=heads).head_dim * heads == cure


@pytest.mark.parametrize(("dim", "heads"), [(6, 2), (18, 6), (12, 4), (9, 3), (15, 5), (9, 9)])
def test_the_cure_for_odd_head_widths_under_rope_works(dim, heads):
    with pytest.raises(ValueError, match=r"must be even for positions=rope") as error:
        config(dim=dim, num_heads=heads, positions="rope")
    cures = dict(re.findall(r"(dim|num_heads)=(\d+)", str(error.value)))
    fixed = {key: int(value) for key, value in cures.items()}
    assert (
        config(**{"dim": dim, "num_heads": heads, "positions": "rope", **fixed}).head_dim % 2 == 0
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 3}, r"num_kv_heads \(3\) must divide num_heads \(2\)"),
        ({"num_kv_heads": 0}, r"num_kv_heads \(0\) must divide"),
        ({"rope_fraction": 0.0}, r"rope_fraction \(0.0\) must be above 0"),
        ({"positions": "rope", "rope_fraction": 0.5}, "makes 3, which must be an even number"),
    ],
)
def test_options_of_published_models_out_of_range(changes, words):
    with pytest.raises(ValueError, match=words):
        TransformerConfig(**{**SIZES, **changes})


def test_derived_sizes():
    assert config().head_dim == 6
    assert config().hidden_dim == 48
    assert config(ffn_dim=7).hidden_dim == 7
    assert config(dim=768, num_heads=12, activation="swiglu").hidden_dim == 2048
    assert config(dim=512, num_heads=8, activation="swiglu").hidden_dim == 1376  # 1365.3, up to 32
    assert config().padded_vocab_size == 128
    assert config(vocab_size=128).padded_vocab_size == 128
    assert config(vocab_size=50257).padded_vocab_size == 50304
    assert config(vocab_multiple=1).padded_vocab_size == 100


def test_it_is_frozen_and_takes_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().dim = 4
    with pytest.raises(TypeError):
        DecoderConfig(100, 8)
    with pytest.raises(TypeError, match="vocab_size"):
        DecoderConfig(block_size=8)
