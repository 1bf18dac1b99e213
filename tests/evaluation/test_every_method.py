"""Commands that make models write, on an untrained checkpoint of every method that reads text.

Twice each: the same command gives the same numbers. Other commands have this beside their own
tests (perplexity, zero_shot, sweep, compute, compare, tasks, reason).
"""

import json

import pytest
from methods import METHODS

FIRST = {method.model: method.name for method in reversed(METHODS) if method.continues}
PROBLEM = {"question": "Tim has 2 + 3 pears.", "answer": "<<2+3=5>>5\n#### 5"}
TIMES = ("seconds", "per_second")


def numbers(content):
    """A result without what takes another time each time."""
    if isinstance(content, dict):
        return {k: numbers(v) for k, v in content.items() if not k.endswith(TIMES)}
    return [numbers(each) for each in content] if isinstance(content, list) else content


@pytest.fixture(params=sorted(FIRST.values()))
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


def test_word_problems(twice, tmp_path):
    files = tmp_path / "problems.jsonl"
    files.write_text(f"{json.dumps(PROBLEM)}\n" * 2)
    words = ("--files.test", files, "--limit_questions", 2, "--max_new_tokens", 3, "--pass_at", 2)
    one, other = twice("gsm8k", *words)
    assert one == other
    assert one["flops_per_token"] > 0


def test_texts(twice):
    words = ("--mode", "unconditional", "--samples", 2, "--sample_tokens", 6, "--judge", "null")
    one, other = twice("quality", *words, "--batch_size", 2)
    assert one == other


@pytest.mark.parametrize("name", sorted(FIRST.values()))
def test_continuations(write_method, evaluates, name):
    words = ("--ckpt", write_method(name), "--prompt", "a thought", "--max_new_tokens", 4)
    one, other = (evaluates("generate", *words, "--temperature", 1.0) for _ in range(2))
    assert one == other
    assert "a thought" in one
