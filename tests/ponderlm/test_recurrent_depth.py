"""Recurrent depth against its equations: objectives, exits, caches, draws and costs."""

import dataclasses
import math
import warnings
from itertools import accumulate
from operator import mul

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from callbacks import StepAllocation
from datamodules import load_tokenizer
from lightning_models import (
    RecurrentDepthConfig,
    RecurrentDepthLM,
    TransformerConfig,
    TransformerLM,
    output_layer,
)
from lightning_models.generation import SamplingConfig, generate
from lightning_models.layers import recording
from lightning_models.ponderlm.baselines.recurrent_depth import decoding, exits
from lightning_models.ponderlm.baselines.recurrent_depth.network import (
    RecurrentNetwork,
    draw_noise,
    draw_recurrences,
    mean_recurrences,
)
from tests.ponderlm.baseline_cases import build as lively
from tests.ponderlm.baseline_cases import counted_flops, own_rows, rows_of, unseen_flops
from tests.ponderlm.cases import SIZES
from tests.reference import ponderlm as decoder
from tests.reference import recurrent_depth as reference

HUGINN = {
    "prelude_layers": 1,
    "coda_layers": 1,
    "injection": "concat",
    "state": "noise",
    "norms": "huginn",
    "tie_head": True,
}
OURO = {"norms": "ouro", "gate": "joint", "thinking_steps": 3}
BETWEEN = {"injection": "add", "state": "zero", "coda_layers": 1, "norms": "ouro"}
PRE = {"injection": "concat", "state": "zero", "prelude_layers": 2}
SHAPES = {
    "huginn": HUGINN,
    "huginn-k1": HUGINN | {"thinking_steps": 0},
    "huginn-last-two": HUGINN | {"thinking_steps": 4, "backprop_recurrences": 2},
    "huginn-all": HUGINN | {"backprop_recurrences": 9},
    "between": BETWEEN,
    "pre": PRE | {"init": "gpt2"},
    "loop": {},
}
EXACT = {"atol": 1e-9, "rtol": 1e-8}


def build(seed=0, **changes):
    return lively(RecurrentDepthLM, RecurrentDepthConfig, seed, **changes)


def numbered(lengths, **options):
    batch = rows_of(lengths, **options)
    return batch | {"sequence_id": torch.arange(len(lengths)) + 7}


def check_gradients(model, weights):
    for name, parameter in model.network.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, weights[name].grad, **EXACT)


# ---- objectives


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_loss_and_gradients(changes, monkeypatch):
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", 5)
    model, batch = build(**changes).train(), numbered([6, 4])
    weights, config = decoder.leaves(model.network.state_dict()), model.config
    output, expected = model.loss(batch), torch.zeros(())
    for number, (tokens, targets) in enumerate(own_rows(batch)):
        row = reference.run(
            weights,
            config,
            tokens,
            config.thinking_steps + 1,
            noise=draw_noise((0, 0, number + 7), len(tokens), config.dim)[: len(tokens)],
            trained=config.backprop_recurrences,
        )
        expected = expected + reference.losses(weights, row.read[-1], targets).sum()
    torch.testing.assert_close(output.terms["nll"].sum, expected, **EXACT)
    output.terms["nll"].sum.backward()
    expected.backward()
    check_gradients(model, weights)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("stage", ["joint", "alone"])
@pytest.mark.parametrize("changes", [OURO, HUGINN | {"state": "zero"}], ids=["ouro", "huginn"])
def test_the_gate_learns_by_its_equations(stage, changes):
    model, batch = build(**changes | {"gate": stage}).train(), numbered([6, 4])
    weights, count = decoder.leaves(model.network.state_dict()), model.config.thinking_steps + 1
    rows = [
        reference.gate_loss(weights, model.config, *row, recurrences=count)
        for row in own_rows(batch)
    ]
    expected, entropy, gain = (sum(parts) for parts in zip(*rows, strict=True))
    terms = model.loss(batch).terms
    torch.testing.assert_close(terms["nll"].sum, expected.detach() * 1.0, **EXACT)
    objective = expected - 0.1 * entropy if stage == "joint" else gain
    mine = sum(term.sum for term in terms.values())
    mine.backward()
    objective.backward()
    if stage == "joint":
        torch.testing.assert_close(mine, objective, **EXACT)
    else:
        torch.testing.assert_close(terms["gate"].sum, objective, **EXACT)
        trained = [n for n, p in model.network.named_parameters() if p.requires_grad]
        assert trained == ["gate.weight", "gate.bias"]
    check_gradients(model, weights)


