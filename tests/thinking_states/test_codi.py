"""CODI, PCCoT and SIM-CoT: values and gradients of the float64 reference, degenerate cases."""

import itertools

import pytest
import torch

from evaluation.reason.controls import latents_of, replacement, replacing
from lightning_models.layers import recording
from lightning_models.runtime import seeded_generator
from lightning_models.thinking_states.baselines.latents import step_texts
from lightning_models.thinking_states.baselines.text import NOTHING
from tests.methods import decoder
from tests.reference import chain, coconut, codi
from tests.thinking_states import questions
from tests.thinking_states.literal import (
    LOSS,
    assert_same_gradients,
    batch_of,
    draw,
    in_float64,
    moved,
    weights_of,
)
from tests.thinking_states.questions import PREFIX, SEPARATOR, V, rows

QUESTIONS = [
    (3, [(1, 2), (2, 3), (2, 1)], 2),
    (2, [], 3),
    (6, [(4, 1)], 1),
    (4, [(0, 2), (1, 1), (2, 2), (3, 1)], 2),
]
START, END, LATENT = V, V + 1, V + 2
EOS = 0


@pytest.fixture(autouse=True)
def double():
    with in_float64():
        yield


def build(name="codi", **changes):
    changes = {"num_latents": 3, **changes} if name == "codi" else changes
    return moved(questions.build(name, double=False, **changes), size=0.15)


def asked(seed=0, **more):
    drawn = draw(QUESTIONS, V, seed)
    return drawn, {**batch_of(drawn), **more}


def terms(model, batch):
    return {key: term.sum / term.normaliser for key, term in model.loss(batch).terms.items()}


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.network.named_parameters()
    }


def like(model, name="codi", **changes):
    """A model of another configuration with a model's weights, as far as it has them."""
    other = build(name, **changes)
    own = other.network.state_dict()
    saved = {key: value for key, value in model.network.state_dict().items() if key in own}
    other.network.load_state_dict({**own, **saved})
    return other


# ---- against the reference


def expected_terms(model, weights, shape, drawn):
    """The terms of the objective, a question at a time."""
    config, read, taught, says = model.config, [], [], []
    for row in drawn:
        prompt = [*row.query, START]
        latents = codi.latents_of(weights, shape, prompt, config.num_latents, LATENT, config.passes)
        markers, learned = (START, END), config.predict_prefix
        read.append(
            codi.student(weights, shape, row.query, latents, PREFIX, row.answer, markers, learned)
        )
        steps = row.steps[:-1] if config.drop_last_step else row.steps
        written = chain.chain_tokens(steps, SEPARATOR)
        taught.append(codi.teacher(weights, shape, row.query, written, PREFIX, row.answer))
        if config.step_weight:
            texts = codi.spoken(row.steps, config.num_latents, SEPARATOR, EOS)
            total = config.step_loss == "token_sum"
            decoder = codi.decoder_of(weights)
            says += codi.step_loss(decoder, shape, latents, texts, 1, total)
    found = {"nll": -config.student_weight * torch.cat([one.log_probs for one in read]).mean()}
    if config.teacher_weight:
        nll = -torch.cat([one.log_probs for one in taught]).mean()
        found["teacher"] = config.teacher_weight * nll
    if config.distillation_weight:
        states = [[one.layers for one in kind] for kind in (read, taught)]
        smooth, batch = config.distance == "smooth_l1", config.distillation_std == "batch"
        off = codi.distillation(*states, smooth=smooth, over_batch=batch)
        found["distillation"] = config.distillation_weight * off
    if config.step_weight:
        found["steps"] = config.step_weight * torch.stack(says).mean()
    return found


