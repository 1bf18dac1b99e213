"""Mixture-of-Recursions, one token at a time, and against LoopedLM where nothing is chosen."""

import math
from fractions import Fraction

import pytest
import torch

from lightning_models.ponderlm.baselines.mixture_of_recursions import (
    MoRConfig,
    MoRLM,
    choose,
    chosen_first,
    quota,
    quotas_of,
)
from lightning_models.ponderlm.baselines.recurrent_depth import LoopedConfig, LoopedLM
from tests.ponderlm.baseline_cases import (
    blocks,
    build,
    check_depths,
    counted_flops,
    cross_entropies,
    embedded,
    own_rows,
    recorded,
    rows_of,
)
from tests.reference import ponderlm as reference

SOME = {"thinking_steps": 3, "capacities": (0.75, 0.5, 0.25)}
TIED = {"thinking_steps": 3, "capacities": (1.0, 0.6, 0.6)}
"""The first and the last extra recursion have nothing to choose."""
ALL = {"thinking_steps": 2, "capacities": (1.0, 1.0)}


class Naive:
    """A row's streams after each recursion, who took it, and the routers' losses."""

    def __init__(self, weights, config, tokens, routing):
        x = blocks(weights, config, embedded(weights, config, tokens), list(range(len(tokens))))
        self.streams, self.took, self.nats = [x], [], []
        alive, before = list(range(len(tokens))), 1.0
        for number, capacity in enumerate(config.capacities):
            name = f"routers.{number}"
            logit = x @ weights[f"{name}.weight"][0] + weights[f"{name}.bias"][0]
            chosen = self.choose(logit.tolist(), alive, capacity, before, routing, len(tokens))
            if capacity != before:
                self.nats += [self.loss(logit[t], t in chosen) for t in alive]
            rows = list(x)
            if chosen:
                out = blocks(weights, config, torch.stack([x[t] for t in chosen]), chosen)
                for t, new in zip(chosen, out, strict=True):
                    gate = 1 / (1 + (-logit[t]).exp())
                    rows[t] = x[t] + gate * (new - x[t])
            x, alive, before = torch.stack(rows), chosen, capacity
            self.streams.append(x)
            self.took.append(chosen)
        self.executed = [sum(t in chosen for chosen in self.took) for t in range(len(tokens))]

    @staticmethod
    def choose(logit, alive, capacity, before, routing, length):
        if capacity == before:
            return alive
        if routing == "threshold":
            return [t for t in alive if 1 / (1 + math.exp(-logit[t])) > 0.5]
        number = math.ceil(Fraction(str(capacity)) * length)
        return sorted(sorted(alive, key=lambda t: (-logit[t], t))[:number])

    @staticmethod
    def loss(logit, chosen):
        probability = 1 / (1 + (-logit).exp())
        return -(probability if chosen else 1 - probability).log()


def by_depth(routing):
    def losses(weights, config, tokens, targets):
        streams = Naive(weights, config, tokens, routing).streams
        return [cross_entropies(weights, config, x, targets) for x in streams]

    return losses


def executed_of(model, batch, routing):
    """Recursions of every token, by the naive computation."""
    weights = reference.leaves(model.network.state_dict())
    with torch.no_grad():
        rows = [Naive(weights, model.config, tokens, routing) for tokens, _ in own_rows(batch)]
    executed = torch.zeros_like(batch["tokens"])
    for number, row in enumerate(rows):
        executed[number, : len(row.executed)] = torch.tensor(row.executed)
    return executed


# ---- training


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("changes", [SOME, TIED, ALL], ids=str)
def test_both_terms_and_all_gradients(changes):
    model, batch = build(MoRLM, MoRConfig, router_weight=0.3, **changes), rows_of([8, 5])
    weights = reference.leaves(model.network.state_dict())
    nll, nats = 0.0, []
    for tokens, targets in own_rows(batch):
        row = Naive(weights, model.config, tokens, "topk")
        nll = nll + cross_entropies(weights, model.config, row.streams[-1], targets).sum()
        nats += row.nats
    expected = nll / 13 + (0.3 * sum(nats) / len(nats) if nats else 0.0)
    expected.backward()
    terms = model.loss(batch).terms
    assert ("router" in terms) == bool(nats) == model.config.chooses
    total = sum(term.sum / term.normaliser for term in terms.values())
    total.backward()
    torch.testing.assert_close(total, expected, atol=1e-10, rtol=1e-10)
    for name, parameter in model.network.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, atol=1e-8, rtol=1e-8)


