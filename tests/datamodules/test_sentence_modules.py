"""`Sentences` and `SentenceWindows` as data modules: arguments, order, command line."""

import re

import pytest
import torch
from tokenizer_files import begun, byte_level

from datamodules import LocalText, Sentences, SentenceWindows
from datamodules.tokenizers import load_tokenizer
from training import LatentCLI


def test_sizes_are_known_without_preparing(stories, tmp_path):
    inner = LocalText(data_files=str(stories), tokenizer="gpt2", cache_dir=str(tmp_path))
    data = Sentences(corpus=inner)
    assert (data.vocab_size, data.block_size) == (50260, 67)
    assert Sentences(corpus=inner, max_sentence_tokens=32).block_size == 35
    assert (data.batch_size, data.eval_batch_size, data.batch_tokens) == (64, 64, 8192)


def test_a_checkpoint_with_other_special_tokens_of_the_inner_corpus_is_refused(stories, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    begun(byte_level("<s>", "</s>"), "<s>").save(str(folder / "tokenizer.json"))
    inner = LocalText(data_files=str(stories), tokenizer=str(folder), cache_dir=str(tmp_path))
    data = Sentences(corpus=inner)
    data.prepare_data()
    state = data.state_dict()
    data.load_state_dict(state)
    for part in (state["tokenizer"]["inner"], state["corpus"]["tokenizer"]):
        part.pop("special")  # as versions wrote it that knew no BOS
    expected = (
        r"has BOS '<s>' \(256\), .* was trained with no BOS, .*--data\.corpus\.tokenizer (\S+)"
    )
    with pytest.raises(ValueError, match=expected) as refused:
        data.load_state_dict(state)
    cure = re.search(expected, str(refused.value))[1]
    assert load_tokenizer(cure).text_bos_id is None


def test_the_order_has_all_that_decides_a_batch(stories):
    sizes = {"batch_tokens": 99, "batch_size": 3, "max_sentences": 4, "seed": 2}
    growth = {"curriculum_step": 5, "curriculum_epochs": 6, "curriculum_limit": None}
    data = Sentences(corpus=LocalText(data_files=str(stories)), num_workers=1, **sizes, **growth)
    assert data.order() == sizes | growth


def test_a_split_that_is_too_small_is_told_at_once(sentences):
    data = sentences(batch_tokens=64)
    assert len(data.training_source()) > 100
    (path,) = data.store_dir.parent.parent.glob("stories.jsonl")
    path.write_text('{"text": "One. Two."}\n' * 3)
    inner = LocalText(data_files=str(path), cache_dir=str(data.cache_dir))
    tiny = Sentences(corpus=inner, max_sentence_tokens=1, batch_tokens=1, splitter="spans:1")
    tiny.prepare_data()
    with pytest.raises(ValueError, match="batch_tokens, batch_size: an epoch has 11 batches"):
        tiny.training_source()


# Windows


def test_windows_of_marked_text_report_words(sentences):
    data = sentences(kind=SentenceWindows, block_size=48, batch_size=4)
    tokenizer = data.tokenizer
    special = torch.tensor(tokenizer.special_ids)
    words = markers = 0
    for batch in data.val_dataloader():
        targets = batch["targets"]
        marked = torch.isin(targets, special)
        assert (batch["lexical"] == (targets >= 0) & ~marked).all()
        words, markers = words + int(batch["lexical"].sum()), markers + int(marked.sum())
    flat = data.corpus.counts("val")
    assert words == flat.tokens - flat.documents
    assert words + markers == data.counts("val").tokens
    assert "lexical" not in next(iter(data.train_dataloader()))
    first = next(iter(data.val_dataloader()))["tokens"][0]
    assert first[:2].tolist() == [tokenizer.eos_id, tokenizer.bos_id]
    assert sentences(kind=SentenceWindows, report="all").report == "all"


def test_prompts_of_windows_begin_as_documents_do(sentences):
    data = sentences(kind=SentenceWindows, block_size=48)
    ids = data.tokenizer.prompt_ids("He ran. It")
    batch = data.prompt_source(["He ran. It", ""]).batch(0)
    assert batch["tokens"][0].tolist() == ids[:-1]
    assert batch["targets"][0].tolist() == ids[1:]
    assert batch["tokens"][1, 0] == data.tokenizer.bos_id
    assert (batch["targets"][1] < 0).all()


# The command line

MODEL = ["--model.config.num_layers=2", "--model.config.dim=16", "--model.config.num_heads=2"]


def build(*arguments: str) -> LatentCLI:
    quiet = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    return LatentCLI([*MODEL, *quiet, *arguments], run=False)


def test_a_corpus_on_the_command_line(stories, tmp_path):
    cli = build(
        "--model=lightning_models.ThoughtGestaltLM",
        "--model.config.sentence_layer=1",
        "--data=datamodules.Sentences",
        "--data.corpus=datamodules.LocalText",
        f"--data.corpus.data_files={stories}",
        f"--data.corpus.cache_dir={tmp_path}",
        "--data.splitter=spans:9",
        "--data.max_sentence_tokens=13",
    )
    data = cli.datamodule
    inner = LocalText(data_files=str(stories), cache_dir=str(tmp_path))
    assert type(data) is Sentences
    assert data.corpus.fingerprint == inner.fingerprint
    assert data.recipe()["init_args"]["corpus"] == inner.recipe()
    assert dict(data.hparams)["corpus"] == inner.recipe()
    assert (cli.model.config.vocab_size, cli.model.config.block_size) == (260, 16)


def test_what_is_the_inner_corpus_cannot_be_given_twice(stories):
    arguments = ["--data=datamodules.Sentences", "--data.corpus=datamodules.LocalText"]
    for key in ("tokenizer=bytes", "cache_dir=x", "val_fraction=0.1", "num_proc=1"):
        with pytest.raises((SystemExit, Exception), match=key.partition("=")[0]):
            build(*arguments, f"--data.corpus.data_files={stories}", f"--data.{key}")
