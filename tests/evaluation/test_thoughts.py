"""What a model did at each token: tables against what analyses find, and the page in a browser."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation.thoughts import MAX_STEP, TokenTrace
from evaluation.thoughts_page import page, visible
from lightning_models import load

FIXTURES = Path(__file__).parents[1] / "fixtures"
TEXT = "One. Two here. It is."
QUESTION = "a = 1; b = a + 2;"


def opened(path, noise=0.3):
    """A checkpoint, its weights disturbed."""
    lm = load(FIXTURES / f"{path}.ckpt" if isinstance(path, str) else path, device="cpu")
    torch.manual_seed(0)
    for parameter in lm.model.network.parameters():
        parameter.data.add_(noise * torch.randn_like(parameter))
    return lm


def batch_of(lm, text=TEXT):
    reader = lm._reader(text)
    return reader.batch([reader.document(text)], whole=True)


# ---- numbers of a token


@pytest.mark.parametrize("method", ["transformer", "ponderlm", "thought_gestalt"])
def test_losses_are_those_of_a_score(method):
    lm = opened(method)
    trace, score = lm.trace(TEXT), lm.score(TEXT)
    text = trace.tokens[trace.tokens["kind"] == "text"]
    assert text["text"].tolist() == score.tokens["text"].tolist()
    assert text["nats"].tolist() == pytest.approx(score.tokens["nats"].tolist(), rel=1e-5)
    assert [TEXT[a:b] for a, b in zip(text["start"], text["end"], strict=True)] == list(TEXT)
    assert trace.facts["loss"] == f"{score.nats_per_token:.3f} nats per token (exact)"
    per_byte = score.as_dict()["bits_per_byte"]  # marks of sentences are not counted
    assert trace.facts.get("bits per byte") == (per_byte and f"{per_byte:.3f}")


def test_a_fork_is_created_kept_or_deleted():
    lm = opened("thoughtbubbles")
    trace, table = lm.trace(TEXT).tokens, lm.think(TEXT).table
    read = trace.iloc[:-1]  # the end of the document is predicted only
    layers = table.filter(like="streams_layer")
    assert read["streams"].tolist() == layers.iloc[:, -1].tolist()
    before, kinds = np.ones(len(table)), set()
    for layer in range(1, layers.shape[1] + 1):
        told = [re.search(rf"fork layer {layer}: ([^;]*)", note)[1] for note in read["note"]]
        counts = [{kind: int(n) for n, kind in re.findall(r"(\d+) (\w+)", each)} for each in told]
        kinds |= {kind for each in counts for kind in each}
        new, kept, gone = (
            np.array([each.get(kind, 0) for each in counts])
            for kind in ("created", "kept", "deleted")
        )
        assert (kept + gone == before - 1).all()
        before = before + new - gone
        assert (before == layers[f"streams_layer{layer}"]).all()
    assert kinds == {"created", "kept", "deleted"}


def test_steps_and_what_they_gain():
    lm = opened("ponderlm")
    trace, table = lm.trace(TEXT).tokens, lm.think(TEXT).table
    read = trace.iloc[:-1]
    assert read["executed"].tolist() == table["executed"].tolist()
    w = table.filter(regex=r"^w_[1-9]").sum(axis=1)
    assert read["expected"].tolist() == pytest.approx(w.tolist(), rel=1e-5)
    gain = (table["first"] - table["last"]).tolist()  # of the token after each
    assert trace["gain"].iloc[1:].tolist()[:-1] == pytest.approx(gain[:-1], abs=1e-5)
    assert "loss after each step" in read["note"].iloc[1]


@pytest.mark.parametrize(
    "name", ["huginn", "ouro", "ouro-exits", "mixture-of-recursions", "looped"]
)
def test_recurrences_and_routers_are_shown(name, write_method):
    lm = opened(write_method(name))
    trace, table = lm.trace(TEXT).tokens, lm.think(TEXT).table
    column = "executed" if "recursions" in name else "recurrences"
    more = 0 if column == "executed" else 1
    assert trace[column].iloc[:-1].tolist() == (table["executed"] + more).tolist()


def test_latents_gain_over_the_mean_of_the_prior():
    lm = opened("latent_thought")
    trace, batch, network = lm.trace(TEXT), batch_of(lm), lm.model.network
    with torch.no_grad():
        z = torch.zeros(1, lm.model.config.num_latents, lm.model.config.dim)
        logits = network(network.begin(batch["tokens"]), z) @ network.output_matrix.T
        vocab = lm.model.config.padded_vocab_size
        nats = torch.nn.functional.cross_entropy(
            logits[..., :vocab].flatten(0, 1), batch["targets"].flatten(), reduction="none"
        )
    scored = trace.tokens.iloc[1:]
    assert (scored["gain"] + scored["nats"]).tolist() == pytest.approx(nats.tolist(), rel=1e-4)
    assert scored["gain"].abs().max() > 0.01
    assert float(trace.facts["of which KL"].split()[0]) > 0


def test_ages_are_those_of_the_gate_analysis():
    lm = opened("thought_gestalt")
    trace, attention = lm.trace(TEXT), lm.think(TEXT).table
    tokens = trace.tokens
    slots = attention.groupby("layer")["slots"].first()
    mean = (attention["age"] * attention["weight"]).groupby(attention["layer"]).sum()
    assert tokens["age"].mean() == pytest.approx(mean.mean(), rel=1e-5)
    assert tokens["age"].notna().sum() == slots.iloc[0]
    assert tokens["age"].nunique() > 3
    for layer, gate in attention.groupby("layer")["gate"].first().items():
        assert trace.facts[f"gate of layer {layer}"] == f"{gate:.3g}"


def test_thoughts_stand_after_their_chunk_and_the_answer_is_scored():
    lm = opened("thinking_states")
    tokens, chunks = lm.trace(QUESTION).tokens, lm.think(QUESTION).table
    thoughts = tokens[tokens["kind"] == "thought"]
    full = chunks[chunks["length"] > 0]
    assert thoughts["text"].tolist() == full["thought"].tolist()
    assert thoughts["end"].tolist() == chunks["text"].str.len().cumsum()[full.index].tolist()
    answer = tokens[tokens["kind"] == "answer"]
    written = lm.generate(QUESTION, max_new_tokens=64, temperature=0)
    assert "".join(answer["text"]) == written
    score = lm.score(written, context=QUESTION).tokens["nats"]
    assert answer["nats"].tolist() == pytest.approx(score[: len(answer)].tolist(), rel=1e-4)


@pytest.mark.parametrize("name", ["coconut", "codi", "pccot"])
def test_latents_are_read_in_words(name, write_method):
    """The first latent is made of the state that would speak after the marker."""
    lm = opened(write_method(name))
    tokens, model = lm.trace(QUESTION).tokens, lm.model
    thoughts = tokens[tokens["kind"] == "thought"]
    assert len(thoughts) == model.latents + ("coconut" in name and len(thoughts) > model.latents)
    query = [*lm.tokenizer.prompt_ids(QUESTION), model.config.special_id("latent_start")]
    with torch.no_grad():
        h = model.network(torch.tensor([query])).last[0, -1]
        logits = (h @ model.network.output_matrix.T)[: lm.tokenizer.vocab_size]
        p, best = logits.double().softmax(dim=0).max(dim=0)
    word = lm.tokenizer.decode_continuation([best.item()]) or "\N{END OF PROOF}"
    assert thoughts["text"].iloc[0] == word
    assert thoughts["note"].iloc[0].startswith(f"{word!r} {p:.2f}, ")


@pytest.mark.parametrize("name", ["codi-steps", "pccot-steps", "coconut-steps"])
def test_a_decoder_says_the_steps_of_latents(name, write_method, monkeypatch):
    """Each token is the likeliest after those before it, also where all are read at once."""
    lm = opened(write_method(name))
    model, write, given = lm.model, lm.model.network.write_steps, []
    monkeypatch.setattr(
        model.network, "write_steps", lambda *args: given.append(args[0]) or write(*args)
    )
    tokens = lm.trace(QUESTION).tokens
    said = tokens[tokens["note"].str.startswith("a step said by the decoder; most likely words")]
    thoughts, each = tokens[tokens["kind"] == "thought"], model.layout.latents_per_step
    assert said.index.tolist() == thoughts.index[each - 1 :: each].tolist()
    query = [*lm.tokenizer.prompt_ids(QUESTION), model.config.special_id("latent_start")]
    with torch.no_grad():
        state = model.network(torch.tensor([query])).last[0, -1]
        torch.testing.assert_close(given[0][0, 0], model.network.project(state))
        latents = torch.randn(3, *given[0].shape[1:])
        written = write(latents, 6, lm.tokenizer.vocab_size)
        logits = model.network.say(latents, written) @ model.network.decoder.output_matrix.T
    assert torch.equal(written, logits[..., : lm.tokenizer.vocab_size].argmax(dim=-1))
    assert len(written.unique()) > 2
    ids = write(given[0], MAX_STEP, lm.tokenizer.vocab_size).tolist()
    words = [lm.tokenizer.decode_continuation(each).strip() for each in ids]
    assert all(map(str.startswith, words, said["text"]))


def test_a_chain_is_a_thought_and_no_thoughts_are_said(write_method):
    chain = opened(write_method("cot"), noise=0.0).trace(QUESTION)
    kinds = chain.tokens["kind"].tolist()
    assert "thought" in kinds
    assert kinds.index("thought") == len(QUESTION) + 1
    silent = opened(write_method("no-cot")).trace(QUESTION)
    assert silent.facts["thinking"] == "no thoughts"
    assert opened("transformer").trace(TEXT).facts["thinking"] == "none, loss only"


def test_the_model_and_random_states_do_not_change():
    lm = opened("ponderlm")
    lm.model.train()
    state = torch.get_rng_state()
    one, other = lm.trace(TEXT), lm.trace(TEXT)
    assert one.tokens.equals(other.tokens)
    assert torch.equal(torch.get_rng_state(), state)
    assert lm.model.training


# ---- the page


def columns_of(html):
    """The texts of the page's tokens: lines, models, columns."""
    cell = r"<td>(.*?)</td>"
    lines = re.findall(r'<table class="line">(.*?)</table>', html, re.DOTALL)
    rows = [re.findall(r"<tr>(.*?)</tr>", line, re.DOTALL) for line in lines]
    texts = r"<span>(.*?)</span>"
    return [
        [[re.findall(texts, td) for td in re.findall(cell, row, re.DOTALL)] for row in line]
        for line in rows
    ]


