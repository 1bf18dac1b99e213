"""``lightning_models.load`` on a checkpoint of each method, and what it returns."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from callbacks.recorded_thoughts import Recorded, query_with_thoughts
from lightning_models import load
from tests.programs import ROOT

FIXTURES = Path(__file__).parents[1] / "fixtures"
WINDOWS = ("transformer", "thoughtbubbles", "ponderlm", "latent_thought")
METHODS = (*WINDOWS, "thought_gestalt", "thinking_states")
TEXT, QUESTION, ANSWER = "One. Two here.", "a = 1; b = a + 2;", "a = 1, b = 3"

each = pytest.mark.parametrize("method", METHODS)


def opened(method, noise=0.0, **options):
    """The fixture of a method, its weights disturbed."""
    lm = load(FIXTURES / f"{method}.ckpt", device="cpu", **options)
    torch.manual_seed(0)
    for parameter in lm.model.network.parameters():
        parameter.data.add_(noise * torch.randn_like(parameter))
    return lm


def score(lm):
    """The score of the text, or of the answer."""
    if lm.model.reads == "reasoning":
        return lm.score(ANSWER, context=QUESTION)
    return lm.score(TEXT)


def decoded_nats(lm, prompt, ids):
    """Nats of ids after a prompt, decoded step by step: the other way to the same likelihood."""
    model, nats, read = lm.model, [], torch.tensor([prompt])
    with torch.no_grad():
        cache = model.init_cache(read, torch.tensor([len(prompt)]), len(ids))
        tokens = read[:, -1]
        for token in ids:
            ready = torch.tensor([False])
            while not ready:
                logits, ready = model.decode_step(cache, tokens)
            nats.append(-logits.double().log_softmax(dim=-1)[0, token].item())
            tokens = torch.tensor([token])
    return nats


@each
def test_pieces_join_to_the_text(method):
    lm = opened(method)
    prompt = QUESTION if method == "thinking_states" else "One."
    options = {"max_new_tokens": 12, "temperature": 1.5, "seed": 3}
    pieces = lm.generate(prompt, stream=True, **options)
    first = next(pieces)
    assert torch.is_grad_enabled()  # the caller's own turn
    joined = [first, *pieces]
    assert len(joined) > 1
    assert all(joined)
    assert "".join(joined) == lm.generate(prompt, **options)
    assert lm.generate(prompt, max_new_tokens=0) == ""


def test_a_character_comes_whole(monkeypatch):
    lm = opened("transformer")
    ids = [*"a\u00e9\u4e16".encode(), 0xFF, ord("b"), 0xC3]
    monkeypatch.setattr("evaluation.api.generate_steps", lambda *_, **__: ((0, i) for i in ids))
    assert list(lm.generate("", stream=True)) == ["a", "\u00e9", "\u4e16", "\ufffdb", "\ufffd"]


@each
def test_scores_add_up(method):
    lm = opened(method, noise=0.1)
    found = score(lm)
    total = found.tokens["nats"].sum() + found.totals.sequence_nats
    assert found.nats_per_token == pytest.approx(total / len(found.tokens), rel=1e-12)
    assert found.likelihood == lm.model.likelihood
    assert found.causal == lm.model.causal
    text = ANSWER + "\N{END OF PROOF}" if method == "thinking_states" else TEXT
    assert "".join(found.tokens["text"]) == text
    assert found.as_dict()["likelihood"] == found.likelihood
    assert (found.totals.sequence_nats > 0) == (method == "latent_thought")


@pytest.mark.parametrize("method", ["transformer", "thought_gestalt", "thinking_states"])
def test_scores_are_those_of_decoding(method):
    lm = opened(method, noise=0.1)
    if method == "thinking_states":
        prompt = lm.tokenizer.prompt_ids(QUESTION)
        ids = [*lm.tokenizer.encode(ANSWER), lm.tokenizer.eos_id]
    else:
        start, *ids = lm.tokenizer.prompt_ids(TEXT)
        prompt = [start]
    nats = pd.DataFrame({"id": ids, "nats": decoded_nats(lm, prompt, ids)})
    if method == "thought_gestalt":
        nats = nats[nats["id"] < lm.tokenizer.bos_id]  # words are scored
    found = score(lm).tokens
    assert found["id"].tolist() == nats["id"].tolist()
    assert found["nats"].tolist() == pytest.approx(nats["nats"].tolist(), rel=1e-4)


def test_a_context_is_given_and_not_scored():
    lm = opened("transformer", noise=0.1)
    first, second, both = lm.score("One."), lm.score(" Two.", context="One."), lm.score("One. Two.")
    assert first.totals.nats + second.totals.nats == pytest.approx(both.totals.nats, rel=1e-6)
    assert second.tokens["text"].tolist() == list(" Two.")


def test_a_long_text_is_scored_in_windows():
    lm = opened("transformer", noise=0.1)
    limit, text = lm.model.context_limit, "abcdefg " * 12
    found = lm.score(text)
    assert len(text) > 2 * limit
    assert "".join(found.tokens["text"]) == text
    start = lm.score(text[:limit]).tokens["nats"]
    assert found.tokens["nats"][:limit].tolist() == pytest.approx(start.tolist(), rel=1e-5)


def test_texts_of_tokens_are_decoded_once(monkeypatch):
    """A long text repeats itself; decoding each token took as long as scoring it."""
    lm = opened("transformer")
    calls, decode = [], lm.tokenizer.decode
    monkeypatch.setattr(lm.tokenizer, "decode", lambda ids: calls.append(ids) or decode(ids))
    text = "abcdefg " * 99
    assert "".join(lm.score(text).tokens["text"]) == text
    assert len(calls) < len(text) / 10


def test_prefixes_make_a_score_causal():
    lm = opened("thoughtbubbles", noise=0.3)
    whole, prefixes = lm.score(TEXT), lm.score(TEXT, mode="autoregressive")
    assert (whole.likelihood, whole.causal) == ("noncausal", False)
    assert (prefixes.likelihood, prefixes.causal) == ("exact", True)
    assert prefixes.tokens["id"].tolist() == whole.tokens["id"].tolist()
    assert prefixes.nats_per_token != pytest.approx(whole.nats_per_token, rel=1e-6)
    shorter = lm.score(TEXT[:-4], mode="autoregressive").tokens["nats"]
    same = prefixes.tokens["nats"][: len(shorter)]
    assert same.tolist() == pytest.approx(shorter.tolist(), rel=1e-6)


THOUGHTS = {
    "thoughtbubbles": ("fork_analysis", "place id text streams_layer1"),
    "ponderlm": ("step_allocation", "place id text executed first last w_0"),
    "latent_thought": ("posterior_analysis", "layer vector kl mean_norm variance"),
    "thought_gestalt": ("gate_analysis", "layer age weight weight_if_there slots gate"),
    "thinking_states": ("thought_trace", "chunk text thought length"),
}


@pytest.mark.parametrize("method", THOUGHTS)
def test_what_a_method_thinks_is_shown(method):
    lm = opened(method, noise=0.1)
    found = lm.think(QUESTION if method == "thinking_states" else TEXT)
    analysis, columns = THOUGHTS[method]
    names = columns.split()
    assert found.analysis == analysis
    assert list(found.table.columns)[: len(names)] == names
    assert all(isinstance(figure, Figure) for figure in found.figures.values())
    assert found.figure is found.figures[next(iter(found.tables))]
    if "place" in names:  # the whole text after the end of the document before it
        assert "".join(found.table["text"]) == "\N{END OF PROOF}" + TEXT


def test_latents_have_the_divergence_of_the_score():
    lm = opened("latent_thought", noise=0.1)
    found, seen = lm.think(TEXT), []
    lm.model.score = lambda batch, score=lm.model.score: seen.append(score(batch)) or seen[-1]
    again = lm.think(TEXT)
    assert found.tables["latents"].equals(again.tables["latents"])
    divergence = -seen[-1].sequence_term.item()
    assert found.table["kl"].sum() == pytest.approx(divergence, rel=1e-5)
    assert len(found.tables["coordinates"]) % len(found.table) == 0


def test_gates_are_those_of_the_model():
    lm = opened("thought_gestalt", noise=0.1)
    table = lm.think("One. Two here. Three.").table
    gates = {
        int(name.split(".")[1]) + 1: gate.item()
        for name, gate in lm.model.network.named_parameters()
        if name.endswith("memory_attention.gate")
    }
    assert dict(zip(table["layer"], table["gate"], strict=True)) == pytest.approx(gates)
    assert table.groupby("layer")["weight"].sum().tolist() == pytest.approx([1.0] * len(gates))


def test_thoughts_stand_where_they_are_thought():
    lm = opened("thinking_states", noise=0.3)
    found, seen = lm.think(QUESTION).table, Recorded()
    query = lm.tokenizer.prompt_ids(QUESTION)
    batch = {
        "query": torch.tensor([query]),
        "query_lengths": torch.tensor([len(query)]),
        "targets": torch.tensor([[lm.tokenizer.eos_id]]),
    }
    lm.model.recorded(batch, thoughts=seen.take)
    assert "".join(found["text"]) == QUESTION
    assert found["length"].sum() == seen.rows[0].within(query).length > 0
    written = query_with_thoughts(lm.tokenizer, query, seen.rows[0])
    assert all(f"[T: {text}]" in written for text in found["thought"][found["length"] > 0])


def test_what_cannot_be_done_is_said():
    plain, gestalt, asked = (opened(name) for name in ("transformer", *METHODS[-2:]))
    assert gestalt.think("One").analysis == "loss"  # memory begins with the second sentence
    with pytest.raises(ValueError, match="reads 32 at once"):
        plain.think("a" * 40)
    with pytest.raises(ValueError, match="give the question as context"):
        asked.score(ANSWER)
    for call in (plain.score, plain.think):
        with pytest.raises(ValueError, match="is empty"):
            call("")
    with pytest.raises(ValueError, match=r"mode \(autoregresive\) must be one of blockwise"):
        plain.score("a", mode="autoregresive")
    with pytest.raises(ValueError, match=r"kind \(generating\) must be one of scoring"):
        plain.flops(kind="generating")
    with pytest.raises(ValueError, match=r"which \(bset\) must be one of last, best"):
        load("none.ckpt", which="bset")
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load("no/such/run")


WRONG = {
    "load": {
        "path": [None, 3, b"runs"],
        "device": ["tpu", None, 0],
        "precision": ["7", None, 32],
        "which": ["bset", None, 1],
        "changes": ["dim", 3, [1]],
        "tokenizer": [3, b"bytes"],
        "packages": ["mine", None, (3,)],
    },
    "generate": {
        "text": [None, 3, b"One."],
        "max_new_tokens": [-1, True, 1.5, "3", None, 10**12, 10**30, np.bool_(True)],
        "stream": ["yes", None, 1],
        "temperature": ["x", True, None, -1.0, float("nan"), np.float32("inf"), 10**400],
        "top_k": ["x", 1.5, True, 0],
        "top_p": ["x", True, 0.0, 2, 10**400],
        "seed": ["x", 1.5, None, True, -1, np.float64(3), 2**64],
        "temprature": [1.0],
    },
    "score": {"text": [None, 3, b"One."], "context": [5, None, b"One."], "mode": [None, 3, "x"]},
    "think": {"text": [None, 3, b"One."]},
    "flops": {"context": ["x", 1.5, True, 0, 10**400], "kind": [None, 3]},
}
"""Arguments of the public functions, and values that they refuse."""
ARGUMENTS = [(verb, name) for verb, names in WRONG.items() for name in names]


@pytest.mark.parametrize(("verb", "name"), ARGUMENTS)
def test_a_wrong_argument_is_named(verb, name):
    path = FIXTURES / "transformer.ckpt"
    if verb == "load":
        call, given = load, {"path": path}
    else:
        call, given = getattr(load(path, device="cpu"), verb), {"text": "One."}
        given = {} if verb == "flops" else given
    for value in WRONG[verb][name]:
        kind = TypeError if name == "temprature" else ValueError
        with pytest.raises(kind, match=rf"\b{name}\b"):
            call(**{**given, name: value})


def test_numbers_of_numpy_are_numbers():
    lm = opened("transformer")
    plain = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 9, "top_p": 0.75, "seed": 3}
    kinds = dict(zip(plain, (np.int64, np.float32, np.uint8, np.float64, np.int32), strict=True))
    theirs = {key: kinds[key](value) for key, value in plain.items()}
    assert lm.generate(TEXT, **theirs) == lm.generate(TEXT, **plain)
    assert "".join(lm.generate(TEXT, **theirs, stream=True)) == lm.generate(TEXT, **plain)
    assert lm.flops(np.int16(16)) == lm.flops(16)
    few = load(FIXTURES / "latent_thought.ckpt", device="cpu", changes={"inner_steps": np.int64(1)})
    assert type(few.model.config.inner_steps) is int


def test_the_hottest_temperature_draws_evenly_and_the_coldest_is_greedy():
    lm = opened("transformer")
    texts = [lm.generate(TEXT, max_new_tokens=6, temperature=10**30, seed=n) for n in range(20)]
    assert len(set("".join(texts))) > 35  # 48 ASCII characters are expected in 120 even draws
    greedy = lm.generate(TEXT, max_new_tokens=6, temperature=0)
    assert lm.generate(TEXT, max_new_tokens=6, temperature=1e-320) == greedy


def test_options_of_load_reach_the_model(tmp_path):
    few, most = opened("ponderlm", changes={"alpha": -20.0}), opened("ponderlm")
    assert few.think(TEXT).table["executed"].sum() < most.think(TEXT).table["executed"].sum()
    rounded, full = (score(opened("transformer", precision=name)) for name in ("bf16", "32"))
    assert rounded.nats_per_token == pytest.approx(full.nats_per_token, rel=0.02)
    assert rounded.nats_per_token != full.nats_per_token
    (tmp_path / "last.ckpt").write_bytes((FIXTURES / "transformer.ckpt").read_bytes())
    assert score(load(tmp_path, device="cpu")).nats_per_token == full.nats_per_token


@each
def test_flops_count_what_is_asked_for(method):
    lm = opened(method)
    assert lm.flops(16, "training") > lm.flops(16) > 0
    assert lm.flops() == lm.flops(lm.model.config.block_size)
    assert lm.flops(kind="generation") > 0


def test_the_package_is_imported_without_what_load_needs():
    code = (
        "import sys, lightning_models; "
        "print({'torch', 'lightning', 'pandas', 'evaluation'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
