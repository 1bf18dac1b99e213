import multiprocessing
import signal
import subprocess
import sys

import pytest
import torch

from datamodules.base import BatchLoader, TrainingSource, accumulation_group


class Numbers:
    """Batch n is its number; three batches an epoch."""

    def __len__(self):
        return 3

    def batch(self, n):
        return {"n": torch.tensor(n)}

    def counts(self, n):
        return {"targets": 10.0 + n, "other": 1.0}


def drawn(loader) -> list[int]:
    return [int(batch["n"]) for batch in loader]


def test_epochs_count_on():
    loader = BatchLoader(Numbers())
    assert [drawn(loader) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len(loader) == 3


def test_position_can_be_saved_and_restored_at_any_batch():
    loader = BatchLoader(Numbers())
    drawn(loader)
    epoch = iter(loader)
    assert int(next(epoch)["n"]) == 3
    state = loader.state_dict()
    again = BatchLoader(Numbers())
    again.load_state_dict(state)
    assert drawn(again) == [int(b["n"]) for b in epoch] == [4, 5]
    assert drawn(again) == [6, 7, 8]


def test_start_is_the_only_authority_where_given():
    loader = BatchLoader(Numbers(), start=lambda: 4)
    loader.load_state_dict({"next_batch": 1})
    assert drawn(loader) == [4, 5]
    assert loader.state_dict() == {"next_batch": 4}


def test_a_limit_shortens_epochs_and_skips_nothing():
    loader = BatchLoader(Numbers(), epoch_batches=2)
    assert [drawn(loader) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_iterating_does_not_touch_the_global_generator():
    before = torch.random.get_rng_state()
    drawn(BatchLoader(Numbers()))
    drawn(BatchLoader(Numbers(), num_workers=1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_accumulation_groups_end_with_the_epoch():
    groups = [list(accumulation_group(n, 5, 2)) for n in range(10)]
    assert groups == [[0, 1]] * 2 + [[2, 3]] * 2 + [[4]] + [[5, 6]] * 2 + [[7, 8]] * 2 + [[9]]


def test_normalisers_are_those_of_the_whole_step():
    source = TrainingSource(Numbers(), epoch_batches=3, accumulate=2)
    totals = [source.batch(n)["step_normalisers"] for n in range(4)]
    assert [t["targets"] for t in totals] == [21.0, 21.0, 12.0, 27.0]
    assert [t["other"] for t in totals] == [2.0, 2.0, 1.0, 2.0]


def test_repeating_epochs():
    source = TrainingSource(Numbers(), epoch_batches=2, repeat=True)
    assert [int(source.batch(n)["n"]) for n in range(5)] == [0, 1, 0, 1, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="who sent a signal is known there only")
def test_workers_take_no_end_but_their_parents():
    """Signals to the whole group reach workers that training still needs for its checkpoint."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    loader = BatchLoader(Numbers(), epoch_batches=200, num_workers=2)
    epoch = iter(loader)
    next(epoch)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for name in ("TERM", "INT"):
        subprocess.run(["sh", "-c", f"kill -{name} " + " ".join(str(w.pid) for w in workers)])
    assert [int(batch["n"]) for batch in epoch] == list(range(1, 200))
    epoch = iter(loader)
    next(epoch)
    (worker, *_) = multiprocessing.active_children()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises for any ended worker
    try:
        worker.terminate()
        worker.join(timeout=30)
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert worker.exitcode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
