"""``evaluate.py zero_shot``: a row a set, the numbers of perplexity, and one line for bad input."""

import json
import math
import re

import pytest

from datamodules import LocalText, SentenceWindows
from datamodules.zero_shot import ZERO_SHOT_SETS

SENTENCES = ["the state reads n't the memory", "a token 's thought , and N forks ( latent ) ."]
FILES = {
    "ptb": "one.txt",
    "wikitext": "two.txt",
    "lm1b": "three.txt",
    "lambada": "four.jsonl",
    "ag_news": "five.json",
    "pubmed": "six.jsonl",
    "arxiv": "seven.txt",
}


@pytest.fixture
def files(tmp_path):
    """Writes a small file of each set; returns the options that name them."""
    options = {}
    for name, file in FILES.items():
        path = tmp_path / file
        field = ZERO_SHOT_SETS[name].text_field
        rows = [f"{name} {text}" for text in SENTENCES * 6]
        lines = rows if path.suffix == ".txt" else [json.dumps({field: row}) for row in rows]
        path.write_text("\n".join(lines) + "\n")
        options[name] = (f"--files.{name}", path)
    return options


@pytest.fixture
def score(reports):
    """Scores sets; returns what was printed and the result."""
    return lambda checkpoint, *options: reports("zero_shot", "--ckpt", checkpoint, *options)[::-1]


def test_all_sets_are_scored_by_default(score, checkpoint_path, files):
    named = [word for pair in files.values() for word in pair]
    printed, result = score(checkpoint_path, *named)
    header, *rows = printed.split("\n\n")[0].splitlines()
    titles = ["set", "perplexity", "bits per byte", "tokens", "batches", "of"]
    assert re.split("  +", header) == titles
    assert [row.split()[0] for row in rows] == list(ZERO_SHOT_SETS)
    assert list(result["sets"]) == list(ZERO_SHOT_SETS)
    for row, (name, own) in zip(rows, result["sets"].items(), strict=True):
        assert own["perplexity"] == pytest.approx(math.exp(own["nats_per_token"]))
        assert result[f"{name}_perplexity"] == own["perplexity"]
        assert row.split()[1] == f"{own['perplexity']:.2f}"
        assert own["data"]["recipe"]["init_args"]["block_size"] == 32
        assert own["settings"]["batches"] == own["settings"]["of_batches"]
    assert result["likelihood"] == "exact"
    assert re.search("likelihood +exact", printed)
    sets = result["sets"].values()
    assert result["flops_per_token"] == pytest.approx(next(iter(sets))["flops_per_token"])
    assert result["executed_steps"] == 0
    assert result["seconds"] == pytest.approx(sum(own["seconds"] for own in sets))
    assert "6 N (1 + steps)" in printed


def test_the_numbers_are_those_of_perplexity(score, reports, checkpoint_path, files):
    _, result = score(checkpoint_path, "--sets", "lm1b", *files["lm1b"])
    assert score(checkpoint_path, "--sets", "lm1b", *files["lm1b"])[1] == result  # seconds, too
    data = ("--data", "datamodules.ZeroShotText", "--data.set_name", "lm1b")
    named = ("--data.data_files", files["lm1b"][1])
    same, _ = reports("perplexity", "--ckpt", checkpoint_path, *data, *named)
    own = result["sets"]["lm1b"]
    for key in ("nats_per_token", "bits_per_byte", "tokens", "bytes", "likelihood"):
        assert own[key] == same[key]
    texts = [f"lm1b {SENTENCES[0]}", "lm1b a token's thought, and N forks (latent) ."]
    assert own["bytes"] == 6 * sum(map(len, texts))
    assert own["tokens"] == own["bytes"] + 12  # an EOS a document
    assert own["data"]["fingerprint"] == same["data"]["fingerprint"]


