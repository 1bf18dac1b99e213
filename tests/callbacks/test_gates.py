"""What the analysis of memory finds: within trainings, against direct gradients, and by hand."""

import math
from dataclasses import asdict

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

from callbacks import GateAnalysis, NonFinite
from callbacks.analysis import gates as module
from callbacks.analysis.base import Findings
from callbacks.analysis.gates import (
    GateHistory,
    attention_consumer,
    attention_summary,
    beyond,
    by_age,
    cut,
    even_weights,
    gates,
    gradient_norms,
    memory_report,
    reach_lines,
    run_report,
    shares,
)
from callbacks.random_state import undisturbed
from lightning_models import (
    OptimizerConfig,
    ThoughtGestaltConfig,
    ThoughtGestaltLM,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.layers import record, recording
from tests.callbacks.written import names, table
from tests.thought_gestalt.cases import SIZES, streams

M = SIZES["memory_size"]
SHAPE = [[3, 1, 2, 2, 3, 1, 2], [2, 5], [4, 4, 1, 1, 2, 3]]
OF_VALIDATION = {"scalars.csv", "reach.csv", "attention.csv"}
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="constant", warmup=0)
COMPONENTS = ("self_attention", "memory_attention", "feed_forward")


def build(**changes):
    torch.manual_seed(0)
    model = ThoughtGestaltLM(ThoughtGestaltConfig(**{**SIZES, **changes}), OPTIMIZER)
    model.configure_model()
    return model


def batches(number, seed=0):
    """Batches of three streams, the longest of 2 M + 2 sentences."""
    shape = [[3, 1, 2, 2, 3, 1, 2, 4], [2, 5], [4, 4, 1, 1, 2, 3]]
    made = [streams(shape, seed=seed + i) for i in range(number)]
    return DataLoader(made, batch_size=None, shuffle=False)


# ---- gates and gradients, in training


def test_the_rows_of_a_training(make_trainer, tmp_path, undrawn):
    model = build()
    trainer = make_trainer(GateAnalysis(every_n_steps=2), max_steps=5, limit_val_batches=0)
    trainer.fit(model, batches(5))
    rows = table(tmp_path / "gate_analysis", "gates.csv")
    assert [int(row["step"]) for row in rows] == [0, 0, 2, 2, 4, 4]
    assert [int(row["sentence_steps"]) for row in rows] == [0, 0, 16, 16, 32, 32]  # 8 a batch
    assert [int(row["layer"]) for row in rows] == 3 * [2, 4]
    assert {float(row["gate"]) for row in rows[:2]} == {1.0}
    assert 1.0 not in {float(row["gate"]) for row in rows[2:]}
    for row in table(tmp_path / "gate_analysis", "gradient_share.csv"):
        parts = [float(row[name]) for name in COMPONENTS]
        assert sum(parts) == pytest.approx(1, abs=1e-5)
        assert min(parts) > 0
    norms = table(tmp_path / "gate_analysis", "gradient_norms.csv")
    assert len(norms) == 2 * (2 + 2 + 4)  # two layers of each attention, four feed-forward ones


def test_gates_are_those_after_the_step(make_trainer, undrawn):
    model, analysis = build(), GateAnalysis(every_n_steps=1)
    make_trainer(analysis, max_steps=3, limit_val_batches=0).fit(model, batches(3))
    last = dict(zip(analysis._gates.places, analysis._gates.rows[-1], strict=True))
    assert last == gates(model)


def test_the_gradient_of_an_accumulated_step_is_that_of_one_large_batch(make_trainer, undrawn):
    kept = []
    for accumulate, loader in ((1, [0]), (2, [0, 1])):
        analysis = GateAnalysis(every_n_steps=1)
        options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1e-3}
        trainer = make_trainer(analysis, max_steps=1, limit_val_batches=0, **options)
        model = build(attention_dropout=0, token_dropout=0, sentence_dropout=0)
        # the same batch twice: the mean over micro-batches is the batch's own
        trainer.fit(model, DataLoader([streams([[3, 2, 4, 1]])] * len(loader), batch_size=None))
        assert analysis._norms.steps == [1]
        kept.append(analysis._norms.table()["value"].to_numpy())
    assert kept[1] == pytest.approx(kept[0], rel=1e-5)
    assert kept[0].max() > 1e-2  # before clipping


