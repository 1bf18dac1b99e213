"""The benchmark of scoring asks both sides the same, in tokens of its own vocabulary."""

import argparse
from itertools import takewhile

import pytest
from tokenizers import Tokenizer

from benchmarks.scoring import SHAPES, requests_of, rows, tokenizer_json

TINY = {
    "layers": 1,
    "dim": 16,
    "heads": 2,
    "vocab": 1000,
    "batch": 4,
    "questions": 2,
    "cpu_time": True,
    "model": None,
}


def test_words_are_single_tokens():
    inner = Tokenizer.from_str(tokenizer_json(1000))
    assert inner.get_vocab_size() == 1000
    assert len(inner.encode(" a bc zz q").ids) == 4


def test_both_sides_agree():
    options = argparse.Namespace(**TINY, device="cpu", rounds=1, tasks=["arc_easy", "piqa"])
    found = list(rows(options))
    assert [row["requests"] for row in found] == [8, 4]
    assert all(row["largest difference, nats"] < 1e-3 for row in found)
    assert all(row["same greedy flags"] for row in found)


@pytest.mark.parametrize("task", SHAPES)
def test_requests_have_the_lengths_of_their_task(task):
    shape, tokenizer = SHAPES[task], Tokenizer.from_str(tokenizer_json(1000))
    words = [" a", " b", " c", " zz"] + [f" {a}{b}" for a in "defgh" for b in "abcdefghijklm"]
    pairs = [one.args for one in requests_of(shape, words, 200)]
    assert len(pairs) == 200 * shape.choices
    given, after = (
        [tokenizer.encode(text).ids for text in texts] for texts in zip(*pairs, strict=True)
    )
    assert sum(map(len, given)) / len(pairs) == pytest.approx(shape.context, rel=0.05)
    assert sum(map(len, after)) / len(pairs) == pytest.approx(shape.continuation, rel=0.05)
    asked = [after[i : i + shape.choices] for i in range(0, len(pairs), shape.choices)]
    common = [
        sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))
        for texts in asked
    ]
    assert sum(common) / 200 == pytest.approx(shape.start, rel=0.15, abs=0.15)
    assert shape.start == 0 or len(set(common)) > 2


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("TransformerLM", []),
        ("LatentThoughtLM", ["inner_steps=2"]),
        ("ThoughtGestaltLM", ["num_layers=2", "sentence_layer=1"]),
    ],
)
def test_a_method_answers_as_with_whole_rows(model, config):
    asked = TINY | {"model": model, "config": config}
    (row,) = rows(argparse.Namespace(**asked, device="cpu", rounds=1, tasks=["arc_easy"]))
    assert row["requests"] == 8
    assert row["largest difference, nats"] < 1e-3
