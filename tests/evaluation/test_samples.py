"""Continuations depend on the prompt, its number and the seed, and on nothing else."""

import json
import shutil

import pytest
import torch

from evaluation import generate
from evaluation.generate import continue_prompts
from evaluation.load import build_model, build_tokenizer
from lightning_models.checkpoint import read_checkpoint
from lightning_models.generation import SamplingConfig

PROMPTS = ["The thought", "", "memory and state", "x", "Reads the"]


@pytest.fixture
def continued(checkpoint_path):
    checkpoint = read_checkpoint(checkpoint_path)
    model, tokenizer = build_model(checkpoint), build_tokenizer(checkpoint)

    def run(prompts, seed=0, **options):
        sampling = SamplingConfig(seed=seed, **options)
        pairs = list(
            continue_prompts(model, tokenizer, prompts, max_new_tokens=8, sampling=sampling)
        )
        assert [prompt for prompt, _ in pairs] == prompts
        return [text for _, text in pairs]

    return run


def test_the_seed_decides(continued):
    first = continued(PROMPTS)
    torch.manual_seed(99)
    assert continued(PROMPTS) == first
    assert continued(PROMPTS, seed=1) != first
    assert continued(["another", *PROMPTS[1:], "more"])[1:-1] == first[1:]


def test_groups_have_streams_of_their_own_and_change_nothing(continued, monkeypatch):
    greedy = continued(PROMPTS, temperature=0)
    monkeypatch.setattr(generate, "GROUP", 2)
    assert continued(PROMPTS, temperature=0) == greedy
    texts = continued(["same"] * 5)
    assert len(set(texts)) == 5
    assert continued(["other", *["same"] * 3])[1:] == texts[1:4]


def test_the_command_prints_and_writes(evaluates, checkpoint_path, continued, tmp_path):
    file, target = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("memory and state\n\nx\r\nReads the")
    prompts = ("--prompt", "The thought", "--prompt", "", "--prompts_file", file)
    options = ("--max_new_tokens", "8", "--seed", "3", "--top_k", "20", "--output", target)
    printed = evaluates("generate", "--ckpt", checkpoint_path, *prompts, *options)
    expected = continued(PROMPTS, seed=3, top_k=20)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["continuation"] for row in rows] == expected
    assert all(prompt in printed for prompt in PROMPTS)


def test_prompts_are_taken_literally(evaluates, checkpoint_path, tmp_path):
    file, target = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "two\\nlines"}\n{"prompt": "", "id": 7}\n')
    odd = ["null", "a: b", "[1", "3"]
    typed = [word for prompt in odd for word in ("--prompt", prompt)]
    options = ("--prompts_file", file, "--max_new_tokens", "1", "--output", target)
    evaluates("generate", "--ckpt", checkpoint_path, *typed, *options)
    prompts = [json.loads(line)["prompt"] for line in target.read_text().splitlines()]
    assert prompts == [*odd, "two\nlines", ""]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "there is nothing to continue; give --prompt"),
        (["--prompts_file", "none.txt"], "prompts file none.txt does not exist"),
        (
            ["--prompt", "a", "--temperature", "-1"],
            "temperature (-1.0) must be 0 (greedy) or above",
        ),
        (["--prompt", "a", "--top_p", "2"], "top_p (2.0) must be in (0, 1]"),
        (["--prompt", "a", "--max_new_tokens", "0"], "--max_new_tokens: "),
        (["--prompt", "a", "--max_new_tokens", "40"], "the model has learned 32 (block_size)"),
        (["--prompt", "a", "--tokenizer", "bpe:300"], "is trained on a corpus"),
        (["--prompt", "a", "--tokenizer", "nonsense"], "tokenizer='nonsense' is unknown"),
    ],
)
def test_bad_options_are_named(fails, checkpoint_path, options, expected):
    assert expected in fails("generate", "--ckpt", checkpoint_path, *options)


def test_neither_corpus_nor_store_is_needed(evaluates, bpe_run, tmp_path):
    command = ("generate", "--ckpt", bpe_run, "--prompt", "thought", "--max_new_tokens", "5")
    expected = evaluates(*command)
    (tmp_path / "own.jsonl").unlink()
    shutil.rmtree(tmp_path / "cache")
    assert evaluates(*command) == expected


def test_a_checkpoint_without_data_takes_a_tokenizer(fails, evaluates, edited, bpe_run):
    path = edited(lambda content: content["recipe"].update(data=None))
    line = fails("generate", "--ckpt", path, "--prompt", "a")
    assert "names no tokenizer; name one with --tokenizer" in line
    evaluates(
        "generate", "--ckpt", path, "--prompt", "a", "--tokenizer", "bytes", "--max_new_tokens", "3"
    )
    line = fails("generate", "--ckpt", bpe_run, "--prompt", "a", "--tokenizer", "bytes")
    assert "(bytes) has 257 entries, the checkpoint's model has a vocabulary of 280" in line