def test_the_distribution_over_exits_at_its_ends():
    for logit, expected in ((-1e4, [0, 0, 1]), (1e4, [1, 0, 0]), (0.0, [0.5, 0.25, 0.25])):
        gate = torch.full((3,), logit, requires_grad=True)
        log_p, log_stay = exits.log_exits(gate)
        assert log_p.exp().tolist() == pytest.approx(expected)
        assert log_stay[0] == 0
        log_p.exp()[0].backward()
        assert gate.grad.isfinite().all()
    one, _ = exits.log_exits(torch.ones(1))
    assert one.tolist() == [0.0]


def test_equal_losses_teach_the_gate_to_leave():
    """The target is sigmoid(-0.25), at which the binary cross-entropy is the entropy."""
    stay = 1 / (1 + math.exp(0.25))
    gate = torch.full((1, 2), -math.log(stay / (1 - stay)))
    loss = exits.gain_loss(gate, torch.full((1, 2), 1.5), torch.ones(1, dtype=torch.bool))
    entropy = -stay * math.log(stay) - (1 - stay) * math.log(1 - stay)
    assert loss.item() == pytest.approx(entropy / 2, rel=1e-6)


def test_stage_two_starts_from_the_weights_of_stage_one(tmp_path):
    from tests.quiet import quiet_trainer

    model = build(**OURO)
    trainer = quiet_trainer(tmp_path)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    config = dataclasses.replace(model.config, gate="alone")
    second = RecurrentDepthLM.load_from_checkpoint(tmp_path / "one.ckpt", config=config)
    assert second.config.gate == "alone"
    for name, value in model.network.state_dict().items():
        assert torch.equal(second.network.state_dict()[name], value), name
    assert sum(p.requires_grad for p in second.network.parameters()) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.on_train_start()
    with pytest.warns(UserWarning, match="no checkpoint was loaded"):
        build(**OURO | {"gate": "alone"}).on_train_start()


# ---- what is logged


def test_collapsed_states_and_an_ignored_recurrence_show_in_the_log():
    model, batch = build(**HUGINN | {"state": "zero"}).train(), numbered([6, 4])
    stats = model.loss(batch).stats
    assert {"token_similarity", "state_change", "depth_0/nll", "recurrences"} <= stats.keys()
    healthy = (stats["token_similarity"].sum / stats["token_similarity"].normaliser).item()
    tokens = batch["tokens"]
    with torch.no_grad():
        entered = model.network.enter(tokens)
        s = model.network.recur(entered, torch.zeros_like(entered.e))[-1]
    rows = []
    for states, length in zip(s, (6, 4), strict=True):
        pairs = [(a, b) for a in range(length) for b in range(length) if a != b]
        cosines = [torch.cosine_similarity(states[a], states[b], dim=0).item() for a, b in pairs]
        rows.append(sum(cosines) / len(cosines))
    assert healthy == pytest.approx(sum(rows) / 2, abs=1e-5)
    # attention averages equal values: all states are alike
    alike = model.loss(batch | {"tokens": torch.full_like(tokens, 3)}).stats["token_similarity"]
    assert (alike.sum / alike.normaliser).item() == pytest.approx(1.0, abs=1e-5) != healthy
    other = build(**HUGINN | {"state": "zero"}).train()
    with torch.no_grad():  # what the state brings in is gone
        other.network.adapter.weight[:, : other.config.dim] = 0.0
    output = other.loss(batch)
    assert torch.equal(output.stats["depth_0/nll"].sum, output.terms["nll"].sum)
    assert stats["depth_0/nll"].sum != model.loss(batch).terms["nll"].sum


