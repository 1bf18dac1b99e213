"""The line that `fit` prints before it trains: what it says is what is trained."""

import re

import pytest
import torch

from tests.programs import ROOT, Program
from training import main

ROWS, LENGTH, BATCHES, EPOCHS = 2, 32, 5, 2
LINE = re.compile(r"^global batch .*$", re.MULTILINE)


def words(text, root, cache, *extra):
    return [
        "fit",
        "--data=datamodules.LocalText",
        f"--data.data_files={text}",
        f"--data.cache_dir={cache}",
        f"--data.block_size={LENGTH}",
        f"--data.batch_size={ROWS}",
        "--model.config.dim=16",
        "--model.config.num_layers=1",
        "--model.config.num_heads=2",
        "--trainer.accelerator=cpu",
        f"--trainer.max_epochs={EPOCHS}",
        f"--trainer.limit_train_batches={BATCHES}",
        "--trainer.limit_val_batches=0",
        "--samples.every_n_validations=0",
        f"--trainer.default_root_dir={root}",
        *extra,
    ]


def trained_tokens(root):
    """Tokens that a run has counted in its batches, on all ranks, and its steps."""
    (last,) = root.rglob("last.ckpt")
    checkpoint = torch.load(last, weights_only=True)
    return checkpoint["train/tokens"], checkpoint["global_step"]


@pytest.mark.parametrize("devices", [1, 2])
def test_it_is_the_product_and_the_tokens_are_those_that_are_trained_on(
    text_file, data_cache, tmp_path, devices
):
    """Five micro-batches of an epoch, two accumulated: three steps, the last of one of them."""
    two = ("--trainer.devices=2", "--trainer.strategy=ddp")
    extra = two if devices == 2 else ("--trainer.devices=1",)
    argv = words(text_file, tmp_path, data_cache, "--trainer.accumulate_grad_batches=2", *extra)
    process = Program(str(ROOT / "train.py"), *argv, forks_ranks=True)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    tokens = ROWS * LENGTH * BATCHES * EPOCHS * devices
    assert trained_tokens(tmp_path) == (tokens, 3 * EPOCHS)
    batch = {1: "4 rows = 2 micro-batch x 2 accumulated x 1 device"}
    batch[2] = "8 rows = 2 micro-batch x 2 accumulated x 2 devices"
    assert LINE.findall(out) == [
        f"global batch {batch[devices]}, {2 * 2 * 32 * devices} tokens a step, 6 steps, "
        f"{tokens:,} tokens in all"
    ]
    assert out.index("global batch") < out.index("step 6")


def test_sentences_are_counted_in_lexical_tokens(text_file, data_cache, tmp_path, capsys):
    sentences = [
        "--data=datamodules.Sentences",
        "--data.corpus=datamodules.LocalText",
        f"--data.corpus.data_files={text_file}",
        f"--data.corpus.cache_dir={data_cache}",
        "--data.corpus.tokenizer=bytes",
        "--data.batch_tokens=700",
        "--model=lightning_models.ThoughtGestaltLM",
        "--model.config.num_layers=2",
        "--model.config.sentence_layer=1",
    ]
    common = [
        word
        for word in words(text_file, tmp_path, data_cache)[1:]
        if not word.startswith(("--data", "--trainer.limit_train", "--trainer.max_epochs"))
    ]
    steps = ["--trainer.max_steps=4", "--trainer.accumulate_grad_batches=3", "--trainer.devices=1"]
    assert main(["fit", *sentences, *common, *steps]) == 0
    (line,) = LINE.findall(capsys.readouterr().out)
    assert line.startswith(
        "global batch at most 2,100 lexical tokens = 700 micro-batch x 3 accumulated"
    )
    assert line.endswith(
        "x 1 device, at most 2,100 tokens a step, 4 steps, at most 8,400 tokens in all"
    )


def test_the_planner_prints_the_same_line(text_file, data_cache, tmp_path, capsys):
    argv = words(text_file, tmp_path, data_cache, "--trainer.devices=1")
    argv.append("--trainer.accumulate_grad_batches=2")
    assert main(argv) == 0
    (line,) = LINE.findall(capsys.readouterr().out)
    assert main(["plan", *argv[1:]]) == 0
    assert LINE.findall(capsys.readouterr().out) == [line]
    assert main(["plan", *argv[1:], "--trainer.max_steps=3", "--trainer.devices=4"]) == 0
    assert LINE.findall(capsys.readouterr().out) == [
        "global batch 16 rows = 2 micro-batch x 2 accumulated x 4 devices, 512 tokens a step, "
        "3 steps, 1,536 tokens in all"
    ]