PUBLIC = {"distance": "smooth_l1", "distillation_std": "batch", "predict_prefix": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PUBLIC | {"tie_head": False, "drop_last_step": False},
        {"student_weight": 0.5, "distillation_weight": 20.0, "teacher_weight": 0.25},
        {"num_latents": 0},
        {"projection": False, "teacher_weight": 0.0},
        {"distillation_weight": 0.0, "projection_dim": 5},
        {"window": 4, "num_heads": 4, "num_kv_heads": 2},
        {"passes": 2, "num_latents": 4},
        {"passes": 0},
        {"step_weight": 0.7},
        {"step_weight": 1.5, "step_loss": "token_sum", "num_latents": 2, "tie_head": False},
        {"step_weight": 1.0, "passes": 1, "num_latents": 5},
    ],
    ids=str,
)
def test_codi(changes):
    model, (drawn, batch) = build(**changes), asked()
    weights, shape = weights_of(model)
    expected, found = expected_terms(model, weights, shape, drawn), terms(model, batch)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, **LOSS, msg=lambda m, k=key: f"{k}: {m}")
    counted = model.counter(batch)
    for term in model.loss(batch).terms.values():
        assert counted[term.over] == float(term.normaliser)
    sum(found.values()).backward()
    sum(expected.values()).backward()
    assert_same_gradients(model, weights)
    parameters = model.network.named_parameters()
    assert not [name for name, p in parameters if p.grad is None], "processes wait for all"


@pytest.mark.parametrize(
    ("stage", "step_loss"), [(1, "token_mean"), (2, "token_sum"), (3, "token_mean")]
)
def test_coconut_says_the_steps_that_latents_stand_for(stage, step_loss):
    changes = {"epochs_per_stage": 1, "max_latent_stage": 2, "step_weight": 0.7}
    model = build("coconut", step_loss=step_loss, **changes)
    drawn, batch = asked(epochs=float(stage))
    weights, shape = weights_of(model)
    decoder, says, texts = codi.decoder_of(weights), [], []
    for row in drawn:
        n, m = coconut.stage_counts(stage, len(row.steps), 2, 2)
        left = coconut.remaining(row.steps, n, SEPARATOR)
        learned = stage <= 2
        markers = (START, END)
        text = coconut.text_of(row.query, m, left, PREFIX, row.answer, markers, learned)
        texts.append(text)
        inputs = coconut.read(weights, shape, text.pieces).inputs
        latents = [x for x, piece in zip(inputs, text.pieces, strict=True) if piece < 0]
        meant = row.steps if stage >= 2 else row.steps[:n]  # from the last stage with a chain on
        said = codi.spoken(meant, m // 2, SEPARATOR, EOS)
        says += codi.step_loss(decoder, shape, latents, said, 2, step_loss == "token_sum")
    expected = coconut.nll(weights, shape, texts) + 0.7 * torch.stack(says).mean()
    found = sum(terms(model, batch).values())
    torch.testing.assert_close(found, expected, **LOSS)
    found.backward()
    expected.backward()
    assert_same_gradients(model, weights)


@pytest.mark.parametrize("changes", [{}, {"eval_latents": 5}, {"passes": 2, "step_weight": 1.0}])
@torch.no_grad()
def test_scores_come_after_the_models_own_latents(changes):
    model, (drawn, batch) = build(**changes), asked()
    weights, shape = weights_of(model)
    scores = model.score(batch).log_prob
    for number, row in enumerate(drawn):
        prompt, passes = [*row.query, START], model.config.passes
        latents = codi.latents_of(weights, shape, prompt, model.latents, LATENT, passes)
        read = codi.student(weights, shape, row.query, latents, PREFIX, row.answer, (START, END))
        torch.testing.assert_close(scores[number, : len(row.answer)], read.log_probs, **LOSS)


@pytest.mark.parametrize("passes", [None, 2])
@pytest.mark.parametrize("control", ["zero", "noise", "swap", "pause"])
@torch.no_grad()
def test_scores_come_after_replaced_latents(control, passes):
    model, (drawn, batch) = build(passes=passes), asked()
    weights, shape = weights_of(model)
    numbers = [7, 70, 3, 9]

    def others():
        return latents_of(model, lambda: model.score(rows(batch, torch.tensor([1, 2, 3, 0]))))

    with replacing(model, replacement(control, model, numbers, 5, others)):
        scores = model.score(batch).log_prob
    assert not torch.allclose(scores, model.score(batch).log_prob, atol=1e-3), "they are read"
    prompts = [[*row.query, START] for row in drawn]
    theirs = [
        codi.latents_of(weights, shape, prompt, 3, LATENT, passes)
        for prompt in (*prompts[1:], prompts[0])
    ]
    for idx, row in enumerate(drawn):

        def noise(own, number, idx=idx):
            generator = seeded_generator(5, numbers[idx], number)
            drawn = torch.randn(16, generator=generator, dtype=torch.float64)
            return own.norm() * drawn / drawn.norm()

        replaced = {
            "zero": lambda own, _: torch.zeros_like(own),
            "noise": noise,
            "swap": lambda _, number, idx=idx: theirs[idx][number],
            "pause": lambda *_: weights["model.embed_tokens.weight"][LATENT],
        }[control]
        latents = codi.latents_of(weights, shape, prompts[idx], 3, LATENT, passes, replaced)
        read = codi.student(weights, shape, row.query, latents, PREFIX, row.answer, (START, END))
        torch.testing.assert_close(scores[idx, : len(row.answer)], read.log_probs, **LOSS)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("coconut", {"first_stage": 1, "uniform_prob": 0.6, "max_latent_stage": 2}),
        ("codi", {}),
        ("codi", {"passes": 2, "num_latents": 4}),
    ],
    ids=str,
)
@torch.no_grad()
def test_gpt2_reads_padded_rows_with_latents_as_transformers_reads_each_alone(name, changes):
    """Learned positions count neither padding nor passes, and latents count as tokens."""
    from transformers import GPT2LMHeadModel

    model = build(name, architecture=decoder("gpt2", vocab_size=V, hidden_size=16), **changes)
    alone = GPT2LMHeadModel(model.network.backbone.shape).double().eval()
    alone.transformer.load_state_dict(model.network.backbone.model.state_dict())
    assert torch.equal(alone.lm_head.weight, model.network.output_matrix)
    text = model.layout.training(asked(epochs=0.0)[1])
    logits = model.states(text).last @ model.network.output_matrix.T
    real = text.kinds != NOTHING
    assert not real[:, 0].all(), "on the left"
    assert not real[:, -1].all(), "and on the right"

    def read(x):
        places = torch.arange(len(x))[None]
        return alone(inputs_embeds=x[None], position_ids=places, output_hidden_states=True)

    weights, passes = model.network.state_dict(), changes.get("passes")
    for row, ids in enumerate(tokens[own] for tokens, own in zip(text.tokens, real, strict=True)):
        x, latents = alone.transformer.wte(ids), (ids == LATENT).nonzero()[:, 0].tolist()
        for turn in latents if passes is None else [latents] * passes:
            turn = [turn] if passes is None else turn
            states = read(x[: max(turn) + 1]).hidden_states[-1][0]  # after the final norm
            x[turn] = torch.stack([codi.project(weights, states[place - 1]) for place in turn])
        torch.testing.assert_close(logits[row][real[row]], read(x).logits[0], atol=1e-10, rtol=0)


