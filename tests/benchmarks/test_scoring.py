"""The benchmark of scoring asks both sides the same, in tokens of its own vocabulary."""

import argparse

import pytest
from tokenizers import Tokenizer

from benchmarks.scoring import SHAPES, requests_of, rows, sides, tokenizer_json

TINY = {
    "layers": 1,
    "dim": 16,
    "heads": 2,
    "vocab": 1000,
    "batch": 4,
    "questions": 2,
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


def test_requests_have_the_lengths_of_their_task():
    _, ours, words = sides(argparse.Namespace(**TINY, device="cpu"))
    asked = requests_of(SHAPES["hellaswag"], words, 20)
    pieces = [ours.reader.piece(*one.args) for one in asked]
    given = sum(piece.given for piece in pieces) / len(pieces)
    assert 55 < given < 85
    assert 25 < sum(len(piece.tokens) - piece.given for piece in pieces) / len(pieces) < 35


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
