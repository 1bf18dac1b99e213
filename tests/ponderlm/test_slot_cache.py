"""What a row of slots keeps."""

import torch

from lightning_models.layers import KVCache
from lightning_models.ponderlm.sequential import SlotCache

HEADS, CHANNELS = 2, 3


def numbers(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def entries(*rows):
    return numbers(*rows)[:, None, :, None].expand(-1, HEADS, -1, CHANNELS)


def written(kv, row):
    probe = torch.zeros(len(kv.lengths), HEADS, 1, CHANNELS, dtype=torch.float64)
    keys, values = kv.layers[1].append(probe, probe)
    held = keys[row, :, : kv.lengths[row]]
    assert torch.equal(values[row, :, : kv.lengths[row]], -held)
    assert (held == held[:1, :, :1]).all()
    return held[0, :, 0].tolist()


def append(kv, *rows):
    for layer in kv.layers:
        layer.append(entries(*rows), -entries(*rows))


def test_entries_are_kept_in_their_order_behind_earlier_ones():
    """Of both layers, with the bias of each as a key; rows end where they end."""
    kv = KVCache(2, 2, 12)
    cache = SlotCache(kv, 12, torch.zeros(2, 4).double(), 2)
    append(kv, [1.0, 2.0], [3.0, 4.0])
    cache.add_bias(numbers([0.1, 0.2], [0.3, 0.4]))
    kv.advance(torch.tensor([2, 1]))
    append(kv, [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0])
    kept = torch.tensor([[True, False, False, True], [False, True, True, True]])
    cache.keep(kept, numbers([0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]))
    assert kv.lengths.tolist() == [4, 4]
    assert written(kv, 0) == [1, 2, 5, 8]
    assert written(kv, 1) == [3, 10, 11, 12]
    assert cache.bias[:, :4].tolist() == [[0.1, 0.2, 0.5, 0.8], [0.3, 1.0, 1.1, 1.2]]
    assert cache.bias[:, 4:].count_nonzero() == 0, "nothing stale after them"
    cache.select(torch.tensor([1]))
    assert written(kv, 0) == [3, 10, 11, 12]
    assert cache.key_bias(1).tolist() == [[0.3, 1.0, 1.1, 1.2, 0.0]]


def test_keeping_all_or_nothing():
    kv = KVCache(2, 2, 6)
    append(kv, [1.0, 2.0], [3.0, 4.0])
    order = kv.keep(torch.tensor([[True, True], [False, False]]))
    assert order.tolist() == [[0, 1], [0, 1]]
    assert kv.lengths.tolist() == [2, 0]
    append(kv, [5.0], [6.0])
    kv.advance(1)
    assert (written(kv, 0), written(kv, 1)) == ([1, 2, 5], [6])
