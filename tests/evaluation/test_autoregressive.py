"""A target's score from its prefix knows nothing else, whatever the method and however batched."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datamodules import LocalText
from evaluation.autoregressive import (
    PairedScores,
    bucket_by_length,
    draw_targets,
    prefix_batch,
    score_pairs,
)
from evaluation.scoring import standard_error
from lightning_models import (
    OptimizerConfig,
    ThoughtbubblesConfig,
    ThoughtbubblesLM,
)
from tests.methods import BLOCK, METHODS, VOCAB

BY_NAME = {method.name: method for method in METHODS}
CAUSAL = [method.name for method in METHODS if method.reads_windows and method.build().causal]


@pytest.fixture
def make_source(make_data):
    """The validation split's batches, with the data they come from."""

    def make(**changes):
        data = make_data(val_fraction=0.2, **changes)
        data.prepare_data()
        data.setup("validate")
        return data, data.evaluation_source("val")

    return make


@pytest.fixture
def pair(make_source):
    """Scores drawn targets of the first two batches."""

    def run(model, positions=None, batch_size=4):
        data, source = make_source()
        drawn = draw_targets(source, batches=2, positions=positions, seed=0)
        return drawn, score_pairs(model.eval(), drawn, data.tokenizer, batch_size=batch_size)

    return run


def one_by_one(model, data, drawn):
    """Nats (N,) of targets, each after its own unpadded prefix, straight from the text."""
    stream = data.stream("val")
    text = np.concatenate(([data.tokenizer.eos_id], stream.gather(np.arange(len(stream)))))
    nats = []
    for row, column in zip(drawn.row, drawn.column, strict=True):
        start = int(drawn.windows["sequence_id"][row]) * data.block_size
        tokens = torch.from_numpy(text[start : start + int(column) + 2].astype(np.int64))
        targets = torch.full_like(tokens[:-1], -100)
        targets[-1] = tokens[-1]
        batch = {"tokens": tokens[None, :-1], "targets": targets[None]}
        with torch.no_grad():
            nats.append(-model.score(batch).log_prob.sum().item())
    return torch.tensor(nats, dtype=torch.float64)


def places(drawn, block_size):
    """Place of each drawn target in the text."""
    return drawn.windows["sequence_id"][drawn.row] * block_size + drawn.column