def test_models_stand_below_each_other_by_characters(bpe_run):
    text = "thought\nreads  me"
    traces = [lm.trace(text) for lm in (opened("transformer"), opened(bpe_run))]
    assert len(traces[1].tokens) < len(traces[0].tokens)
    whole = ["", ""]
    for line in columns_of(page(traces)):
        for bytes_row, bpe_row in [line]:
            assert len(bytes_row) == len(bpe_row)
            for one, other in zip(bytes_row, bpe_row, strict=True):
                first, second = ("".join(each).replace("∎", "") for each in (one, other))
                assert first.replace("␣", " ") == second.replace("␣", " ")
                whole[0] += first
                whole[1] += second
    assert whole[0].replace("␣", " ") == text.replace("\n", "↵")


def test_characters_of_several_tokens_and_of_changed_texts():
    lm = opened("transformer")
    tokens = lm.trace("a\u00e9\u4e16b").tokens.query("kind == 'text'")
    spans = [(0, 1), (1, 2), (1, 2), *[(2, 3)] * 3, (3, 4)]
    assert list(zip(tokens["start"], tokens["end"], strict=True)) == spans
    from evaluation.thoughts import _characters

    lower = tokens.iloc[[0, -1]].assign(text=["the ", "cat"])
    changed = _characters(lower.drop(columns=["start", "end"]), "The cat")
    assert changed["end"].tolist() == [4, 7]


