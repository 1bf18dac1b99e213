"""What holds for all baselines: normalisers, padding, decoding, refusals."""

import pytest
import torch

from tests.methods import decoder
from tests.thinking_states.questions import (
    EOS,
    PREFIX,
    Asked,
    V,
    build,
    questions,
)

STAGES = {"max_latent_stage": 2, "epochs_per_stage": 1}


def on(family):
    sizes = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.25}
    return {"architecture": decoder(family, **sizes)}


VARIANTS = {
    "no_cot": ("no_cot", {}),
    "no_cot_query": ("no_cot", {"lm_on_query": True}),
    "no_cot_no_prefix": ("no_cot", {"answer_prefix": ()}),
    "cot": ("cot", {"max_chain_tokens": 12}),
    "icot": ("icot", {"remove_per_epoch": 2, "remove_all_beyond": 6, "removal_smoothing": 0.5}),
    "icot_gone": ("icot", {"remove_all_beyond": 0}),
    "icot_steps": ("icot", {"removal": "steps", "first_stage": 1, "uniform_prob": 0.5, **STAGES}),
    "coconut_first": ("coconut", STAGES),
    "coconut": ("coconut", {"first_stage": 2, "uniform_prob": 0.5, **STAGES}),
    "coconut_last": ("coconut", {"first_stage": 3, "pad_latent_to_max": False, **STAGES}),
    "coconut_query": ("coconut", {"first_stage": 3, "lm_on_query": True, **STAGES}),
    "coconut_gpt2": ("coconut", {"first_stage": 2, **STAGES, **on("gpt2")}),
    "coconut_steps": ("coconut", {"first_stage": 2, "step_weight": 1.0, **STAGES}),
    "codi": ("codi", {"num_latents": 3, "predict_prefix": True}),
    "codi_none": ("codi", {"num_latents": 0, "lm_on_query": True}),
    "codi_gpt2": ("codi", {"num_latents": 2, "eval_latents": 4, "step_weight": 1.0, **on("gpt2")}),
    "pccot": ("codi", {"num_latents": 4, "passes": 2, **on("llama")}),
    "cot_gpt2": ("cot", {"max_chain_tokens": 12, **on("gpt2")}),
    "icot_llama": ("icot", {"removal": "steps", "first_stage": 1, **STAGES, **on("llama")}),
    "no_cot_qwen3": ("no_cot", on("qwen3")),
}


@pytest.fixture(params=VARIANTS)
def make(request):
    name, changes = VARIANTS[request.param]
    return lambda **more: build(name, **{**changes, **more})


def test_statistics_tell_the_answer_from_the_chain(make):
    model, batch = make(), questions(epochs=0.5)
    output = model.loss(batch)
    answers = output.stats["answer_nll"]
    assert answers.normaliser == (batch["targets"] >= 0).sum()
    only_answers = model.layout.training(batch).targets >= 0
    if int(only_answers.sum()) == int(answers.normaliser):
        torch.testing.assert_close(answers.sum, output.terms["nll"].sum.detach())
    else:
        assert 0 < answers.sum < output.terms["nll"].sum


def test_decoding_gives_the_scores(make):
    """Teacher-forced answers after what the model writes itself, batched, from the cache."""
    model, batch = make().eval(), questions()
    targets, lengths = batch["targets"], batch["query_lengths"]
    with torch.no_grad():
        expected = model.score(batch).log_prob
        cache = model.init_cache(batch["query"], lengths, 40)
        tokens = torch.zeros_like(lengths)
        found = torch.zeros_like(expected)
        read = torch.zeros_like(lengths)
        while (read < targets.shape[1]).any():
            out, ready = model.decode_step(cache, tokens)
            assert ready.all()
            log_prob = out.log_softmax(-1)
            place = read.clamp(max=targets.shape[1] - 1)[:, None]
            answer = targets.gather(1, place)[:, 0].clamp(min=0)
            scored = cache.answering & (read < targets.shape[1])
            own = log_prob.gather(1, answer[:, None])[:, 0]
            own = own.to(found.dtype)
            found[scored] = found[scored].scatter(1, place[scored], own[scored][:, None])
            tokens = torch.where(cache.answering, answer, out[:, :V].argmax(-1))
            read = read + cache.answering
    torch.testing.assert_close(found[targets >= 0], expected[targets >= 0], atol=1e-5, rtol=1e-5)


def test_the_first_step_does_not_look_at_what_it_is_given(make):
    model, batch, steps = make().eval(), questions(), []
    for tokens in (torch.zeros(4, dtype=torch.int64), torch.full((4,), 9)):
        cache = model.init_cache(batch["query"], batch["query_lengths"], 3)
        with torch.no_grad():
            steps.append(model.decode_step(cache, tokens)[0])
    assert torch.equal(*steps)
    assert bool(cache.answering.all()) != model.writes_chain


def test_the_counter_can_be_sent_to_another_process(make):
    import pickle

    model, source = make(), Asked(None)
    counter = pickle.loads(pickle.dumps(model.counter))
    for n in range(3):
        batch = source.batch(n)
        assert counter(batch)["targets"] == model.loss(batch).terms["nll"].normaliser


@pytest.mark.parametrize("name", ["cot", "icot", "coconut"])
def test_a_chain_needs_an_end(name):
    model = build(name, answer_prefix=())
    with pytest.raises(ValueError, match="answer_prefix"):
        model.loss(questions(epochs=0.0))


@pytest.mark.parametrize("name", ["cot", "icot", "coconut"])
@pytest.mark.parametrize(
    ("generated", "answer"),
    [([7, 8, *PREFIX, 9, EOS], [9, EOS]), ([*PREFIX, *PREFIX], [*PREFIX]), ([7, PREFIX[0]], [])],
)
def test_the_answer_stands_behind_the_first_prefix(name, generated, answer):
    assert build(name).answer_tokens(generated) == answer


def test_answers_of_models_without_a_chain_are_all_that_they_write():
    for name, changes in (VARIANTS["no_cot"], VARIANTS["icot_gone"], VARIANTS["coconut_last"]):
        assert build(name, **changes).answer_tokens([7, *PREFIX, 9]) == [7, *PREFIX, 9]
