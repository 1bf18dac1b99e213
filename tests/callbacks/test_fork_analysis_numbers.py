"""What the analysis of forks computes, against numbers found by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from callbacks.fork_analysis.entropy import WINDOW, fit_parabola, windows
from callbacks.fork_analysis.statistics import MEASURES, ForkRecorder, TokenRow

T = 3  # tokens of a row; also the mark of padding


def streams(tokens, p=None):
    """Streams of these tokens, those of one token next to each other; as networks record them."""
    token = torch.tensor(tokens)
    count = torch.stack([(row[:, None] == row).sum(1) for row in token])
    slot = torch.stack([torch.tril(row[:, None] == row, -1).sum(1) for row in token])
    real = token < T
    log_p = torch.zeros(token.shape) if p is None else torch.tensor(p).log()
    return SimpleNamespace(
        token=token,
        count=count,
        slot=slot,
        log_p=log_p,
        num_tokens=T,
        real=real,
        original=real & (slot == count - 1),
        lengths=real.sum(1),
    )


# One row of three tokens, one of two, and one that only fills up the batch. The fork of token 0
# dies but forks itself first; token 1 forks.
BATCH = {
    "tokens": torch.tensor([[10, 11, 12], [13, 14, 0], [0, 0, 0]]),
    "mask": torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool),
}
DECISION = {
    "ordinal": 0,
    "before": streams([[0, 0, 1, 2], [0, 1, T, T], [T, T, T, T]]),
    "after": streams(
        [[0, 0, 1, 1, 2], [0, 1, T, T, T], [T] * 5],
        [[0.5, 0.8, 0.25, 0.6, 1.0], [0.7, 0.9, 1.0, 1.0, 1.0], [1.0] * 5],
    ),
    "parent": torch.tensor([[0, 1, 2, 2, 3], [0, 1, 3, 3, 3], [3] * 5]),
    "is_fork": torch.tensor([[1, 0, 1, 0, 0], [0] * 5, [0] * 5], dtype=torch.bool),
    "budgets": torch.tensor([6, 4, 3]),
}
ENTROPY = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan], [math.nan] * 3])


def recorded(**changes):
    recorder = ForkRecorder()
    recorder.fork(**{**DECISION, **changes})
    recorder.entropy(entropy=ENTROPY)
    return recorder


def test_a_fork_layer_by_hand():
    (layer,) = recorded().measures
    expected = {
        "per_token": 2 / 5,
        "created": 2 / 5,
        "kept": 0.0,
        "deleted": 1 / 5,
        "survival": 0.0,
        "deletion": 1.0,
        "orphans": 1 / 2,
        "score_originals": (0.8 + 0.6 + 1.0 + 0.7 + 0.9) / 5,
        "score_forks": (0.5 + 0.25) / 2,
        "budget_use": (5 + 2) / (6 + 4),
    }
    found = {name: value for name, value in layer.items() if not math.isnan(value)}
    assert found == pytest.approx(expected, rel=1e-6)
    assert list(layer) == list(MEASURES)


def test_a_fork_that_is_kept_is_not_new():
    """The same decision, but token 0's fork lives on instead of forking."""
    (layer,) = recorded(is_fork=torch.zeros(3, 5, dtype=torch.bool)).measures
    assert (layer["created"], layer["survival"], layer["deletion"]) == (0, 1, 0)
    assert math.isnan(layer["orphans"])


def test_without_a_budget_none_is_reported():
    (layer,) = recorded(budgets=None).measures
    assert math.isnan(layer["budget_use"])


def test_passes_add_up():
    recorder = recorded()
    once = recorder.measures[0]
    recorder.end(BATCH)
    recorder.begin()
    recorder.fork(**DECISION)
    recorder.end(BATCH)
    assert recorder.measures[0] == pytest.approx(once, nan_ok=True)
    assert len(recorder.rows) == 4


def test_real_tokens_by_hand():
    recorder = recorded()
    assert recorder.end(BATCH)
    first, second = recorder.rows  # none of the row that fills up the batch
    assert first.ids.tolist() == [10, 11, 12]
    assert first.streams.tolist() == [[2, 2, 1]]
    assert first.forks.tolist() == [1, 1, 0]
    np.testing.assert_allclose(first.original_score, [0.8, 0.6, 1.0], rtol=1e-6)
    np.testing.assert_allclose(first.fork_score, [0.5, 0.25, np.nan], rtol=1e-6)
    assert first.entropy.tolist() == [1, 2, 3]
    assert (second.ids.tolist(), second.streams.tolist()) == ([13, 14], [[1, 1]])
    assert second.entropy.tolist() == [4, 5]


