"""What the analysis of memory measures, on numbers known by hand and against direct gradients."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from callbacks import GateAnalysis
from callbacks.gate_analysis.ages import Ages, Findings, add_reach, cut
from callbacks.gate_analysis.history import (
    History,
    gates,
    gradient_norms,
    shares,
    shares_over,
)
from lightning_models import (
    ThoughtGestaltConfig,
    ThoughtGestaltLM,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.layers import record, recording
from tests.thought_gestalt.cases import SIZES, streams

M = SIZES["memory_size"]
SHAPE = [[3, 1, 2, 2, 3, 1, 2], [2, 5], [4, 4, 1, 1, 2, 3]]


def build(**changes):
    torch.manual_seed(0)
    model = ThoughtGestaltLM(ThoughtGestaltConfig(**{**SIZES, **changes}))
    model.configure_model()
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def found(model, batch, **options):
    """The findings of one batch."""
    analysis = GateAnalysis(**options)
    analysis._findings = findings = Findings()
    analysis.evaluation_batch_ends(None, model, batch, 0, 0)
    assert not analysis._unable
    return findings


# ---- sums by age


def test_means_by_age():
    ages = Ages()
    ages.add(np.array([4.0, 2.0]), 2)
    ages.add(np.array([3.0, 1.0, 5.0]), 1)
    ages.add(np.array([1.0]), 1)
    assert ages.counts.tolist() == [4, 3, 1]
    assert ages.means.tolist() == [2, 1, 5]
    assert ages.spread.tolist() == [2, 3 / 4, 5 / 4]
    # one summand ends at age 1, two at age 2, one at age 3
    expected = [(1 + 2 / 2 + 1 / 3) / 4, (2 / 2 + 1 / 3) / 4, 1 / 12]
    assert ages.even.tolist() == pytest.approx(expected)


def test_findings_of_ranks_are_merged():
    one, two, both = Findings(), Findings(), Findings()
    assert not one
    one.reach.add(np.array([6.0]), 2)
    two.reach.add(np.array([3.0, 8.0]), 1)
    for findings, weights in ((one, [[0.5, 0.5]]), (two, [[0.0, 1.0], [1.0, 0.0]])):
        findings.consumer()(layer=2, gate=None, weights=torch.tensor(weights))
        both.merge(findings)
    assert both.reach.means.tolist() == [3, 8]
    assert both.attention[2].spread.tolist() == [0.5, 0.5]
    assert both.entropy(2) == pytest.approx(math.log(2) / 3)
    assert both.beyond(1) == pytest.approx(8 / 11)
    assert both.beyond(2) is None


# ---- reach


def test_reach_of_a_chain_by_hand():
    """s_t = 2 s_{t-1}, and the loss of t is 3 times the sum of s_{t-1}."""
    first = torch.ones(2, 4, requires_grad=True)
    vectors, losses = [first], [first.sum()]
    for t in range(1, 5):
        rows = 2 if t < 4 else 1  # the second stream has four sentences
        losses.append(3 * vectors[-1][:rows].sum())
        vectors.append(2 * vectors[-1][:rows])
    ages = Ages()
    add_reach(ages, vectors, losses, probes=2)  # from sentences 3 and 4
    assert ages.counts.tolist() == [3, 3, 3, 1]
    norm = 3 * 2.0  # of a gradient of threes, D = 4
    assert ages.means.tolist() == pytest.approx([norm, 2 * norm, 4 * norm, 8 * norm])
    assert first.grad is None


def test_reach_is_the_gradient_of_every_stream_alone():
    model, batch = build(), streams(SHAPE)
    reach = found(model, batch, max_sentences=10, probes=2).reach
    sums, counts = np.zeros(6), np.zeros(6)
    for row, t in ((0, 4), (2, 4), (0, 6)):
        alone = {key: value[row : row + 1] for key, value in batch.items()}
        kept = {}
        model.recorded_loss(alone, sentences=lambda kept=kept, **values: kept.update(values))
        for age in range(1, t + 1):
            (gradient,) = torch.autograd.grad(
                kept["nll"][t], kept["vectors"][t - age], retain_graph=True
            )
            sums[age - 1] += gradient.norm().item()
            counts[age - 1] += 1
    assert reach.counts.tolist() == counts.tolist()
    assert reach.means == pytest.approx(sums / counts, rel=1e-5)


@pytest.mark.parametrize(
    "changes", [{}, {"layer_type": "serial"}, {"memory": "in_context"}], ids=str
)
def test_gradients_reach_behind_a_differentiable_memory(changes):
    findings = found(build(**changes), streams(SHAPE))
    assert len(findings.reach.means) == 2 * M  # by default 2 M + 1 sentences are read
    assert (findings.reach.means > 0).all()
    assert 0 < findings.beyond(M) < 1


def test_without_seeding_only_younger_sentences_carry_gradients_behind_memory():
    """The first layer that reads memory is below the sentence layer: vectors depend on it."""
    assert (found(build(context_seeding=False), streams(SHAPE)).reach.means > 0).all()
    above = build(context_seeding=False, sentence_layer=1)
    assert (found(above, streams(SHAPE)).reach.means > 0).tolist() == [True] * M + [False] * M


def test_no_gradient_reaches_through_a_detached_memory():
    findings = found(build(memory="detached"), streams(SHAPE))
    assert findings.reach.means.tolist() == [0.0] * (2 * M)
    assert findings.beyond(M) is None
    assert findings.attention[2].spread.sum() == pytest.approx(1)  # it is read all the same


def test_what_the_analysis_leaves_alone():
    model, batch = build(dropout=0.5, attention_dropout=0.5).train(), streams(SHAPE)
    model.network.blocks[0].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    modes = [module.training for module in model.modules()]
    before, state = {k: v.clone() for k, v in batch.items()}, torch.get_rng_state()
    with torch.inference_mode():
        inside = {key: value.clone() for key, value in batch.items()}
        first = found(model, inside).reach.means
    assert first.tolist() == found(model, batch).reach.means.tolist()  # no dropout
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
    assert all(torch.equal(batch[key], value) for key, value in before.items())
    assert model.sentence_steps == 0


def test_a_compiled_network_is_analysed_uncompiled():
    model, batch, graphs = build(), streams(SHAPE), []
    plain = found(model, batch).reach.means
    model.network.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    assert found(model, batch).reach.means.tolist() == plain.tolist()
    assert not graphs


# ---- attention


@pytest.mark.parametrize("layer_type", ["alternate", "serial", "parallel"])
def test_attention_adds_up_to_one(layer_type):
    findings = found(build(layer_type=layer_type), streams(SHAPE))
    layers = [2, 4] if layer_type == "alternate" else [1, 2, 3, 4]
    assert sorted(findings.attention) == layers
    for layer in layers:
        ages = findings.attention[layer]
        assert len(ages.spread) == M
        assert ages.spread.sum() == pytest.approx(1)
        assert 1 <= findings.mean_age(layer) <= M
        assert 0 < findings.entropy(layer) <= math.log(M)


def test_queries_of_zero_look_everywhere():
    model, batch = build(), streams(SHAPE)
    with torch.no_grad():
        for reader in model.network.readers:
            reader.query.weight.zero_()
            reader.query.bias.zero_()
    findings = found(model, batch, max_streams=3)
    ages = findings.attention[2]
    slots = batch["lengths"].sum(dim=0).tolist()  # of each sentence step
    assert ages.counts.tolist() == [sum(slots[1:]), sum(slots[2:]), sum(slots[3:])]
    assert ages.spread == pytest.approx(ages.even)
    sizes = [min(t, M) for t in range(1, len(slots))]
    total = sum(slots[1:])
    entropy = sum(n * math.log(size) for n, size in zip(slots[1:], sizes, strict=True)) / total
    assert findings.entropy(2) == pytest.approx(entropy)
    mean = sum(n * (size + 1) / 2 for n, size in zip(slots[1:], sizes, strict=True)) / total
    assert findings.mean_age(2) == pytest.approx(mean)


def test_the_last_entry_of_memory_has_age_one():
    findings = Findings()
    take = findings.consumer()
    take(layer=4, gate=None, weights=torch.tensor([[1.0]]))
    take(layer=4, gate=None, weights=torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]))
    assert findings.attention[4].spread == pytest.approx([2.1 / 3, 0.5 / 3, 0.4 / 3], rel=1e-6)
    assert findings.attention[4].means == pytest.approx([2.1 / 3, 0.25, 0.2], rel=1e-6)


# ---- batches


def test_the_longest_streams_are_cut():
    batch = streams([[1], [2, 2, 2, 2], [3, 3, 3], [1, 1]])
    part = cut({**batch, "name": "x"}, max_streams=2, max_sentences=3)
    assert part["sequence_id"].tolist() == [1, 2]
    assert part["lengths"].tolist() == batch["lengths"][1:3, :3].tolist()
    assert torch.equal(part["tokens"], batch["tokens"][1:3, :3])
    assert torch.equal(part["lexical"], batch["lexical"][1:3, :3])
    assert part["name"] == "x"
    assert cut(batch, 9, 9)["tokens"].shape == batch["tokens"].shape


def test_a_batch_of_fillers_says_nothing():
    batch, findings = streams([[1], [1]]), Findings()
    batch["lengths"].zero_()
    assert GateAnalysis()._analyse(build(), batch, findings)
    assert not findings


@pytest.mark.parametrize("memory", ["none", None])
def test_models_without_sentence_vectors(memory):
    if memory is None:
        model = TransformerLM(TransformerConfig(vocab_size=40, block_size=9, dim=16, num_heads=2))
        model.configure_model()
        batch = {"tokens": torch.zeros(1, 5, dtype=torch.int64)}
    else:
        model, batch = build(memory=memory), streams(SHAPE)
    findings = Findings()
    assert not GateAnalysis()._analyse(model, batch, findings)
    assert not findings
    assert gates(model) == {}


# ---- gates and gradients


def test_gates_are_found_by_layer():
    model = build(layer_type="alternate")
    with torch.no_grad():
        model.network.blocks[1].memory_attention.gate.fill_(0.25)
        model.network.blocks[3].memory_attention.gate.fill_(1.5)
    assert gates(model) == {(2, "gate"): 0.25, (4, "gate"): 1.5}


class Components(nn.Module):
    """Parameters named as those of a network, with gradients that are given."""

    def __init__(self, **gradients):
        super().__init__()
        for name, gradient in gradients.items():
            *folders, leaf = name.split("__")
            module = self
            for folder in folders:
                if not hasattr(module, folder):
                    module.add_module(folder, nn.Module())
                module = getattr(module, folder)
            module.register_parameter(leaf, nn.Parameter(torch.zeros(2)))
            if gradient is not None:
                getattr(module, leaf).grad = torch.tensor(gradient)


def test_norms_and_shares_by_hand():
    model = Components(
        network__embedding__weight=[100.0, 100.0],
        network__blocks__0__attention__qkv=[3.0, 0.0],
        network__blocks__0__attention_norm__weight=[0.0, 4.0],
        network__blocks__0__feed_forward__up=[1.0, 0.0],
        network__blocks__1__memory_attention__out__weight=[0.0, 2.0],
        network__blocks__1__memory_norm__weight=None,
        network__blocks__1__feed_forward_norm__weight=[2.0, 0.0],
        network__norm__weight=[7.0, 7.0],
    )
    norms = gradient_norms(model)
    assert norms == {
        (1, "self_attention"): 5.0,
        (1, "feed_forward"): 1.0,
        (2, "memory_attention"): 2.0,
        (2, "feed_forward"): 2.0,
    }
    expected = {"self_attention": 0.5, "memory_attention": 0.2, "feed_forward": 0.3}
    assert shares(norms) == pytest.approx(expected)


@pytest.mark.parametrize("layer_type", ["alternate", "serial", "parallel"])
def test_shares_of_a_real_model(layer_type):
    model, batch = build(layer_type=layer_type), streams(SHAPE)
    model.loss(batch).terms["nll"].sum.backward()
    sums = dict.fromkeys(("self_attention", "memory_attention", "feed_forward"), 0.0)
    for block in model.network.blocks:
        groups = {
            "self_attention": (block.attention, block.attention_norm),
            "memory_attention": (block.memory_attention, block.memory_norm),
            "feed_forward": (block.feed_forward, block.feed_forward_norm),
        }
        for component, modules in groups.items():
            parts = [p.grad.flatten() for m in modules if m is not None for p in m.parameters()]
            sums[component] += torch.cat(parts).norm().item() if parts else 0.0
    expected = {component: value / sum(sums.values()) for component, value in sums.items()}
    assert shares(gradient_norms(model)) == pytest.approx(expected)
    assert min(expected.values()) > 0


@pytest.mark.parametrize("norm", [0.0, math.inf, math.nan])
def test_no_share_of_nothing_and_of_no_number(norm):
    assert shares({(1, "feed_forward"): norm, (1, "self_attention"): 0.0}) is None


# ---- rows over training


def test_rows_survive_a_checkpoint(tmp_path):
    history = History()
    for step in (10, 20, 30):
        history.add(step, 7 * step, {(2, "gate"): 1.0 + step, (4, "gate"): 2.0})
    torch.save(history.state(), tmp_path / "state.pt")
    again = History.from_state(torch.load(tmp_path / "state.pt", weights_only=True))
    again.forget_from(30)
    assert again.steps == [10, 20]
    assert again.values.tolist() == [[11, 2], [21, 2]]
    assert again.clock == ("sentence steps", [70, 140])
    assert again.records("gate")[2] == {"step": 20, "sentence_steps": 140, "layer": 2, "gate": 21}
    again.add(30, 0, {(2, "gate"): 3.0})  # a model with other layers
    assert (again.steps, again.values.tolist()) == ([30], [[3.0]])
    assert again.clock == ("optimiser steps", [30])
    assert history.steps == [10, 20, 30]


def test_shares_over_training():
    history = History()
    for step, norms in enumerate(([1.0, 3.0], [2.0, 2.0])):
        places = [(1, "self_attention"), (1, "feed_forward")]
        history.add(step, 0, dict(zip(places, norms, strict=True)))
    found = {part: values.tolist() for part, values in shares_over(history).items()}
    expected = {"self_attention": [0.25, 0.5], "memory_attention": [0, 0]}
    assert found == {**expected, "feed_forward": [0.75, 0.5]}


def test_a_record_may_say_more():
    """A network may add what the analysis does not use."""
    findings = Findings()
    with recording(memory_attention=findings.consumer()):
        record("memory_attention", layer=1, gate=2.0, weights=torch.ones(1, 1), more="x")
    assert findings.attention[1].number == 1
