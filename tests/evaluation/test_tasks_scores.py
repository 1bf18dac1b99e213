"""Log-likelihoods of continuations against the models' own decode loops."""

from contextlib import nullcontext

import pytest
import torch
from methods import METHODS
from task_data import request

from datamodules import SentenceTokenizer, load_tokenizer
from datamodules.sentences.splitters import parse_splitter

PLAIN = load_tokenizer("bytes")
NAMES = (
    "gpt2",
    "thoughtbubbles-threshold",
    "thoughtbubbles-window",
    "gist",
    "thought-gestalt",
    "ponderlm-sequential",
)
CASES = [method for method in METHODS if method.name in NAMES]


def built(name):
    return next(method for method in METHODS if method.name == name).build().eval()


@pytest.fixture(scope="module")
def gpt2():
    return built("gpt2")


def tokenizer_of(model):
    size = model.config.vocab_size
    if size == PLAIN.vocab_size:
        return PLAIN
    return SentenceTokenizer(PLAIN, parse_splitter("rules"), max_sentence_tokens=13)


def harness_model(model, tokenizer, **options):
    from evaluation.tasks.adapter import HarnessModel

    options = {"batch_size": 4, "context": nullcontext, "progress": False, **options}
    return HarnessModel(model, tokenizer, **options)


def decoded(model, tokenizer, context, continuation):
    """Log-probability and greediness by the decode loop, token by token from the prompt."""
    ids, total, greedy = tokenizer.prompt_ids(context), 0.0, True
    if tokenizer is PLAIN:
        ids = ids[1:]
    prompt = torch.tensor([ids])
    with torch.no_grad():
        cache = model.init_cache(prompt, torch.tensor([len(ids)]), len(continuation))
        token = prompt[:, -1]
        for target in continuation.encode():
            ready = torch.tensor([False])
            while not ready:
                logits, ready = model.decode_step(cache, token)
            total += float(logits[0].double().log_softmax(-1)[target])
            greedy &= int(logits[0, : model.config.vocab_size].argmax()) == target
            token = torch.tensor([target])
    return total, greedy


@pytest.mark.parametrize("method", CASES, ids=lambda method: method.name)
def test_scores_are_what_generation_would_say(method):
    """A continuation within the sentence, after a text of two of them."""
    model = method.build().eval()
    tokenizer = tokenizer_of(model)
    lm = harness_model(model, tokenizer)
    pairs = [("Ab c. De", " fgh"), ("Ab c. De", " f"), ("Xy", "z")]
    found = lm.loglikelihood([request(*pair) for pair in pairs])
    for (log_prob, greedy), pair in zip(found, pairs, strict=True):
        expected, by_loop = decoded(model, tokenizer, *pair)
        assert log_prob == pytest.approx(expected, abs=2e-4)
        assert greedy is by_loop


def test_latent_vectors_come_from_the_context_alone():
    """What stands after a token does not change its log-probability."""
    lm = harness_model(built("latent-thought"), PLAIN)
    texts = ["b", *(f"b{chr(code)}" for code in range(97, 123))]
    found = lm.loglikelihood([request("context a", text) for text in texts])
    first, *both = [log_prob for log_prob, _ in found]
    assert all(log_prob < first for log_prob in both)
    parts = torch.tensor(both).double() - first
    assert 0 < parts.exp().sum() < 1  # a part of one distribution
    assert {pair.facts.likelihood for pair in found} == {"estimate"}


def test_rolling_windows_bound_the_likelihood_of_latent_thoughts():
    lm = harness_model(built("latent-thought"), PLAIN)
    (number,) = lm.loglikelihood_rolling([request("text " * 30)])
    assert number.facts.likelihood == "lower_bound"
    assert number.facts.causal is False
    assert number.facts.scored == 150
    assert number < 0


def test_nothing_to_score_is_certain(gpt2):
    lm = harness_model(gpt2, PLAIN)
    ((log_prob, greedy),) = lm.loglikelihood([request("context", "")])
    assert (log_prob, greedy) == (0.0, True)


def test_longer_than_the_context_is_scored_whole(gpt2):
    lm, limit = harness_model(gpt2, PLAIN), gpt2.context_limit
    (pair,) = lm.loglikelihood([request("a", "b" * (3 * limit))])
    assert pair.facts.scored == 3 * limit
    assert pair.facts.read == 3 * limit


def test_steps_are_those_of_the_scored_tokens():
    lm = harness_model(built("looped"), PLAIN)
    (pair,) = lm.loglikelihood([request("abc", "de")])
    assert pair.facts.steps == 2 * lm.model.config.thinking_steps
    assert pair.facts.flops == 4 * lm.model.flops_per_token(4)
    assert lm.usage["task"].seconds > 0


