"""The slow version against itself: what the equations imply of each other."""

import itertools
import math

import pytest
import torch

from tests.ponderlm.cases import (
    PonderConfig,
    config_of,
    some_tokens,
    toy_weights,
)
from tests.reference import ponderlm as reference


def test_tail_identities():
    """T4, and that log space loses nothing where w underflows."""
    g = torch.tensor([0.3, -1.2, 2.0, 0.7], dtype=torch.float64)
    s = g.softmax(dim=0)
    log_w = reference.tail_log(g)
    torch.testing.assert_close(log_w.exp(), reference.tail_naive(s), atol=1e-15, rtol=0)
    assert log_w[0] == 0
    assert all(later < earlier for earlier, later in itertools.pairwise(log_w.tolist()))
    steps = sum(k * s[k] for k in range(4))
    torch.testing.assert_close(log_w[1:].exp().sum(), steps)
    far = torch.tensor([0.0, -900.0, -1000.0], dtype=torch.float64)
    assert reference.tail_naive(far.softmax(dim=0))[1] == 0
    torch.testing.assert_close(reference.tail_log(far)[2].item(), -1000.0)


def test_both_attenuations_of_a_key():
    """``shifted``: w_k on slot k; ``literal``: w_(k-1), so that the first latent never fades."""
    log_w = torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64)
    found = {}
    for mask_index in ("shifted", "literal"):
        config = config_of(mask_index=mask_index)
        found[mask_index] = [reference.key_bias(config, log_w, k, 0.2).item() for k in range(3)]
    assert found == {"shifted": [0, -1, -math.inf], "literal": [0, 0, -math.inf]}
    matrix = reference.mask_matrix([log_w[0], log_w[1], log_w[2]])
    assert matrix.tolist() == [[0, -math.inf, -math.inf], [0, -1, -math.inf], [0, -1, -2]]


def final_pass(config, tokens=None, iterations=1, **scales):
    weights = toy_weights(config, **scales)
    tokens = some_tokens(6) if tokens is None else tokens
    return weights, reference.jacobi(weights, config, tokens, iterations)[-1]


def test_losses_behind_each_depth():
    """The last depth is all of the sum; the first is h^(0) alone, shrunken by s_0 if as printed."""
    config, targets = config_of(thinking_steps=3), [1, -100, 3, 4, 5, 6]
    weights, done = final_pass(config)
    rows = reference.depth_losses(weights, done, targets)
    printed = reference.depth_losses(weights, done, targets, renormalised=False)
    h = reference.read_out(done)
    assert rows[1] is None
    full = reference.cross_entropy(weights, h[0], 1)
    torch.testing.assert_close(torch.stack([rows[0][3], printed[0][3]]), torch.stack([full, full]))
    first = reference.cross_entropy(weights, done.states[2, 0], 3)
    torch.testing.assert_close(rows[2][0], first)
    assert abs(printed[2][0] - first) > 1e-3


def test_the_penalty_by_hand():
    """Five tokens, K = 1: of f_1 = rho_0 = 1/2 two of the smallest w_1."""
    config = config_of(PonderConfig, thinking_steps=1, penalty_beta=1e-9)
    weights, done = final_pass(config)
    rows = [(done, [1, 2, -100, 3, 4, 5])]
    assert reference.fractions(config, [2.0, 1.0]) == pytest.approx([0.5])
    w = sorted(done.log_tail[[0, 1, 3, 4, 5], 1].exp().tolist())
    found = reference.penalty(weights, config, rows)
    assert found.item() == pytest.approx((w[0] + w[1]) / 2)
    plain = config_of(PonderConfig, thinking_steps=1, penalty="expected_steps")
    assert reference.penalty(weights, plain, rows).item() == pytest.approx(sum(w) / 5)


def test_both_penalties_of_some_losses():
    """ours: where the depth before costs little; paper: where a step lowers the loss to 0.5."""
    losses = [1.5, 1.03, 1.0]
    ours = reference.fractions(config_of(penalty="ours"), losses)
    assert ours == pytest.approx([0, 1 / (1 + math.exp(-2))])
    paper = reference.fractions(config_of(penalty="paper"), [2.0, 0.5, 1.0])
    assert paper == pytest.approx([0.5, 0], abs=1e-6)