# ---- exits and caches

RULES = {"kl": 0.3, "latent": 0.7, "entropy": 0.1, "argmax": 1.0, "gate": 0.8}
LOOKUPS = ["latest", "skip", "last", "mean", "first"]
DEEP = HUGINN | {"thinking_steps": 4, "gate": "joint"}
CASES = [
    *({"exit": rule, "exit_threshold": at} for rule, at in RULES.items()),
    *({"exit": "latent", "exit_threshold": 0.7, "cache_lookup": how} for how in LOOKUPS[1:]),
    *({"cache_lookup": how} for how in LOOKUPS),
    {"cache_slots": 2},
    {"cache_slots": 3, "exit": "argmax", "exit_threshold": 1.0},
]


def reading(model, batch):
    cache = decoding.RecurrentCache(model.network, *batch["tokens"].shape)
    lengths = batch["mask"].sum(dim=1)
    with torch.no_grad():
        return decoding.read_text(model.network, batch["tokens"], lengths, cache, every_depth=True)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("changes", CASES, ids=lambda changes: "-".join(map(str, changes.values())))
def test_tokens_exit_and_are_seen_as_the_equations_say(changes):
    """Rows of several lengths, whose tokens exit after different recurrences."""
    model, batch = build(**DEEP | changes), numbered([8, 5, 7])
    weights, most = decoder.leaves(model.network.state_dict()), model.config.thinking_steps + 1
    done, taken = reading(model, batch), []
    noise = draw_noise((0,), 8, model.config.dim)
    for number, (tokens, _) in enumerate(own_rows(batch)):
        with torch.no_grad():
            own = reference.decode(weights, model.config, tokens, most, noise=noise)
        taken += own.taken
        assert done.recurrences[number, : len(tokens)].tolist() == own.taken
        states = done.states[number, : len(tokens)]
        torch.testing.assert_close(states, own.read, atol=1e-10, rtol=1e-9)
        assert not done.states[number, len(tokens) :].any()
    assert len(set(taken)) > 1 or "exit" not in changes
    torch.testing.assert_close(done.by_depth[:, :, -1], done.states, atol=1e-10, rtol=1e-9)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("changes", [DEEP, OURO, BETWEEN, PRE], ids=str)
def test_a_full_cache_is_full_recomputation(changes):
    model, batch = build(**changes), numbered([8, 8])
    with torch.no_grad():
        expected = model.network(batch["tokens"], None, True)
    done = reading(model, batch)
    torch.testing.assert_close(done.states, expected[:, :, -1], atol=1e-10, rtol=0)
    if not model.config.coda_layers:  # which sees earlier tokens as deep as they went
        torch.testing.assert_close(done.by_depth, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_a_threshold_that_never_fires_is_fixed_recurrences_to_the_bit(rule):
    never = {"gate": 1.0, "argmax": 99.0}.get(rule, 0.0)
    fixed = build(**DEEP)
    model = build(**DEEP | {"exit": rule, "exit_threshold": never})
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5]]
    generations, batches = [], numbered([8, 5, 7])
    for each in (fixed, model):
        each.eval()
        greedy = SamplingConfig(temperature=0)
        generations.append(generate(each, prompts, max_new_tokens=6, sampling=greedy))
    assert generations[0] == generations[1]
    mine, theirs = reading(model, batches), reading(fixed, batches)
    assert torch.equal(mine.states, theirs.states)
    assert torch.equal(mine.by_depth, theirs.by_depth)
    assert torch.equal(mine.recurrences, theirs.recurrences)


