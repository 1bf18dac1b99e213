"""Scoring other data than those of the training."""

import shutil
from types import SimpleNamespace

import datasets
import pytest
from jsonargparse import Namespace

from datamodules import HubText, LocalText, Store
from datamodules.tokenizers import tokenizer_from_state
from evaluation.arguments import data_recipe
from evaluation.cli import main
from lightning_models.checkpoint import read_checkpoint

TEXT = "A thought reads the memory and writes a token.\n\nUnseen words: zebra, quartz, 42!\n\n"


@pytest.fixture
def other_file(tmp_path):
    path = tmp_path / "other.txt"
    path.write_text(TEXT * 20)
    return path


@pytest.fixture
def score(reports):
    """Scores the training split of a text file under ``--data``."""

    def run(checkpoint, file, *options):
        data = ("--data", "datamodules.LocalText", "--data.data_files", file)
        everything = ("--data.val_fraction", 0, "--data.test_fraction", 0, "--split", "train")
        return reports("perplexity", "--ckpt", checkpoint, *data, *everything, *options)[0]

    return run


def test_what_is_not_typed_comes_from_the_checkpoint(score, checkpoint_path, other_file, corpus):
    result = score(checkpoint_path, other_file)
    arguments = result["data"]["recipe"]["init_args"]
    assert arguments["data_files"] == str(other_file)
    assert arguments["tokenizer"] == "bytes"
    assert arguments["block_size"] == 32
    assert arguments["batch_size"] == 4
    assert arguments["cache_dir"] == corpus["cache_dir"]
    assert result["bytes"] == len(TEXT * 20)
    assert result["data"]["fingerprint"] != result["data"]["trained_on"]


def test_options_alone_change_the_checkpoints_own_data(reports, checkpoint_path):
    data = reports("perplexity", "--ckpt", checkpoint_path, "--data.block_size", 8)[0]["data"]
    assert data["recipe"]["init_args"]["block_size"] == 8
    assert data["fingerprint"] == data["trained_on"]


def test_a_trained_tokenizer_is_not_trained_again(score, bpe_run, other_file):
    own = tokenizer_from_state(read_checkpoint(bpe_run).data_state["tokenizer"])
    result = score(bpe_run, other_file)
    documents = [TEXT * 20]
    assert result["tokens"] == sum(len(own.encode(text)) + 1 for text in documents)
    assert result["bytes"] == len(TEXT * 20)


def test_own_data_keep_their_store(evaluates, bpe_run, tmp_path):
    before = sorted(path.name for path in (tmp_path / "cache").glob("local_text*"))
    evaluates("perplexity", "--ckpt", bpe_run)
    assert sorted(path.name for path in (tmp_path / "cache").glob("local_text*")) == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--data.tokenizer", "bpe:257"],
            "tokenizer (bpe:257, 257 entries) is not the checkpoint's (bytes, 257 entries)",
        ),
        (
            ["--data.tokenizer", "bpe:300", "--data.cache_dir", "untouched"],
            "(bpe:300) has 300 entries, the checkpoint's model has a vocabulary of 257",
        ),
        (
            ["--data.block_size", "33", "--data.cache_dir", "untouched"],
            "block_size (33) of the data is longer than the 32 positions",
        ),
        (["--data.blocksize", "3"], "blocksize"),
        (["--data.val_fraction", "0"], "val split is empty"),
    ],
)
def test_data_that_do_not_fit_are_named(
    fails, checkpoint_path, tmp_path, monkeypatch, options, expected
):
    monkeypatch.chdir(tmp_path)
    assert expected in fails("perplexity", "--ckpt", checkpoint_path, *options)
    assert not (tmp_path / "untouched").exists()


