"""Orders of documents and of examples: functions of seed and number, shared by processes."""

import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from datamodules import order as orders
from datamodules.order import RowOrder, epoch_order, permutation
from datamodules.text import PackedWindows
from tests.reference.windows import packed_row

LENGTHS = [3, 1, 7, 2, 9, 4, 1, 1, 30, 5] * 5


@pytest.fixture
def shared(monkeypatch):
    """Every order is written to a file, in several parts."""
    monkeypatch.setattr(orders, "SHARED_FROM", 1)
    monkeypatch.setattr(orders, "_PART", 7)


@pytest.fixture(params=[2**28, 20])
def stream(request, make_stream, monkeypatch):
    """A stream of one shard, or of several."""
    monkeypatch.setattr("datamodules.encoding.CHUNK_DOCUMENTS", 3)
    return make_stream(LENGTHS, part_bytes=request.param)


def windows(stream, **options) -> PackedWindows:
    return PackedWindows(stream, **{"block_size": 6, "eos_id": 0, "seed": 5, **options})


def files(stream) -> list[str]:
    return sorted(path.name for path in stream.split_file("").parent.glob("train-order-*"))


def test_the_file_has_the_order_that_memory_has(stream, monkeypatch):
    rows = np.arange(150)
    expected = windows(stream).rows(rows)
    assert files(stream) == []
    monkeypatch.setattr(orders, "SHARED_FROM", 1)
    assert windows(stream).rows(rows).tolist() == expected.tolist()
    assert files(stream)[0] == "train-order-5-0"
    assert len(files(stream)) == 3  # epochs of 60 rows
    size = stream.split_file("order-5-0").stat().st_size
    assert size == 12 * len(LENGTHS)


@pytest.mark.usefixtures("shared")
def test_rows_are_those_of_the_slow_reference(stream):
    order = windows(stream)
    for number in range(3 * len(order)):
        expected = packed_row(stream, number, block_size=6, rows=len(order), seed=5, eos_id=0)
        assert order.rows(np.array([number]))[0].tolist() == expected


@pytest.mark.usefixtures("shared")
def test_a_second_process_reads_what_the_first_wrote(stream, monkeypatch):
    first = epoch_order(stream, seed=1, epoch=2)
    monkeypatch.setattr(orders, "permutation", None)  # would fail if it were called
    again = epoch_order(pickle.loads(pickle.dumps(stream)), seed=1, epoch=2)
    assert isinstance(again.ends.base, np.memmap) or isinstance(again.ends, np.memmap)
    assert again.documents.tolist() == first.documents.tolist()
    assert again.ends[-1] == len(stream)


@pytest.mark.usefixtures("shared")
def test_processes_that_want_it_at_once_get_the_same(stream):
    def rows(queue):
        queue.put(windows(stream).rows(np.arange(20)).tolist())

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=rows, args=(queue,)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert found == [windows(stream).rows(np.arange(20)).tolist()] * 4
    assert files(stream) == ["train-order-5-0"]


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("damage", ["cut", "numbers", "ends"])
def test_a_damaged_file_is_written_anew(stream, damage):
    expected = windows(stream).rows(np.arange(9)).tolist()
    path = stream.split_file("order-5-0")
    whole = path.read_bytes()
    changed = {"cut": whole[:-1], "numbers": whole[:-8] + b"\xff" * 8, "ends": b"\xff" + whole[1:]}
    path.write_bytes(changed[damage])
    assert windows(stream).rows(np.arange(9)).tolist() == expected
    assert path.stat().st_size == 12 * len(LENGTHS)


@pytest.mark.usefixtures("shared")
def test_old_files_are_removed(stream):
    for epoch in range(7):
        epoch_order(stream, seed=0, epoch=epoch)
        os.utime(stream.split_file(f"order-0-{epoch}"), (epoch, epoch))
    assert files(stream) == [f"train-order-0-{epoch}" for epoch in range(3, 7)]


@pytest.mark.usefixtures("shared")
def test_a_disk_that_cannot_be_written_is_no_obstacle(stream, monkeypatch):
    def refused(*_, **__):
        raise OSError("Read-only file system")

    expected = permutation(len(LENGTHS), seed=1, epoch=0).tolist()
    monkeypatch.setattr(orders, "FileLock", refused)
    with pytest.warns(UserWarning, match="Read-only file system.*12 bytes each"):
        assert epoch_order(stream, seed=1, epoch=0).documents.tolist() == expected
    monkeypatch.undo()
    monkeypatch.setattr(orders, "SHARED_FROM", 1)
    monkeypatch.setattr(Path, "replace", refused)
    with pytest.warns(UserWarning, match="cannot be written"):
        assert epoch_order(stream, seed=1, epoch=0).documents.tolist() == expected
    assert not list(stream.split_file("").parent.glob(".*.partial"))


@pytest.mark.usefixtures("shared")
def test_no_process_holds_an_order_of_its_own(stream):
    order = windows(stream)
    order.rows(np.arange(4))
    held = order._order(0)
    for array in (held.ends, held.documents):
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable
    assert "document_ends" not in vars(stream)  # which for several shards would be a copy
    assert len(pickle.dumps(order)) < 20_000


def test_ends_and_starts_are_those_of_the_documents(stream):
    numbers = np.arange(len(LENGTHS))
    assert stream.num_documents == len(LENGTHS)
    assert stream.ends(numbers).tolist() == stream.document_ends.tolist()
    assert (stream.ends(numbers) - stream.starts(numbers)).tolist() == [n + 1 for n in LENGTHS]
    grid = numbers[:6].reshape(2, 3)
    assert stream.starts(grid).tolist() == stream.starts(numbers)[:6].reshape(2, 3).tolist()


@pytest.mark.parametrize("order", ["packed", "random"])
def test_rows_are_a_function_of_their_number(order):
    rows = RowOrder(11, order=order, rows_per_batch=3, seed=5)
    whole = rows.examples(np.arange(40))
    again = pickle.loads(pickle.dumps(rows))
    alone = [int(again.examples(np.array([n]))[0]) for n in reversed(range(40))]
    assert alone == whole[::-1].tolist()
    assert whole.min() >= 0
    assert whole.max() <= 10
    assert not np.array_equal(
        whole, RowOrder(11, order=order, rows_per_batch=3, seed=6).examples(np.arange(40))
    )


def test_an_epoch_is_of_whole_batches_and_has_no_example_twice():
    rows = RowOrder(11, order="packed", rows_per_batch=3)
    assert (len(rows), rows.batches) == (9, 3)
    epochs = rows.examples(np.arange(36)).reshape(4, 9).tolist()
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert {example for epoch in epochs for example in epoch} == set(range(11))


def test_evaluation_has_every_example_once_and_fills_the_last_batch():
    rows = RowOrder(5, order=None, rows_per_batch=3)
    assert (len(rows), rows.batches) == (5, 2)
    assert rows.examples(np.arange(6)).tolist() == [0, 1, 2, 3, 4, -1]


@pytest.mark.parametrize("order", ["packed", "random"])
def test_too_few_examples_for_a_batch(order):
    with pytest.raises(ValueError, match="takes 12 examples, but the train split has only 11"):
        RowOrder(11, order=order, rows_per_batch=12)
