"""The literal chunks of Thinking States and their targets."""

import math

import pytest

from tests.reference import thinking_states_grid as grid

KINDS = ("left_align", "partial", "absolute")


def arithmetic(kind, c, q, t):
    """Chunk and place in closed form."""
    n = math.ceil(q / c)
    if kind == "left_align":
        return n + (t - q) // c, (t - q) % c
    if kind == "absolute" or t < q:
        return t // c, t % c
    return n + (t - q) // c, (t - q) % c


@pytest.mark.parametrize("kind", KINDS)
def test_grid_is_its_closed_form(kind):
    for c in (1, 2, 3, 5):
        for q in range(1, 12):
            found = [grid.find(kind, c, q, t) for t in range(q + 2 * c + 1)]
            assert found == [arithmetic(kind, c, q, t) for t in range(len(found))]
            for k in range(max(chunk for chunk, _ in found)):
                assert grid.end(kind, c, q, k) == max(
                    t for t, (chunk, _) in enumerate(found) if chunk == k
                )


@pytest.mark.parametrize(
    ("kind", "places", "ends"),
    [
        ("left_align", [1, 2, 0, 1, 2, 0, 1, 2, 0, 1], [1, 4, 7]),
        ("partial", [0, 1, 2, 0, 1, 0, 1, 2, 0, 1], [2, 4, 7]),
        ("absolute", [0, 1, 2, 0, 1, 2, 0, 1, 2, 0], [2, 5, 8]),
    ],
)
def test_grid_of_five_query_tokens_in_threes(kind, places, ends):
    assert [grid.place(kind, 3, 5, t) for t in range(10)] == places
    assert [grid.end(kind, 3, 5, k) for k in range(3)] == ends


def test_chunks_think_once_their_last_token_is_there():
    assert grid.thinking_chunks("left_align", 3, 5, 9) == [0, 1]
    assert grid.thinking_chunks("left_align", 3, 5, 10, think_in_decode=True) == [0, 1, 2]
    assert grid.thinking_chunks("partial", 3, 5, 5) == [0, 1]
    assert grid.thinking_chunks("absolute", 3, 5, 5) == [0]
    assert grid.thinking_chunks("absolute", 3, 5, 6) == [0, 1]
    assert grid.thinking_chunks("absolute", 3, 5, 9) == [0, 1]
    assert grid.thinking_chunks("absolute", 3, 5, 9, think_in_decode=True) == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("left_align", [[1, 99], [2, 3, 77, 4, 99], [5, 77, 6, 99]]),
        ("partial", [[1, 77, 2, 3, 77, 4, 99], [99], [5, 77, 6, 99]]),
        ("absolute", [[1, 77, 2, 3, 77, 4, 99], [99], [5, 77, 6, 99]]),
    ],
)
def test_gold_targets_join_the_steps_of_a_chunk(kind, targets):
    steps, places = [[1], [2, 3], [4], [5], [6]], [0, 2, 2, 6, 6]
    assert grid.gold_targets(kind, 3, 7, steps, places, separator=77, eos=99) == targets
    with pytest.raises(ValueError, match="step place 7"):
        grid.gold_targets(kind, 3, 7, [[1]], [7], separator=77, eos=99)


def test_gold_thoughts_are_those_of_chunks_that_end():
    targets = [[1, 99], [2, 99]]
    assert grid.gold_thoughts("absolute", 3, 5, 5, targets, 99) == {0: [1, 99]}
    found = grid.gold_thoughts("absolute", 3, 5, 9, targets, 99, think_in_decode=True)
    assert found == {0: [1, 99], 1: [2, 99], 2: [99]}