def test_the_routers_term_is_a_mean_over_the_micro_batch():
    term = build(MoRLM, MoRConfig, **SOME).loss(rows_of([8, 4])).terms["router"]
    assert term.over is None
    assert term.normaliser == 8 + 4 + 6 + 3 + 4 + 2  # who took the recursion before


def test_padding_has_no_place_among_the_chosen():
    model, batch = build(MoRLM, MoRConfig, eval_routing="topk", **SOME), rows_of([5, 8])
    short = {key: value[:1, :5] for key, value in batch.items()}
    torch.testing.assert_close(
        model.score(batch).log_prob[:1, :5], model.score(short).log_prob, atol=1e-5, rtol=1e-5
    )
    _, found = recorded(model, batch)
    executed = found["thinking_steps"]["executed"]
    assert not executed[0, 5:].any()
    assert [(executed[0] > r).sum().item() for r in range(3)] == [4, 3, 2]
    assert [(executed[1] > r).sum().item() for r in range(3)] == [6, 4, 2]


def test_executed_steps_are_logged():
    stats = build(MoRLM, MoRConfig, **SOME).loss(rows_of([8, 8])).stats
    total, number = stats["executed_steps"]
    assert total / number == 1.5


def test_routers_do_not_decay():
    model = build(MoRLM, MoRConfig, **SOME)
    exempt = {id(parameter) for parameter in model.no_decay_parameters()}
    names = {name for name, p in model.network.named_parameters() if id(p) in exempt}
    assert names == {f"routers.{r}.{part}" for r in range(3) for part in ("weight", "bias")}


# ---- scoring


@pytest.mark.parametrize("routing", ["threshold", "topk"])
@pytest.mark.parametrize("changes", [SOME, TIED], ids=str)
def test_every_depth_is_recorded(changes, routing):
    model, batch = build(MoRLM, MoRConfig, eval_routing=routing, **changes), rows_of([8, 8])
    steps = check_depths(model, by_depth(routing), batch)
    assert steps["most"] == 3
    assert torch.equal(steps["executed"], executed_of(model, batch, routing))
    assert len(steps["executed"].unique()) > 1


def test_threshold_routing_computes_about_as_much_as_it_needs():
    model = build(MoRLM, MoRConfig, block_size=150, **SOME)
    batch, widths = rows_of([150, 120]), []
    block = model.network.blocks[0]
    handle = block.register_forward_hook(lambda module, args, out: widths.append(out.shape[1]))
    _, found = recorded(model, batch)
    handle.remove()
    executed = found["thinking_steps"]["executed"]
    assert torch.equal(executed, executed_of(model, batch, "threshold"))
    counts = [(executed > r).sum(dim=1).max().item() for r in range(3)]
    assert widths == [150, *(min(150, math.ceil(n / 64) * 64) for n in counts if n)]
    assert min(widths) < 150
    check_depths(model, by_depth("threshold"), batch)


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        (SOME, True),
        (SOME | {"eval_routing": "topk"}, False),
        (ALL | {"eval_routing": "topk"}, True),
        ({"thinking_steps": 0, "capacities": (), "eval_routing": "topk"}, True),
    ],
)
def test_what_scores_are(changes, causal):
    model = build(MoRLM, MoRConfig, **changes)
    assert model.causal == causal
    assert model.score(rows_of([8])).kind == ("exact" if causal else "noncausal")


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("routing", ["threshold", "topk"])
def test_all_tokens_with_full_gates_are_the_looped_decoder(routing):
    model = build(MoRLM, MoRConfig, eval_routing=routing, **ALL)
    looped = build(LoopedLM, LoopedConfig, thinking_steps=2)
    weights = model.network.state_dict()
    looped.network.load_state_dict({k: v for k, v in weights.items() if "routers" not in k})
    batch = rows_of([8, 5])
    assert (looped.score(batch).log_prob - model.score(batch).log_prob).abs().max() > 1e-3
    with torch.no_grad():
        for router in model.network.routers:
            router.weight.zero_()
            router.bias.fill_(60.0)  # sigmoid(60) is 1 in float64
    expected = looped.network(batch["tokens"], every_depth=True)
    found, _ = model.read(batch, every_depth=True)
    seen = batch["mask"]  # padding is never chosen
    torch.testing.assert_close(found[seen], expected[seen], atol=1e-11, rtol=1e-11)
    trained = model.network(batch["tokens"], valid=seen, routing="topk").states
    torch.testing.assert_close(trained[seen], expected[seen][:, -1], atol=1e-11, rtol=1e-11)


