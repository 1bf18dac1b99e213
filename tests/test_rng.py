"""Streams of random numbers that are named by what they are for."""

import itertools

import numpy as np
import pytest
import torch

from lightning_models.runtime import seeded_generator


def draw(*key, count=4):
    return tuple(torch.rand(count, generator=seeded_generator(*key), dtype=torch.float64).tolist())


def test_a_key_names_one_stream_whatever_was_drawn_before():
    expected = draw(3, 5)
    torch.manual_seed(1)
    np.random.seed(1)
    torch.rand(7)
    assert draw(3, 5) == expected
    assert draw(3, 5) == expected


def test_the_global_states_are_left_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    draw(3, 5)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_generators_of_one_key_do_not_share_a_state():
    first, second = seeded_generator(1, 2), seeded_generator(1, 2)
    torch.rand(3, generator=first)
    assert torch.rand((), generator=second).item() == torch.rand(
        (), generator=seeded_generator(1, 2)
    )


KEYS = [
    (0,),
    (1,),
    (0, 0),
    (1, 0),
    (0, 1),
    (1, 1),
    (0, 0, 0),
    (1, 0, 0),
    (0, 0, 0, 0, 0),
    (-1,),
    (-1, 0),
    (0, -1),
    (2**32,),
    (2**32, 0),
    (0, 2**32),
    (2**32 + 3, 9),
    (3, 2**32 * 9 + 1),
    (2**63, 2**40 + 1),
]


def test_different_keys_have_different_streams():
    streams = {}
    for key in KEYS:
        streams.setdefault(draw(*key), []).append(key)
    assert [keys for keys in streams.values() if len(keys) > 1] == []


def test_every_step_and_every_sequence_has_its_own_stream():
    streams = {draw(*key) for key in itertools.product(range(40), range(50))}
    assert len(streams) == 2000


@pytest.mark.parametrize("vary", ["seed", "step"])
def test_first_numbers_of_neighbouring_keys_are_uniform_and_uncorrelated(vary):
    keys = [(n, 7) if vary == "seed" else (7, n) for n in range(4000)]
    first = torch.tensor([draw(*key, count=1)[0] for key in keys])
    assert abs(first.mean().item() - 0.5) < 0.018  # four standard errors
    assert abs(first.var().item() - 1 / 12) < 0.005
    neighbours = torch.corrcoef(torch.stack((first[:-1], first[1:])))[0, 1]
    assert abs(neighbours.item()) < 0.063
    counts = torch.histc(first, bins=20, min=0, max=1)
    assert ((counts - 200) ** 2 / 200).sum().item() < 52  # chi-square, 19 degrees: odds 1e-4