def test_attention_by_hand():
    recorder = recorded()
    weights = torch.zeros(3, 2, 5, 5)
    weights[0, :, 1, :2] = torch.tensor([[0.2, 0.8], [0.4, 0.6]])  # original of token 0
    weights[0, :, 3, :4] = torch.tensor([[0.0, 0.2, 0.4, 0.4], [0.2, 0.2, 0.2, 0.4]])  # of token 1
    weights[0, :, 4, 4] = 1.0  # token 2 has no forks, so it is not asked
    weights[0, :, 2, 2] = 1.0  # nor are forks
    recorder.attention(weights=weights)
    (layer,) = recorder.measures
    assert layer["attention_self"] == pytest.approx((0.7 + 0.4) / 2)
    assert layer["attention_own_forks"] == pytest.approx((0.3 + 0.3) / 2)
    assert layer["attention_others"] == pytest.approx((0.1 + 0.2) / 2)  # token 0 has none before


def test_attention_in_front_of_the_first_fork_layer_does_not_count():
    recorder = ForkRecorder()
    recorder.attention(weights=torch.ones(3, 2, 3, 3))
    recorder.fork(**DECISION)
    assert math.isnan(recorder.measures[0]["attention_self"])


def test_who_does_not_fork_has_no_rows():
    recorder = ForkRecorder()
    recorder.entropy(entropy=ENTROPY)
    assert not recorder.end(BATCH)
    assert (recorder.rows, recorder.measures) == ([], [])


def test_attention_is_left_alone_where_nobody_asks():
    assert set(ForkRecorder(attention=False).consumers()) == {"fork", "entropy"}


# ---- entropy


def row(forks, entropy, reference=None):
    forks = np.asarray(forks)
    nothing = np.full(len(forks), np.nan)
    layers = np.stack([np.ones_like(forks), forks + 1])
    return TokenRow(np.arange(len(forks)), layers, nothing, nothing, np.asarray(entropy), reference)


def test_windows_by_hand():
    rows = [
        row([0, 1, 2, 1, 3, 3, 3, 3, 9], [1.0, 1.0, 2.0, 2.0, 0.0, 0.0, 4.0, 4.0, 99.0]),
        row([2, 2, 2, 2], [5.0, 5.0, 5.0, 5.0]),
        row([7, 7], [1.0, 1.0]),  # shorter than a window
    ]
    found = windows(rows)
    assert WINDOW == 4
    assert found.forks.tolist() == [1, 3, 2]
    assert found.entropy.tolist() == [1.5, 2, 5]
    assert found.normalised.tolist() == [0.5, 1.5, 1]


def test_windows_by_the_reference_are_those_of_the_rows_that_have_it():
    rows = [row([1] * 4, [0.0] * 4, np.full(4, 3.0)), row([2] * 4, [0.0] * 4)]
    found = windows(rows, reference=True)
    assert (found.entropy.tolist(), found.forks.tolist()) == ([3], [1])
    assert len(windows(rows[1:], reference=True).entropy) == 0


def test_without_forks_nothing_is_divided_by_zero():
    assert windows([row([0] * 4, [1.0] * 4)]).normalised.tolist() == [0]


def test_the_parabola_is_found_again():
    x = np.linspace(0, 4, 9)
    parabola = fit_parabola(x, -2 * (x - 1.5) ** 2 + 3)
    assert parabola.curvature == pytest.approx(-2)
    assert parabola.slope == pytest.approx(6)
    assert parabola.constant == pytest.approx(-1.5)
    assert (parabola.r2, parabola.vertex) == (pytest.approx(1), pytest.approx(1.5))
    assert parabola.concave
    assert parabola(np.array([1.5])) == pytest.approx([3])


def test_r2_by_hand():
    """The best parabola through these is constant: it explains nothing."""
    parabola = fit_parabola(np.array([0.0, 0, 1, 1, 2, 2]), np.array([-1.0, 1, -1, 1, -1, 1]))
    assert parabola.r2 == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("x", "y"), [([1, 1, 2, 2], [1, 2, 3, 4]), ([1, 2, 3], [5, 5, 5]), ([], [])]
)
def test_no_parabola_where_there_is_none(x, y):
    assert fit_parabola(np.array(x, dtype=float), np.array(y, dtype=float)) is None