HOSTILE = "</script><img src=x onerror=alert(1)>{{7*7}}"


def test_texts_are_escaped():
    trace = replace(opened("transformer").trace(HOSTILE[:30]), name=HOSTILE)
    html = page([trace])
    assert "<img" not in html
    assert html.count("</script>") == 2
    assert "49" not in re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL).split("</h1>")[0]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", html)
    assert visible(" a b ") == "␣a b␣"
    assert visible("\n\t ") == "↵→␣"


def test_a_page_of_one_model_is_saved(tmp_path):
    thinking = opened("ponderlm").think(TEXT)
    path = thinking.save(tmp_path / "x.html")
    assert path.read_text() == page([thinking.trace])
    for wrong, message in (("x.pdf", "must end in .html"), ("no/x.html", "does not exist")):
        with pytest.raises(ValueError, match=message):
            thinking.save(tmp_path / wrong)


def test_plain_models_show_their_losses():
    thinking = opened("transformer").think(TEXT)
    assert thinking.analysis == "loss"
    assert thinking.table is thinking.trace.tokens
    heights = [bar.get_height() for bar in thinking.figure.axes[0].patches]
    assert heights == pytest.approx(thinking.table["nats"].fillna(0).tolist())


# ---- the command


def test_several_models_and_methods_on_one_page(evaluates, fails, tmp_path):
    target = tmp_path / "thoughts.html"
    ckpts = [f"plain={FIXTURES}/transformer.ckpt", FIXTURES / "ponderlm.ckpt"]
    ckpts.append(FIXTURES / "thinking_states.ckpt")
    printed = evaluates("think", "--ckpt", *ckpts, "--text", "One.", "--output", target)
    assert f"written to {target}" in printed
    assert "none, loss only" in printed
    html = target.read_text()
    assert "<td>plain</td>" in html
    assert [len(line) for line in columns_of(html)] == [3] * len(columns_of(html))
    few = evaluates("think", "--ckpt", ckpts[1], "--text", "One.", "--set.alpha", -20)
    assert re.search(r"mean additional steps.*\n.*\s0\s", few)
    line = fails("think", "--ckpt", *ckpts, "--text", "a" * 40)
    assert f"ckpt ({FIXTURES}/transformer.ckpt): text has 41 tokens" in line
    assert "output" in fails("think", "--ckpt", *ckpts, "--text", "a", "--output", "x.txt")
    assert "text ('') is empty" in fails("think", "--ckpt", *ckpts, "--text", "")


