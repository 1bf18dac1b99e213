"""Decoding token by token against scoring the whole row."""

import pytest
import torch

from lightning_models.thoughtbubbles.network import PrefixCache, StreamCache
from tests.thoughtbubbles.cases import (
    THRESHOLDS,
    build,
    full_distribution,
    rows_of,
)

LENGTH = 12
CAUSAL = {
    "threshold": {"allocation": "threshold", "kappa": "1.5L", "fork_layers": (0, 2)},
    "threshold-2L": {"allocation": "threshold", "kappa": "2L", "fork_layers": (1, 2, 3)},
    "threshold-residual": {
        "allocation": "threshold",
        "kappa": "1.5L",
        "output_average": "residual_norm",
    },
    "window": {"allocation": "window_topk", "kappa": "1.5L", "fork_layers": (0, 2)},
    "window-2L": {"allocation": "window_topk", "kappa": "2L", "fork_layers": (0, 1, 3)},
    "window-1": {"allocation": "window_topk", "kappa": "1.5L", "allocation_window": 1},
    "window-5-residual": {
        "allocation": "window_topk",
        "allocation_window": 5,
        "output_average": "residual_norm",
    },
    "one": {"allocation": "window_topk", "bias_scale": "one"},
    "no-forks": {"fork_layers": ()},
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def feed(model, cache, rows, places, tokens):
    """One step for these rows, each at its own place; returns the log-probabilities (rows, V)."""
    own = torch.tensor([tokens[row, place] for row, place in zip(rows, places, strict=True)])
    with torch.no_grad():
        logits, ready = model.decode_step(cache, own)
    assert ready.all()
    assert logits.dtype == torch.float32
    return logits.log_softmax(-1)


def start(model, tokens, lengths):
    widest = int(max(lengths))
    lengths = torch.tensor(lengths)
    with torch.no_grad():
        return model.init_cache(tokens[:, :widest], lengths, LENGTH - widest + 1)


@pytest.mark.parametrize("lengths", [(1, 4, 3), (1, 1, 1), (6, 6, 6)], ids=str)
@pytest.mark.parametrize("case", CAUSAL)
def test_steps_are_the_whole_row(case, lengths):
    """Prompts of their own lengths, streams of their own numbers, rows that leave the batch."""
    model = build(thresholds=THRESHOLDS, **CAUSAL[case])
    batch = rows_of([LENGTH] * 3, seed=1)
    expected = full_distribution(model, batch)
    cache = start(model, batch["tokens"], lengths)
    assert isinstance(cache, StreamCache)
    rows, places = [0, 1, 2], [length - 1 for length in lengths]
    steps = LENGTH - max(lengths) + 1
    for step in range(steps):
        if step == steps // 2:
            cache.select(torch.tensor([2, 0]))
            rows, places = [2, 0], [places[2], places[0]]
        mine = feed(model, cache, rows, places, batch["tokens"])
        torch.testing.assert_close(mine, expected[rows, places], **CLOSE)
        places = [place + 1 for place in places]
    assert cache.tokens.tolist() == places


@pytest.mark.parametrize("case", CAUSAL)
def test_a_cache_in_two_parts_is_a_cache_in_one(case):
    """The network may read several new tokens after a cache, fewer in some rows."""
    model = build(thresholds=THRESHOLDS, **CAUSAL[case])
    tokens = rows_of([LENGTH] * 2, seed=2)["tokens"]
    expected = full_distribution(model, rows_of([LENGTH] * 2, seed=2))
    cache = model.network.new_cache(2, LENGTH)
    with torch.no_grad():
        model.network(tokens[:, :4], torch.tensor([4, 2]), cache)
        second = torch.stack((tokens[0, 4:8], tokens[1, 2:6]))
        model.network(second, torch.tensor([1, 4]), cache)
        assert cache.tokens.tolist() == [5, 6]
    mine = feed(model, cache, [0, 1], [5, 6], tokens)
    torch.testing.assert_close(mine, expected[[0, 1], [5, 6]], **CLOSE)


@pytest.mark.parametrize(
    "changes",
    [{"kappa": 9}, {"kappa": "1.5L", "budget": "fixed"}, {"output_average": "residual_norm"}],
    ids=str,
)
def test_the_papers_topk_reads_the_whole_prefix_anew(changes):
    model = build(fork_layers=(0, 2), **changes)
    batch = rows_of([LENGTH] * 3, seed=1)
    cache = start(model, batch["tokens"], (1, 4, 3))
    assert isinstance(cache, PrefixCache)
    rows, places = [0, 1, 2], [0, 3, 2]
    for step in range(6):
        if step == 3:
            cache.select(torch.tensor([2, 0]))
            rows, places = [2, 0], [places[2], places[0]]
        mine = feed(model, cache, rows, places, batch["tokens"])
        for index, (row, place) in enumerate(zip(rows, places, strict=True)):
            prefix = {key: value[row : row + 1, : place + 1] for key, value in batch.items()}
            torch.testing.assert_close(
                mine[index], full_distribution(model, prefix)[0, -1], **CLOSE
            )
        places = [place + 1 for place in places]


@pytest.mark.parametrize("case", ["threshold", "window-2L"])
def test_a_long_text_outgrows_the_first_room_of_the_cache(case):
    """More streams than a cache takes at once, and many more tokens than the window."""
    model = build(thresholds=THRESHOLDS, **CAUSAL[case])
    batch = rows_of([60, 60], seed=4)
    batch["tokens"] = torch.randint(0, 11, (2, 60), generator=torch.Generator().manual_seed(4))
    expected = full_distribution(model, batch)
    with torch.no_grad():
        cache = model.init_cache(batch["tokens"][:, :40], torch.tensor([38, 3]), 21)
    for step in range(20):
        mine = feed(model, cache, [0, 1], [37 + step, 2 + step], batch["tokens"])
        torch.testing.assert_close(mine[0], expected[0, 37 + step], atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(mine[1], expected[1, 2 + step], atol=5e-5, rtol=1e-5)