@pytest.mark.parametrize(
    "name",
    ["thoughtbubbles", "thoughtbubbles-threshold", "thoughtbubbles-window"],
)
def test_streams_are_those_that_ran(name):
    """Of the scored tokens, whatever the batch; FLOPs of all that are read."""
    model = built(name)
    requests = [request("abcdefgh", "ij"), request("a", "bcd"), request("abcab", "cab")]
    together = harness_model(model, PLAIN).loglikelihood(requests)
    for one, pair in zip(requests, together, strict=True):
        ids = PLAIN.encode("".join(one.args))
        read, scored = torch.tensor([ids]), len(one.args[1])
        batch = {"tokens": read[:, :-1], "targets": read[:, 1:]}
        found = {}
        model.recorded(
            batch,
            thinking_steps=lambda to=found, **seen: to.update(seen),
            flops=lambda to=found, **seen: to.update(seen),
        )
        steps = found["executed"][0, -scored:].sum().item()
        assert pair.facts.steps == pytest.approx(steps, abs=1e-12)
        assert pair.facts.flops == pytest.approx(found["flops"].item(), rel=1e-12)
        planned = pair.facts.read * model.flops_per_token(pair.facts.read)
        assert pair.facts.nominal_flops == planned
    gaps = [pair.facts.flops - pair.facts.nominal_flops for pair in together]
    assert (max(map(abs, gaps)) > 1) is model.adaptive


SAMPLED = {"until": [], "max_gen_toks": 5, "do_sample": True, "temperature": 2.0}


@pytest.mark.parametrize("more", [{}, {"streams": "example", "document_start": True}])
def test_repeated_requests_have_draws_of_their_own(gpt2, more):
    """The harness hands over the same request several times; the first is as if it were alone."""
    one, other = request("ab", {**SAMPLED, **more}), request("cde", {**SAMPLED, **more})
    texts = harness_model(gpt2, PLAIN).generate_until([one, one, one, other, other])
    assert len(set(texts[:3])) > 1
    assert texts[3] != texts[4]
    assert harness_model(gpt2, PLAIN, batch_size=1).generate_until([one, one]) == texts[:2]
    lengths = {len(prompt) for prompt in prompts_read(gpt2, [one])}
    assert lengths == {2 + ("document_start" in more)}


def prompts_read(model, requests):
    """Token ids of the prompts as the decode loop gets them."""
    seen, own = [], model.init_cache

    def init_cache(prompts, lengths, *rest):
        seen.extend(row[:n].tolist() for row, n in zip(prompts, lengths, strict=True))
        return own(prompts, lengths, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "init_cache", init_cache)
        harness_model(model, PLAIN).generate_until(requests)
    return seen


def test_unknown_options_of_writing_are_refused(gpt2):
    lm = harness_model(gpt2, PLAIN)
    with pytest.raises(ValueError, match="generation_kwargs num_beams"):
        lm.generate_until([request("a", {"until": [], "num_beams": 3})])


# ---- several answers together


def facts(scored, likelihood):
    from evaluation.tasks.adapter import RequestStats

    return RequestStats(scored=scored, read=scored + 1, flops=10.0, likelihood=likelihood)


def test_kinds_of_several_answers():
    """An empty answer is certain whatever the model; it makes estimates of others no less."""
    from evaluation.tasks.adapter import LogLikelihood
    from evaluation.tasks.task_scores import facts_of, kinds_of, weakest

    sure = LogLikelihood(0.0, True, facts(0, "exact"))
    answers = [sure, LogLikelihood(-3.0, False, facts(2, "estimate")), "a written text"]
    assert len(facts_of(answers)) == 2
    assert kinds_of(facts_of(answers)) == ["estimate"]
    assert weakest(["exact", "estimate", "lower_bound"]) == "estimate"
    assert weakest(["estimate", "noncausal"]) == "noncausal"


def test_answers_survive_a_cache_file():
    """The harness pickles them; the facts go along."""
    import pickle

    from evaluation.tasks.adapter import LogLikelihood, RollingLogLikelihood

    pair = LogLikelihood(-3.0, False, facts(2, "estimate"))
    number = RollingLogLikelihood(-4.0, facts(3, "exact"))
    for answer in (pair, number):
        written = pickle.dumps(answer, protocol=0)  # protocol 0 writes names as lines
        older = written.replace(b"\nRequestStats\n", b"\nFacts\n")  # as caches before a renaming
        assert older != written
        for again in map(pickle.loads, (written, older)):
            assert (again, again.facts) == (answer, answer.facts)