@pytest.mark.parametrize("changes", CASES[:9], ids=lambda c: "-".join(map(str, c.values())))
def test_early_exits_are_right_in_batches_and_spare_the_core(changes, monkeypatch):
    model = build(**DEEP | changes)
    batch, computed = numbered([8, 5, 7]), []
    step = model.network.step

    def counted(s, entered, number):
        computed.append(len(s))
        return step(s, entered, number)

    monkeypatch.setattr(model.network, "step", counted)
    together = reading(model, batch)
    assert sum(computed) == together.recurrences.sum()
    assert sum(computed) < 20 * (model.config.thinking_steps + 1)
    for row, length in enumerate((8, 5, 7)):
        alone = {
            key: value[row : row + 1, :length]
            for key, value in batch.items()
            if key != "sequence_id"
        }
        done = reading(model, alone)
        assert torch.equal(done.recurrences[0], together.recurrences[row, :length])
        own = together.states[row, :length]
        torch.testing.assert_close(done.states[0], own, atol=1e-4, rtol=1e-4)


def test_a_batch_of_padding_alone_scores_nothing():
    model = build(**DEEP | {"exit": "latent", "exit_threshold": 0.7})
    batch = numbered([4, 2])
    batch |= {"mask": batch["mask"] & False, "targets": batch["targets"] * 0 - 100}
    found = {}
    scores = model.recorded(batch, depth_losses=lambda losses: found.update(losses=losses))
    assert not scores.log_prob.any()
    assert found["losses"].shape == (2, 4, 5)


def test_prompts_may_be_read_with_every_recurrence():
    early = DEEP | {"exit": "latent", "exit_threshold": 9.9}
    tokens, lengths = torch.tensor([[3, 1, 4, 1]]), torch.tensor([4])
    for exits_too, taken in ((True, 1), (False, 5)):
        model = build(**early | {"prompt_exits": exits_too})
        with torch.no_grad():
            cache = model.init_cache(tokens, lengths, 2)
            model.decode_step(cache, tokens[:, -1])
        assert cache.recurrences[0, :4].tolist() == [taken] * 3 + [1]


def test_analyses_show_the_recurrences_of_each_token_and_the_gate():
    model, batch = build(**DEEP | {"exit": "latent", "exit_threshold": 0.7}), numbered([8])
    found = StepAllocation().analyse_text(model, batch, load_tokenizer("bytes")).tables
    taken = reading(model, batch).recurrences[0] - 1
    assert found["tokens"]["executed"].tolist() == taken.tolist()
    assert found["steps"]["tokens"].tolist() == torch.bincount(taken, minlength=5).tolist()
    whole = build(**OURO)
    shown = StepAllocation().analyse_text(whole, batch, load_tokenizer("bytes")).tables["tokens"]
    assert set(shown["executed"]) == {3}
    weights = decoder.leaves(whole.network.state_dict())
    with torch.no_grad():
        states = reference.run(weights, whole.config, batch["tokens"][0].tolist(), 4).states[1:]
        stays = [
            [1 - reference.exit_probability(weights, whole.config, s[t]).item() for s in states]
            for t in range(8)
        ]
    survived = [[1.0, *accumulate(own[:-1], mul)] for own in stays]
    mine = shown[[f"w_{k}" for k in range(4)]].to_numpy().tolist()
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(survived), atol=1e-4, rtol=1e-4)


# ---- recurrences of training steps


def test_recurrences_are_a_function_of_seed_and_step():
    config = build(**HUGINN | {"thinking_steps": 31}).config
    drawn = [draw_recurrences(config, step) for step in range(4000)]
    assert drawn[:50] == [draw_recurrences(config, step) for step in range(50)]
    other = dataclasses.replace(config, seed=1)
    assert drawn[:50] != [draw_recurrences(other, step) for step in range(50)]
    assert min(drawn) >= 1
    mean = torch.tensor(drawn).double()
    deviation = math.sqrt(32 + 32**2 * (math.exp(0.25) - 1))  # of a log-normal Poisson
    assert mean.mean().item() == pytest.approx(33, abs=4 * deviation / math.sqrt(4000))
    assert mean.std().item() == pytest.approx(deviation, rel=0.1)
    for k in (1, 8, 40):
        config = dataclasses.replace(config, training_recurrences="sampled", backprop_recurrences=k)
        expected = mean.clamp(max=k).mean().item()
        assert mean_recurrences(config) == (33, pytest.approx(expected, rel=0.02))
    assert mean_recurrences(dataclasses.replace(config, training_recurrences="fixed")) == (32, 32)