# ---- generation


def test_deeper_caches_hold_only_who_came():
    model, batch = build(MoRLM, MoRConfig, **SOME), rows_of([8, 8, 8])
    executed = executed_of(model, batch, "threshold")
    with torch.no_grad():
        cache = model.init_cache(batch["tokens"][:, :5], torch.tensor([5, 5, 5]), 3)
        for place in (4, 5):
            model.decode_step(cache, batch["tokens"][:, place])
    depths = [recursion.lengths.tolist() for recursion in cache.recursions]
    assert depths == [[6] * 3, *((executed[:, :6] > r).sum(dim=1).tolist() for r in range(3))]
    assert len(set(depths[1])) > 1, "rows must differ for this to test anything"


def test_a_recursion_that_no_row_takes_is_not_computed():
    model = build(MoRLM, MoRConfig, **SOME)
    with torch.no_grad():
        model.network.routers[1].weight.zero_()
        model.network.routers[1].bias.fill_(-9.0)
        model.network.routers[0].weight.zero_()
        model.network.routers[0].bias.fill_(9.0)
    runs = []
    model.network.blocks[0].register_forward_hook(lambda *_: runs.append(1))
    tokens = rows_of([3, 3])["tokens"]
    cache = model.init_cache(tokens[:, :1], torch.tensor([1, 1]), 3)
    model.decode_step(cache, tokens[:, 0])
    assert len(runs) == 2


# ---- choosing


def test_quotas_round_up_and_floats_do_not_count():
    assert [quota(0.9, n) for n in (1, 10, 11, 32)] == [1, 9, 10, 29]
    assert quota(0.55, 100) == 55  # 0.55 * 100 is 55.00000000000001
    numbers = torch.arange(0, 2049)
    for capacity in (0.9, 0.8, 0.73, 0.55, 0.07, 1.0):
        expected = [math.ceil(Fraction(str(capacity)) * n) for n in numbers.tolist()]
        assert quotas_of(capacity, numbers).tolist() == expected
        assert [quota(capacity, n) for n in numbers.tolist()] == expected


def test_of_equal_logits_the_earlier_tokens_go_on():
    candidates = torch.tensor([[True, False, True, True, True]])
    found = choose(torch.zeros(1, 5), candidates, torch.tensor([2]))
    assert found.chosen.tolist() == [[True, False, True, False, False]]
    assert found.decisions == 4
    assert found.router_loss.item() == pytest.approx(4 * math.log(2))


def test_the_chosen_come_first_and_in_order():
    chosen = torch.tensor([[False, True, False, True], [True, True, True, False]])
    assert chosen_first(chosen, 3).tolist() == [[1, 3, 0], [0, 1, 2]]


# ---- compute


@pytest.mark.parametrize("changes", [SOME, {"capacities": (0.9, 0.8, 0.73)}, ALL], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_flops(changes, training):
    steps = len(changes["capacities"])
    options = {"attention_backend": "math", "eval_routing": "topk", "thinking_steps": steps}
    model = build(MoRLM, MoRConfig, **{**options, **changes})
    widths = [8, *(quota(capacity, 8) for capacity in model.config.capacities)]
    counted = counted_flops(model, rows_of([8, 8]), widths, training)
    assert model.flops_per_token(8, training) * 16 == pytest.approx(counted, rel=1e-12)


def test_flops_of_generating():
    model = build(MoRLM, MoRConfig, **SOME)
    looped = build(LoopedLM, LoopedConfig, thinking_steps=3)
    routers = 3 * 2 * model.config.dim
    assert model.generation_flops(8, 1.5) == pytest.approx(model.flops_per_token(8))
    assert model.generation_flops(8) == pytest.approx(looped.flops_per_token(8) + routers)
    assert model.generation_flops(8, 0) == sum(model.plain_flops(8).values()) + routers
    steps = [model.generation_flops(8, steps / 4) for steps in range(13)]
    assert steps == sorted(set(steps))
    with pytest.raises(ValueError, match=r"steps \(3.5\)"):
        model.generation_flops(8, 3.5)
