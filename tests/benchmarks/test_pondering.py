"""The router of the pondering benchmark is obeyed, and its tables are printed."""

import argparse
import math
import sys

import pytest
import torch

from benchmarks import pondering, pondering_depth

TINY = {
    "device": "cpu",
    "layers": 1,
    "dim": 16,
    "heads": 2,
    "context": 8,
    "batch": 2,
    "vocab": 40,
    "steps": 2,
    "iterations": 1,
    "prompt": 3,
    "new": 5,
    "rounds": 1,
}
OPTIONS = argparse.Namespace(**TINY, bf16=False, checkpoint=False, compile=False)
PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture
def model():
    return pondering.build("ours", OPTIONS).eval()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_token_takes_the_steps_it_is_told(model, depth):
    assert pondering_depth._mean_steps(model, PROMPTS, depth, OPTIONS) == depth


def test_mixed_depths_differ_between_tokens_and_are_the_same_each_time(model):
    steps = pondering_depth._mean_steps(model, PROMPTS, "mixed", OPTIONS)
    assert 0 < steps < 2
    assert pondering_depth._mean_steps(model, PROMPTS, "mixed", OPTIONS) == steps


def test_the_model_is_left_as_it_was(model):
    route = model.network.route
    pondering_depth._generate(model, PROMPTS, 1, OPTIONS)
    assert model.network.route == route


def test_both_sides_of_the_training_table_have_as_many_positions():
    assert pondering.length_of("plain", OPTIONS) == 3 * pondering.length_of("ours", OPTIONS)
    steps = [pondering.build_step(side, OPTIONS) for side in ("ours", "plain")]
    losses = [step() for step in steps]
    assert all(torch.tensor(losses).isfinite())


@pytest.mark.parametrize(("only", "rows"), [("training", 2), ("generation", 6)])
def test_the_command_prints_its_tables(monkeypatch, capsys, only, rows):
    sizes = [f"--{key}={value}" for key, value in TINY.items()]
    monkeypatch.setattr(sys, "argv", ["pondering", *sizes, f"--only={only}"])
    pondering.main()
    heading, columns, *lines = capsys.readouterr().out.splitlines()
    assert "K 2, J 1" in heading
    assert len(lines) == rows
    assert "ratio" in columns
    numbers = [float(line.split()[-1]) for line in lines]  # times of a busy machine: any sign
    assert all(map(math.isfinite, numbers))
