"""``evaluate.py quality`` from a checkpoint to its numbers, with tiny models as judges."""

import json
import sys

import pytest
import torch

from datamodules.tokenizers import BytesTokenizer
from evaluation.load import Pretrained
from evaluation.quality.measures import Judge, token_entropy
from evaluation.quality.texts import QualityConfig, documents

RESULTS = ("compare", "--view", "results")

CPU = torch.device("cpu")
SHORT = ("--prompt_tokens", "8", "--new_tokens", "12", "--prompts", "12", "--continuations", "2")
FEW = ("--samples", "5", "--sample_tokens", "32")


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
    judged = Judge(Pretrained(str(tiny_gpt2[2]), CPU)).score(texts, 2)
    perplexity = judged.totals.perplexity
    assert result["multinomial_generative_perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["multinomial_token_entropy"] == pytest.approx(token_entropy(tokens))
    details = result["unconditional"]["multinomial"]
    assert details["texts"] == details["distinct_texts"] == 5
    assert details["judged_tokens"] == judged.totals.tokens
    assert result["multinomial_samples_per_second"] == 5 / details["seconds"]
    assert result["conditional"] == {}
    assert result["seconds"] == details["seconds"]
    assert (result["executed_steps"], result["flops_per_token_6nd"] > 0) == (0, True)
    assert result["data"] is None
    assert "continuations" not in printed
    assert f"{perplexity:.5g}" in printed
    settings = result["settings"]
    assert settings["judge"] == str(tiny_gpt2[2])
    assert {"batch_size", "device", "precision", "seed", "trained_on"} <= settings.keys()
    assert not {"featurizer", "prompts", "top_p", "mauve_text"} & settings.keys()


def test_both_modes_and_three_ways_of_sampling(quality, corpus, evaluates, tmp_path):
    pytest.importorskip("mauve")
    ways = ["greedy", "multinomial", "nucleus"]
    result, lines, printed = quality("--sampling", *ways, "--mauve_seeds", "2", "--batch_size", "7")
    assert list(result["conditional"]) == list(result["unconditional"]) == ways
    assert len(lines) == 3 * (12 * 2 + 5)
    for way in ways:
        details = result["conditional"][way]
        assert (details["texts"], details["human_texts"]) == (24, 12)
        assert sum(details["mauve_by_seed"]) / 2 == pytest.approx(result[f"{way}_mauve"])
        assert 0 < result[f"{way}_mauve"] <= 1
    assert result["unconditional"]["greedy"]["distinct_texts"] == 1
    assert result["conditional"]["multinomial"]["distinct_texts"] == 24
    assert result["settings"]["top_p"] == 0.95
    assert result["data"]["split"] == "val"
    assert result["data"]["fingerprint"] == result["settings"]["trained_on"]
    pairs = [line for line in lines if line["mode"] == "conditional"][:24]
    assert [line["prompt"] for line in pairs[::2]] == [line["prompt"] for line in pairs[1::2]]
    assert all(way in printed for way in ways)
    columns = evaluates(*RESULTS, tmp_path / "quality.json").splitlines()[0]
    assert "greedy mauve" in columns
    assert "nucleus generative perplexity" in columns


def test_other_batches_give_the_same_result(quality):
    options = ("--mode", "unconditional", "--sampling", "multinomial", "greedy")
    first, lines, _ = quality(*options)
    second, again, _ = quality(*options, "--batch_size", "3", "--judge_batch_size", "2")
    assert again == lines
    for key in ("multinomial_generative_perplexity", "greedy_token_entropy"):
        assert second[key] == pytest.approx(first[key], rel=1e-5)
    _, other, _ = quality(*options, "--seed", "1")
    assert other[0]["tokens"] != lines[0]["tokens"]


def test_nothing_but_a_tokenizer_is_needed_for_samples(quality, fails, edited, tiny_gpt2):
    path = edited(lambda content: content["recipe"].update(data=None))
    options = ("--mode", "unconditional", "--sampling", "greedy")
    line = fails("quality", "--ckpt", path, *options, *FEW)
    assert "names no tokenizer; name one with --tokenizer" in line
    result, _, _ = quality(*options, "--tokenizer", "bytes", checkpoint=path)
    assert result["settings"]["tokenizer"] == "bytes"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "prompt of 50 do not fit the model's context of 32 tokens; shorten the prompt"),
        (
            [*SHORT],
            "sample_tokens (1024) after a prompt of 1 do not fit the model's context of 32",
        ),
        (["--mode", "unconditional"], "pass --sample_tokens 32 or less"),
        (["--sampling", "beam"], "sampling"),
        (["--mode", "some"], "mode"),
        (["--samples", "0"], "samples (0) must be at least 1"),
        (["--top_p", "0"], "top_p (0.0) must be in (0, 1]"),
        (["--prompts", "1", "--continuations", "5"], "MAUVE compares distributions"),
        (
            [*SHORT, *FEW, "--tokenizer", "bytes"],
            "tokenizer (bytes): prompts have that of the data",
        ),
        (["--texts", "nowhere/a.jsonl"], "texts (nowhere/a.jsonl): the folder nowhere does not"),
        ([*FEW, "--mode", "unconditional", "--judge", "none"], "judge (none): no tokenizer found"),
    ],
)
def test_bad_options_are_named(fails, checkpoint_path, options, expected):
    assert expected in fails("quality", "--ckpt", checkpoint_path, *options)


