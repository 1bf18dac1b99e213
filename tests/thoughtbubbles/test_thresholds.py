"""The running thresholds: what moves them, when, and what they lead to."""

import math

import pytest
import torch

from tests.thoughtbubbles.cases import (
    build,
    reference_of,
    row_alone,
    rows_of,
    stream_counts,
)

DECAY = 0.9


def thresholds(model):
    return [fork.threshold.item() for fork in model.network.forks]


def borders_by_loops(model, batch):
    """The mean over rows of the kappa-th log score at each fork layer, -inf where none competes."""
    slow, rows = reference_of(model), []
    slow.allocation = "global_topk"
    for row in range(len(batch["tokens"])):
        slow.log_probs(row_alone(batch, row)["tokens"][0].tolist())
        rows.append(slow.borders)
    return [sum(layer) / len(layer) for layer in zip(*rows, strict=True)]


@pytest.mark.parametrize("kappa", ["1.5L", "2L", "4L"])
def test_a_running_mean_of_the_kappa_th_score(kappa):
    model = build(kappa=kappa, fork_layers=(0, 1, 3), threshold_decay=DECAY)
    assert thresholds(model) == [-math.inf] * 3
    expected = None
    for seed in range(3):
        batch = rows_of([6, 4], seed=seed)
        seen = borders_by_loops(model, batch)
        model.train().loss(batch)
        if expected is None:
            expected = seen
        else:
            expected = [
                old if new == -math.inf else DECAY * old + (1 - DECAY) * new
                for old, new in zip(expected, seen, strict=True)
            ]
        assert thresholds(model) == pytest.approx(expected, abs=1e-5)
    competing = {"1.5L": 3, "2L": 2, "4L": 1}[kappa]
    assert [value > -math.inf for value in expected] == [False] * (3 - competing) + [
        True
    ] * competing
    assert [fork.updates.item() for fork in model.network.forks] == [
        3 * (value > -math.inf) for value in expected
    ]


def test_only_training_moves_them():
    model, batch = build(kappa="1.5L", thresholds=(-1.0, -1.5)), rows_of([6, 6])
    model.eval().loss(batch)
    with torch.no_grad():
        model.score(batch)
        model.train().loss(batch)
    model.score(batch)
    model.eval().init_cache(batch["tokens"], torch.tensor([6, 6]), 3)
    assert thresholds(model) == [-1.0, -1.5]
    model.train().loss(batch)
    assert all(new != old for new, old in zip(thresholds(model), [-1.0, -1.5], strict=True))


@pytest.mark.parametrize("kappa", ["1.5L", "2L"])
def test_trained_by_topk_evaluated_by_threshold(kappa):
    """The budget is then met on average, and rows differ."""
    changes = {"kappa": kappa, "fork_layers": (1, 2), "threshold_decay": 0.8}
    model = build(eval_allocation="threshold", **changes).train()
    assert model.likelihood == "exact"
    for seed in range(30):
        batch = rows_of([6] * 4, seed=seed)
        model.loss(batch)
        (first, second) = stream_counts(model, batch)
        most = math.ceil(float(kappa[:-1]) * 6)
        assert first.sum(dim=1).tolist() == [min(most, 12)] * 4
        assert second.sum(dim=1).tolist() == [most] * 4
    counts = stream_counts(model.eval(), rows_of([6] * 64, seed=99))[-1].sum(dim=1)
    assert counts.unique().numel() > 1
    assert counts.double().mean().item() == pytest.approx(most, rel=0.15)


def test_trained_by_threshold_the_first_batch_goes_by_itself():
    """There is no running mean yet; from then on there is, this batch left out of it."""
    model = build(kappa="1.5L", allocation="threshold", fork_layers=(1,)).train()
    first = rows_of([6])
    (counts,) = stream_counts(model, first)
    assert counts.sum() == 8  # all above the ninth score: the kappa-th is not above itself
    model.loss(first)
    border = model.network.forks[0].threshold.item()
    assert border == pytest.approx(borders_by_loops(model, first)[0], abs=1e-5)
    second = rows_of([6], seed=1)
    (trained,) = stream_counts(model, second)
    (evaluated,) = stream_counts(model.eval(), second)
    assert torch.equal(trained, evaluated)


@pytest.mark.parametrize("kappa", ["1L", 6])
def test_a_budget_of_originals_only(kappa):
    """Originals fill the budget: no fork may pass, however training went."""
    model = build(kappa=kappa, eval_allocation="threshold", fork_layers=(1, 2)).train()
    for seed in range(3):
        model.loss(rows_of([6, 6], seed=seed))
    assert [c.sum().item() for c in stream_counts(model, rows_of([6, 6]))] == [12, 12]
    assert [c.sum().item() for c in stream_counts(model.eval(), rows_of([6, 6]))] == [12, 12]


def test_an_empty_row_has_no_say():
    moved = []
    for lengths in ([6, 4], [6, 4, 0]):
        model = build(kappa="1.5L").train()
        batch = rows_of([6, 4, 0])
        model.loss({key: value[: len(lengths)] for key, value in batch.items()})
        moved.append(thresholds(model))
    assert moved[0] == pytest.approx(moved[1], abs=1e-6)


def test_thresholds_far_up_and_down():
    batch = rows_of([6, 3])
    for threshold, per_token in ((0.0, 1), (-1e9, 4)):
        model = build(kappa="1.5L", allocation="threshold", thresholds=(threshold,) * 2)
        counts = stream_counts(model, batch)[-1]
        assert counts[0].tolist() == [per_token] * 6
        assert counts[1].tolist() == [per_token] * 3 + [0] * 3


@pytest.mark.parametrize(
    ("trained", "asked", "message"),
    [
        ({"allocation": "window_topk"}, {"eval_allocation": "threshold"}, "no thresholds"),
        ({"kappa": "4L"}, {"kappa": "2L", "eval_allocation": "threshold"}, "observed at 4L"),
    ],
    ids=["by window", "another kappa"],
)
def test_thresholds_that_were_not_observed_are_refused(trained, asked, message):
    shape = {"fork_layers": (0, 1, 2), "allocation_window": 4}
    model = build(**shape, **trained)
    batch = rows_of([6, 4])
    model.train().loss(batch)
    other = build(**{**shape, **trained, **asked})
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=message):
        other.eval().score(batch)
    with pytest.raises(ValueError, match=message):
        other.init_cache(batch["tokens"], batch["mask"].sum(1), 3)
    assert model.eval().score(batch).log_prob.isfinite().all()


def test_before_anything_is_observed_only_originals_pass():
    model = build(allocation="threshold", fork_layers=(0, 1, 2), kappa="2L")
    batch = rows_of([6, 6])
    decoded = model.network(batch["tokens"], batch["mask"].sum(1))
    assert (decoded.token < 6).sum(1).tolist() == [6, 6]