# ---- what is scored


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_methods_score_prefixes_as_whole_windows(pair, name):
    number = None if name == CAUSAL[0] else 2 * BLOCK
    _, scores = pair(BY_NAME[name].build(), positions=number)
    assert scores.of == 2 * 4 * BLOCK
    assert len(scores.prefix) == (number or scores.of)
    torch.testing.assert_close(scores.prefix, scores.blockwise, rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget", ["dynamic", "fixed"])
def test_a_choice_over_the_whole_sequence_is_made_again_for_each_prefix(pair, make_source, budget):
    model = BY_NAME["thoughtbubbles"].build(budget=budget)
    drawn, scores = pair(model, positions=60)
    data, _ = make_source()
    expected = one_by_one(model, data, drawn)
    torch.testing.assert_close(scores.prefix, expected, rtol=0, atol=1e-5)
    assert (scores.prefix - scores.blockwise).abs().max() > 1e-3


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_batching_changes_nothing(pair, batch_size):
    model = BY_NAME["thoughtbubbles"].build(budget="fixed")
    _, expected = pair(model, positions=40)
    _, scores = pair(model, positions=40, batch_size=batch_size)
    torch.testing.assert_close(scores.prefix, expected.prefix, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.blockwise, expected.blockwise, rtol=0, atol=1e-5)


def test_what_is_inferred_of_a_prefix_comes_from_the_prefix_alone(pair, make_source):
    """Another target changes nothing in what the model makes of the prefix before it."""
    model = BY_NAME["latent-thought"].build().eval()
    drawn, scores = pair(model, positions=4)
    assert scores.prefix_likelihood == "estimate"
    assert scores.likelihood == "lower_bound"
    assert scores.blockwise is None
    data, _ = make_source()
    batch = prefix_batch(drawn, torch.arange(4), data.tokenizer.eos_id)
    size = model.config.padded_vocab_size  # a row for each possible target
    batch = {key: value.repeat_interleave(size, dim=0) for key, value in batch.items()}
    every = torch.arange(size).repeat(4)[:, None]
    batch["targets"] = torch.where(batch["targets"] == -100, -100, every)
    likelihoods = model.score(batch).log_prob.sum(dim=1).exp().view(4, size)
    torch.testing.assert_close(likelihoods.sum(dim=1), torch.ones(4))


def test_a_batch_of_prefixes_holds_no_later_token(make_source):
    _, source = make_source()
    drawn = draw_targets(source, batches=2, positions=20, seed=1)
    chosen = torch.arange(20)
    before = prefix_batch(drawn, chosen, 256)
    place = torch.arange(before["tokens"].shape[1])
    later = place > drawn.column[:, None]
    assert (before["tokens"][later] == 256).all()
    assert torch.equal(before["mask"], ~later)
    assert ((before["targets"] != -100).sum(dim=1) == 1).all()
    assert torch.equal(
        before["targets"][chosen, drawn.column], drawn.windows["targets"][drawn.row, drawn.column]
    )


def test_groups_hold_each_row_once_and_no_more_tokens_than_allowed():
    lengths = torch.tensor([5, 1, 32, 7, 7, 2, 40, 1])
    groups = list(bucket_by_length(lengths, 32))
    assert sorted(torch.cat(groups).tolist()) == list(range(8))
    assert groups[0].tolist() == [6]  # longer than allowed: alone
    sizes = [len(group) * int(lengths[group].max()) for group in groups[1:]]
    assert max(sizes) <= 32
    assert len(groups) == 4


# ---- what is drawn


def test_positions_depend_on_text_and_seed_only(make_source):
    draws = []
    for changes in ({}, {"batch_size": 1}, {"batch_size": 7}, {"block_size": 8}):
        data, source = make_source(**changes)
        drawn = draw_targets(source, batches=len(source), positions=50, seed=3)
        assert len(drawn) == 50
        assert drawn.of == data.counts("val").tokens
        draws.append(places(drawn, data.block_size))
    assert all(torch.equal(draws[0], draw) for draw in draws)
    _, source = make_source()
    other = draw_targets(source, batches=len(source), positions=50, seed=4)
    assert not torch.equal(places(other, BLOCK), draws[0])


def test_a_larger_draw_has_the_smaller_one(make_source):
    _, source = make_source()
    count = len(source)
    few, many, every = (
        set(places(draw_targets(source, batches=count, positions=n, seed=0), BLOCK).tolist())
        for n in (10, 200, None)
    )
    assert len(few) == 10
    assert len(many) == 200
    assert few < many < every
    assert every == set(range(len(every)))


def test_every_target_is_drawn_equally_often(make_source):
    _, source = make_source()
    drawn = np.zeros(4 * BLOCK)
    for seed in range(200):
        one = draw_targets(source, batches=1, positions=16, seed=seed)
        drawn[places(one, BLOCK)] += 1
    assert drawn.sum() == 200 * 16
    expected = drawn.mean()  # 25, standard deviation 4.7
    assert abs(drawn - expected).max() < 5 * 4.7
    assert ((drawn - expected) ** 2).sum() / (expected * (1 - 16 / 128)) < 127 + 5 * math.sqrt(254)


# ---- what is reported


def test_bytes_are_those_of_the_targets_or_not_known(make_source):
    data, source = make_source(tokenizer="bpe:280")
    drawn = draw_targets(source, batches=2, positions=30, seed=0)
    sizes = drawn.num_bytes
    targets = drawn.windows["targets"][drawn.row, drawn.column]
    assert sizes.tolist() == [
        0 if i == data.tokenizer.eos_id else len(data.tokenizer.decode([i]).encode())
        for i in targets.tolist()
    ]
    assert len(set(sizes.tolist())) > 1
    bare = SimpleNamespace(batch=source.batch)  # a source that counts no bytes by target
    assert draw_targets(bare, batches=2, positions=30, seed=0).num_bytes is None


def test_the_gap_is_paired():
    prefix, blockwise = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([0.5, 4.0, 8.5])
    scores = PairedScores(prefix, blockwise, 6, 100, "noncausal", False, "exact")
    result = scores.as_dict()
    assert result["standard_error"] == pytest.approx(4 / math.sqrt(3))
    gap = {"nats_per_token": 2 / 3, "standard_error": math.sqrt(1 / 12 / 3)}
    assert result["difference"] == pytest.approx(gap, rel=1e-6)
    assert result["blockwise"]["ppl_noncausal"] == pytest.approx(math.exp(13 / 3))
    assert result["blockwise"]["bits_per_byte"] == pytest.approx(13 / 6 / math.log(2))
    assert (result["positions"], result["of_positions"]) == (3, 100)


def test_one_value_has_no_standard_error():
    assert math.isnan(standard_error(torch.tensor([1.0])))


# ---- the command

SIZES = {"vocab_size": VOCAB, "block_size": BLOCK, "num_layers": 3, "dim": 32, "num_heads": 2}


@pytest.fixture(scope="module")
def forking_path(corpus, quiet_trainer, tmp_path_factory):
    """A checkpoint of Thoughtbubbles after two steps; not to be changed."""
    path = tmp_path_factory.mktemp("forking") / "forking.ckpt"
    torch.manual_seed(0)
    config = ThoughtbubblesConfig(**SIZES, fork_layers=(1, 2), kappa="2L")
    trainer = quiet_trainer(max_steps=2, limit_val_batches=0, default_root_dir=path.parent)
    trainer.fit(ThoughtbubblesLM(config, OptimizerConfig(lr=0.01, warmup=0)), LocalText(**corpus))
    trainer.save_checkpoint(path)
    return path


@pytest.fixture
def score(evaluates, tmp_path):
    """Runs the command in autoregressive mode; returns the JSON file's content."""

    def run(checkpoint, *options, mode="autoregressive"):
        target = tmp_path / "result.json"
        evaluates("perplexity", "--ckpt", checkpoint, "--mode", mode, "--output", target, *options)
        return json.loads(target.read_text())

    return run


FEW = ("--positions", 40)


def test_all_positions_of_a_causal_model_are_its_blockwise_perplexity(score, checkpoint_path):
    blockwise = score(checkpoint_path, "--limit_batches", 2, mode="blockwise")
    result = score(checkpoint_path, "--limit_batches", 2, "--positions", "null")
    assert blockwise["mode"] == "blockwise"
    assert "difference" not in blockwise
    assert result["mode"] == "autoregressive"
    assert result["positions"] == result["of_positions"] == result["tokens"] == blockwise["tokens"]
    for key in ("nats_per_token", "perplexity", "bits_per_byte", "bytes"):
        assert result[key] == pytest.approx(blockwise[key], rel=1e-5)
        assert result["blockwise"][key] == pytest.approx(blockwise[key], rel=1e-5)
    assert abs(result["difference"]["nats_per_token"]) < 1e-5
    assert result["flops_per_token"] == blockwise["flops_per_token"]


def test_a_noncausal_model_is_exact_after_prefixes(score, forking_path):
    result = score(forking_path, *FEW)
    assert (result["likelihood"], result["causal"]) == ("exact", True)
    assert result["perplexity"] == pytest.approx(math.exp(result["nats_per_token"]))
    blockwise = result["blockwise"]
    assert (blockwise["likelihood"], blockwise["causal"]) == ("noncausal", False)
    assert "perplexity" not in blockwise
    assert blockwise["ppl_noncausal"] > 1
    gap = result["nats_per_token"] - blockwise["nats_per_token"]
    assert result["difference"]["nats_per_token"] == pytest.approx(gap, abs=1e-9)
    assert result["difference"]["standard_error"] < result["standard_error"]
    assert result["settings"]["seed"] == 0
    assert result["settings"]["positions"] == 40
    whole = score(forking_path, mode="blockwise")
    assert whole["causal"] is False
    assert "perplexity" not in whole


def test_a_fixed_budget_is_another_number_for_short_prefixes(score, forking_path):
    few = (*FEW, "--limit_batches", 8)  # without the split's last window, which is shorter
    dynamic, fixed = (score(forking_path, *few, "--budget", b) for b in ("dynamic", "fixed"))
    assert dynamic["settings"]["set"] == {}
    assert fixed["settings"]["set"] == {"budget": "fixed"}
    assert (dynamic["settings"]["budget"], fixed["settings"]["budget"]) == ("dynamic", "fixed")
    assert fixed["nats_per_token"] != pytest.approx(dynamic["nats_per_token"], rel=1e-5)
    same = score(forking_path, *few, "--set.budget", "fixed")
    assert same["nats_per_token"] == fixed["nats_per_token"]
    whole = fixed["blockwise"]["nats_per_token"]  # nothing changes at the trained length
    assert whole == pytest.approx(dynamic["blockwise"]["nats_per_token"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "changed", "gap"),
    [
        (("--set.kappa", "4L"), {"kappa": "4L"}, False),  # nothing competes at two fork layers
        (("--set.kappa", "48"), {"kappa": 48}, True),
        (("--set.allocation", "threshold"), {"allocation": "threshold"}, False),
        (("--set.eval_allocation", "window_topk"), {"eval_allocation": "window_topk"}, False),
        (("--set.fork_layers", "[2, 1]"), {}, True),
    ],
)
def test_config_fields_can_be_set(score, forking_path, options, changed, gap):
    result = score(forking_path, *FEW, *options)
    assert json.dumps(result["settings"]["set"]) == json.dumps(changed)  # 48 is no "48"
    assert result["blockwise"]["causal"] is not gap
    assert (result["difference"]["standard_error"] > 1e-6) is gap


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--budget", "fixed"), "budget (fixed): TransformerLM has no budget to set"),
        (("--positions", "0"), "--positions: "),
        (("--positions", "many"), "positions"),
        (("--seed", "-1"), "--seed: "),
        (("--mode", "causal"), "mode"),
        (("--mode", "blockwise", "--positions", "9"), "drawn in autoregressive mode only"),
    ],
)
def test_bad_options_are_named(fails, checkpoint_path, options, expected):
    start = ("perplexity", "--ckpt", checkpoint_path, "--mode", "autoregressive")
    assert expected in fails(*start, *options)


def test_two_budgets_are_refused(fails, forking_path):
    both = ("--budget", "fixed", "--set.budget", "dynamic")
    assert "the same field" in fails("perplexity", "--ckpt", forking_path, *both)
    one = ("--budget", "none")
    assert "budget" in fails("perplexity", "--ckpt", forking_path, *one)


def test_a_budget_without_effect_is_refused(fails, forking_path):
    options = ("--budget", "fixed", "--set.eval_allocation", "window_topk")
    line = fails("perplexity", "--ckpt", forking_path, "--mode", "autoregressive", *options)
    assert "budget (fixed) has no effect" in line