# ---- in a browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def example():
    """Two models with a tokenizer each, and numbers to recognise."""
    plain, ponder = opened("transformer").trace("One two."), opened("ponderlm").trace("One two.")
    return [replace(plain, name="plain"), replace(ponder, name=HOSTILE)]


@pytest.fixture
def shown(tmp_path):
    """Opens a page of traces in headless Chromium; returns its file and playwright's page."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    api = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "thoughts.html"
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened_page = browser.new_page()
        opened_page.requests, opened_page.said = [], []
        opened_page.on("request", lambda request: opened_page.requests.append(request.url))
        opened_page.on("console", lambda message: opened_page.said.append(message.text))
        opened_page.on("pageerror", lambda error: opened_page.said.append(str(error)))

        def show(traces):
            path.write_text(page(traces), encoding="utf-8")
            opened_page.goto(path.resolve().as_uri())
            return opened_page

        yield show
        browser.close()


def test_the_page_answers_mouse_and_keys(shown, tmp_path):
    traces = example()
    seen = shown(traces)
    assert seen.locator(".token").count() == 2 * len(traces[0].tokens)
    token = seen.locator(".token[data-model='1'][data-index='2']")
    token.hover()
    detail = seen.locator("#detail").inner_text()
    values = traces[1].tokens.iloc[2]
    assert f'B {HOSTILE}: text "n", loss {values["nats"]:.4g} nats' in detail
    assert f"expected additional steps: {values['expected']:.4g}" in detail
    both = [f"{trace.tokens['nats'].iloc[2]:.4g}" for trace in traces]
    assert f"loss of these characters: A {both[0]}, B {both[1]}" in detail
    token.click()
    focused = "key => document.activeElement.dataset[key]"
    assert seen.evaluate(focused, "index") == "2"
    for key, name, value in (
        ("ArrowRight", "index", "3"),
        ("ArrowLeft", "index", "2"),
        ("ArrowUp", "model", "0"),
        ("ArrowDown", "model", "1"),
        ("End", "index", str(len(traces[1].tokens) - 1)),
        ("Home", "index", "0"),
    ):
        seen.keyboard.press(key)
        assert seen.evaluate(focused, name) == value, key
    before = token.evaluate("e => e.style.background")
    seen.locator("select[data-model='1']").select_option(str(traces[1].measures.index("nats")))
    assert token.evaluate("e => e.style.background") != before
    assert seen.requests == [(tmp_path / "thoughts.html").resolve().as_uri()]
    assert not seen.said
    assert seen.screenshot().startswith(b"\x89PNG")


def test_an_answer_is_not_compared_with_the_end_of_a_text(shown):
    asked = opened("thinking_states").trace("One two.")
    plain = opened("transformer").trace("One two.")
    last = (asked.tokens["kind"] == "answer").to_numpy().nonzero()[0][-1]
    seen = shown([replace(asked, name="asked"), replace(plain, name="plain")])
    seen.locator(f".token[data-model='0'][data-index='{last}']").hover()
    nats = asked.tokens["nats"][asked.tokens["kind"] == "answer"].sum()
    detail = seen.locator("#detail").inner_text()
    assert f"loss of these characters: A {nats:.4g}, B none" in detail


def test_colours_can_be_told_apart_without_red_and_green(shown):
    script = "[-1, -.5, 0, .5, 1].map((v) => colour(v, -1, 1).background)"
    colours = [
        list(map(int, re.findall(r"\d+", each))) for each in shown(example()).evaluate(script)
    ]
    grey = [sum(np.array(each) * (0.2126, 0.7152, 0.0722)) for each in colours]
    assert grey[2] > grey[1] > grey[0]
    assert grey[2] > grey[3] > grey[4]
    for amount in (0, 1):  # as protanopes, who lack red, see the two signs: blue against none
        assert colours[4 - amount][2] - colours[amount][2] > 40
    assert math.isclose(max(grey[2], 0), 255, abs_tol=1)


def test_a_trace_knows_its_measures():
    trace = opened("transformer").trace(TEXT)
    assert trace.measures == ["nats"]
    assert isinstance(trace, TokenTrace)