def test_blocks_batches_and_their_number_can_be_set(score, checkpoint_path, files):
    options = ("--sets", "ptb, ptb", "--block_size", 8, "--batch_size", 2, "--limit_batches", 3)
    printed, result = score(checkpoint_path, *options, *files["ptb"])
    own = result["sets"]["ptb"]
    assert own["tokens"] == 3 * 2 * 8
    assert own["settings"]["batch_size"] == 2
    assert printed.splitlines()[1].split()[3:] == ["48", "3", str(own["settings"]["of_batches"])]


def test_patterns_and_lists_name_files(score, checkpoint_path, files, tmp_path):
    one, three = files["ptb"][1], files["lm1b"][1]
    _, single = score(checkpoint_path, "--sets", "lm1b", "--files.lm1b", one)
    _, both = score(checkpoint_path, "--sets", "lm1b", "--files.lm1b", f"[{one}, {three}]")
    _, globbed = score(checkpoint_path, "--sets", "lm1b", "--files.lm1b", tmp_path / "*e.txt")
    tokens = [r["sets"]["lm1b"]["tokens"] for r in (single, both, globbed)]
    assert tokens[0] < tokens[1] == tokens[2]


def test_a_model_of_marked_sentences_reads_the_sets_so(
    score, train_checkpoint, corpus, files, tmp_path
):
    inner = LocalText(data_files=corpus["data_files"], cache_dir=str(tmp_path / "cache"))
    data = SentenceWindows(corpus=inner, splitter="spans:7", block_size=32, batch_size=4)
    path = train_checkpoint(tmp_path / "marked.ckpt", data)
    printed, result = score(path, "--sets", "ptb", *files["ptb"])
    assert printed.splitlines()[1].startswith("ptb ")
    own = result["sets"]["ptb"]
    recipe = own["data"]["recipe"]
    assert recipe["class_path"] == "datamodules.SentenceWindows"
    assert recipe["init_args"]["corpus"]["class_path"] == "datamodules.ZeroShotText"
    assert own["counted"] == "lexical"


def test_field_and_cache_can_be_set(score, checkpoint_path, tmp_path):
    path, cache = tmp_path / "mine.jsonl", tmp_path / "elsewhere"
    path.write_text(json.dumps({"body": "the state reads", "text": "no"}) + "\n")
    options = ("--text_field", "body", "--cache_dir", cache)
    _, result = score(checkpoint_path, "--sets", "lm1b", "--files.lm1b", path, *options)
    own = result["sets"]["lm1b"]
    assert own["bytes"] == len("the state reads")
    assert own["data"]["recipe"]["init_args"]["text_field"] == "body"
    assert (cache / own["data"]["fingerprint"]).is_dir()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--sets", "ptb,wikitxt"], "sets (ptb,wikitxt)"),
        (["--sets", ","], "sets (,)"),
        (["--sets", "ptb", "--files.lm1b", "a.txt"], "files.lm1b"),
        (["--files.ptbb", "a.txt"], "files.ptbb"),
        (["--sets", "ptb", "--files.ptb", "none.txt"], "none.txt"),
        (["--text_field", "body"], "text_field (body)"),
        (["--sets", "ptb", "--block_size", "64"], "block_size to 32"),
        (["--sets", "ptb", "--block_size", "0"], "--block_size: "),
    ],
)
def test_bad_input_is_one_line(fails, checkpoint_path, options, named):
    assert named in fails("zero_shot", "--ckpt", checkpoint_path, *options)


def test_a_set_that_cannot_be_fetched_names_the_cure_before_anything_is_scored(
    fails, checkpoint_path, files, monkeypatch, tmp_path
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("evaluation.zero_shot.score_checkpoint", None)
    line = fails("zero_shot", "--ckpt", checkpoint_path, "--sets", "ptb,arxiv", *files["ptb"])
    assert "ZeroShotText (arxiv): ccdv/arxiv-summarization" in line
    assert "Pass your copy with --files.arxiv" in line


def test_a_checkpoint_without_data_says_how_to_go_on(fails, edited):
    path = edited(lambda content: content["recipe"].update(data=None))
    line = fails("zero_shot", "--ckpt", path, "--sets", "ptb")
    assert "names no tokenizer; score one set at a time with evaluate.py perplexity" in line
