"""The router of the pondering benchmark is obeyed, and its tables are printed."""

import argparse
import math
import sys

import pytest
import torch

from benchmarks import pondering

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
OPTIONS = argparse.Namespace(**TINY, bf16=False, checkpoint=False, compile=False, side="ours")
PLAIN = argparse.Namespace(**{**vars(OPTIONS), "side": "plain"})
PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture
def model():
    return pondering.build(OPTIONS).eval()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_token_takes_the_steps_it_is_told(model, depth):
    assert pondering._mean_steps(model, PROMPTS, depth, OPTIONS) == depth


def test_mixed_depths_differ_between_tokens_and_are_the_same_each_time(model):
    steps = pondering._mean_steps(model, PROMPTS, "mixed", OPTIONS)
    assert 0 < steps < 2
    assert pondering._mean_steps(model, PROMPTS, "mixed", OPTIONS) == steps


def test_the_model_is_left_as_it_was(model):
    route = model.network.route
    pondering._generate(model, PROMPTS, 1, OPTIONS)
    assert model.network.route == route


def test_both_sides_of_the_training_table_have_as_many_positions():
    assert pondering.length_of(PLAIN) == 3 * pondering.length_of(OPTIONS)
    steps = [pondering.build_step(side) for side in (OPTIONS, PLAIN)]
    losses = [step() for step in steps]
    assert all(torch.tensor(losses).isfinite())


@pytest.mark.parametrize(("only", "rows"), [("training", 2), ("generation", 6)])
def test_the_command_prints_its_tables(monkeypatch, capsys, only, rows):
    sizes = [f"--{key}={value}" for key, value in TINY.items()]
    monkeypatch.setattr(sys, "argv", ["pondering", *sizes, f"--only={only}"])
    pondering.main()
    heading, _, title, _, _, _, *lines = capsys.readouterr().out.splitlines()
    assert "steps 2, iterations 1" in heading
    assert title == only
    assert len(lines) == rows
    numbers = [float(line.split()[-2]) for line in lines]  # times of a busy machine: any sign
    assert all(map(math.isfinite, numbers))
