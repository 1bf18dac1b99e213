"""Lists of texts, stop texts, logits and what notebooks show, of a loaded model."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation.text_scores import ROWS
from lightning_models import load

FIXTURES = Path(__file__).parents[1] / "fixtures"
WINDOWS = ("transformer", "thoughtbubbles", "ponderlm", "latent_thought")
TEXTS = ["One. Two here.", "Three", "", "One. Two here.", "a < b & c\nd " * 9]
QUESTIONS = ["a = 1;", "a = 1; b = a + 2;", "a = 1;"]
FEW = {"max_new_tokens": 9, "temperature": 1.3, "seed": 4}
"""Sampling: without a seed of its own each text would draw otherwise in a list."""

each = pytest.mark.parametrize("method", [*WINDOWS, "thought_gestalt", "thinking_states"])
each_of_windows = pytest.mark.parametrize("method", WINDOWS)


def opened(method, noise=0.1):
    lm = load(FIXTURES / f"{method}.ckpt", device="cpu")
    torch.manual_seed(0)
    for parameter in lm.model.network.parameters():
        parameter.data.add_(noise * torch.randn_like(parameter))
    return lm


# ---- lists


@each
def test_texts_of_a_list_are_continued_as_each_alone(method):
    lm = opened(method)
    prompts = QUESTIONS if method == "thinking_states" else TEXTS[:4]
    together = lm.generate(prompts, **FEW)
    assert together == [lm.generate(prompt, **FEW) for prompt in prompts]
    assert len(set(together)) > 1
    assert lm.generate(tuple(prompts), **FEW) == together
    assert lm.generate([], **FEW) == []


@each
def test_texts_of_a_list_are_scored_as_each_alone(method):
    lm = opened(method)
    texts, contexts = [text for text in TEXTS if text], ["", "Four. ", "", "Five. "]
    if method == "thinking_states":
        texts, contexts = ["a = 1", "a = 1, b = 3", "b = 2"], QUESTIONS
    pairs = zip(texts, contexts, strict=True)
    alone = [lm.score(text, context=context) for text, context in pairs]
    for together in (lm.score(texts, context=contexts), lm.score(tuple(texts), context=contexts)):
        for mine, expected in zip(together, alone, strict=True):
            assert mine.tokens["id"].tolist() == expected.tokens["id"].tolist()
            assert mine.tokens["nats"].tolist() == pytest.approx(expected.tokens["nats"], rel=1e-4)
            assert mine.totals.nats == pytest.approx(expected.totals.nats, rel=1e-5)
            assert (mine.likelihood, mine.causal) == (expected.likelihood, expected.causal)
    assert lm.score([]) == []


def test_texts_are_read_in_batches(monkeypatch):
    lm, calls = opened("transformer"), []
    score = lm.model.score
    counted = lambda batch: calls.append(len(batch["tokens"])) or score(batch)  # noqa: E731
    monkeypatch.setattr(lm.model, "score", counted)
    assert len(lm.score(["One", "Two two"] * ROWS)) == 2 * ROWS
    assert calls == [ROWS, ROWS]


@pytest.mark.parametrize(
    ("verb", "given", "words"),
    [
        ("generate", {"text": ["a", 3]}, r"text \(3\) must be str"),
        ("generate", {"text": ["a"], "stream": True}, "one str with stream=True"),
        ("generate", {"text": "a", "stop": ""}, r"stop \(''\) ends every text"),
        ("generate", {"text": "a", "stop": [3]}, r"stop \(3\)"),
        ("score", {"text": ["a", ""]}, r"text \(''\) is empty"),
        ("score", {"text": ["a", "b"], "context": ["c"]}, "context has 1 texts for 2 to score"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(verb, given, words):
    with pytest.raises(ValueError, match=words):
        getattr(opened("transformer"), verb)(**given)


# ---- stop texts


@each
def test_a_continuation_ends_before_a_stop_text(method):
    lm = opened(method)
    prompts = QUESTIONS if method == "thinking_states" else TEXTS[:3]
    whole = lm.generate(prompts, **FEW)
    stop = next(text[3:5] for text in whole if len(text) > 5)
    expected = [text.partition(stop)[0] for text in whole]
    assert expected != whole
    assert lm.generate(prompts, stop=stop, **FEW) == expected
    assert lm.generate(prompts, stop=["never written", stop], **FEW) == expected
    for prompt, text in zip(prompts, expected, strict=True):
        assert lm.generate(prompt, stop=stop, **FEW) == text
        assert "".join(lm.generate(prompt, stop=stop, stream=True, **FEW)) == text


def test_a_stop_text_ends_the_decoding(monkeypatch):
    lm, steps = opened("transformer"), []
    decode = lm.model.decode_step
    monkeypatch.setattr(lm.model, "decode_step", lambda *x: steps.append(1) or decode(*x))
    text = lm.generate("One.", max_new_tokens=20, temperature=0)
    lm.generate("One.", max_new_tokens=20, temperature=0, stop=text[0])
    assert len(steps) == 20 + 1


# ---- logits


def predictions(lm, ids):
    """Next-token distributions after each prefix, decoded: the other way to them."""
    rows = []
    with torch.no_grad():
        for length in range(1, len(ids) + 1):
            prompt = torch.tensor([ids[:length]])
            cache = lm.model.init_cache(prompt, torch.tensor([length]), 1)
            ready = torch.tensor([False])
            while not ready:
                logits, ready = lm.model.decode_step(cache, prompt[:, -1])
            rows.append(logits[0].log_softmax(dim=-1))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("method", "most"), [("transformer", 1e-4), ("thoughtbubbles", 1e-4), ("ponderlm", 2e-3)]
)
def test_logits_of_prefixes_are_those_of_decoding(method, most):
    """PonderLM iterates where it scores, and goes step by step where it decodes."""
    lm = opened(method)
    ids = lm.tokenizer.prompt_ids("One. Two here.")
    found = lm([ids, ids[::-1]], mode="autoregressive")
    assert (found.likelihood, found.causal) == ("exact", True)
    assert found.logits.shape == (2, len(ids), lm.model.config.padded_vocab_size)
    for row, tokens in zip(found.logits, (ids, ids[::-1]), strict=True):
        assert (row.log_softmax(dim=-1) - predictions(lm, tokens)).abs().max() < most


@each_of_windows
def test_logits_say_whether_they_read_ahead(method):
    lm = opened(method)
    ids = lm.tokenizer.prompt_ids("One. Two here.")
    found, other = lm(ids), lm([*ids[:-1], ids[-1] + 1])
    same = torch.equal(found.logits[:, :-1], other.logits[:, :-1])
    assert found.causal == lm.model.causal == same
    assert found.likelihood == ("estimate" if method == "latent_thought" else lm.model.likelihood)
    apart = lm(ids, mode="autoregressive")
    assert apart.causal
    alone = [lm(ids[:length]).logits[:, -1] for length in range(1, len(ids) + 1)]
    assert (apart.logits - torch.stack(alone, dim=1)).abs().max() < 1e-4


@pytest.mark.parametrize("method", ["transformer", "thoughtbubbles", "ponderlm"])
def test_logits_are_those_of_the_score(method):
    lm = opened(method)
    *read, last = lm.tokenizer.prompt_ids("One. Two here.")
    log_probs = lm(torch.tensor(read)).logits[0].log_softmax(dim=-1)
    nats = -log_probs.gather(1, torch.tensor([*read[1:], last])[:, None])[:, 0]
    assert nats.tolist() == pytest.approx(lm.score("One. Two here.").tokens["nats"], rel=1e-4)


def test_a_text_is_ids_from_the_start_of_a_document():
    lm = opened("transformer")
    ids = np.array([lm.tokenizer.start_id, *lm.tokenizer.encode("One.")])
    found = lm.logits("One.")
    assert torch.equal(found.logits, lm(ids).logits)
    assert repr(found) == "TokenLogits: (1, 5, 320) (exact, causal)"
    assert found.logits.requires_grad is False
    assert not found.logits.is_inference()


@pytest.mark.parametrize(
    ("method", "ids", "words"),
    [
        ("transformer", "One.", "lm.logits"),
        ("transformer", [[1, 2], [3]], "whole numbers"),
        ("transformer", [1.5], "whole numbers"),
        ("transformer", [True], "whole numbers"),
        ("transformer", [], "whole numbers"),
        ("transformer", [[[1]]], "whole numbers"),
        ("transformer", [1, 257], r"from 1 to 257\) must be at least 0 and below 257"),
        ("transformer", [-1], "must be at least 0"),
        ("transformer", [1] * 99, "the model has learned 32"),
        ("thought_gestalt", [1], "ThoughtGestaltLM reads sentences"),
        ("thinking_states", [1], "ThinkingStatesLM reads reasoning"),
    ],
)
def test_what_has_no_logits_is_said(method, ids, words):
    with pytest.raises(ValueError, match=words):
        opened(method)(ids)


# ---- what is shown


def test_a_score_is_shown_with_its_kind_and_its_tokens():
    score = opened("thoughtbubbles").score("a < b & c")
    assert re.fullmatch(
        r"TextScore: \d\.\d{4} nats/token \(noncausal, not causal\), 9 tokens", repr(score)
    )
    page = score._repr_html_()
    assert repr(score) in page
    assert re.sub(r"<[^>]*>", "", page.partition("<pre>")[2]) == "a &lt; b &amp; c"
    assert page.count("<span title=") == 9
    assert f'title="{score.tokens["nats"][4]:.3f} nats"' in page


def test_thoughts_are_shown_with_figure_and_table():
    found = opened("thoughtbubbles").think("One. Two here.")
    assert repr(found).startswith("Thinking: fork_analysis; tables tokens (15 rows)")
    assert len(repr(found)) < 200
    page = found._repr_html_()
    assert 'src="data:image/png;base64,iVBOR' in page
    assert all(f"<th>{name}</th>" in page for name in found.table.columns)


# ---- what cannot be loaded


def test_what_cannot_be_loaded_has_a_cure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        with pytest.raises(
            ValueError, match=rf"evaluate.py import --hf {re.escape(name)} --output"
        ):
            load(name)
    for name in ("mine.yaml", "other.yml"):
        with pytest.raises(ValueError, match=rf"there is no checkpoint at {re.escape(name)}$"):
            load(name)
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"python train.py fit -c {name}\), then name"):
            load(name)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match=r"under runs; .*python train.py fit -c CONFIG"):
        load("runs")
    with pytest.raises(ValueError) as error:
        load("runs/firts")
    assert "import" not in str(error.value)


def test_of_several_runs_the_newest_is_taken_and_named(tmp_path):
    content = (FIXTURES / "transformer.ckpt").read_bytes()
    for name in ("first", "second"):
        folder = tmp_path / name / "checkpoints"
        folder.mkdir(parents=True)
        (folder.parent / "config.yaml").touch()
        (folder / "last.ckpt").write_bytes(content)
    with pytest.warns(UserWarning, match="has 2 runs, and the newest is taken") as record:
        lm = load(tmp_path, device="cpu")
    assert str(lm.checkpoint.path) in str(record[0].message)
    assert lm.checkpoint.path.parts[-3] == "second"
