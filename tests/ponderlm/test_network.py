"""All passes of the parallel computation against the slow version."""

import itertools
import math

import pytest
import torch

from lightning_models.ponderlm import PonderLM, PonderLM2
from lightning_models.transformer.network import TransformerConfig, TransformerNetwork
from tests.ponderlm.cases import (
    ALL_STYLES,
    EXACT,
    SIZES,
    build,
    recorded,
    row_of,
    rows_of,
    weights_of,
)
from tests.reference import ponderlm as reference

pytestmark = pytest.mark.usefixtures("exact_tables")


def slow_passes(model, batch, iterations, **options):
    weights = weights_of(model)
    with torch.no_grad():
        return [
            reference.jacobi(weights, model.config, row_of(batch, row)[0], iterations, **options)
            for row in range(len(batch["tokens"]))
        ]


def assert_like(pondered, row, last, tau=0.0):
    """States, router and read-out of a row are those of a final pass."""
    length = len(last.states)
    torch.testing.assert_close(pondered.states[row, :length], last.states, **EXACT)
    h = reference.read_out(last, tau)
    torch.testing.assert_close(pondered.read_out[row, :length], h, **EXACT)
    if last.log_tail is not None:
        found = pondered.steps.log_tail[row, :length]
        torch.testing.assert_close(found, last.log_tail, **EXACT)


@pytest.mark.parametrize("iterations", [0, 1, 2, 3])
@pytest.mark.parametrize("style", ALL_STYLES)
def test_final_pass(style, iterations):
    """In training, where nothing is truncated: states, log s, log w and what predicts."""
    kind, changes = ALL_STYLES[style]
    model, batch = build(kind, **changes), rows_of([3, 2])
    model.train()
    with torch.no_grad():
        pondered = model.network(batch["tokens"], iterations)
    for row, passes in enumerate(slow_passes(model, batch, iterations)):
        last = passes[-1]
        assert_like(pondered, row, last)
        if last.log_steps is None:
            assert pondered.steps is None
            continue
        log_steps = pondered.steps.log_steps[row, : len(last.states)]
        torch.testing.assert_close(log_steps, last.log_steps, **EXACT)


@pytest.mark.parametrize("kind", [PonderLM, PonderLM2])
def test_every_pass_is_recorded(kind):
    """Of passes with all slots: refinements and the last, counted from 0."""
    model, batch = build(kind, eval_iterations=2), rows_of([3, 2])
    _, found = recorded(model, batch, "states")
    assert [values["iteration"] for values in found["states"]] == [0, 1, 2]
    for row, passes in enumerate(slow_passes(model, batch, 2)):
        assert len(passes) == 2 + 2 + 1
        for values, expected in zip(found["states"], passes[2:], strict=True):
            states = values["states"][row, : len(expected.states)]
            torch.testing.assert_close(states, expected.states, **EXACT)


@pytest.mark.parametrize("mask_index", ["shifted", "literal"])
@pytest.mark.parametrize("iterations", [0, 2])
def test_outside_training_steps_are_truncated(iterations, mask_index):
    """Slots of w_k < tau are no keys of the next pass, and no summands of the last."""
    tau = 0.05
    model = build(router=2.0, thinking_steps=3, tau=tau, mask_index=mask_index)
    batch = rows_of([3, 3])
    with torch.no_grad():
        pondered = model.network(batch["tokens"], iterations)
    executed = []
    for row, passes in enumerate(slow_passes(model, batch, iterations, tau=tau)):
        assert_like(pondered, row, passes[-1], tau)
        w = passes[-1].log_tail.exp()
        executed.append([max(k for k in range(4) if each[k] >= tau) for each in w])
        for t, most in enumerate(executed[-1]):
            log_steps = pondered.steps.log_steps[row, t]
            torch.testing.assert_close(
                log_steps[: most + 1], passes[-1].log_steps[t, : most + 1], **EXACT
            )
            assert torch.isneginf(log_steps[most + 1 :]).all()
    assert pondered.executed.tolist() == executed
    assert len({steps for row in executed for steps in row}) > 1
    untruncated = slow_passes(model, batch, iterations)[0][-1]
    change = (reference.read_out(untruncated) - pondered.read_out[0]).abs().max()
    assert change > 1e-4, "tau makes no difference here"


@pytest.mark.parametrize("alpha", [-2.0, 3.0])
def test_alpha_shifts_every_pass(alpha):
    model, batch = build(thinking_steps=3, alpha=alpha, tau=0.0), rows_of([3, 2])
    with torch.no_grad():
        pondered = model.network(batch["tokens"], 1)
    for row, passes in enumerate(slow_passes(model, batch, 1, alpha=alpha)):
        assert_like(pondered, row, passes[-1])


