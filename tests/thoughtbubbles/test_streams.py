"""How many streams there are, which ones, where they stand and what they score."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_models import TransformerConfig, TransformerLM
from lightning_models.layers import recording
from lightning_models.thoughtbubbles.forking import ForkLayer
from lightning_models.thoughtbubbles.network import _averaged
from tests.thoughtbubbles.cases import SIZES, THRESHOLDS, build, enliven, rows_of

ALLOCATIONS = {
    "global_topk": {"kappa": "1.5L"},
    "threshold": {"allocation": "threshold", "kappa": "1.5L"},
    "window_topk": {"allocation": "window_topk", "kappa": "1.5L"},
}


def forks_of(model, batch):
    """What every fork layer records, in order."""
    seen = []
    model.recorded(batch, fork=lambda **values: seen.append(values))
    return seen


@pytest.mark.parametrize("lively", [False, True])
def test_without_fork_layers_it_is_the_plain_decoder_to_the_bit(lively):
    """The same weights from the same seed, and the same numbers from any weights."""
    forking = build(fork_layers=())
    sizes = {key: SIZES[key] for key in ("vocab_size", "vocab_multiple", "block_size")}
    sizes |= {key: SIZES[key] for key in ("num_layers", "dim", "num_heads")}
    plain = TransformerLM(TransformerConfig(**sizes, positions="rope"))
    for model in (plain, forking):
        torch.manual_seed(3)
        model.network = model.build_network()
        if lively:
            enliven(model.network)
    mine, theirs = forking.network.state_dict(), plain.network.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    batch = rows_of([6, 4])
    assert torch.equal(forking.score(batch).log_prob, plain.score(batch).log_prob)
    assert torch.equal(forking.network(batch["tokens"]).states, plain.network(batch["tokens"]))
    losses = [model.loss(batch).terms["nll"].sum for model in (forking, plain)]
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=1e-6)
    assert forking.likelihood == "exact"
    assert forking.causal


def test_fork_layers_leave_the_decoders_weights_to_the_same_seed():
    plain, forking = build(fork_layers=()), build(fork_layers=(1, 2))
    networks = []
    for model in (plain, forking):
        torch.manual_seed(7)
        networks.append(model.build_network().state_dict())
    assert all(torch.equal(networks[0][name], networks[1][name]) for name in networks[0])
    own = networks[1].keys() - networks[0].keys()
    assert own
    assert all(name.startswith("forks.") for name in own)


def test_fork_layers_start_as_documented():
    network = build(dim=64, fork_layers=(1, 2)).build_network()
    for fork in network.forks:
        assert fork.fork_embedding.min() >= 0
        assert 0.9 / 8 < fork.fork_embedding.max() < 1 / 8  # uniform in [0, 1 / sqrt(D))
        assert fork.score.bias is None
        assert fork.score.weight.std().item() == pytest.approx(0.02, rel=0.3)
        assert fork.threshold == -math.inf


@pytest.mark.parametrize("length", [1, 2, 5, 6, 9])
@pytest.mark.parametrize("kappa", ["1L", "1.5L", "2L", "4L", 11, 24])
@pytest.mark.parametrize("budget", ["dynamic", "fixed"])
def test_stream_counts(kappa, length, budget):
    """min(kappa, 2 N) after every fork layer, and never fewer than tokens."""
    model = build(kappa=kappa, budget=budget, fork_layers=(0, 1, 3))
    ratio = float(kappa[:-1]) if isinstance(kappa, str) else kappa / 6
    most = max(length, math.ceil(ratio * (length if budget == "dynamic" else 6) - 1e-9))
    expected, streams = [], length
    for _ in range(3):
        streams = min(most, 2 * streams)
        expected.append(streams)
    steps = forks_of(model, rows_of([length, length]))
    assert [step["after"].x.shape[1] for step in steps] == expected
    assert all(step["after"].real.all() for step in steps)
    first, second, third = expected
    assert model.config.streams_by_layer(length) == [first, second, second, third]


def test_the_floor_of_a_score():
    model = build(fork_layers=(1,))
    with torch.no_grad():
        model.network.forks[0].score.weight.mul_(1e4)
    (step,) = forks_of(model, rows_of([6]))
    assert step["after"].log_p.min() == -20.0
    batch = rows_of([6])
    assert model.score(batch).log_prob.isfinite().all()
    model.loss(batch).terms["nll"].sum.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.network.parameters())


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_gradients_reach_survivors_only(name, monkeypatch):
    kept = []
    log_scores = ForkLayer.log_scores

    def watched(self, streams):
        out = log_scores(self, streams)
        out.retain_grad()
        kept.append(out)
        return out

    monkeypatch.setattr(ForkLayer, "log_scores", watched)
    model = build(thresholds=THRESHOLDS, fork_layers=(1, 3), **ALLOCATIONS[name])
    steps = []
    with recording(fork=lambda **values: steps.append(values)):
        loss = model.loss(rows_of([6, 4])).terms["nll"].sum
    loss.backward()
    dropped = 0
    for scores, step in zip(kept, steps, strict=True):
        chosen = 2 * step["parent"] + (~step["is_fork"]).long()
        for row in range(2):
            alive = set(chosen[row][step["after"].real[row]].tolist())
            reached = set(scores.grad[row].nonzero()[:, 0].tolist())
            assert reached == alive
            dropped += 2 * int(step["before"].real[row].sum()) - len(alive)
    assert dropped > 0


def test_a_layer_that_never_forks_gives_its_vector_no_gradient():
    model = build(kappa="1L")
    model.loss(rows_of([6])).terms["nll"].sum.backward()
    for fork in model.network.forks:
        assert not fork.fork_embedding.grad.any()
        assert not fork.score.weight.grad[0].any()
        assert fork.score.weight.grad[1].any()


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_scores_stay_float32_under_autocast(name):
    """A score rounded to 8 bits would put most candidates into a tie."""
    model = build(thresholds=THRESHOLDS, fork_layers=(0, 2), **ALLOCATIONS[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        steps = forks_of(model, rows_of([6, 4]))
        for fork, step in zip(model.network.forks, steps, strict=True):
            inside = fork.log_scores(step["before"])
            assert step["after"].log_p.dtype == inside.dtype == torch.float32
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(fork.log_scores(step["before"]), inside)
                before = step["before"]
                half = before.with_x(before.x.bfloat16())
                assert fork.log_scores(half).dtype == torch.float32


def test_low_scores_do_not_drown_the_averaged_residual():
    """The norm after it has an epsilon: without a division by sum P it would see only that."""
    model, batch = build(fork_layers=(1,)), rows_of([6, 6])
    (step,) = forks_of(model, batch)
    after = step["after"]
    low = replace(after, log_p=after.log_p - 30.0)
    torch.testing.assert_close(_averaged(low).x, _averaged(after).x, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("average", ["mixture", "residual_norm"])
def test_scores_and_positions_are_float32_beside_bfloat16_weights(average):
    model = build(fork_layers=(0, 1, 2), output_average=average)
    batch = rows_of([6, 4])
    model.network.bfloat16()
    torch.set_default_dtype(torch.bfloat16)  # as Lightning's bf16-true does
    try:
        seen = forks_of(model, batch)
        loss = model.train().loss(batch).terms["nll"].sum
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    for step in seen:
        assert step["after"].log_p.dtype == step["after"].positions().dtype == torch.float32
        assert step["after"].x.dtype == torch.bfloat16
    assert loss.isfinite()
