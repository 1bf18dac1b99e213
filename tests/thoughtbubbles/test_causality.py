"""Which allocations look at later tokens, and padded rows against rows on their own."""

import pytest
import torch

from tests.thoughtbubbles.cases import (
    THRESHOLDS,
    V,
    build,
    full_distribution,
    row_alone,
    rows_of,
    stream_counts,
)

LONG = 14
CAUSAL = {
    "threshold": {"allocation": "threshold", "kappa": "1.5L", "fork_layers": (0, 2)},
    "threshold-2L": {"allocation": "threshold", "kappa": "2L", "fork_layers": (0, 1, 3)},
    "trained-by-topk": {"eval_allocation": "threshold", "kappa": "1.5L"},
    "window": {"allocation": "window_topk", "kappa": "1.5L", "fork_layers": (0, 2)},
    "window-2L": {"allocation": "window_topk", "kappa": "2L", "allocation_window": 5},
    "window-residual": {
        "allocation": "window_topk",
        "kappa": "1.5L",
        "output_average": "residual_norm",
        "fork_layers": (1, 3),
    },
}
GLOBAL = {
    "1.5L": {"kappa": "1.5L", "fork_layers": (0, 2)},
    "2L": {"kappa": "2L"},
    "4L": {"kappa": "4L", "fork_layers": (1, 2, 3)},
    "8-streams": {"kappa": 8},
    "fixed-1.5L": {"kappa": "1.5L", "budget": "fixed"},
    "fixed-4L": {"kappa": "4L", "budget": "fixed", "fork_layers": (0, 1, 2)},
    "residual": {"kappa": "1.5L", "output_average": "residual_norm"},
}


def changed_at(batch, place):
    tokens = batch["tokens"].clone()
    tokens[:, place] = (tokens[:, place] + 1 + torch.arange(len(tokens))) % V
    return batch | {"tokens": tokens}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CAUSAL)
def test_later_tokens_change_nothing_before_them(case, seed):
    model = build(seed, thresholds=THRESHOLDS, **CAUSAL[case])
    batch = rows_of([LONG, LONG, LONG], seed=seed)
    before = full_distribution(model, batch)
    counts = stream_counts(model, batch)
    assert counts[-1].sum(dim=1).unique().numel() > 1, "the rows must be ragged"
    assert model.causal
    assert model.likelihood == "exact"
    for place in (1, 5, 9, LONG - 1):
        other = changed_at(batch, place)
        after = full_distribution(model, other)
        torch.testing.assert_close(after[:, :place], before[:, :place], atol=1e-6, rtol=0)
        assert (after[:, place] - before[:, place]).abs().max() > 1e-2
        for mine, theirs in zip(counts, stream_counts(model, other), strict=True):
            assert torch.equal(mine[:, :place], theirs[:, :place])


@pytest.mark.parametrize("case", CAUSAL | GLOBAL)
def test_a_padded_row_is_the_row_alone(case):
    """Rows of many lengths, one of them empty: budgets belong to rows."""
    model = build(thresholds=THRESHOLDS, **(CAUSAL | GLOBAL)[case])
    batch = rows_of([9, 6, 3, 1, 0])
    together = full_distribution(model, batch)
    counts = stream_counts(model, batch)
    score = model.score(batch).log_prob
    assert score.isfinite().all()
    assert (score[4] == 0).all()
    summed = model.loss(batch).terms["nll"]
    assert summed.normaliser == 19
    alone = 0.0
    for row, length in enumerate([9, 6, 3, 1]):
        own = row_alone(batch, row)
        torch.testing.assert_close(together[row, :length], full_distribution(model, own)[0], **NEAR)
        for mine, theirs in zip(counts, stream_counts(model, own), strict=True):
            assert torch.equal(mine[row, :length], theirs[0])
            assert not mine[row, length:].any()
        alone = alone + model.loss(own).terms["nll"].sum
    torch.testing.assert_close(summed.sum, alone, **NEAR)


NEAR = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("case", sorted(set(GLOBAL) - {"8-streams"}))  # too few for 40 tokens
def test_equal_scores_are_cut_alike_whatever_the_padding(case):
    """A token twice in a row scores the same in front of block 0; who stays is then by order."""
    model = build(block_size=40, **GLOBAL[case] | {"fork_layers": (0, 2)})
    generator = torch.Generator().manual_seed(0)
    batch = rows_of([40, 33, 20])
    batch["tokens"] = torch.randint(0, 3, (3, 40), generator=generator)
    together = model.score(batch).log_prob
    for row, length in enumerate([40, 33, 20]):
        alone = model.score(row_alone(batch, row)).log_prob[0]
        torch.testing.assert_close(together[row, :length], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", CAUSAL | GLOBAL)
def test_batches_of_empty_rows_are_finite(case, training):
    """What fills up the last batch of an epoch; its gradients are zeros."""
    model = build(thresholds=THRESHOLDS, **(CAUSAL | GLOBAL)[case]).train(training)
    before = [fork.threshold.clone() for fork in model.network.forks]
    batch = rows_of([4, 4])
    batch["mask"][:] = False
    batch["targets"][:] = -100
    loss = model.loss(batch).terms["nll"]
    loss.sum.backward()
    assert loss.sum == 0
    assert loss.normaliser == 0
    for parameter in model.network.parameters():
        assert parameter.grad is None or not parameter.grad.any()
    assert [fork.threshold for fork in model.network.forks] == before
    scores = model.score(batch)
    assert (scores.log_prob == 0).all()
    assert scores.num_targets.tolist() == [0, 0]


@pytest.mark.parametrize("case", CAUSAL | GLOBAL)
def test_an_empty_row_gives_others_no_wrong_gradients(case):
    model = build(thresholds=THRESHOLDS, **(CAUSAL | GLOBAL)[case])
    gradients = []
    for batch in (rows_of([5, 0]), row_alone(rows_of([5, 0]), 0)):
        model.zero_grad()
        model.loss(batch).terms["nll"].sum.backward()
        gradients.append([p.grad for p in model.network.parameters()])
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


def test_small_windows_of_scores_are_unfolded_in_parts(monkeypatch):
    """The same streams, whatever number of scores is held at once."""
    from lightning_models.thoughtbubbles import forking

    model, batch = build(**CAUSAL["window-2L"]), rows_of([LONG, 8, 3])
    whole = stream_counts(model, batch)
    for limit in (1, 100, 333):
        monkeypatch.setattr(forking, "WINDOW_ELEMENTS", limit)
        for mine, expected in zip(stream_counts(model, batch), whole, strict=True):
            assert torch.equal(mine, expected)