class Spoil(L.Callback):
    """Makes every gradient infinite."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.network.blocks[0].attention.qkv.weight.grad[0] = math.inf


@pytest.mark.parametrize("place", [1, 2])
def test_a_step_that_is_skipped_has_no_share(make_trainer, undrawn, place):
    analysis = GateAnalysis(every_n_steps=1)
    callbacks = [Spoil(), NonFinite("skip")]
    callbacks.insert(place, analysis)
    trainer = make_trainer(*callbacks, max_steps=1, limit_val_batches=0)
    with pytest.warns(UserWarning, match="skipped"):
        trainer.fit(build(), batches(1))
    assert analysis._norms.steps == []
    assert analysis._gates.steps == [0, 1]


def test_a_validation_alone(make_trainer, tmp_path, undrawn):
    trainer = make_trainer(GateAnalysis(num_batches=2), limit_val_batches=2)
    trainer.validate(build(), batches(2), verbose=False)
    folder = tmp_path / "gate_analysis"
    assert names(folder) == OF_VALIDATION
    assert not (folder / "gates.csv").exists()  # there has been no training
    reach = table(folder, "reach")
    assert [int(row["age"]) for row in reach] == list(range(1, 2 * M + 1))
    assert [row["in_memory"] for row in reach] == ["1"] * M + ["0"] * M
    assert all(float(row["gradient_norm"]) > 0 for row in reach)
    attention = table(folder, "attention")
    for layer in ("2", "4"):
        weights = [float(row["weight"]) for row in attention if row["layer"] == layer]
        assert len(weights) == M
        assert sum(weights) == pytest.approx(1, abs=1e-5)


# ---- resuming


def test_a_resumed_run_has_the_rows_of_the_whole(make_trainer, tmp_path, undrawn):
    whole, first, second = (GateAnalysis(every_n_steps=1) for _ in range(3))
    options = {"limit_val_batches": 1, "val_check_interval": 2}
    make_trainer(whole, max_steps=4, **options).fit(build(), batches(4), batches(1))
    trainer = make_trainer(first, max_steps=2, **options)
    trainer.fit(build(), batches(4), batches(1))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    trainer = make_trainer(second, max_steps=4, **options)
    trainer.fit(build(), batches(4), batches(1), ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert second._gates.steps == whole._gates.steps == [0, 1, 2, 3, 4]
    assert second._norms.steps == whole._norms.steps == [1, 2, 3, 4]
    assert second._gates.sentence_steps == [0, 8, 16, 24, 32]
    assert (second._validations, first._validations) == (2, 1)
    assert len(table(tmp_path / "gate_analysis", "gates.csv")) == 2 * 5


def test_a_checkpoint_is_validated_with_the_rows_up_to_it(make_trainer, tmp_path, undrawn):
    trainer = make_trainer(GateAnalysis(every_n_steps=1), max_steps=3, limit_val_batches=0)
    trainer.fit(build(), batches(3))
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    trainer = make_trainer(GateAnalysis(output=str(tmp_path / "later")))
    trainer.validate(build(), batches(1), ckpt_path=tmp_path / "three.ckpt", verbose=False)
    assert "reach.csv" in names(tmp_path / "later", 3)
    steps = [int(row["step"]) for row in table(tmp_path / "later", "gates.csv")]
    assert steps == [0, 0, 1, 1, 2, 2, 3, 3]


def test_another_training_of_the_process_starts_again(make_trainer, undrawn):
    analysis = GateAnalysis(every_n_steps=1)
    for _ in range(2):
        model = build(gate_init=0.5)
        make_trainer(analysis, max_steps=2, limit_val_batches=0).fit(model, batches(2))
        assert analysis._gates.steps == [0, 1, 2]
        assert analysis._gates.rows[0] == [0.5, 0.5]


# ---- models and batches without what is needed


def test_reach_is_measured_without_gates(make_trainer, tmp_path, undrawn):
    trainer = make_trainer(GateAnalysis())
    with pytest.warns(UserWarning, match="no memory gates"):
        trainer.validate(build(memory="in_context"), batches(1), verbose=False)
    assert names(tmp_path / "gate_analysis") == {"scalars.csv", "reach.csv"}


def test_documents_of_one_sentence_show_nothing(make_trainer, tmp_path):
    loader = DataLoader([streams([[3], [2]])], batch_size=None)
    make_trainer(GateAnalysis()).validate(build(), loader, verbose=False)
    assert not (tmp_path / "gate_analysis").exists()


def test_what_does_not_fit_the_device_is_left_out(make_trainer, monkeypatch, tmp_path, undrawn):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "reach_lines", fails)
    trainer = make_trainer(GateAnalysis(every_n_steps=1), max_steps=2, val_check_interval=1)
    model = build()
    with pytest.warns(UserWarning, match=r"lower max_streams \(4\)"):
        trainer.fit(model, batches(2), batches(1))
    assert trainer.global_step == 2
    assert model.training


@pytest.mark.parametrize(("steps", "validations"), [(0, 1), (1, 0)])
def test_either_half_may_be_off(make_trainer, tmp_path, undrawn, steps, validations):
    analysis = GateAnalysis(every_n_steps=steps, every_n_validations=validations)
    trainer = make_trainer(analysis, max_steps=2, val_check_interval=2, num_sanity_val_steps=1)
    trainer.fit(build(), batches(2), batches(1))
    folder = tmp_path / "gate_analysis"
    assert (folder / "gates.csv").exists() is bool(steps)
    assert ("reach.csv" in names(folder, 2)) is bool(validations)
    assert not names(folder)  # of the sanity check


# ---- against direct gradients and by hand


def noisy(**changes):
    """A float64 model whose parameters are all random."""
    model = build(**changes)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def found(model, batch, **options):
    """The findings of one batch."""
    findings = Findings()
    with undisturbed(model):
        GateAnalysis(**options)._collect(None, model, batch, findings)
    return findings


def reach(model, batch, **options):
    """The reach of one batch by age."""
    return by_age(found(model, batch, **options)["reach"])


def lines(*sums):
    """Lines by age: lists of sums from age 1, each with its count."""
    tables = [
        pd.DataFrame(
            {"layer": 0, "age": range(1, len(total) + 1), "total": total, "count": float(count)}
        )
        for total, count in sums
    ]
    return pd.concat(tables)


def test_means_by_age():
    ages = by_age(lines(([4.0, 2.0], 2), ([3.0, 1.0, 5.0], 1), ([1.0], 1)))
    assert ages["count"].tolist() == [4, 3, 1]
    assert ages["mean"].tolist() == [2, 1, 5]
    assert ages["spread"].tolist() == [2, 3 / 4, 5 / 4]
    # one summand ends at age 1, two at age 2, one at age 3
    expected = [(1 + 2 / 2 + 1 / 3) / 4, (2 / 2 + 1 / 3) / 4, 1 / 12]
    even = even_weights(ages.rename(columns={"count": "slots"}))
    assert even.tolist() == pytest.approx(expected)
    assert len(by_age(Findings()["reach"])) == 0


def test_scalars_by_hand():
    findings = Findings()
    for sums, weights in (
        (([6.0], 2), [[0.5, 0.5]]),
        (([3.0, 8.0], 1), [[0.0, 1.0], [1.0, 0.0]]),
    ):
        findings.add("reach", lines(sums))
        attention_consumer(findings)(layer=2, gate=None, weights=torch.tensor(weights))
    ages = by_age(findings["reach"])
    assert ages["mean"].tolist() == [3, 8]
    assert by_age(findings["attention"])["spread"].tolist() == [0.5, 0.5]
    assert beyond(ages, 1) == pytest.approx(8 / 11)
    assert math.isnan(beyond(ages, 2))
    assert math.isnan(beyond(ages, None))
    scalars = memory_report(findings, 1).finite
    assert scalars["gradient_reach/beyond_memory"] == pytest.approx(8 / 11)
    assert scalars["memory_attention/layer_2/mean_age"] == 1.5
    assert scalars["memory_attention/layer_2/entropy"] == pytest.approx(math.log(2) / 3)
    assert set(memory_report(findings, None).tables["reach"]["in_memory"]) == {""}


# ---- reach


def test_reach_of_a_chain_by_hand():
    """s_t = 2 s_{t-1}, and the loss of t is 3 times the sum of s_{t-1}."""
    first = torch.ones(2, 4, requires_grad=True)
    vectors, losses = [first], [first.sum()]
    for t in range(1, 5):
        rows = 2 if t < 4 else 1  # the second stream has four sentences
        losses.append(3 * vectors[-1][:rows].sum())
        vectors.append(2 * vectors[-1][:rows])
    ages = by_age(pd.concat(reach_lines(vectors, losses, probes=2)))  # from sentences 3 and 4
    assert ages["count"].tolist() == [3, 3, 3, 1]
    norm = 3 * 2.0  # of a gradient of threes, D = 4
    assert ages["mean"].tolist() == pytest.approx([norm, 2 * norm, 4 * norm, 8 * norm])
    assert first.grad is None


def test_reach_is_the_gradient_of_every_stream_alone():
    model, batch = noisy(), streams(SHAPE)
    ages = reach(model, batch, max_sentences=10, probes=2)
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
    assert ages["count"].tolist() == counts.tolist()
    assert ages["mean"].tolist() == pytest.approx(list(sums / counts), rel=1e-5)


def test_no_gradient_reaches_through_a_detached_memory():
    findings = found(noisy(memory="detached"), streams(SHAPE))
    ages = by_age(findings["reach"])
    assert ages["mean"].tolist() == [0.0] * (2 * M)
    assert math.isnan(beyond(ages, M))
    attention = by_age(findings["attention"])  # it is read all the same
    assert attention.groupby("layer")["spread"].sum().tolist() == pytest.approx([1, 1])


def test_compiled_networks_and_checkpointed_sentences_change_nothing():
    model, batch, graphs = noisy(), streams(SHAPE), []
    plain = reach(model, batch)["mean"].tolist()
    model.network.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    assert reach(model, batch)["mean"].tolist() == plain
    assert not graphs
    again = reach(noisy(checkpoint_sentences=True), batch)["mean"]
    assert again.tolist() == pytest.approx(plain)


# ---- attention


def test_queries_of_zero_attend_everywhere():
    model, batch = noisy(), streams(SHAPE)
    with torch.no_grad():
        for reader in model.network.readers:
            reader.query.weight.zero_()
            reader.query.bias.zero_()
    findings = found(model, batch, max_streams=3)
    table = by_age(findings["attention"])
    ages = table[table["layer"] == 2]
    slots = batch["lengths"].sum(dim=0).tolist()  # of each sentence step
    assert ages["count"].tolist() == [sum(slots[1:]), sum(slots[2:]), sum(slots[3:])]
    even = even_weights(ages.rename(columns={"count": "slots"}))
    assert ages["spread"].tolist() == pytest.approx(even.tolist())
    sizes = [min(t, M) for t in range(1, len(slots))]
    total = sum(slots[1:])
    entropy = sum(n * math.log(size) for n, size in zip(slots[1:], sizes, strict=True)) / total
    mean = sum(n * (size + 1) / 2 for n, size in zip(slots[1:], sizes, strict=True)) / total
    summary = attention_summary(table, findings["entropy"]).set_index("layer").loc[2]
    assert (summary["entropy"], summary["mean_age"]) == pytest.approx((entropy, mean))


def test_the_last_entry_of_memory_has_age_one():
    """A network may record what the analysis does not use."""
    findings = Findings()
    with recording(memory_attention=attention_consumer(findings)):
        for weights in ([[1.0]], [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]):
            weights = torch.tensor(weights)
            record("memory_attention", layer=4, gate=2.0, weights=weights, more="x")
    ages = by_age(findings["attention"])
    assert ages["spread"].tolist() == pytest.approx([2.1 / 3, 0.5 / 3, 0.4 / 3], rel=1e-6)
    assert ages["mean"].tolist() == pytest.approx([2.1 / 3, 0.25, 0.2], rel=1e-6)


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
    assert GateAnalysis()._analyse(noisy(), batch, findings)
    assert not findings


@pytest.mark.parametrize("memory", ["none", None])
def test_models_without_sentence_vectors(memory):
    if memory is None:
        model = TransformerLM(TransformerConfig(vocab_size=40, block_size=9, dim=16, num_heads=2))
        model.configure_model()
        batch = {"tokens": torch.zeros(1, 5, dtype=torch.int64)}
    else:
        model, batch = noisy(memory=memory), streams(SHAPE)
    findings = Findings()
    assert not GateAnalysis()._analyse(model, batch, findings)
    assert not findings
    assert gates(model) == {}


# ---- gates and gradients


def test_gates_are_found_by_layer():
    model = noisy(layer_type="alternate")
    with torch.no_grad():
        model.network.blocks[1].memory_attention.gate.fill_(0.25)
        model.network.blocks[3].memory_attention.gate.fill_(1.5)
    assert gates(model) == {(2, "gate"): 0.25, (4, "gate"): 1.5}


@pytest.mark.parametrize("layer_type", ["alternate", "serial", "parallel"])
def test_shares_of_a_real_model(layer_type):
    model, batch = noisy(layer_type=layer_type), streams(SHAPE)
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
    history = GateHistory()
    for step in (10, 20, 30):
        history.add(step, 7 * step, {(2, "gate"): 1.0 + step, (4, "gate"): 2.0})
    torch.save(asdict(history), tmp_path / "state.pt")
    again = GateHistory(**torch.load(tmp_path / "state.pt", weights_only=True))
    assert again == history
    lines = again.table().to_dict("records")
    assert [line["value"] for line in lines] == [11, 2, 21, 2, 31, 2]
    line = {"step": 20, "sentence_steps": 140, "layer": 2, "part": "gate", "value": 21}
    assert lines[2] == line


def test_shares_over_training():
    history = GateHistory()
    for step, norms in enumerate(([1.0, 3.0], [2.0, 2.0])):
        places = [(1, "self_attention"), (1, "feed_forward")]
        history.add(step, 0, dict(zip(places, norms, strict=True)))
    found = run_report(GateHistory(), history).tables["gradient_share"]
    expected = {"self_attention": [0.25, 0.5], "memory_attention": [0, 0]}
    assert found[list(COMPONENTS)].to_dict("list") == {**expected, "feed_forward": [0.75, 0.5]}
