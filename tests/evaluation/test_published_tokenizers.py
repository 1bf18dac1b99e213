"""Scores, streams and answers with tokenizers of the kinds that are published."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tokenizer_files
import torch

from callbacks.answer_accuracy import judge, questions_in
from datamodules import Kinship, LocalText
from datamodules.sentences.splitters import parse_splitter
from datamodules.sentences.tokenizer import SentenceTokenizer
from datamodules.tokenizers import JsonTokenizer, SpecialTokens
from evaluation.api import LoadedModel
from evaluation.autoregressive import draw_targets
from evaluation.compare import compare_runs
from evaluation.importing import import_checkpoint
from evaluation.perplexity import measure_perplexity, perplexity_table
from evaluation.quality import documents
from evaluation.reason.asking import rank
from evaluation.tasks.readers import SentenceReader, WindowReader
from evaluation.tasks.writing import WritingRequest, write
from lightning_models import Scores, TransformerConfig, TransformerLM
from lightning_models.checkpoint import Checkpoint
from lightning_models.generation import written_text

TEXT = "The cat ate. He na\u00efve \u2603, the end"
WORDS = ("the", "cat", "he", "ate")


def read(inner, bos, eos):
    """The tokenizer of a file."""
    return JsonTokenizer("written here", inner.to_str(), SpecialTokens(bos, (eos,)))


def byte_level():
    return read(tokenizer_files.byte_level("</s>", words=WORDS), None, "</s>")


def sentencepiece():
    return read(tokenizer_files.pieces(words=WORDS), "<s>", "</s>")


def word_piece():
    return read(tokenizer_files.word_pieces(), None, "[SEP]")


KINDS = {
    "byte level": byte_level,
    "byte level, BOS": lambda: read(tokenizer_files.PUBLISHED["byte_level_bos"](), "<s>", "</s>"),
    "sentencepiece": sentencepiece,
    "sentencepiece without a space piece": lambda: read(
        tokenizer_files.pieces(space=False, words=WORDS), None, "</s>"
    ),
    "word pieces": word_piece,
}
every = pytest.mark.parametrize("kind", KINDS)


def loaded(tokenizer, block_size=64):
    """A random model, its output spread out, with a tokenizer."""
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "dim": 16, "num_heads": 2, "block_size": block_size}
    model = TransformerLM(TransformerConfig(vocab_size=tokenizer.vocab_size, **sizes))
    model.configure_model()
    for parameter in model.network.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return LoadedModel(None, model.eval(), tokenizer)


# ---- written text


@every
def test_a_continuation_keeps_its_space(kind):
    tokenizer = KINDS[kind]()
    if kind == "sentencepiece without a space piece":  # writes the space as U+2581 in bytes
        assert written_text(tokenizer, tokenizer.encode_continuation("cat")) == "cat"
        return
    after = [*tokenizer.encode_continuation(" cat ate"), *tokenizer.stop_ids]
    assert written_text(tokenizer, after) == " cat ate"
    assert written_text(tokenizer, tokenizer.encode("the cat"), begins=True) == "the cat"


@every
@pytest.mark.parametrize("prompt", ["", "the c"])
def test_streams_add_up_to_the_text(kind, prompt):
    """A random model writes broken bytes, specials and pieces in any order."""
    lm = loaded(KINDS[kind]())
    texts = []
    for seed in range(30):
        options = {"max_new_tokens": 12, "temperature": 1.5, "seed": seed}
        parts = list(lm.generate(prompt, stream=True, **options))
        assert "".join(parts) == lm.generate(prompt, **options)
        assert all(parts)
        texts.append(parts)
    assert max(map(len, texts)) > 1


def test_broken_bytes_change_those_before_them(monkeypatch):
    tokenizer = sentencepiece()
    lm = loaded(tokenizer)
    (letter,) = tokenizer.encode_continuation("b")
    ids = [letter, *(3 + byte for byte in (0x0A, 0xC3, 0xA9)), letter, 3 + 0x0A, 3 + 0xFF]
    monkeypatch.setattr("evaluation.api.generate_steps", lambda *_, **__: ((0, i) for i in ids))
    assert list(lm.generate("x", stream=True)) == ["b", "\n\u00e9b", "\ufffd\ufffd"]


def test_tasks_keep_the_space_of_a_continuation(monkeypatch):
    tokenizer = sentencepiece()
    reader = WindowReader(tokenizer, None)
    written = tokenizer.encode_continuation(" cat ate")
    assert len(written) > 1

    def generate(model, prompts, *, ended, **options):
        rows = []
        for row, _ in enumerate(prompts):
            upto = (k for k in range(1, len(written) + 1) if ended(row, written[:k]))
            rows.append(written[: next(upto, len(written))])
        return rows

    monkeypatch.setattr("evaluation.tasks.writing.generate", generate)
    lm = loaded(tokenizer)

    def texts(*until):
        requests = [
            WritingRequest.of(text, {"until": list(until)}, reader, max_new_tokens=9, seed=0)
            for text in ("the", "")
        ]
        return write(lm.model, tokenizer, requests).texts

    assert texts() == [" cat ate", "cat ate"]
    assert texts(" cat") == ["", "cat ate"]
    assert texts(" ate") == [" cat", "cat"]


def test_judges_of_quality_read_spaces():
    tokenizer = sentencepiece()
    bos, eos = tokenizer.text_bos_id, tokenizer.eos_id
    within, start = tokenizer.encode_continuation(" cat"), tokenizer.encode("the cat")
    assert documents([*within, eos, bos, *start], tokenizer) == [" cat", "the cat"]
    assert documents([bos, *start, eos], tokenizer) == ["the cat", ""]


# ---- scores


@every
@pytest.mark.parametrize("context", ["", "the c", "The ", "na\u00ef"])
def test_bytes_are_those_of_the_scored_text(kind, context):
    tokenizer = KINDS[kind]()
    found = loaded(tokenizer).score("at. \u2603 the ", context=context)
    assert found.totals.bytes == len("at. \u2603 the ".encode())
    assert found.as_dict()["bits_per_byte"] == pytest.approx(
        found.totals.nats / 0.6931471805599453 / 12, rel=1e-12
    )
    if tokenizer.text_changes is None:
        assert "".join(found.tokens["text"]).replace("\u25af", "") == "at. \u2603 the "


def test_a_token_across_the_join_loses_no_text():
    tokenizer = byte_level()
    context, text = "the c", "at ate"
    whole, given = tokenizer.encode(context + text), tokenizer.encode(context)
    assert whole[: len(given)] != given
    lm = loaded(tokenizer)
    found = lm.score(text, context=context)
    assert tokenizer.decode(found.tokens["id"].tolist()) == text
    piece = WindowReader(tokenizer, None, documents=True).segment(context, text)
    assert piece.tokens == (tokenizer.eos_id, *given, *tokenizer.encode(text))
    assert list(piece.tokens[piece.given :]) == found.tokens["id"].tolist()
    # the harness' own convention, as lm_eval.api.model.TemplateLM._encode_pair has it
    harness = WindowReader(tokenizer, None).segment(context, text)
    assert harness.tokens == (*given, *whole[len(given) :])


def test_a_word_across_the_join_of_sentences():
    inner = byte_level()
    tokenizer = SentenceTokenizer(inner, parse_splitter("rules"))
    context, text = "He ate. the c", "at. He"

    def scored(piece):
        return inner.decode([i for i, s in zip(piece.tokens, piece.scored, strict=True) if s])

    apart = SentenceReader(tokenizer, None, documents=True).segment(context, text)
    assert scored(apart) == text
    assert inner.decode(apart.tokens) == context + text
    assert [inner.decode(apart.tokens[a:b]) for a, b in ((0, apart.ends[0]),)] == ["He ate."]
    together = SentenceReader(tokenizer, None).segment(context, text)
    assert list(together.tokens) == inner.encode(context + text)
    assert scored(together) == " cat. He"  # the word that spans the join, whole


def test_a_text_without_tokens_is_refused():
    with pytest.raises(ValueError, match=r"text \(' '\) has no tokens in written here"):
        loaded(word_piece()).score(" ")


@pytest.fixture(scope="module")
def llama(save_llama):
    """Transformers' model and tokenizer that begins texts with <s>, and ours with its weights."""
    theirs, fast, tokenizer, folder = save_llama
    ours = import_checkpoint(str(folder), folder / "scores.ckpt").eval()
    return theirs, fast, LoadedModel(None, ours, tokenizer)


