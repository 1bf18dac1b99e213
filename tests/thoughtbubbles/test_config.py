"""The dials: what they mean, and what is refused with key, value and a cure."""

import math

import pytest

from lightning_models.thoughtbubbles import CopyConfig, ThoughtbubblesConfig
from tests.thoughtbubbles.cases import SIZES


def config(**changes):
    return ThoughtbubblesConfig(**{**SIZES, **changes})


def copies(**changes):
    sizes = {key: SIZES[key] for key in ("vocab_size", "block_size", "num_layers", "dim")}
    return CopyConfig(**{**sizes, "num_heads": 2, **changes})


WRONG = [
    (config, {"kappa": "0.5L"}, "kappa (0.5L)", "at least 1"),
    (config, {"kappa": 5}, "kappa (5)", "at least 1"),
    (config, {"kappa": 0}, "kappa (0)", "at least 1"),
    (config, {"kappa": "abc"}, "kappa (abc)", "2L"),
    (config, {"kappa": "nanL"}, "kappa (nanL)", "2L"),
    (config, {"fork_layers": (1, 4)}, "fork_layers ([1, 4])", "among 0 to 3"),
    (config, {"fork_layers": (-1,)}, "fork_layers ([-1])", "among 0 to 3"),
    (config, {"fork_layers": (1, 1)}, "fork_layers ([1, 1])", "different"),
    (config, {"window": 8}, "window (8)", "null"),
    (config, {"positions": "learned"}, "positions (learned)", "rope"),
    (config, {"allocation": "topk"}, "allocation (topk)", "threshold"),
    (config, {"eval_allocation": "topk"}, "eval_allocation (topk)", "threshold"),
    (config, {"bias_scale": "2"}, "bias_scale (2)", "inv_sqrt_dhead"),
    (config, {"output_average": "mean"}, "output_average (mean)", "mixture"),
    (config, {"budget": "some"}, "budget (some)", "dynamic"),
    (config, {"allocation_window": 0}, "allocation_window (0)", "at least 1"),
    (config, {"threshold_decay": 1.0}, "threshold_decay (1.0)", "[0, 1)"),
    (config, {"threshold_decay": -0.1}, "threshold_decay (-0.1)", "[0, 1)"),
    (config, {"threshold_decay": math.nan}, "threshold_decay (nan)", "finite"),
    (copies, {"copies": 0}, "copies (0)", "at least 1"),
    (copies, {"window": 4}, "window (4)", "null"),
    (copies, {"positions": "learned"}, "positions (learned)", "rope"),
    (copies, {"copy_positions": "own"}, "copy_positions (own)", "fractional"),
]


@pytest.mark.parametrize(
    ("build", "changes", "value", "cure"),
    WRONG,
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_what_cannot_work_is_refused_in_one_line(build, changes, value, cure):
    with pytest.raises(ValueError) as error:
        build(**changes)
    message = str(error.value)
    assert value in message
    assert cure in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kappa", "ratio"),
    [("2L", 2), ("4L", 4), ("1.5L", 1.5), (".5e", None), ("1L", 1), (12, 2), ("12", 2), (9, 1.5)],
)
def test_budgets_are_ratios(kappa, ratio):
    if ratio is None:
        with pytest.raises(ValueError, match="kappa"):
            config(kappa=kappa)
    else:
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
