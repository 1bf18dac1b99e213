"""The output layer in chunks against all logits at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_models import output_layer
from lightning_models.output_layer import (
    linear_cross_entropy,
    linear_cross_entropy_each,
    linear_mixture_cross_entropy,
    token_scores,
)
from tests.largest import Largest
from tests.reference import cross_entropy as reference

V, D = 11, 6


@pytest.fixture(params=[1, 12, 5, 256], ids=lambda limit: f"limit-{limit}")
def chunked(request, monkeypatch):
    """Chunks of one, twelve and five of 24 rows (the last one shorter), and a single chunk."""
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", request.param)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", 5)


def inputs(*shape, dtype=torch.float64, seed=0, scale=1.0):
    """States, matrix, targets (a quarter of them -100) and weights."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(*shape, D, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, V, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.25] = output_layer.IGNORE_INDEX
    weights = torch.rand(shape, generator=generator) * 2  # float32, as the function keeps them
    return h.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, weights


def with_gradients(loss, *leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def assert_equal(mine, expected, atol=1e-11):
    for ours, theirs in zip(mine, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs.double(), atol=atol, rtol=atol)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients_of_all_logits_at_once(shape, weighted):
    h, weight, targets, weights = inputs(*shape)
    weights = weights if weighted else None
    mine = linear_cross_entropy(h, weight, targets, weights)
    assert mine.shape == ()
    expected = reference.cross_entropy(h, weight, targets, weights)
    assert_equal(with_gradients(mine, h, weight), with_gradients(expected, h, weight))


@pytest.mark.usefixtures("chunked")
def test_the_loss_of_each_target_comes_with_the_sum():
    """Unweighted, and a constant: whatever is made of it, the gradients are those of the sum."""
    h, weight, targets, weights = inputs(4, 6)
    total, each = linear_cross_entropy_each(h, weight, targets, weights)
    assert_equal([each], [-reference.log_probs(h, weight, targets).detach()])
    assert not each.requires_grad
    assert (each[targets == -100] == 0).all()
    alone = linear_cross_entropy(h, weight, targets, weights)
    mine = with_gradients(total + each.sum() - each.sum(), h, weight)
    assert_equal(mine, with_gradients(alone, h, weight), atol=1e-9)


@pytest.mark.usefixtures("small_chunks")
def test_each_target_costs_no_second_pass():
    h, weight, targets, weights = inputs(4, 6)
    with Products() as products:
        linear_cross_entropy_each(h, weight, targets, weights)
    assert products.count == 3 * 5  # of 24 rows in chunks of five


@pytest.mark.usefixtures("chunked")
def test_pytorch_cross_entropy_in_float32():
    h, weight, targets, _ = inputs(4, 6, dtype=torch.float32)
    logits = (h @ weight.t()).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    mine = linear_cross_entropy(h, weight, targets)
    assert mine.dtype == torch.float32
    assert_equal(with_gradients(mine, h, weight), with_gradients(expected, h, weight), atol=2e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 30), limit=st.integers(1, 40), seed=st.integers(0, 5))
