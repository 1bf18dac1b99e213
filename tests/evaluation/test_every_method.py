"""Commands that ask models something, on an untrained checkpoint of every method of texts.

Twice each: the same command gives the same numbers. Other commands have this next to their own
tests (perplexity, zero_shot, sweep, compute, compare, tasks, reason).
"""

import json

import pytest
import torch
from formats import BYTES
from methods import METHODS

from datamodules import Kinship
from datamodules.tokenizers import train_bpe

FIRST = {method.model: method for method in reversed(METHODS) if method.continues}
MARKS = {method.name: method.format.sizes["vocab_size"] - BYTES for method in FIRST.values()}
"""Entries that each method's data put after those of the tokenizer."""
NAMES = "The son of James is John. The father of Mark is Paul. "
ENTRIES = 288
PROBLEM = {"question": "Tim has 2 + 3 pears.", "answer": "<<2+3=5>>5\n#### 5"}
TIMES = ("seconds", "per_second")


def numbers(content):
    """A result without what takes another time each time."""
    if isinstance(content, dict):
        return {k: numbers(v) for k, v in content.items() if not k.endswith(TIMES)}
    return [numbers(each) for each in content] if isinstance(content, list) else content


@pytest.fixture(params=sorted(MARKS))
def twice(request, write_method, evaluates, tmp_path):
    """Runs a command on a checkpoint two times; returns its results, times left out."""
    path = write_method(request.param)

    def run(command, *words):
        found = []
        for number in range(2):
            output = tmp_path / f"{number}.json"
            evaluates(command, "--ckpt", path, *words, "--output", output)
            found.append(numbers(json.loads(output.read_text())))
        return found

    return run


def priced(result):
    """FLOPs per token: planned ones where compute depends on the text and text was only written."""
    return result.get("flops_per_token") or result["nominal_flops_per_token"]


def test_word_problems(twice, tmp_path):
    files = tmp_path / "problems.jsonl"
    files.write_text(f"{json.dumps(PROBLEM)}\n" * 2)
    words = ("--files.test", files, "--limit_questions", 2, "--max_new_tokens", 3, "--pass_at", 2)
    one, other = twice("gsm8k", *words)
    assert one == other
    assert priced(one) > 0


def test_texts(twice):
    words = ("--mode", "unconditional", "--samples", 2, "--sample_tokens", 6, "--judge", "null")
    one, other = twice("quality", *words, "--batch_size", 2)
    assert one == other


@pytest.mark.parametrize("name", sorted(MARKS))
def test_continuations(write_method, evaluates, name):
    words = ("--ckpt", write_method(name), "--prompt", "a thought", "--max_new_tokens", 4)
    one, other = (evaluates("generate", *words, "--temperature", 1.0) for _ in range(2))
    assert one == other
    assert "a thought" in one


@pytest.fixture
def write_with_names(write_method, tmp_path):
    """Writes an untrained checkpoint of a method whose tokenizer has names of men as tokens."""

    def write(name):
        known = tmp_path / "tokenizer.json"
        known.write_text(train_bpe(f"bpe:{ENTRIES}", [NAMES * 50]).json_text)
        path = write_method(name, vocab_size=ENTRIES + MARKS[name])
        content = torch.load(path, weights_only=False)
        data = content["recipe"]["data"]["init_args"]
        corpus = data["corpus"]["init_args"] if "corpus" in data else data
        corpus["tokenizer"] = str(known)
        torch.save(content, path)
        return path

    return write


@pytest.mark.parametrize("name", sorted(MARKS))
def test_fathers_and_sons(write_with_names, evaluates, tmp_path, name):
    path, found = write_with_names(name), []
    for number in range(2):
        output = tmp_path / f"{number}.json"
        evaluates("reversal", "--ckpt", path, "--pairs", 3, "--output", output)
        found.append(numbers(json.loads(output.read_text())))
    assert found[0] == found[1]
    assert found[0]["pairs"] == 3
    assert priced(found[0]) > 0


@pytest.mark.parametrize("name", sorted(m for m, marks in MARKS.items() if not marks))
def test_answers(write_method, evaluates, data_cache, tmp_path, name):
    stories = {"train_stories": 4, "val_stories": 2, "test_stories": 2, "test_hops": [2]}
    data = Kinship(**stories, block_size=320, batch_size=2, cache_dir=str(data_cache))
    few = {"eval_iterations": 3} if name in ("ponderlm", "ponderlm2") else {}  # not to convergence
    path, found = write_method(name, block_size=320, **few), []
    content = torch.load(path, weights_only=False)
    content["recipe"]["data"] = data.recipe()
    torch.save(content, path)
    for number in range(2):
        output = tmp_path / f"{number}.json"
        evaluates("answers", "--ckpt", path, "--output", output)
        found.append(numbers(json.loads(output.read_text())))
    assert found[0] == found[1]
    assert found[0]["questions"] == 2
    assert found[0]["likelihood"] in ("exact", "estimate", "noncausal")