def test_every_micro_batch_of_a_step_takes_the_same_draw():
    model = build(**HUGINN | {"training_recurrences": "sampled", "thinking_steps": 7}).train()
    first, second = (model.loss(numbered([6, 4], seed=seed)).stats for seed in (0, 1))
    assert first["recurrences"] == second["recurrences"] == draw_recurrences(model.config, 0)


def test_noise_of_a_position_does_not_depend_on_how_long_the_row_is():
    short = draw_noise((1, 2), 5, 6)
    assert torch.equal(draw_noise((1, 2), 300, 6)[:5], short[:5])


# ---- degenerate cases and costs


def test_an_adapter_that_ignores_the_state_makes_a_plain_decoder():
    """A = [0 I]: any r is one pass through prelude, core and coda, with one more norm."""
    model = build(**HUGINN)
    with torch.no_grad():
        model.network.adapter.weight.copy_(torch.cat((torch.zeros(8, 8), torch.eye(8)), dim=1))
    tokens = rows_of([8, 8])["tokens"]
    with torch.no_grad():
        every = model.network(tokens, None, True)
    for depth in range(every.shape[2]):
        torch.testing.assert_close(every[:, :, depth], every[:, :, 0], atol=1e-6, rtol=1e-6)


def test_norms_of_small_gain_leave_states_near_embeddings():
    """From x <- x + n2(f(n1 x)): 2 sub-layers of 2 blocks add vectors of RMS 0.01 to x."""
    config = RecurrentDepthConfig(**SIZES, norms="ouro", post_norm_gain=0.01)
    network, tokens = RecurrentNetwork(config), numbered([8])["tokens"]
    with torch.no_grad():
        entered = network.enter(tokens)
        x = network.apply_blocks(entered.e, entered.rope)
    assert 0 < (x - entered.e).pow(2).mean(-1).sqrt().max() <= 0.04 + 1e-6


def test_without_options_it_is_the_plain_decoder():
    torch.manual_seed(3)
    mine = RecurrentDepthLM(RecurrentDepthConfig(**SIZES | {"thinking_steps": 0}))
    mine.configure_model()
    plain = TransformerLM(
        TransformerConfig(
            **{key: value for key, value in SIZES.items() if key != "thinking_steps"},
            norm="rms",
            activation="swiglu",
            bias=False,
            positions="rope",
            tie_head=False,
            init="ponderlm",
        )
    )
    plain.configure_model()
    plain.network.load_state_dict(mine.network.state_dict())
    batch = rows_of([6, 4])
    assert torch.equal(mine.score(batch).log_prob, plain.score(batch).log_prob)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        HUGINN | {"thinking_steps": 3, "backprop_recurrences": 2},
        OURO,
        OURO | {"gate": "alone"},
        PRE | {"log_states": False},
    ],
    ids=["truncated", "joint", "alone", "whole"],
)
def test_flops(changes, training):
    model = build(**{**changes, "attention_backend": "math", "vocab_multiple": 1})
    config, batch = model.config, numbered([8, 8])
    model.train(training)
    outside = config.prelude_layers + config.coda_layers
    stacks = outside / config.num_layers + config.thinking_steps + 1
    counted = counted_flops(model, batch, [8], training)
    one = unseen_flops(config, 2, [8])  # in one core stack; counted_flops took off one, or three
    trained = min(config.thinking_steps + 1, config.backprop_recurrences or 99)
    run = stacks
    if training and config.gate != "alone":
        run = 3 * (outside / config.num_layers + trained) + config.thinking_steps + 1 - trained
        run += (
            config.coda_layers / config.num_layers * (config.log_states and config.gate == "none")
        )
    counted -= (run - (3 if training else 1)) * one
    assert model.flops_per_token(8, training) * 16 == pytest.approx(counted, rel=1e-12)
    if training:
        parts = model.flops_by_part(8)
        assert ("injection" in parts) == (config.injection == "concat")