def test_sentences_are_no_windows(fails, checkpoint_path, other_file, tmp_path):
    cache = tmp_path / "untouched"
    words = ["--data", "datamodules.Sentences", "--data.corpus", "datamodules.LocalText"]
    words += ["--data.corpus.data_files", other_file, "--data.corpus.cache_dir", cache]
    line = fails("perplexity", "--ckpt", checkpoint_path, *words)
    assert "data (Sentences) are sentences, and TransformerLM reads windows" in line
    assert not cache.exists()


def test_a_checkpoint_without_data_asks_for_them(fails, edited, score, other_file, tmp_path):
    path = edited(lambda content: content["recipe"].update(data=None))
    assert "trained without a datamodule; name the data with --data" in fails(
        "perplexity", "--ckpt", path
    )
    options = ("--data.block_size", "32", "--data.cache_dir", tmp_path / "cache")
    assert score(path, other_file, *options)["bytes"] == len(TEXT * 20)


@pytest.mark.parametrize("own_class", [True, False])
def test_files_to_score_are_enough(
    reports, edited, checkpoint_path, other_file, tmp_path, own_class
):
    """The training's text is not prepared again for them, whatever the training read."""
    cache = tmp_path / "files_alone"
    words = ["--data.test_files", other_file, "--split", "test", "--data.cache_dir", cache]
    if not own_class:
        recipe = {"class_path": "datamodules.PythonDocs", "init_args": {"block_size": 32}}
        checkpoint_path = edited(lambda content: content["recipe"].update(data=recipe))
        words = ["--data", "datamodules.LocalText", *words]
    result, _ = reports("perplexity", "--ckpt", checkpoint_path, *words)
    assert result["bytes"] == len(TEXT * 20)
    assert result["data"]["recipe"]["init_args"]["data_files"] is None
    (store,) = cache.glob("local_text*")
    counts = {split: Store(store).counts(split).documents for split in ("train", "val", "test")}
    assert counts == {"train": 0, "val": 0, "test": 1}


def test_the_data_may_be_rebuilt_in_another_place(score, checkpoint_path, other_file, tmp_path):
    here = score(checkpoint_path, other_file)
    there = score(checkpoint_path, other_file, "--data.cache_dir", tmp_path / "elsewhere")
    assert there["nats_per_token"] == here["nats_per_token"]
    assert LocalText(data_files=str(other_file)).vocab_size == 257


def test_a_dataset_made_in_python_is_scored_from_its_store_or_asked_for(
    reports, capsys, train_checkpoint, tmp_path
):
    """Where the store is gone, in one line that names --data."""
    rows = [{"text": f"{TEXT} {number}"} for number in range(60)]
    data = HubText(
        dataset=datasets.Dataset.from_list(rows),
        cache_dir=str(tmp_path / "cache"),
        val_fraction=0.2,
        block_size=32,
        batch_size=4,
    )
    checkpoint = train_checkpoint(tmp_path / "made.ckpt", data)
    result, _ = reports("perplexity", "--ckpt", checkpoint, "--split", "val")
    assert result["bytes"] == data.counts("val").utf8_bytes
    shutil.rmtree(data.store_dir)
    assert main(["perplexity", "--ckpt", str(checkpoint), "--split", "train"]) == 2
    assert "--data" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("words", [["--data", "null"], ["--data=null"]])
def test_null_is_the_checkpoints_own_data(reports, checkpoint_path, words):
    data = reports("perplexity", "--ckpt", checkpoint_path, *words)[0]["data"]
    assert data["fingerprint"] == data["trained_on"]


def test_null_names_no_data_where_there_are_none():
    settings = Namespace(data=["--data=null"], split="val", batch_size=None)
    assert data_recipe(settings, SimpleNamespace(data_recipe=None)) is None


def test_an_option_without_a_value_takes_no_other_option(checkpoint_path, capsys):
    words = ["--data.block_size", "--split", "test"]
    assert main(["perplexity", "--ckpt", str(checkpoint_path), *words]) == 2
    assert "--data" in capsys.readouterr().err.splitlines()[-1]
