"""Configurations that cannot work are refused with key, value and a cure that works."""

import dataclasses
import re

import pytest

from lightning_models.layers import DecoderConfig

SIZES = {"vocab_size": 100, "block_size": 8, "num_layers": 2, "dim": 12, "num_heads": 2}


def config(**changes):
    return DecoderConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(("dim", "heads"), [(10, 4), (3, 4), (7, 2), (100, 12), (13, 13 * 2)])
def test_the_cure_for_heads_that_do_not_divide_works(dim, heads):
    with pytest.raises(ValueError, match=rf"num_heads \({heads}\) must divide dim \({dim}\)") as e:
        config(dim=dim, num_heads=heads)
    cure = int(re.search(r"try dim=(\d+)", str(e.value)).group(1))
    assert config(dim=cure, num_heads=heads).head_dim * heads == cure


@pytest.mark.parametrize(("dim", "heads"), [(6, 2), (18, 6), (12, 4), (9, 3), (15, 5), (9, 9)])
def test_the_cure_for_odd_head_widths_under_rope_works(dim, heads):
    with pytest.raises(ValueError, match="positions=rope") as error:
        config(dim=dim, num_heads=heads, positions="rope")
    cures = dict(re.findall(r"(dim|num_heads)=(\d+)", str(error.value)))
    fixed = {key: int(value) for key, value in cures.items()}
    assert (
        config(**{"dim": dim, "num_heads": heads, "positions": "rope", **fixed}).head_dim % 2 == 0
    )


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
