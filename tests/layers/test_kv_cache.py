"""Rows that advance at their own pace compute what each would compute alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_models.layers import DecoderConfig, KVCache, SelfAttention, rope_tables

LENGTHS = [2, 5, 3]


def attention(window=None):
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "block_size": 32, "num_layers": 1, "dim": 16, "num_heads": 2}
    return SelfAttention(DecoderConfig(**sizes, window=window)).eval()


def streams(rows=3, length=16):
    return torch.randn(rows, length, 16, generator=torch.Generator().manual_seed(1))


def alone(layer, stream):
    return layer(stream[None], rope=rope_tables(torch.arange(len(stream)), 8))[0]


def step(layer, cache, x):
    """Attention of new entries x (B, T, D) at each row's own positions."""
    rope = rope_tables(cache.positions(x.shape[1]), 8)
    mask = cache.mask(x.shape[1], layer.window)
    return layer(x, rope=rope, cache=cache.layers[0], mask=mask)


def prefill(layer, cache, x, lengths):
    """Feeds the first entries of each row, padded on the right with garbage."""
    longest = max(lengths)
    padded = torch.full((len(lengths), longest, 16), 1e3)
    for row, length in enumerate(lengths):
        padded[row, :length] = x[row, :length]
    out = step(layer, cache, padded)
    cache.advance(torch.tensor(lengths))
    return out


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_ragged_rows_equal_rows_alone(window, chunk):
    layer, x = attention(window), streams()
    expected = [alone(layer, row) for row in x]
    cache = KVCache(1, 3, 5 + 2 * chunk)
    first = prefill(layer, cache, x, LENGTHS)
    ends = list(LENGTHS)
    for row, end in enumerate(ends):
        torch.testing.assert_close(first[row, :end], expected[row][:end])
    for _ in range(2):
        new = torch.stack([x[row, end : end + chunk] for row, end in enumerate(ends)])
        out = step(layer, cache, new)
        cache.advance(chunk)
        for row, end in enumerate(ends):
            torch.testing.assert_close(out[row], expected[row][end : end + chunk])
        ends = [end + chunk for end in ends]
    assert cache.lengths.tolist() == ends
    assert cache.longest == max(ends)


def test_select_of_no_rows_and_before_the_first_write():
    cache = KVCache(2, 3, 10)
    cache.select(torch.tensor([2, 1]))
    assert cache.lengths.tolist() == [0, 0]
    cache.select(torch.tensor([], dtype=torch.int64))
    assert cache.lengths.shape == (0,)
    assert cache.longest == 0


def test_rows_of_equal_length_need_no_mask():
    cache = KVCache(1, 2, 10)
    assert cache.uniform
    assert cache.mask(3) is None
    cache.advance(torch.tensor([1, 3]))
    assert not cache.uniform
    cache.advance(2)
    assert cache.lengths.tolist() == [3, 5]
    assert cache.longest == 5
    assert not cache.uniform
    cache.advance(torch.tensor([2, 0]))
    assert cache.uniform
    assert cache.mask(1, window=2) is None
    cache.advance(torch.tensor([0, 1]))
    cache.select(torch.tensor([1]))
    assert cache.uniform


def test_mask_of_ragged_rows():
    cache = KVCache(1, 2, 10)
    cache.advance(torch.tensor([1, 3]))
    expected = [
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    ]
    assert cache.mask(2).int().tolist() == [[rows] for rows in expected]
    windowed = [
        [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]],
        [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]],
    ]
    assert cache.mask(2, window=2).int().tolist() == [[rows] for rows in windowed]


def test_it_fills_to_the_brim_and_no_further():
    cache = KVCache(1, 2, 4)
    k = torch.randn(2, 2, 3, 8)
    cache.layers[0].append(k, k)
    cache.advance(torch.tensor([1, 3]))
    keys, _ = cache.layers[0].append(k[:, :, :1], k[:, :, :1])
    assert keys.shape[2] == 4
    with pytest.raises(ValueError, match="holds 4 entries per row, 5 are needed"):
        cache.layers[0].append(k[:, :, :2], k[:, :, :2])
    cache.advance(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="holds 4 entries per row, 5 are needed"):
        cache.layers[0].append(k[:, :, :1], k[:, :, :1])


@torch.no_grad()
def test_key_bias_counts_cached_keys():
    layer, x = attention(), streams(rows=2)[:, :6]
    bias = -torch.rand(2, 6)
    expected = layer(x, key_bias=bias)
    cache = KVCache(1, 2, 6)
    layer(x[:, :4], cache=cache.layers[0], key_bias=bias[:, :4])
    cache.advance(4)
    out = layer(x[:, 4:], cache=cache.layers[0], key_bias=bias)
    torch.testing.assert_close(out, expected[:, 4:])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_every_row_holds_its_own_history(data):
    rows = data.draw(st.integers(1, 4))
    cache, layers = KVCache(2, rows, 24), range(2)
    history = [[] for _ in range(rows)]
    written = 0
    for _ in range(data.draw(st.integers(1, 6))):
        num_new = data.draw(st.integers(1, 4))
        count = rows * num_new
        new = torch.arange(written, written + count).float().view(rows, 1, num_new, 1)
        written += count
        for layer in layers:
            keys, values = cache.layers[layer].append(new + layer, -new - layer)
            assert keys.shape == values.shape == (rows, 1, cache.longest + num_new, 1)
            for row, past in enumerate(history):
                expected = [entry + layer for entry in past + new[row, 0, :, 0].tolist()]
                assert keys[row, 0, : len(expected), 0].tolist() == expected
                assert values[row, 0, : len(expected), 0].tolist() == [-e for e in expected]
        keep = data.draw(st.lists(st.integers(0, num_new), min_size=rows, max_size=rows))
        cache.advance(torch.tensor(keep))
        for row, kept in enumerate(keep):
            history[row] += new[row, 0, :kept, 0].tolist()
        if data.draw(st.booleans()):
            chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
            cache.select(torch.tensor(chosen))
            history, rows = [list(history[row]) for row in chosen], len(chosen)
        assert cache.lengths.tolist() == [len(past) for past in history]
        assert cache.longest == max(map(len, history))
