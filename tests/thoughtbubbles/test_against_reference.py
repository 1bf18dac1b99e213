"""The network against the paper's equations, written out with lists of streams."""

import pytest
import torch

from lightning_models.layers import recording
from tests.thoughtbubbles.cases import (
    THRESHOLDS,
    build,
    full_distribution,
    reference_of,
    row_alone,
    rows_of,
    stream_counts,
)

FORKS = {
    "1-2-at-2L": {"fork_layers": (1, 2), "kappa": "2L"},
    "0-2-at-1.5L": {"fork_layers": (0, 2), "kappa": "1.5L"},
    "1-2-3-at-4L": {"fork_layers": (1, 2, 3), "kappa": "4L"},
    "0-1-2-3-at-3L": {"fork_layers": (0, 1, 2, 3), "kappa": "3L"},
    "2-at-8-streams": {"fork_layers": (2,), "kappa": 8},
    "3-1-at-13-streams": {"fork_layers": (3, 1), "kappa": 13},
    "fixed": {"fork_layers": (0, 2), "kappa": "1.5L", "budget": "fixed"},
    "originals-only": {"fork_layers": (1, 3), "kappa": "1L"},
    "no-forks": {"fork_layers": ()},
}
STYLES = {
    "one": {"bias_scale": "one"},
    "inv_sqrt_dmodel": {"bias_scale": "inv_sqrt_dmodel"},
    "residual_norm": {"output_average": "residual_norm"},
    "residual_norm-one": {"output_average": "residual_norm", "bias_scale": "one"},
    "untied": {"tie_head": False},
    "math": {"attention_backend": "math"},
}
CAUSAL = {
    "threshold-2L": {"allocation": "threshold", "kappa": "2L"},
    "threshold-1.5L": {"allocation": "threshold", "kappa": "1.5L", "fork_layers": (0, 2)},
    "threshold-4L": {"allocation": "threshold", "kappa": "4L", "fork_layers": (0, 1, 2)},
    "trained-by-topk": {"eval_allocation": "threshold", "kappa": "1.5L"},
    "window-2L": {"allocation": "window_topk", "kappa": "2L"},
    "window-1.5L": {"allocation": "window_topk", "kappa": "1.5L", "allocation_window": 2},
    "window-1-token": {"allocation": "window_topk", "kappa": "2L", "allocation_window": 1},
    "window-of-all": {"allocation": "window_topk", "kappa": "1.5L", "allocation_window": 64},
    "window-3-layers": {"allocation": "window_topk", "kappa": "1.3L", "fork_layers": (0, 1, 3)},
    "window-residual": {"allocation": "window_topk", "output_average": "residual_norm"},
    "threshold-residual": {
        "allocation": "threshold",
        "kappa": "1.5L",
        "output_average": "residual_norm",
    },
}
EVERY = FORKS | STYLES | CAUSAL


CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def slow_rows(model, batch):
    """Of each row without its padding: log-probabilities (T, V), and the streams at each fork."""
    slow, log_probs, layers = reference_of(model), [], []
    for row in range(len(batch["tokens"])):
        log_probs.append(slow.log_probs(row_alone(batch, row)["tokens"][0].tolist()))
        layers.append(slow.layers)
    return slow, log_probs, layers


def summed_loss(log_probs, targets):
    return sum(
        -row[place, target]
        for row, own in zip(log_probs, targets.tolist(), strict=True)
        for place, target in enumerate(own)
        if target >= 0
    )


def assert_same_streams(seen, expected, row):
    """Who is there, in which order, and with which states and scores."""
    flat = [(k, stream) for k, streams in enumerate(expected) for stream in streams]
    real = slice(len(flat))
    assert not seen.real[row, len(flat) :].any()
    assert seen.token[row, real].tolist() == [k for k, _ in flat]
    assert seen.original[row, real].tolist() == [s.original for _, s in flat]
    torch.testing.assert_close(seen.log_p[row, real], torch.stack([s.log_p for _, s in flat]))
    torch.testing.assert_close(seen.x[row, real], torch.stack([s.x for _, s in flat]))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", EVERY)
def test_streams_loss_and_all_gradients(case):
    """Float64: what differs is rounding alone."""
    model, batch = build(thresholds=THRESHOLDS, **EVERY[case]), rows_of([5, 3])
    batch["targets"][0, 1] = -100
    seen = []
    with recording(fork=lambda after, **_: seen.append(after)):
        mine = model.loss(batch).terms["nll"]
    mine.sum.backward()
    slow, log_probs, layers = slow_rows(model, batch)
    loss = summed_loss(log_probs, batch["targets"])
    loss.backward()
    assert mine.normaliser == 7
    torch.testing.assert_close(mine.sum, loss, atol=1e-9, rtol=1e-9)
    for name, parameter in model.network.named_parameters():
        expected = slow.weights[name].grad
        expected = torch.zeros_like(parameter) if expected is None else expected
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.allclose(gradient, expected, atol=1e-8, rtol=1e-8), name
    assert len(seen) == len(model.config.fork_layers)
    for row, own in enumerate(layers):
        for layer, expected in zip(seen, own, strict=True):
            assert_same_streams(layer, expected, row)


SOME = "1-2-at-2L 0-2-at-1.5L residual_norm-one untied no-forks threshold-1.5L window-2L"


@pytest.mark.parametrize("case", [*SOME.split(), "threshold-residual"])
def test_all_next_tokens(case):
    """Float32 as it is used: rotary tables and positions have that precision."""
    model, batch = build(thresholds=THRESHOLDS, **EVERY[case]), rows_of([6, 4], seed=1)
    mine = full_distribution(model, batch)
    for row, expected in enumerate(slow_rows(model, batch)[1]):
        torch.testing.assert_close(mine[row, : len(expected)].double(), expected.detach(), **CLOSE)
    torch.testing.assert_close(mine.exp().sum(-1)[0], torch.ones(6))


@pytest.mark.parametrize("case", sorted(set(CAUSAL) - {"window-1-token", "window-of-all"}))
def test_the_causal_cases_are_ragged(case):
    """They would prove little if all tokens had equally many streams."""
    model = build(thresholds=THRESHOLDS, **CAUSAL[case])
    last = stream_counts(model, rows_of([6, 6, 6], seed=3))[-1]
    assert last.unique().numel() > 1
    assert last.sum(dim=1).unique().numel() > 1