def expected_steps(model, batch):
    _, found = recorded(model, batch, "router")
    return found["router"][-1]["log_tail"][..., 1:].exp().sum(dim=-1)


def test_alpha_moves_all_tokens_one_way():
    """T8: more steps with every step of the ramp; the printed shape changes nothing at all."""
    batch, found = rows_of([3, 3]), []
    for alpha in (-5.0, -1.0, 0.0, 1.0, 5.0):
        model = build(thinking_steps=3, alpha=alpha, eval_iterations=0, tau=0.0)
        found.append(expected_steps(model, batch))
    for fewer, more in itertools.pairwise(found):
        assert (more > fewer + 1e-3).all()
    model = build(thinking_steps=3, alpha=5.0, alpha_shape="scalar", eval_iterations=0, tau=0.0)
    torch.testing.assert_close(expected_steps(model, batch), found[2], **EXACT)


@pytest.mark.parametrize("style", ALL_STYLES)
def test_convergence_is_sequential_thinking(style):
    """T1: iterated until nothing changes, states are those of thinking slot by slot."""
    kind, changes = ALL_STYLES[style]
    never = {"tau": 0.0} if kind is PonderLM else {}
    model, batch = build(kind, **changes, **never), rows_of([3, 2])
    with torch.no_grad():
        pondered = model.network(batch["tokens"], None)
        for row in range(2):
            tokens, _ = row_of(batch, row)
            thoughts = reference.sequential(weights_of(model), model.config, tokens)
            for t, thought in enumerate(thoughts):
                states = torch.stack(thought.states)
                torch.testing.assert_close(pondered.states[row, t], states, atol=1e-12, rtol=0)
                h = pondered.read_out[row, t]
                torch.testing.assert_close(h, thought.read_out, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("kind", "steps"), [(PonderLM, 1), (PonderLM, 3), (PonderLM2, 3)])
def test_so_many_iterations_are_enough(kind, steps):
    """T1: J = K (T - 1) and not fewer, and convergence takes at most two passes more."""
    model = build(kind, thinking_steps=steps, eval_iterations=None)
    batch, enough = rows_of([4]), steps * 3
    with torch.no_grad():
        reached, short = (model.network(batch["tokens"], j).states for j in (enough, enough - 1))
        fixed = model.network(batch["tokens"], 30).states
    torch.testing.assert_close(reached, fixed, atol=1e-12, rtol=0)
    assert (short - fixed).abs().max() > 1e-9
    _, found = recorded(model, batch, "states")
    assert found["states"][-1]["iteration"] <= enough + 2
    torch.testing.assert_close(found["states"][-1]["states"], fixed, atol=1e-12, rtol=0)


