"""Questions with one answer, asked of an untrained checkpoint of every method of texts, twice."""

import json

import pytest
import torch
from formats import BYTES
from methods import METHODS

from datamodules import Kinship

FIRST = {method.model: method for method in reversed(METHODS) if method.continues}
MARKS = {method.name: method.format.sizes["vocab_size"] - BYTES for method in FIRST.values()}
"""Entries that each method's data put after those of the tokenizer."""
TIMES = ("seconds", "per_second")


def numbers(content):
    """A result without what takes another time each time."""
    if isinstance(content, dict):
        return {k: numbers(v) for k, v in content.items() if not k.endswith(TIMES)}
    return [numbers(each) for each in content] if isinstance(content, list) else content


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
        evaluates("reason", "--ckpt", path, "--rounds", "null", "--output", output)
        found.append(numbers(json.loads(output.read_text())["results"][0]))
    assert found[0] == found[1]
    assert found[0]["questions"] == 2
    assert found[0]["likelihood"] in ("exact", "estimate", "noncausal")
