"""Windows: each token once, rows by number, batches of ranks."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datamodules.order import permutation
from datamodules.text import (
    IGNORE,
    EvaluationWindows,
    PackedWindows,
    RandomWindows,
    WindowSource,
)

EOS = 0
lengths = st.lists(st.integers(1, 12), min_size=1, max_size=12)
few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def content(stream) -> np.ndarray:
    return stream.gather(np.arange(len(stream)))


def source(order, **options) -> WindowSource:
    defaults = {"batch_size": 2, "eos_id": EOS}
    if order._stream.token_bytes is None:
        order._stream.token_bytes = np.ones(2**20, dtype=np.int64)
    return WindowSource(order, **{**defaults, **options})


@few
@given(lengths=lengths, block_size=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_packed_each_token_is_a_target_at_most_once_per_epoch(
    make_stream, lengths, block_size, seed
):
    stream = make_stream(lengths)
    block_size = min(block_size, len(stream))
    order = PackedWindows(stream, block_size=block_size, eos_id=EOS, seed=seed)
    for epoch in range(3):
        rows = order.rows(epoch * len(order) + np.arange(len(order)))
        targets = rows[:, 1:].ravel()
        words = targets[targets != EOS]  # ids other than EOS are all distinct
        assert len(np.unique(words)) == len(words)
        assert len(targets) == len(stream) // block_size * block_size  # all but a tail
        assert rows[0, 0] == EOS  # context of the first token
        assert (rows[1:, 0] == rows[:-1, -1]).all()  # rows follow one another


def test_an_epochs_permutation_is_the_same_everywhere():
    assert permutation(8, seed=5, epoch=3).tolist() == FROZEN_ORDER


def test_packed_epoch_uses_whole_batches(make_stream):
    stream = make_stream([9] * 7)  # 70 tokens, 17 rows of 4
    order = PackedWindows(stream, block_size=4, eos_id=EOS, seed=0, rows_per_batch=6)
    assert len(order) == 12
    assert order.rows(np.array([12]))[0, 0] == EOS  # row 12 begins epoch 1


@few
@given(lengths=lengths, block_size=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_random_rows_are_consecutive_tokens(make_stream, lengths, block_size, seed):
    stream = make_stream(lengths)
    block_size = min(block_size, len(stream))
    order = RandomWindows(stream, block_size=block_size, eos_id=EOS, seed=seed)
    padded = np.concatenate([[EOS], content(stream)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, block_size + 1)
    possible = {w.tobytes() for w in windows}
    rows = order.rows(np.arange(7, 27))
    assert all(row.tobytes() in possible for row in rows)


def test_random_starts_everywhere(make_stream):
    stream = make_stream([20])
    order = RandomWindows(stream, block_size=18, eos_id=EOS, seed=3)
    starts = order.rows(np.arange(200))[:, 1] - 1
    assert set(starts.tolist()) == {0, 1, 2, 3}
    assert np.bincount(starts).min() > 30  # expected 50 each
    other = RandomWindows(stream, block_size=18, eos_id=EOS, seed=4)
    assert (other.rows(np.arange(200))[:, 1] - 1).tolist() != starts.tolist()


@few
@given(lengths, st.integers(1, 9), st.integers(0, 8), st.integers(1, 5), st.integers(1, 4))
def test_evaluation_scores_every_token_once(
    make_stream, lengths, block_size, context, batch_size, world_size
):
    stream, context = make_stream(lengths), min(context, block_size - 1)
    stride = block_size - context
    order = EvaluationWindows(stream, block_size=block_size, eos_id=EOS, stride=stride)
    share = {"batch_size": batch_size, "world_size": world_size, "context": context}
    scored = {}
    for rank in range(world_size):
        batches = source(order, rank=rank, **share)
        for n in range(len(batches)):
            batch = batches.batch(n)
            assert batch["tokens"].shape == (batch_size, block_size)
            for row, number in enumerate(batch["sequence_id"].tolist()):
                kept = batch["targets"][row] != IGNORE
                assert number not in scored
                scored[number] = batch["targets"][row][kept].tolist()
                assert not kept.any() or batch["mask"][row][kept].all()
                assert number == 0 or not kept[:context].any()
                read = [EOS, *content(stream)][number * stride :][: int(batch["mask"][row].sum())]
                assert batch["tokens"][row][: len(read)].tolist() == read
    joined = [token for number in sorted(scored) for token in scored[number]]
    assert joined == content(stream).tolist()


def test_evaluation_inputs_predict_the_next_token_and_padding_is_marked(make_stream):
    stream = make_stream([4])  # 1 2 3 4 EOS
    batch = source(EvaluationWindows(stream, block_size=3, eos_id=EOS)).batch(0)
    assert batch["tokens"].tolist() == [[EOS, 1, 2], [3, 4, EOS]]
    assert batch["targets"].tolist() == [[1, 2, 3], [4, EOS, IGNORE]]
    assert batch["mask"].tolist() == [[True] * 3, [True] * 3]  # the last EOS is real context
    stream = make_stream([2])
    batch = source(EvaluationWindows(stream, block_size=5, eos_id=EOS)).batch(0)
    assert batch["mask"].tolist() == [[True] * 4 + [False], [False] * 5]  # second row: filler
    assert batch["tokens"][1].tolist() == [EOS] * 5
    assert batch["targets"][1].tolist() == [IGNORE] * 5


@pytest.mark.parametrize("kind", [RandomWindows, PackedWindows])
def test_two_ranks_share_the_rows_of_one(make_stream, kind):
    order = kind(make_stream([7] * 30), block_size=4, eos_id=EOS, seed=1)
    one = source(order, batch_size=4, drop_last=True)
    two = [source(order, batch_size=2, rank=r, world_size=2, drop_last=True) for r in range(2)]
    assert len(one) == len(two[0]) == len(two[1])
    for n in (0, 3, len(one) + 1):
        halves = [s.batch(n) for s in two]
        for key, whole in one.batch(n).items():
            assert torch.equal(whole, torch.cat([half[key] for half in halves])), key


def test_batch_dtypes_and_bytes(make_stream):
    stream = make_stream([9, 9])
    stream.token_bytes = np.arange(2**20)
    stream.token_bytes[EOS] = 0
    batch = source(PackedWindows(stream, block_size=5, eos_id=EOS, seed=0)).batch(1)
    dtypes = {key: value.dtype for key, value in batch.items()}
    assert dtypes == {
        "tokens": torch.int64,
        "targets": torch.int64,
        "mask": torch.bool,
        "sequence_id": torch.int64,
        "num_bytes": torch.int64,
    }
    assert batch["sequence_id"].tolist() == [2, 3]
    assert batch["num_bytes"].tolist() == batch["targets"].sum(1).tolist()
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_too_little_text_is_an_error_with_its_cure(make_stream):
    stream = make_stream([8])
    with pytest.raises(ValueError, match="block_size=10 .* 9 tokens"):
        RandomWindows(stream, block_size=10, eos_id=EOS, seed=0)
    with pytest.raises(ValueError, match="4 windows, but the train split .* 3"):
        PackedWindows(stream, block_size=3, eos_id=EOS, seed=0, rows_per_batch=4)
    order = RandomWindows(stream, block_size=3, eos_id=EOS, seed=0)
    with pytest.raises(ValueError, match="Lower it or block_size"):
        source(order, batch_size=4, drop_last=True)


@few
@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.data())
def test_shards_read_as_one_stream(make_stream, lengths, data):
    from datamodules import encoding

    whole = make_stream(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "CHUNK_DOCUMENTS", 1)
        sharded = make_stream(lengths, part_bytes=4)
    assert content(whole).tolist() == content(sharded).tolist()
    assert whole.document_ends.tolist() == sharded.document_ends.tolist()
    positions = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1)))
    grid = np.stack([positions, positions[::-1]])
    assert sharded.gather(grid).tolist() == content(whole)[grid].tolist()


def test_a_pickled_stream_carries_paths_not_tokens(make_stream):
    stream = make_stream([10_000])
    pickled = pickle.dumps(stream)
    assert len(pickled) < 1000
    assert str(Path("store")).encode() in pickled
    assert content(pickle.loads(pickled)).tolist() == content(stream).tolist()


FROZEN_ORDER = [1, 4, 6, 0, 2, 7, 3, 5]
