"""Which example is row n: once an epoch, with replacement, or as they are stored."""

import pickle

import numpy as np
import pytest

from datamodules.order import RowOrder


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


def test_a_pickled_order_is_small():
    rows = RowOrder(10_000, order="packed", rows_per_batch=3)
    rows.examples(np.arange(3))
    assert len(pickle.dumps(rows)) < 500


@pytest.mark.parametrize("order", ["packed", "random"])
def test_too_few_examples_for_a_batch(order):
    with pytest.raises(ValueError, match="takes 12 examples, the train split has only 11"):
        RowOrder(11, order=order, rows_per_batch=12)