def test_flops_of_texts_are_those_of_the_tokens_recurrences():
    model, batch, found = (
        build(**DEEP | {"exit": "latent", "exit_threshold": 0.7}),
        numbered([8, 5]),
        {},
    )
    model.recorded(batch, flops=lambda **values: found.update(values))
    steps = reading(model, batch).recurrences
    assert found["tokens"].tolist() == [8, 5]
    most = model.flops_per_token(8) * 8
    assert 0 < found["flops"][0] < most
    never = build(**DEEP | {"exit": "latent", "exit_threshold": 0.0})
    never.recorded(batch, flops=lambda **values: found.update(values))
    for row, length in enumerate((8, 5)):
        expected = never.flops_per_token(length) * length
        assert found["flops"][row].item() == pytest.approx(expected)
    assert steps.max() <= 5


def test_flops_of_a_rule_that_reads_logits():
    """Of a token that exits early, scoring computes the logits once more; generation reuses them.

    The output matrix is most of the network; what norms and the rule itself cost is not counted.
    """
    early = {"exit": "kl", "exit_threshold": 0.2, "vocab_size": 2048, "attention_backend": "math"}
    model, found = build(**DEEP | early), {}
    with FlopCounterMode(display=False) as counter:
        model.recorded(numbered([8]), flops=lambda **values: found.update(values))
    assert found["flops"].item() == pytest.approx(counter.get_total_flops(), rel=0.02)

    tokens, taken = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), []
    cache = model.init_cache(tokens[:, None], torch.ones_like(tokens), 1)
    count = recording(generated_steps=lambda steps: taken.extend(steps.tolist()))
    with torch.no_grad(), count, FlopCounterMode(display=False) as counter:
        scores, _ = model.decode_step(cache, tokens)
    assert 0 < min(taken) < max(taken) == model.config.thinking_steps
    expected = sum(sum(model.flops_of_steps(1, steps).values()) for steps in taken)
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.02)
    rows = {"tokens": tokens[:, None], "mask": torch.ones(8, 1, dtype=torch.bool)}
    h = reading(model, rows).states[:, 0]
    torch.testing.assert_close(scores, h @ model.network.output_matrix.T)


def test_a_saturated_gate_stays_below_threshold_one():
    for logit in (20.0, 1e4):
        rule = exits.ExitRule(RecurrentDepthConfig(**SIZES, exit="gate", gate="joint"))
        state, gate = torch.ones(1, 1), torch.tensor([logit])
        assert not any(rule(state, state, None, gate).item() for _ in range(3))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"exit_threshold": 0.5}, "exit_threshold"),
        ({"prompt_exits": False}, "prompt_exits"),
        ({"state": "zero"}, "state"),
        ({"backprop_recurrences": 2}, "backprop_recurrences"),
        (HUGINN | {"backprop_recurrences": 2, "gate": "joint"}, "backprop_recurrences"),
        ({"exit": "gate"}, "exit"),
        ({"norms": "ouro", "parallel_residual": True}, "norms"),
        ({"cache_slots": 0}, "cache_slots"),
        *(({"cache_slots": 2, "cache_lookup": how}, "cache_slots") for how in LOOKUPS[1:]),
        ({"norms": "huginn", "post_norm_gain": 0.1}, "post_norm_gain"),
        ({"prelude_layers": -1}, "prelude_layers"),
        ({"exit_threshold": -0.1}, "exit_threshold"),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes, key):
    with pytest.raises(ValueError, match=rf"^{key} "):
        RecurrentDepthConfig(**SIZES | changes)