# ---- degenerate cases


@pytest.mark.parametrize("passes", [3, 5])
def test_as_many_passes_as_latents_are_the_sequence(passes):
    sequential, (_, batch) = build(), asked()
    jacobi, fewer = (like(sequential, passes=count) for count in (passes, 2))
    found = [terms(model, batch) for model in (sequential, jacobi, fewer)]
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, atol=1e-12, rtol=0)
    assert (found[2]["nll"] - found[0]["nll"]).abs() > 1e-6
    grads = [
        gradients(model, sum(values.values()))
        for model, values in zip((sequential, jacobi), found, strict=False)
    ]
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, atol=1e-11, rtol=0)


def test_without_projection_and_teacher_it_is_coconuts_last_stage():
    alone = {"projection": False, "distillation_weight": 0.0, "teacher_weight": 0.0}
    model, (_, batch) = build(num_latents=4, **alone), asked(epochs=0.0)
    stages = {"max_latent_stage": 2, "c_thought": 2, "first_stage": 3}
    other = like(model, "coconut", **stages)
    found = [terms(each, batch) for each in (model, other)]
    assert [value.keys() for value in found] == [{"nll"}, {"nll"}]
    assert torch.equal(found[0]["nll"], found[1]["nll"])
    grads = [gradients(m, v["nll"]) for m, v in zip((model, other), found, strict=True)]
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(gradient, grads[1][name]) for name, gradient in grads[0].items())
    scores = [each.score(batch).log_prob for each in (model, other)]
    assert torch.equal(*scores)


