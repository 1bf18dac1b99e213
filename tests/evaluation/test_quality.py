"""``evaluate.py quality``: prompts, texts, their judges, and the numbers that come of them."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datamodules import Kinship, LocalText
from datamodules.tokenizers import BytesTokenizer
from evaluation.load import build_model, build_tokenizer
from evaluation.pretrained import Pretrained
from evaluation.quality import (
    QualityConfig,
    check_room,
    documents,
    human_texts,
    judge_texts,
    mauve_scores,
    text_features,
    token_entropy,
    write_texts,
)
from lightning_models import OptimizerConfig, ThoughtGestaltLM
from lightning_models.checkpoint import read_checkpoint
from lightning_models.thought_gestalt import ThoughtGestaltConfig

CPU = torch.device("cpu")
SHORT = ("--prompt_tokens", "8", "--new_tokens", "12", "--prompts", "12", "--continuations", "2")
FEW = ("--samples", "5", "--sample_tokens", "32")
PROMPTS = [[256], [256, 116, 104], [97, 98], [256], [256], [97, 98], [256]]


def prepared(data):
    data.prepare_data()
    data.setup("validate")
    return data


# ---- prompts


@pytest.mark.parametrize("split", ["val", "train"])
def test_human_texts_begin_windows_spread_over_the_split(corpus, split):
    data = prepared(LocalText(**corpus))
    source = data.evaluation_source(split)
    windows = torch.cat([source.batch(n)["tokens"] for n in range(len(source))])
    full = len(data.stream(split)) // 32
    for count in (1, 7, full):
        texts = human_texts(data, split, count=count, length=20)
        assert texts == [windows[number * full // count, :20].tolist() for number in range(count)]
    assert texts[0][0] == data.tokenizer.eos_id
    with pytest.raises(ValueError, match=rf"prompts \({full + 1}\): there are only {full} full"):
        human_texts(data, split, count=full + 1, length=20)


def test_human_texts_of_sentence_data_begin_documents(make_sentences):
    data = prepared(make_sentences())
    stream, bos = data.stream("train"), data.tokenizer.bos_id
    ends = stream.document_ends.tolist()
    tokens = stream.gather(np.arange(len(stream))).tolist()
    whole = [tokens[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    starts = [[i for i in ids if i != bos][:40] for ids in whole if len(ids) >= 60]
    assert human_texts(data, "train", count=len(starts), length=40) == starts
    assert human_texts(data, "train", count=2, length=40) == [starts[0], starts[len(starts) // 2]]
    with pytest.raises(ValueError, match="long enough documents in the train split"):
        human_texts(data, "train", count=len(starts) + 1, length=40)


def test_what_has_no_running_text_is_refused(corpus):
    data = prepared(LocalText(**corpus))
    with pytest.raises(ValueError, match=r"\(40\) exceed the window of the data \(32\)"):
        human_texts(data, "val", count=1, length=40)
    other = SimpleNamespace(stream=data.stream, tokenizer=data.tokenizer)
    for unsuited in (other, Kinship(cache_dir=corpus["cache_dir"])):
        with pytest.raises(ValueError, match="have no running text to continue"):
            human_texts(unsuited, "val", count=1, length=4)


def test_texts_are_cut_where_documents_end():
    tokenizer = BytesTokenizer()
    assert documents([97, 98, 256, 99], tokenizer) == ["ab", "c"]
    assert documents([256, 97, 256, 256], tokenizer) == ["", "a", "", ""]
    assert documents([], tokenizer) == [""]


# ---- what is written


@pytest.fixture
def author(checkpoint_path):
    checkpoint = read_checkpoint(checkpoint_path)
    model, tokenizer = build_model(checkpoint), build_tokenizer(checkpoint)

    def write(way="multinomial", prompts=PROMPTS, **options):
        config = QualityConfig(**options)
        texts = write_texts(model, tokenizer, prompts, new_tokens=6, way=way, config=config)
        assert texts.prompts == prompts
        assert texts.as_dict()["texts_per_second"] == len(prompts) / texts.seconds
        return texts

    return write


@pytest.mark.parametrize("way", ["greedy", "multinomial", "nucleus"])
def test_batches_change_nothing(author, way):
    expected = author(way).new
    for batch_size in (1, 3, 100):
        assert author(way, batch_size=batch_size).new == expected


def test_equal_prompts_have_streams_of_their_own(author):
    nine = {"prompts": [[256]] * 9, "batch_size": 4}
    written = author(**nine)
    assert written.as_dict()["distinct_texts"] == len({tuple(new) for new in written.new}) == 9
    assert author(**nine, seed=1).new != written.new
    # the stream is that of the number, whatever stands before it
    assert author(prompts=[[97, 98], *[[256]] * 8]).new[1:] == written.new[1:]
    assert author("greedy", **nine).as_dict()["distinct_texts"] == 1


def test_every_row_hands_its_stream_to_the_model(author, monkeypatch):
    """Models that draw latent vectors draw them from it, in greedy decoding too."""
    from lightning_models import TransformerLM

    seen = []
    init_cache = TransformerLM.init_cache

    def note(self, prompts, lengths, max_new_tokens, streams=()):
        seen.extend(streams)
        return init_cache(self, prompts, lengths, max_new_tokens, streams)

    monkeypatch.setattr(TransformerLM, "init_cache", note)
    author("greedy", batch_size=3, seed=5)
    assert seen == [(5, row) for row in range(len(PROMPTS))]


def test_the_end_of_a_document_ends_no_text():
    class Ending:
        device = CPU

        def init_cache(self, prompts, lengths, max_new_tokens, streams=()):
            return SimpleNamespace(select=lambda rows: None)

        def decode_step(self, cache, tokens):
            logits = torch.zeros(len(tokens), 300)
            logits[:, 256] = 5.0  # EOS
            logits[:, 280] = 9.0  # padding of the vocabulary
            return logits, torch.ones(len(tokens), dtype=torch.bool)

    options = {"new_tokens": 4, "way": "greedy", "config": QualityConfig()}
    assert write_texts(Ending(), BytesTokenizer(), [[256]] * 3, **options).new == [[256] * 4] * 3


def test_models_of_sentences_write_on_after_documents(make_sentences):
    data = prepared(make_sentences())
    sizes = {"num_layers": 2, "dim": 32, "num_heads": 2, "sentence_layer": 2}
    torch.manual_seed(0)
    model = ThoughtGestaltLM(
        ThoughtGestaltConfig(vocab_size=data.vocab_size, block_size=data.block_size, **sizes),
        OptimizerConfig(),
    )
    model.configure_model()
    texts = human_texts(data, "train", count=3, length=40)
    prompts = [text[:20] for text in texts] + [data.tokenizer.prompt_ids("")]
    assert prompts[-1] == [data.tokenizer.bos_id]
    check_room(model.eval(), data.tokenizer, QualityConfig(sample_tokens=10**6))  # memory forgets
    written = [
        write_texts(
            model,
            data.tokenizer,
            prompts,
            new_tokens=50,
            way="multinomial",
            config=QualityConfig(batch_size=batch_size),
        ).new
        for batch_size in (4, 1)
    ]
    assert [len(new) for new in written[0]] == [50] * 4
    assert data.tokenizer.eod_id in {token for new in written[0] for token in new}
    assert written[0] == written[1]


# ---- entropy, and MAUVE as its library computes it


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([[7, 7, 7, 7]], 0.0),
        ([[1, 2, 3, 4]], math.log(4)),
        ([[5, 5, 9]], -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3)),
        ([[7, 7], [1, 2], [3, 3]], math.log(2) / 3),  # averaged over samples, not pooled
    ],
)
def test_entropy_of_token_frequencies_in_nats(samples, expected):
    assert token_entropy(samples) == pytest.approx(expected, abs=1e-12)


def test_features_are_the_last_states_of_each_text(tiny_gpt2):
    pytest.importorskip("mauve")
    model, words, folder = tiny_gpt2
    featurizer = Pretrained(str(folder), CPU, head="none", key="featurizer")
    texts = [["the thought"], [], ["memory", "state and memory"], ["a"], ["latent " * 100]]
    expected = []
    for text in texts:
        ids = [*words.encode(text[0]), words.eos_id, *words.encode(text[1])] if text[1:] else None
        ids = (words.encode(text[0]) if ids is None else ids) if text else []
        if ids:
            with torch.no_grad():
                out = model(torch.tensor([ids[:64]]), output_hidden_states=True)
            expected.append(out.hidden_states[-1][0, -1])
    for batch_size in (1, 3):
        found = text_features(featurizer, texts, batch_size)
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="every text is empty"):
        text_features(featurizer, [[], []])


def test_mauve_is_that_of_the_library(tiny_gpt2):
    mauve = pytest.importorskip("mauve")
    _, _, folder = tiny_gpt2
    words = ("thought", "reads", "latent", "memory", "state", "writes")
    human = [f"the {a} {b}" for a in words for b in words]
    written = [f"{a} {a} {b}" for a in words for b in words]
    featurizer = Pretrained(str(folder), CPU, head="none", key="featurizer")
    sides = [text_features(featurizer, [[text] for text in side]) for side in (human, written)]
    found = mauve_scores(*sides)
    library = mauve.compute_mauve(
        p_text=human, q_text=written, featurize_model_name=str(folder), verbose=False
    )
    assert found[0] == pytest.approx(library.mauve, abs=1e-6)
    assert len(found) == 5
    assert 0 < found[0] < 1
    assert mauve_scores(sides[0], sides[0])[0] == pytest.approx(1.0, abs=1e-6)


# ---- judges, against one text at a time in float64

TEXTS = [
    ["the thought reads"],
    ["memory", "state and memory", "the end"],
    [],
    ["x"],
    ["latent state " * 40],
    ["", "after an empty document"],
]


def direct(model, words, text, *, start=(), context=64):
    """Nats and number of the scored tokens of one text."""
    ids = list(start)
    for number, document in enumerate(text):
        ids += [words.eos_id] if number else []
        ids += words.encode(document)
    ids = ids[:context]
    if len(ids) < 2:
        return 0.0, 0
    with torch.no_grad():
        log_probs = model.double()(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    nats = -sum(log_probs[place, token].item() for place, token in enumerate(ids[1:]))
    return nats, len(ids) - 1


@pytest.mark.parametrize("bos", [False, True])
def test_likelihoods_are_those_of_each_text_alone(save_gpt2, bos):
    model, words, folder = save_gpt2(bos)
    start = [words.eos_id] if bos else []  # never the EOS that this tokenizer puts after
    expected = [direct(model, words, text, start=start) for text in TEXTS]
    judge = Pretrained(str(folder), CPU, key="judge")
    for text, (nats, count) in zip(TEXTS, expected, strict=True):
        alone = judge_texts(judge, [text])
        assert alone["judged_tokens"] == count
        if count:
            assert alone["nats_per_token"] == pytest.approx(nats / count, rel=1e-5)
        else:
            assert math.isnan(alone["generative_perplexity"])
            assert math.isnan(alone["mean_of_perplexities"])
    nats, tokens = (sum(part) for part in zip(*expected, strict=True))
    each = [math.exp(nats / count) for nats, count in expected if count]
    for batch_size in (1, 2, 8):
        judged = judge_texts(judge, TEXTS, batch_size)
        assert (judged["judged_tokens"], judged["cut_texts"]) == (tokens, 1)
        assert judged["generative_perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
        assert judged["mean_of_perplexities"] == pytest.approx(sum(each) / len(each), rel=1e-4)


def test_a_model_without_a_head_is_no_judge(save_gpt2):
    _, _, folder = save_gpt2(base=True)
    lacks = r"judge \(.*\): 1 of .* weights are not in it \(lm_head.weight\); .* causal language"
    with pytest.raises(ValueError, match=lacks):
        Pretrained(str(folder), CPU, key="judge")
    assert Pretrained(str(folder), CPU, head="none").context == 64


def test_weights_that_are_missing_are_refused_without_a_head_too(save_gpt2):
    from safetensors.torch import load_file, save_file

    _, _, folder = save_gpt2()
    Pretrained(str(folder), CPU, head="none")  # the head of a whole model is not missed
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"featurizer \(.*\): 1 of .*h.1.mlp.c_fc.weight"):
        Pretrained(str(folder), CPU, head="none", key="featurizer")


# ---- the command


@pytest.fixture
def quality(checkpoint_path, evaluates, tiny_gpt2, tmp_path):
    """Runs the command; returns result, texts and what was printed."""
    folder = tiny_gpt2[2]

    def run(*options, checkpoint=checkpoint_path):
        target, texts = tmp_path / "quality.json", tmp_path / "texts.jsonl"
        files = ("--output", target, "--texts", texts)
        readers = ("--judge", folder, "--featurizer", folder)
        command = ("quality", "--ckpt", checkpoint, *SHORT, *FEW, *readers, *files, *options)
        printed = evaluates(*command)
        lines = [json.loads(line) for line in texts.read_text().splitlines()]
        return json.loads(target.read_text()), lines, printed

    return run


def test_samples_are_judged(quality, tiny_gpt2):
    result, lines, printed = quality("--mode", "unconditional", "--sampling", "multinomial")
    tokens = [line["tokens"] for line in lines]
    assert [len(ids) for ids in tokens] == [32] * 5
    assert {line["prompt"] for line in lines} == {""}
    texts = [documents(ids, BytesTokenizer()) for ids in tokens]
    judged = judge_texts(Pretrained(str(tiny_gpt2[2]), CPU), texts, 2)
    perplexity = judged["generative_perplexity"]
    assert result["multinomial_generative_perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["multinomial_token_entropy"] == pytest.approx(token_entropy(tokens))
    details = result["unconditional"]["multinomial"]
    assert details["texts"] == details["distinct_texts"] == 5
    assert details["judged_tokens"] == judged["judged_tokens"]
    assert result["multinomial_samples_per_second"] == 5 / details["seconds"]
    assert (result["conditional"], result["data"]) == ({}, None)
    assert result["seconds"] == details["seconds"]
    assert (result["executed_steps"], result["flops_per_token_6nd"] > 0) == (0, True)
    assert "continuations" not in printed
    assert f"{perplexity:.5g}" in printed
    settings = result["settings"]
    assert settings["judge"] == str(tiny_gpt2[2])
    assert {"batch_size", "device", "precision", "seed", "trained_on"} <= settings.keys()
    assert (settings["mode"], settings["featurizer"]) == ("unconditional", None)


def test_both_modes_and_three_ways_of_sampling(quality):
    pytest.importorskip("mauve")
    ways = ["greedy", "multinomial", "nucleus"]
    result, lines, printed = quality("--sampling", *ways, "--batch_size", "7")
    assert list(result["conditional"]) == list(result["unconditional"]) == ways
    assert len(lines) == 3 * (12 * 2 + 5)
    for way in ways:
        details = result["conditional"][way]
        assert (details["texts"], details["human_texts"]) == (24, 12)
        assert sum(details["mauve_by_seed"]) / 5 == pytest.approx(result[f"{way}_mauve"])
        assert 0 < result[f"{way}_mauve"] <= 1
    assert result["unconditional"]["greedy"]["distinct_texts"] == 1
    assert result["conditional"]["multinomial"]["distinct_texts"] == 24
    assert result["data"]["split"] == "val"
    assert result["data"]["fingerprint"] == result["settings"]["trained_on"]
    pairs = [line for line in lines if line["mode"] == "conditional"][:24]
    assert [line["prompt"] for line in pairs[::2]] == [line["prompt"] for line in pairs[1::2]]
    assert all(way in printed for way in ways)


def test_nothing_but_a_tokenizer_is_needed_for_samples(quality, fails, edited):
    path = edited(lambda content: content["recipe"].update(data=None))
    options = ("--mode", "unconditional", "--sampling", "greedy")
    line = fails("quality", "--ckpt", path, *options, *FEW)
    assert "names no tokenizer; name one with --tokenizer" in line
    result, _, _ = quality(*options, "--tokenizer", "bytes", checkpoint=path)
    assert result["settings"]["tokenizer"] == "bytes"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "prompt of length 50 does not fit the model's context of 32; shorten the prompt"),
        (
            ["--prompt_tokens", "30", "--new_tokens", "4"],
            "new_tokens (4) after a prompt of length 30 does not fit the model's context of 32; "
            "pass --new_tokens 3 or less",
        ),
        (
            [*SHORT],
            "sample_tokens (1024) after a prompt of length 1 does not fit the model's context",
        ),
        (["--mode", "unconditional"], "pass --sample_tokens 32 or less"),
        (["--sampling", "beam"], "sampling"),
        (["--samples", "0"], "--samples: "),
        (["--top_p", "0.9"], "top_p"),
        (["--seed", str(2**64)], f"seed ({2**64}) must be at most"),
        (["--prompts", "1", "--continuations", "5"], "prompts (1)"),
        (
            [*SHORT, *FEW, "--tokenizer", "bytes"],
            "tokenizer (bytes): prompts use the tokenizer of the data",
        ),
        ([*SHORT, *FEW, "--prompts", "9999"], "full windows in the val split; set fewer"),
        ([*FEW, "--mode", "unconditional", "--judge", "none"], "judge (none): no tokenizer found"),
    ],
)
def test_bad_options_are_named(fails, checkpoint_path, options, expected):
    assert expected in fails("quality", "--ckpt", checkpoint_path, *options)


def test_a_missing_library_is_named(fails, checkpoint_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mauve", None)
    line = fails("quality", "--ckpt", checkpoint_path, *SHORT, "--mode", "conditional")
    assert "MAUVE needs the package mauve-text" in line
    assert "pip install -e '.[quality]'" in line