def test_any_chunk_border(rows, limit, seed):
    h, weight, targets, weights = inputs(rows, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(output_layer.CHUNK_ROWS, "cpu", limit)
        mine = linear_cross_entropy(h, weight, targets, weights)
        log_prob = token_scores(h, weight, targets).log_prob
    expected = reference.cross_entropy(h, weight, targets, weights)
    assert_equal(with_gradients(mine, h, weight), with_gradients(expected, h, weight))
    assert_equal([log_prob], [reference.log_probs(h, weight, targets).detach()], atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rows", [0, 7])
def test_nothing_to_predict(rows):
    h, weight, targets, weights = inputs(rows)
    targets.fill_(-100)
    for mine in (
        linear_cross_entropy(h, weight, targets),
        linear_cross_entropy(h, weight, targets, weights),
    ):
        loss, h_gradient, weight_gradient = with_gradients(mine, h, weight)
        assert loss == 0
        assert torch.equal(h_gradient, torch.zeros_like(h))
        assert torch.equal(weight_gradient, torch.zeros_like(weight))
    assert torch.equal(token_scores(h, weight, targets).log_prob, torch.zeros(rows))


@pytest.mark.usefixtures("small_chunks")
def test_weights_of_ignored_targets_and_zero_weights_do_nothing():
    h, weight, targets, weights = inputs(4, 6)
    weights[0] = 0.0
    changed = torch.where(targets == -100, 1e6, weights)
    mine = with_gradients(linear_cross_entropy(h, weight, targets, changed), h, weight)
    expected = linear_cross_entropy(h[1:], weight, targets[1:], weights[1:])
    assert (mine[1][0] == 0).all()
    assert_equal(mine, with_gradients(expected, h, weight))


@pytest.mark.usefixtures("small_chunks")
def test_backward_scales_and_adds_up():
    h, weight, targets, _ = inputs(4, 6)
    plain = torch.autograd.grad(linear_cross_entropy(h, weight, targets), (h, weight))
    tripled = torch.autograd.grad(linear_cross_entropy(h, weight, targets) * 3, (h, weight))
    assert_equal(tripled, [gradient * 3 for gradient in plain])
    loss = linear_cross_entropy(h, weight, targets)
    loss.backward(retain_graph=True)
    (loss * -0.5).backward()
    assert_equal([h.grad, weight.grad], [gradient * 0.5 for gradient in plain])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("wanted", ["h", "weight", "neither"])
def test_only_the_gradients_that_are_asked_for(wanted):
    h, weight, targets, weights = inputs(4, 6)
    expected = reference.cross_entropy(h, weight, targets, weights)
    leaves = {"h": h, "weight": weight}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    mine = linear_cross_entropy(h, weight, targets, weights)
    assert mine.requires_grad == (wanted != "neither")
    assert_equal([mine.detach()], [expected.detach()])
    if wanted != "neither":
        leaf = leaves[wanted].requires_grad_()
        gradient = torch.autograd.grad(mine, leaf)
        assert_equal(gradient, torch.autograd.grad(expected, leaf))


def test_inputs_are_left_alone_and_weights_get_no_gradient():
    h, weight, targets, weights = inputs(4, 6)
    before = [x.detach().clone() for x in (h, weight, targets, weights)]
    linear_cross_entropy(h, weight, targets, weights.requires_grad_()).backward()
    assert weights.grad is None
    for old, new in zip(before, (h, weight, targets, weights), strict=True):
        assert torch.equal(old, new)


@pytest.mark.usefixtures("small_chunks")
def test_inputs_that_are_not_contiguous():
    h, weight, targets, weights = inputs(6, 4)
    views = (
        h.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        weight.detach().t().contiguous().t().requires_grad_(),
        targets.t().contiguous().t(),
        weights.t().contiguous().t(),
    )
    assert not any(view.is_contiguous() for view in views)
    mine = with_gradients(linear_cross_entropy(*views), *views[:2])
    expected = with_gradients(reference.cross_entropy(h, weight, targets, weights), h, weight)
    assert_equal(mine, expected)
    log_prob = token_scores(*views[:3]).log_prob
    assert_equal([log_prob], [reference.log_probs(h, weight, targets).detach()], atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
def test_large_logits_neither_overflow_nor_lose_the_target():
    h, weight, targets, _ = inputs(24, dtype=torch.float32, scale=300.0)
    mine = with_gradients(linear_cross_entropy(h, weight, targets), h, weight)
    logits = h.double() @ weight.double().t()
    expected = F.cross_entropy(logits, targets, reduction="sum")
    assert all(x.isfinite().all() for x in mine)
    assert mine[0].item() == pytest.approx(expected.item(), rel=1e-5)
    assert token_scores(h, weight, targets).log_prob.sum().item() == pytest.approx(
        -expected.item(), rel=1e-5
    )


@pytest.mark.usefixtures("chunked")
def test_token_log_probs():
    h, weight, targets, _ = inputs(2, 3, 4)
    mine = token_scores(h, weight, targets).log_prob
    assert mine.shape == targets.shape
    assert mine.dtype == torch.float64
    assert not mine.requires_grad
    assert (mine[targets == -100] == 0).all()
    assert (mine[targets != -100] < 0).all()
    assert_equal([mine], [reference.log_probs(h, weight, targets).detach()], atol=1e-12)


@pytest.mark.parametrize("function", [linear_cross_entropy, token_scores])
@pytest.mark.parametrize("target", [-1, -99, V])
def test_targets_outside_the_vocabulary_are_errors(function, target):
    h, weight, targets, _ = inputs(4)
    targets[2] = target
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        function(h, weight, targets)


def relative(mine, expected):
    return ((mine.double() - expected.double()).norm() / expected.double().norm()).item()


def test_bfloat16_autocast_is_close_to_float32(monkeypatch):
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", 64)
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(256, 64, generator=generator, requires_grad=True)
    weight = (torch.randn(500, 64, generator=generator) / 8).requires_grad_()
    targets = torch.randint(0, 500, (256,), generator=generator)
    expected = with_gradients(linear_cross_entropy(h, weight, targets), h, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(h, weight, targets)
        log_prob = token_scores(h, weight, targets).log_prob
    mine = with_gradients(loss, h, weight)
    assert loss.dtype == log_prob.dtype == torch.float32
    assert [x.dtype for x in mine] == [torch.float32] * 3
    assert not torch.equal(mine[0], expected[0])  # the products did run in bfloat16
    assert relative(mine[0], expected[0]) < 1e-4
    assert relative(log_prob.sum(), -expected[0]) < 1e-4
    assert relative(mine[1], expected[1]) < 1e-2
    assert relative(mine[2], expected[2]) < 1e-2


@pytest.mark.usefixtures("small_chunks")
def test_bfloat16_states_and_matrix():
    h, weight, targets, weights = inputs(40, dtype=torch.bfloat16)
    loss = linear_cross_entropy(h, weight, targets, weights)
    expected = reference.cross_entropy(h, weight, targets, weights)
    mine = with_gradients(loss, h, weight)
    assert loss.dtype == torch.float32
    assert [x.dtype for x in mine[1:]] == [torch.bfloat16] * 2
    for ours, theirs in zip(mine, with_gradients(expected, h, weight), strict=True):
        assert relative(ours, theirs) < 1e-2


def test_half_precision_does_not_round_the_step_normaliser():
    """All of a backbone's gradients pass here: their common factor must not be rounded to 2^-8."""
    torch.manual_seed(0)
    h = torch.randn(500, 16).bfloat16().requires_grad_()
    weight = torch.randn(V, 16).bfloat16()
    targets = torch.randint(0, V, (500,))
    (plain,) = torch.autograd.grad(linear_cross_entropy(h, weight, targets), h)
    for normaliser in (3.0, 7.0, 1000.0):
        (mine,) = torch.autograd.grad(linear_cross_entropy(h, weight, targets) / normaliser, h)
        factor = (mine.double() * plain.double()).sum() / plain.double().square().sum()
        assert factor.item() * normaliser == pytest.approx(1, abs=5e-4)


class Products(TorchDispatchMode):
    """Counts the matrix products made inside."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted", ["h", "weight", "both", "neither"])
def test_gradients_that_are_not_asked_for_cost_nothing(wanted):
    h, weight, targets, _ = inputs(4, 6)
    h.requires_grad_(wanted in ("h", "both"))
    weight.requires_grad_(wanted in ("weight", "both"))
    with Products() as products:
        linear_cross_entropy(h, weight, targets)
    assert products.count == {"neither": 1, "both": 3}.get(wanted, 2)


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_of_the_batch_are_never_held(monkeypatch, autocast):
    """200 rows of 1000 logits are 200 000; no tensor may hold more than a chunk."""
    rows, words, width, limit = 200, 1000, 4, 20
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", limit)
    h = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(words, width, requires_grad=True)
    targets = torch.randint(0, words, (rows,))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with Largest() as chunked:
            linear_cross_entropy(h, weight, targets).backward()
            token_scores(h, weight, targets)
        with Largest() as whole:
            F.cross_entropy(h @ weight.t(), targets).backward()
    assert whole.numel == rows * words
    assert chunked.numel == limit * words


def mixture_inputs(counts, dtype=torch.float64):
    """States of tokens that have ``counts`` of them, their log scores, owners and targets."""
    generator = torch.Generator().manual_seed(1)
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    h = torch.randn(len(owner), D, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
    log_scores = -3 * torch.rand(len(owner), generator=generator, dtype=dtype)
    targets = torch.randint(0, V, (len(counts),), generator=generator)
    weights = torch.rand(len(counts), generator=generator)
    return h, weight, log_scores.requires_grad_(), owner, targets, weights


@pytest.mark.parametrize("rows", [1, 3, 4, 256])
def test_a_mixture_is_the_mean_of_its_states_distributions(monkeypatch, rows):
    """Eq. 11 by loops: probabilities mixed with weights P / sum P, then the logarithm."""
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", rows)
    h, weight, log_scores, owner, targets, weights = mixture_inputs([1, 4, 2, 7, 1, 1, 3])
    targets[3] = -100
    expected = 0.0
    for token, target in enumerate(targets.tolist()):
        if target >= 0:
            mine = owner == token
            share = log_scores[mine].exp() / log_scores[mine].exp().sum()
            probability = (share[:, None] * (h[mine] @ weight.t()).softmax(-1)).sum(0)[target]
            expected = expected - weights[token].double() * probability.log()
    loss = linear_mixture_cross_entropy(h, weight, log_scores, owner, targets, weights)
    assert_equal(
        [loss, *torch.autograd.grad(3 * loss, (h, weight, log_scores))],
        [expected, *torch.autograd.grad(3 * expected, (h, weight, log_scores))],
    )


def test_a_mixture_of_one_state_each_is_the_plain_loss():
    h, weight, log_scores, owner, targets, weights = mixture_inputs([1] * 9, torch.float32)
    mixed = linear_mixture_cross_entropy(h, weight, log_scores, owner, targets, weights)
    plain = linear_cross_entropy(h, weight, targets, weights)
    torch.testing.assert_close(mixed, plain)
    (gradient,) = torch.autograd.grad(mixed, log_scores)
    assert gradient.abs().max() < 1e-6


def test_float64_states_take_float32_scores():
    """Training with ``precision: 64-true``: the scores of forks are kept in float32."""
    h, weight, log_scores, owner, targets, weights = mixture_inputs([1, 4, 2])
    single = log_scores.detach().float().requires_grad_()
    loss = linear_mixture_cross_entropy(h, weight, single, owner, targets, weights)
    double = linear_mixture_cross_entropy(h, weight, log_scores, owner, targets, weights)
    torch.testing.assert_close(loss, double, atol=1e-6, rtol=1e-6)
    (found,) = torch.autograd.grad(loss, single)
    (expected,) = torch.autograd.grad(double, log_scores)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float())