def test_without_latents_it_is_no_cot_with_two_markers():
    alone = {"num_latents": 0, "distillation_weight": 0.0, "teacher_weight": 0.0}
    model, (drawn, batch) = build(**alone), asked()
    weights, shape = weights_of(model)
    texts = [chain.no_cot_text([*row.query, START, END], PREFIX, row.answer) for row in drawn]
    expected = -torch.cat([chain.log_probs(weights, shape, text) for text in texts]).mean()
    torch.testing.assert_close(terms(model, batch)["nll"], expected, **LOSS)


def test_without_distillation_gradients_of_student_and_teacher_add():
    both, (_, batch) = build(distillation_weight=0.0, drop_last_step=False), asked()
    student = like(both, distillation_weight=0.0, teacher_weight=0.0)
    cot = like(both, "cot", vocab_multiple=V + 3)
    losses = [terms(model, batch) for model in (both, student, cot)]
    torch.testing.assert_close(losses[0]["nll"], losses[1]["nll"], atol=1e-13, rtol=0)
    torch.testing.assert_close(losses[0]["teacher"], losses[2]["nll"], atol=1e-13, rtol=0)
    grads = [
        gradients(model, sum(values.values()))
        for model, values in zip((both, student, cot), losses, strict=True)
    ]
    for name, gradient in grads[0].items():
        expected = grads[1][name] + grads[2].get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


SMALLEST = 1e-200
"""A weight whose terms are computed, and vanish in float64 next to all others."""


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("codi", {}, "step_weight"),
        ("codi", {"passes": 2, "tie_head": False}, "step_weight"),
        ("coconut", {"first_stage": 3, "max_latent_stage": 2}, "step_weight"),
        ("coconut", {"first_stage": 1, "uniform_prob": 0.6}, "step_weight"),
        ("codi", {"teacher_weight": 0.0}, "distillation_weight"),
        ("codi", {"step_weight": 1.0, "distillation_std": "batch"}, "distillation_weight"),
        ("codi", {"distillation_weight": 0.0}, "teacher_weight"),
        ("codi", {}, "student_weight"),
    ],
    ids=str,
)
def test_a_weight_that_vanishes_leaves_the_rest_of_the_objective(name, changes, key):
    """Losses and all gradients are equal, so that what a weight adds is proportional to it."""
    some, (_, batch) = build(name, **changes | {key: SMALLEST}), asked(epochs=0.0)
    none, much = (like(some, name, **changes | {key: weight}) for weight in (0.0, 1.0))
    losses = [sum(terms(model, batch).values()) for model in (some, none, much)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-150, rtol=0)
    assert (losses[2] - losses[1]).abs() > 1e-3
    grads = [gradients(m, x) for m, x in zip((some, none, much), losses, strict=True)]
    for parameter, gradient in grads[1].items():
        torch.testing.assert_close(grads[0][parameter], gradient, atol=1e-150, rtol=0)
    extra = [grads[0][parameter] for parameter in grads[0].keys() - grads[1].keys()]
    assert len(extra) > 5 if key == "step_weight" else not extra
    assert all(gradient.abs().max() < 1e-150 for gradient in extra), "of the decoder"
    reached = [k for k, g in grads[1].items() if not torch.allclose(grads[2][k], g, atol=1e-6)]
    assert len(reached) > 5, "of the base's weights"