def test_what_is_not_used_is_not_checked():
    idle = {"prompts": 0, "continuations": 0, "mauve_seeds": 0}
    assert QualityConfig(mode="unconditional", **idle).prompts == 0
    assert QualityConfig(mode="conditional", samples=0).samples == 0
    with pytest.raises(ValueError, match=r"prompts \(0\) must be at least 1"):
        QualityConfig(**idle)


def test_questions_are_no_text_to_continue(fails, checkpoint_path, tmp_path):
    data = ("--data", "datamodules.Kinship", "--data.cache_dir", tmp_path / "cache")
    line = fails("quality", "--ckpt", checkpoint_path, *SHORT, "--mode", "conditional", *data)
    assert "data (Kinship) have no running text to continue" in line
    assert not (tmp_path / "cache").exists()


def test_results_and_texts_are_two_files(fails, checkpoint_path, tmp_path):
    files = ("--output", tmp_path / "a.json", "--texts", tmp_path / "x" / ".." / "a.json")
    (tmp_path / "x").mkdir()
    line = fails("quality", "--ckpt", checkpoint_path, "--mode", "unconditional", *files)
    assert "output and texts" in line
    assert "are one file" in line


def test_texts_that_are_judged_in_part_are_told(quality, save_gpt2):
    _, _, folder = save_gpt2(positions=8)
    options = ("--mode", "unconditional", "--sampling", "multinomial")
    result, _, printed = quality(*options, "--judge", folder)
    assert result["unconditional"]["multinomial"]["cut_texts"] == 5
    assert "cut multinomial texts  5 of 5, to the judge's context" in printed
    assert "cut multinomial" not in quality(*options, "--sample_tokens", 8)[2]


def test_too_few_windows_are_named(fails, checkpoint_path, tiny_gpt2):
    pytest.importorskip("mauve")
    options = (*SHORT, "--mode", "conditional", "--featurizer", tiny_gpt2[2], "--prompts", "9999")
    line = fails("quality", "--ckpt", checkpoint_path, *options)
    assert "prompts (9999): there are only" in line
    assert "full windows in the val split; ask for fewer" in line


def test_a_missing_library_is_named(fails, checkpoint_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mauve", None)
    line = fails("quality", "--ckpt", checkpoint_path, *SHORT, "--mode", "conditional")
    assert "MAUVE needs the package mauve-text" in line
    assert "pip install -e '.[quality]'" in line