def test_scores_far_below_float32_stay_finite():
    """Logits 900 apart: log w is exact where w is 0, and so are all gradients finite."""
    model, batch = build(thinking_steps=3), rows_of([3])
    with torch.no_grad():
        model.network.router.weight.zero_()
        model.network.router.bias.copy_(torch.tensor([0.0, -900.0, -5e4, -7e4]))
    model.float().train()
    output = model.loss(batch)
    (output.terms["nll"].sum + output.terms["penalty"].sum).backward()
    for name, parameter in model.network.named_parameters():
        assert parameter.grad.isfinite().all(), name
    tail = model.network(batch["tokens"], 1).steps.log_tail[0, 0]
    torch.testing.assert_close(tail.tolist(), [0.0, -900.0, -5e4, -7e4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The router is in float32 whatever autocast says; hidden slots are so in all formats."""
    model = build(thinking_steps=3, dim=128, ffn_dim=64, tau=0.01, scale=0.02, router=0.01)
    model.float()
    with torch.no_grad():
        model.network.router.bias.copy_(torch.tensor([3.0, 0.0, -1.0, -6.0]))
        exact = model.network(rows_of([3])["tokens"], 2)
        with torch.autocast("cpu", dtype=dtype):
            found = model.network(rows_of([3])["tokens"], 2)
            routed = model.network.route(exact.states[:, :, 0])
    assert found.executed.max() < 3
    assert found.read_out.isfinite().all()
    assert (found.read_out - exact.read_out).abs().max() < 0.1
    assert torch.equal(routed.log_tail, exact.steps.log_tail)


def test_a_step_of_exactly_tau_is_taken():
    """Sec. 3.3: K_hat = max{k: w_k >= tau}."""
    for tau, steps in ((0.5, 1), (0.5 + 1e-9, 0)):
        model = build(thinking_steps=1, tau=tau)
        with torch.no_grad():
            model.network.router.weight.zero_()
            model.network.router.bias.zero_()
            executed = model.network(rows_of([2])["tokens"], 0).executed
        assert executed.tolist() == [[steps] * 2]


@pytest.mark.parametrize("kind", [PonderLM, PonderLM2])
def test_no_steps_are_a_plain_decoder(kind):
    """K = 0: the transformer with the same weights."""
    model, batch = build(kind, thinking_steps=0), rows_of([4])
    sizes = {name: value for name, value in SIZES.items() if name != "thinking_steps"}
    style = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False}
    config = TransformerConfig(**sizes, **style, tie_head=False, init="ponderlm")
    plain = TransformerNetwork(config).double()
    weights = model.network.state_dict()
    plain.load_state_dict({n: w for n, w in weights.items() if not n.startswith("router")})
    with torch.no_grad():
        for iterations in (0, 3, None):
            h = model.network(batch["tokens"], iterations).read_out
            torch.testing.assert_close(h, plain(batch["tokens"]), **EXACT)


def test_statistics_of_scoring():
    """Steps of each token, losses after each depth, and scores of all of it."""
    tau = 0.05
    model = build(router=2.0, thinking_steps=3, tau=tau, eval_iterations=1)
    batch = rows_of([3, 2])
    scores, found = recorded(model, batch, "thinking_steps", "depth_losses")
    (steps,), (depths,) = found["thinking_steps"], found["depth_losses"]
    assert steps["most"] == 3
    for row, passes in enumerate(slow_passes(model, batch, 1, tau=tau)):
        tokens, targets = row_of(batch, row)
        h = reference.read_out(passes[-1], tau)
        for t, target in enumerate(targets):
            w = passes[-1].log_tail[t].exp()
            most = max(k for k in range(4) if w[k] >= tau)
            assert steps["executed"][row, t] == most
            nll = reference.cross_entropy(weights_of(model), h[t], target).item()
            assert -scores.log_prob[row, t].item() == pytest.approx(nll, rel=1e-5)
        losses = reference.depth_losses(weights_of(model), passes[-1], targets)
        for t in range(len(targets)):
            most = int(steps["executed"][row, t])
            own = depths["losses"][row, t].tolist()
            expected = [value.item() for value in losses[t]]
            assert own[: most + 1] == pytest.approx(expected[: most + 1], rel=1e-5)
            assert own[most:] == pytest.approx([own[most]] * (4 - most)), "it has stopped"
        assert (depths["losses"][row, len(tokens) :] == 0).all()


def test_losses_behind_each_slot():
    """PonderLM-2: the output matrix on each slot; the last one's are the scores."""
    model, batch = build(PonderLM2, eval_iterations=1), rows_of([3, 2])
    scores, found = recorded(model, batch, "thinking_steps", "depth_losses")
    losses = found["depth_losses"][0]["losses"]
    assert found["thinking_steps"][0]["executed"].tolist() == [[2] * 3] * 2
    torch.testing.assert_close(losses[..., -1], -scores.log_prob)
    for row, passes in enumerate(slow_passes(model, batch, 1)):
        _, targets = row_of(batch, row)
        expected = reference.depth_losses(weights_of(model), passes[-1], targets)
        for t in range(len(targets)):
            own = losses[row, t].tolist()
            assert own == pytest.approx([value.item() for value in expected[t]], rel=1e-5)


def test_the_router_is_not_decayed():
    model = build()
    router = {id(p) for name, p in model.network.named_parameters() if "router" in name}
    assert {id(p) for p in model.no_decay_parameters()} == router
    assert len(router) == 2


def test_first_distribution():
    """``deep``: e^b more on K steps; ``uniform``: w_k = (K + 1 - k) / (K + 1)."""
    for changes, expected in (
        ({"router_init": "uniform"}, [1, 0.75, 0.5, 0.25]),
        ({"router_bias": math.log(7)}, [1, 0.9, 0.8, 0.7]),
    ):
        model = PonderLM(build(thinking_steps=3, **changes).config)
        model.configure_model()
        with torch.no_grad():
            tail = model.eval().network(torch.zeros(1, 2, dtype=torch.int64), 0).steps.log_tail
        torch.testing.assert_close(tail[0, 1].exp(), torch.tensor(expected))