@pytest.mark.parametrize("teaches", [{}, {"teacher_weight": 0.0, "distillation_weight": 0.0}])
def test_without_latents_all_gradients_are_those_of_two_markers(teaches):
    """Coconut without stages is the student, and CoT the teacher."""
    model, (_, batch) = build(num_latents=0, drop_last_step=False, **teaches), asked(epochs=0.0)
    bare = like(model, "coconut", max_latent_stage=0, first_stage=1)
    found, student = terms(model, batch), terms(bare, batch)
    torch.testing.assert_close(found["nll"], student["nll"], atol=1e-13, rtol=0)
    expected = gradients(bare, student["nll"])
    if not teaches:
        cot = like(model, "cot", vocab_multiple=V + 3)
        taught = terms(cot, batch)
        torch.testing.assert_close(found["teacher"], taught["nll"], atol=1e-13, rtol=0)
        for name, gradient in gradients(cot, taught["nll"]).items():
            expected[name] = expected[name] + gradient
        off = gradients(model, found.pop("distillation"))
        assert off["backbone.model.embed_tokens.weight"][START:LATENT].abs().max() > 1e-6
        found = terms(model, batch)
        del found["distillation"]
    grads = gradients(model, sum(found.values()))
    assert grads.keys() == expected.keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=0)


# ---- gradients


@pytest.mark.parametrize("passes", [None, 2])
def test_distillation_reaches_every_latent(passes):
    model, (_, batch) = build(passes=passes), asked()
    fed = []
    with recording(latents=lambda states, latent: fed.append(states)):
        output = model.loss(batch)
    reached = torch.autograd.grad(output.terms["distillation"].sum, fed[0])
    assert len(reached) == 3
    for latent in reached:
        assert (latent.abs().amax(dim=1) > 1e-8).all(), "of every question"


def test_a_batch_without_steps_reaches_the_whole_decoder():
    """Processes wait for the gradients of all parameters."""
    drawn, _ = asked()
    batch = batch_of([drawn[1]])
    for name, changes in (("codi", {}), ("coconut", {"first_stage": 0, "tie_head": False})):
        model = build(name, step_weight=1.0, **changes)
        output = model.loss({**batch, "epochs": 0.0})
        assert output.terms["steps"].sum == 0
        sum(term.sum for term in output.terms.values()).backward()
        decoder = model.network.decoder.parameters()
        assert all(parameter.grad is not None for parameter in decoder)


@pytest.mark.parametrize("std", ["row", "batch"])
def test_a_micro_batch_without_questions_distils_nothing(std):
    model, (drawn, _) = build(distillation_std=std), asked()
    alone = batch_of([drawn[1]])
    alone["targets"] = torch.full_like(alone["targets"], -100)
    total = model.loss(alone).terms["distillation"].sum
    assert total == 0
    total.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.network.parameters())


def test_texts_of_groups_are_steps_and_the_last_ones_joined():
    drawn, batch = asked()
    for groups, taken in itertools.product((0, 1, 3, 6), (0, 2, 9)):
        counts = torch.tensor([min(len(row.steps), taken) for row in drawn])
        tokens, lengths = step_texts(batch, counts, torch.full_like(counts, groups), SEPARATOR)
        for row, own, sizes in zip(drawn, tokens, lengths, strict=True):
            found = [text[:size].tolist() for text, size in zip(own, sizes, strict=True) if size]
            assert found == codi.spoken(row.steps[:taken], groups, SEPARATOR, EOS)


# ---- compute


def test_passes_beyond_the_latents_are_neither_computed_nor_counted():
    (_, batch), found = asked(), []
    for passes in (3, 7):
        model, reads = build(passes=passes), []
        model.network.backbone.register_forward_hook(lambda *_, seen=reads: seen.append(1))
        found.append((model.score(batch).log_prob, len(reads), model.flops_per_token(30)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_flops_of_an_evaluation_have_its_latents_and_no_step_decoder():
    """What both cost is compared with what is executed in ``test_thinking_compute.py``."""
    for name in ("codi", "coconut"):
        trained, apart = (build(name, eval_latents=latents) for latents in (None, 9))
        assert trained.flops_per_token(30, training=True) == apart.flops_per_token(
            30, training=True
        )
        assert trained.flops_per_token(30) != apart.flops_per_token(30)
        assert trained.generation_flops(30, steps=9) == apart.flops_per_token(30)
        says = build(name, step_weight=1.0)
        assert says.flops_per_token(30) == trained.flops_per_token(30)