@pytest.mark.parametrize("context", ["", "He ate the c", "the "])
def test_scores_stand_after_bos(llama, context):
    theirs, fast, ours = llama
    text = "cat ate"
    given = fast(context)["input_ids"]
    assert given[0] == fast.bos_token_id
    ids = [*given, *fast(text, add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    expected = [-logits[k - 1, ids[k]].item() for k in range(len(given), len(ids))]
    found = ours.score(text, context=context)
    assert found.tokens["nats"].tolist() == pytest.approx(expected, abs=1e-4)


def test_generation_stands_after_bos(llama):
    theirs, fast, ours = llama
    for prompt in ("", "He ate the c"):
        ids = torch.tensor([fast(prompt)["input_ids"]])
        written = theirs.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        expected = fast.decode(written, skip_special_tokens=True)
        assert ours.generate(prompt, max_new_tokens=8, temperature=0) == expected


# ---- perplexity


@every
@pytest.mark.parametrize("mode", ["blockwise", "autoregressive"])
def test_perplexity_divides_by_the_bytes_of_the_text(kind, mode, tmp_path):
    tokenizer, file = KINDS[kind](), tmp_path / "tokenizer.json"
    file.write_text(tokenizer.json_text)
    texts = [f"{TEXT} {'cat ' * k}the." for k in range(20)]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    name = str(tmp_path / "val.jsonl")
    (tmp_path / "train.txt").write_text("the cat ate")
    data = LocalText(
        data_files=str(tmp_path / "train.txt"),
        val_files=name,
        tokenizer=str(file),
        val_fraction=0,
        test_fraction=0,
        block_size=16,
        batch_size=4,
        cache_dir=str(tmp_path / "cache"),
    )
    data.prepare_data()
    data.setup("validate")
    model = loaded(data.tokenizer, block_size=16).model
    recipe = {"model": model.recipe(), "data": data.recipe()}
    content = {"recipe": recipe, "state_dict": model.state_dict()}
    checkpoint = Checkpoint(tmp_path / "none.ckpt", content)
    result = measure_perplexity(checkpoint, model, data, mode=mode, positions=None)
    assert result["bytes"] == sum(len(text.encode()) for text in texts)
    assert result["text_changes"] == tokenizer.text_changes
    shown = perplexity_table(result)
    assert ("bytes are of the source" in shown) == (tokenizer.text_changes is not None)
    nats = result["nats_per_token"] * result["tokens"]
    assert result["bits_per_byte"] == pytest.approx(
        nats / 0.6931471805599453 / result["bytes"], rel=1e-9
    )


def test_writing_stops_at_each_end():
    lm = loaded(byte_level())
    options = {"max_new_tokens": 20, "temperature": 0}
    (free,) = lm.model.generate_ids([[1]], tokenizer=lm.tokenizer, **options)
    second = next(i for i in free if i != free[0])
    lm.tokenizer.stop_ids = (lm.tokenizer.eos_id, second)
    (ended,) = lm.model.generate_ids([[1]], tokenizer=lm.tokenizer, **options)
    assert ended == free[: free.index(second) + 1]


# ---- results


@pytest.fixture
def lossy(tmp_path, train_checkpoint, text_file):
    """A checkpoint with a tokenizer that loses case and spaces."""
    file = tmp_path / "word_pieces.json"
    file.write_text(word_piece().json_text)
    options = {"block_size": 16, "batch_size": 4, "cache_dir": str(tmp_path / "cache")}
    data = LocalText(data_files=str(text_file), val_fraction=0.2, tokenizer=str(file), **options)
    return train_checkpoint(tmp_path / "lossy.ckpt", data)


def test_compare_says_that_a_tokenizer_changes_texts(lossy, checkpoint_path):
    notes = compare_runs([f"lossy={lossy}", f"plain={checkpoint_path}"]).report.notes
    (note,) = [note for note in notes if "cannot restore" in note]
    assert note.startswith("lossy: the tokenizer cannot restore leading spaces, case, spaces")


def test_what_a_tokenizer_loses_is_in_every_result(lossy, evaluates):
    printed = evaluates("perplexity", "--ckpt", lossy)
    assert "the tokenizer cannot restore leading spaces, case, spaces" in printed
    (changes,) = compare_runs([str(lossy)]).runs["text_changes"]
    assert changes.startswith("cannot restore leading spaces, case, spaces")


# ---- answers


@pytest.mark.parametrize("kind", ["sentencepiece", "word pieces", "byte level, BOS"])
def test_answers_are_ranked_as_the_data_store_them(kind, tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.write_text(KINDS[kind]().json_text)
    sizes = {"train_stories": 6, "val_stories": 4, "test_stories": 6, "test_hops": [3]}
    sizes["loss_on"] = "all"
    data = Kinship(
        tokenizer=str(file), block_size=2048, batch_size=2, cache_dir=str(tmp_path), **sizes
    )
    data.prepare_data()
    data.setup()
    source, seen = data.evaluation_source("test"), []
    questions = [q for n in range(len(source)) for q in questions_in(source.batch(n))]
    golds = [answer for _, answer in data.questions("test")]
    drawn = draw_targets(source, batches=len(source), positions=None, seed=0)
    texts = [text for pair in data.questions("test") for text in pair]
    assert drawn.num_bytes.sum() == sum(len(text.encode()) for text in texts)
    start = data.tokenizer.start_id
    assert all(question.query[0] == start for question in questions)

    def score_batch(model, batch, precision):
        seen.append(batch)
        count = (batch["targets"] >= 0).sum(dim=1)
        return Scores(torch.zeros(batch["targets"].shape), torch.zeros(len(count)), count, "exact")

    monkeypatch.setattr("evaluation.reason.asking.score_batch", score_batch)
    candidates = data.candidates()
    rank(None, data, questions, "32", SimpleNamespace(recording=nullcontext, watch=iter))
    num_bytes = torch.cat([batch["num_bytes"] for batch in seen]).tolist()
    assert num_bytes == [len(text.encode()) for text in candidates] * len(questions)
    stored = data.tokenizer.measure_continuations(candidates)
    by_text = {text: ids.tolist() for text, (ids, _) in zip(candidates, stored, strict=True)}
    model = SimpleNamespace()
    for question, gold in zip(questions, golds, strict=True):
        assert question.answer == by_text[gold]
        written = [*question.answer, data.tokenizer.eos_id]
        assert judge(model, data, question, written).right
        if kind != "word pieces":
            assert judge(model, data, question, written).text == gold
