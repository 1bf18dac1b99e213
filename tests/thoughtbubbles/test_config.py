"""The dials and what they mean; tests/test_values.py has those that are refused."""

import pytest

from lightning_models.thoughtbubbles import ThoughtbubblesConfig
from tests.thoughtbubbles.cases import SIZES


def config(**changes):
    return ThoughtbubblesConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("kappa", "ratio"),
    [("2L", 2), ("4L", 4), ("1.5L", 1.5), ("1L", 1), (12, 2), ("12", 2), (9, 1.5)],
)
def test_budgets_are_ratios(kappa, ratio):
    assert config(kappa=kappa).ratio == ratio


@pytest.mark.parametrize(
    ("kappa", "length", "dynamic", "fixed"),
    [
        ("2L", 6, 12, 12),
        ("2L", 1, 2, 12),
        ("2L", 20, 40, 20),
        ("1.1L", 10, 11, 10),
        ("1.1L", 30, 33, 30),
        ("1.5L", 3, 5, 9),
        ("1.2L", 5, 6, 8),
        (13, 6, 13, 13),
        (13, 3, 7, 13),
        (7, 1, 2, 7),
    ],
)
def test_budgets_of_other_lengths(kappa, length, dynamic, fixed):
    """Appendix E.1: the ratio stays (rounded up, and not by float noise), or the number does."""
    import torch

    from lightning_models.thoughtbubbles.forking import row_budgets

    for budget, expected in (("dynamic", dynamic), ("fixed", fixed)):
        chosen = config(kappa=kappa, budget=budget)
        assert chosen.most_streams(length) == expected
        assert row_budgets(chosen, torch.tensor([length, length])).tolist() == [expected] * 2


def test_the_papers_defaults():
    chosen = ThoughtbubblesConfig(vocab_size=10, block_size=8)
    assert chosen.fork_layers == (3, 7, 11)
    assert chosen.kappa == "2L"
    assert chosen.positions == "rope"
    assert chosen.allocation == "global_topk"
    assert chosen.inference_allocation == "global_topk"
    assert chosen.output_average == "mixture"
    assert chosen.bias_scale == "inv_sqrt_dhead"


def test_fork_layers_come_in_any_order_and_as_lists():
    assert config(fork_layers=[3, 0]).fork_layers == (0, 3)
    assert config(fork_layers=[]).fork_layers == ()


def test_the_eval_allocation_goes_first():
    assert config(eval_allocation="threshold").inference_allocation == "threshold"
    assert config(allocation="window_topk").inference_allocation == "window_topk"
