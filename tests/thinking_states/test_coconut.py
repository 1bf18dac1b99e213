"""Coconut: stage table, latents against runs from scratch, gradients through them."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from lightning_models.layers import recording
from lightning_models.thinking_states.baselines.coconut import num_latents
from lightning_models.thinking_states.baselines.curricula import StepStages
from lightning_models.thinking_states.baselines.text import NOTHING
from tests.thinking_states.questions import (
    PREFIX,
    SEPARATOR,
    SHAPES,
    Questions,
    V,
    build,
    questions,
    quiet_trainer,
    row_of,
    rows,
)

START, END, LATENT = V, V + 1, V + 2
STAGES = {"max_latent_stage": 2, "epochs_per_stage": 1}
MIXED = {**STAGES, "first_stage": 3, "uniform_prob": 0.6, "curriculum_seed": 2}
"""Rows of one batch at different stages, so with different numbers of latents."""


@pytest.fixture
def exact(monkeypatch):
    """Norms in float64, which transformers compute in float32."""

    def forward(norm, h):
        return norm.weight * h * (h.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    monkeypatch.setattr(Qwen2RMSNorm, "forward", forward)


def states_from_scratch(model, tokens):
    """States of one row whose latents are found one by one, all before them read again for each."""
    backbone = model.network.backbone
    inputs = [None if token == LATENT else backbone.embed(torch.tensor(token)) for token in tokens]

    def states(length):
        h = torch.stack(inputs[:length])[None]
        return backbone(h, torch.arange(length)[None]).last[0]

    for place, token in enumerate(tokens):
        if token == LATENT:
            inputs[place] = states(place)[-1]
    return states(len(tokens))


def texts(model, batch, stage=0):
    """Tokens and targets of each row without padding."""
    found = model.layout.training(batch, stage)
    real = found.kinds != NOTHING
    return [
        (tokens[mask].tolist(), targets[mask].tolist())
        for tokens, targets, mask in zip(found.tokens, found.targets, real, strict=True)
    ]


# ---- curriculum


def test_the_stage_table():
    """n and m by stage and number of steps, max_latent_stage 3, c 2."""
    steps = torch.arange(9)
    stages = StepStages(epochs_per_stage=3, last=3)
    batch = {"step_lengths": (torch.arange(8) < steps[:, None]).long()}
    n = [stages.removed(batch, torch.full((9,), s)).tolist() for s in range(5)]
    assert n == [
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 1, 2, 2, 2, 2, 2, 2, 2],
        [0, 1, 2, 3, 3, 3, 3, 3, 3],
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
    ]
    for pad, last in ((True, [6] * 9), (False, [0, 2, 4, 6, 6, 6, 6, 6, 6])):
        m = [
            num_latents(torch.full((9,), s), steps, each=2, last=3, pad=pad).tolist()
            for s in range(5)
        ]
        assert m == [[0] * 9, [2] * 9, [4] * 9, [6] * 9, last]


def test_stages_follow_the_epochs():
    stages = StepStages(epochs_per_stage=3, last=3)
    by_epoch = [stages.at(float(epoch)) for epoch in range(16)]
    assert by_epoch == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 4
    assert stages.at(2.999) == 0
    skipped = StepStages(epochs_per_stage=3, last=3, first=1)
    assert [skipped.at(float(epoch)) for epoch in (0, 3, 6, 9, 30)] == [1, 2, 3, 4, 4]


def test_some_rows_are_shown_at_a_stage_drawn_among_their_steps():
    count = 600
    shapes = [(2, [1] * 4, 1)] * count
    stages = StepStages(epochs_per_stage=1, last=2, first=3, uniform_prob=0.3)
    found = stages.of_rows(questions(shapes, epochs=0.0), 0)
    for stage in range(5):
        expected = 0.3 / 5 + (0.7 if stage == 3 else 0.0)
        spread = math.sqrt(expected * (1 - expected) / count)
        share = (found == stage).double().mean().item()
        assert share == pytest.approx(expected, abs=4 * spread), stage
    assert (stages.of_rows(questions(shapes[:3]), 1) == 1).all()
    other = replace(stages, seed=1).of_rows(questions(shapes[:99], epochs=0.0), 0)
    assert not torch.equal(other, found[:99]), "they are a function of the seed"


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize(("epochs", "n"), [(0.0, 0), (1.0, 1), (2.5, 2), (3.0, 9)])
def test_rows_have_latents_where_the_first_steps_stood(epochs, n, pad):
    batch = questions(epochs=epochs)
    model = build("coconut", **STAGES, pad_latent_to_max=pad)
    for row, (tokens, targets) in enumerate(texts(model, batch)):
        query, steps, answer = row_of(batch, row)
        level = min(n, 2)
        if n == 9 and not pad:
            level = min(level, len(steps))
        chain = [token for step in steps[n:] for token in (*SEPARATOR, *step)]
        given = [*query, START, *[LATENT] * (2 * level), END]
        rest = [*chain, *PREFIX, *answer]
        assert tokens == given + rest
        learned = rest if n < 9 else [*[-100] * len(PREFIX), *answer]
        assert targets == [-100] * (len(given) - 1) + learned + [-100]


def test_first_latents_stand_below_each_other():
    found = build("coconut", **MIXED).layout.training(questions(epochs=0.0))
    latent = found.tokens == LATENT
    counts = latent.sum(dim=1)
    assert len(set(counts.tolist())) > 1
    first = latent[counts > 0].long().argmax(dim=1)
    assert len(set(first.tolist())) == 1


# ---- latents


@pytest.mark.parametrize("changes", [{**STAGES, "first_stage": 2}, MIXED])
def test_latents_are_those_of_a_run_from_scratch(exact, changes):
    model, batch = build("coconut", **changes), questions(epochs=0.0)
    found, fed = model.layout.training(batch), []
    with torch.no_grad(), recording(latents=lambda **values: fed.append(values)):
        h = model.states(found)
    ((states, latent),) = ((values["states"], values["latent"]) for values in fed)
    for row, (tokens, _) in enumerate(texts(model, batch)):
        with torch.no_grad():
            expected = states_from_scratch(model, tokens)
        real = found.kinds[row] != NOTHING
        torch.testing.assert_close(h[row, real], expected, atol=1e-11, rtol=1e-9)
        places = [place - 1 for place, token in enumerate(tokens) if token == LATENT]
        thoughts = torch.stack(states, dim=1)[row, latent[row]]
        torch.testing.assert_close(thoughts, expected[places], atol=1e-11, rtol=1e-9)


def loss_from_scratch(model, batch):
    total = 0.0
    for tokens, targets in texts(model, batch):
        logits = states_from_scratch(model, tokens) @ model.network.output_matrix.t()
        total = total + F.cross_entropy(logits, torch.tensor(targets), reduction="sum")
    return total


@pytest.mark.parametrize("changes", [{**STAGES, "first_stage": 2}, MIXED])
def test_gradients_flow_back_through_all_latents(exact, changes):
    model, batch = build("coconut", **changes), questions(epochs=0.0)
    parameters = list(model.parameters())
    mine, theirs = model.loss(batch).terms["nll"].sum, loss_from_scratch(model, batch)
    torch.testing.assert_close(mine, theirs)
    found, expected = (torch.autograd.grad(loss, parameters) for loss in (mine, theirs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-8)


def test_gradients_agree_with_finite_differences(exact):
    model, batch = build("coconut", **STAGES, first_stage=3), questions(epochs=0.0)
    weight = model.network.backbone.model.layers[0].mlp.down_proj.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).double()
    model.loss(batch).terms["nll"].sum.backward()
    slope, values = (weight.grad * direction).sum(), []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            weight.add_(step * direction)
            values.append(model.loss(batch).terms["nll"].sum)
    assert ((values[0] - values[1]) / 2e-5).item() == pytest.approx(slope.item(), rel=1e-6)


def test_a_detached_latent_would_show():
    """What the comparisons above stand on: later losses do depend on earlier latents."""
    model, batch = build("coconut", **STAGES, first_stage=3), questions(epochs=0.0)
    fed = []
    with recording(latents=lambda **values: fed.append(values["states"])):
        loss = model.loss(batch).terms["nll"].sum
    for gradient in torch.autograd.grad(loss, fed[0]):
        assert (gradient.abs().amax(dim=-1) > 1e-6).all()


def test_losses_do_not_depend_on_the_rest_of_the_batch():
    model, batch = build("coconut", **MIXED), questions(epochs=0.0)
    alone = [model.loss(rows(batch, [row])).terms["nll"].sum for row in range(len(SHAPES))]
    torch.testing.assert_close(model.loss(batch).terms["nll"].sum, sum(alone))


# ---- evaluation


@pytest.mark.parametrize("latents", [None, 0, 1, 7])
def test_latents_can_be_set_at_test_time(latents):
    model, batch = (
        build("coconut", **STAGES, first_stage=3, eval_latents=latents).eval(),
        questions(),
    )
    count = 4 if latents is None else latents
    assert model.latents == count
    with torch.no_grad():
        found = model.score(batch).log_prob
        for row in range(len(SHAPES)):
            query, _, answer = row_of(batch, row)
            given = [*query, START, *[LATENT] * count, END, *PREFIX]
            h = states_from_scratch(model, [*given, *answer])
            log_prob = (h @ model.network.output_matrix.t()).log_softmax(-1)
            places = torch.arange(len(given) - 1, len(given) + len(answer) - 1)
            expected = log_prob[places, torch.tensor(answer)]
            torch.testing.assert_close(found[row, : len(answer)].double(), expected)


def test_scores_of_a_stage_with_steps_are_behind_the_own_chain():
    model = build("coconut", **STAGES, first_stage=1, answer_prefix=(3,), max_chain_tokens=6)
    batch = questions()
    with torch.no_grad():
        found = model.eval().score(batch).log_prob
        for row in range(len(SHAPES)):
            query, _, answer = row_of(batch, row)
            text = [*query, START, LATENT, LATENT, END]
            for number in range(7):
                h = states_from_scratch(model, text)[-1]
                token = int((model.network.output_matrix @ h)[:V].argmax())
                text.append(3 if number == 6 else token)
                if text[-1] == 3:
                    break
            h = states_from_scratch(model, [*text, *answer])
            log_prob = (h @ model.network.output_matrix.t()).log_softmax(-1)
            places = torch.arange(len(text) - 1, len(text) + len(answer) - 1)
            expected = log_prob[places, torch.tensor(answer)]
            torch.testing.assert_close(found[row, : len(answer)].double(), expected)


def test_latents_and_markers_cost_what_tokens_cost():
    none, some = (build("coconut", **STAGES, first_stage=3, eval_latents=n) for n in (0, 10))
    assert none.flops_per_token(30) == pytest.approx(
        build("no_cot").flops_per_token(32) * 32 / 30, rel=0.01
    )
    assert some.flops_per_token(30) > 1.3 * none.flops_per_token(30)
    assert none.generation_flops(30, steps=10) == some.flops_per_token(30)


# ---- training


def test_a_checkpoint_is_scored_at_its_own_stage(tmp_path):
    model = build("coconut", double=False, **STAGES)
    trainer = quiet_trainer(tmp_path, max_epochs=3, limit_val_batches=0)
    trainer.fit(model, Questions())
    assert model.reached == (2, 2)
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    loaded = type(model).load_from_checkpoint(path, weights_only=True).eval()
    assert loaded.reached == (2, 2)
    assert loaded.latents == 4
    batch = questions()
    assert torch.equal(loaded.score(batch).log_prob, model.eval().score(batch).log_prob)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"c_thought": 0}, "c_thought"),
        ({"eval_latents": -1}, "eval_latents"),
        ({"first_stage": 6}, "first_stage"),
        ({"reset": "batch"}, "reset"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build("coconut", **changes)


def test_sharded_parameters_are_refused():
    model = build("coconut")
    model.network, model._device_mesh = None, object()
    with pytest.raises(ValueError, match="trainer.strategy=ddp"):
        model.configure_model()


def test_a_stage_may_be_a_fraction_of_an_epoch():
    stages = StepStages(epochs_per_stage=0.4, last=3)
    assert [stages.at(step * 0.1) for step in range(18)] == [
        *[0] * 4,
        *[1] * 4,
        *[2] * 4,
        *[3] * 4,
        4,
        4,
    ]
    assert StepStages(epochs_per_stage=0.1, last=9).at(3 / 10) == 3, "0.3 / 0.1 is below 3"
