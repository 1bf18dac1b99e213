"""Dials of every method, turned at test time."""

import csv

import pytest
from methods import METHODS

from datamodules import LocalText
from evaluation.sweep import loss_key
from lightning_models import MoRLM, ThinkingStatesLM, ThoughtbubblesLM

FEW = ("--limit_batches", 1)
DIALS = {
    "thoughtbubbles": ["--kappas=1L,1.5L,64"],
    "copy-3": ["--dial", "copies=1,2,3"],
    "latent-thought": ["--inner_steps=0,2,3"],
    "ponderlm": ["--dial", "alpha=-1,0,1", "tau=0"],
    "ponderlm2": ["--dial", "eval_iterations=0,1,null"],
    "ponderlm1": ["--thinking_steps=0,1,2"],
    "looped": ["--thinking_steps=0,1,2"],
    "pause": ["--thinking_steps=1,2,3"],
    "thought-gestalt": ["--dial", "memory_size=1,2,3"],
}


def test_all_methods_with_dials_are_swept_here():
    turned = {method.model for method in METHODS if method.name in DIALS}
    declared = {method.model for method in METHODS if method.build().config.dials}
    own_test = {MoRLM, ThinkingStatesLM}
    assert declared - turned == own_test, (
        "whose steps have learned capacities; whose dial is on or off"
    )


def test_thoughts_are_switched_off(write_method, evaluates, tmp_path):
    path, output = write_method("thinking-states"), tmp_path / "dial.svg"
    words = ("--split", "train", *FEW, "--output", output)
    evaluates("sweep", "--ckpts", path, *words, "--dial", "think=false,true")
    with output.with_suffix(".csv").open(newline="") as file:
        off, on = csv.DictReader(file)
    assert float(off["flops_per_token"]) < float(on["flops_per_token"])
    assert off["nats_per_token"] != on["nats_per_token"]


def loss_of(row):
    """The one loss of a row, which stands under the name of its kind."""
    losses = {key: row[key] for key in row if key.startswith("nats_per_token") and row[key]}
    ((key, loss),) = losses.items()
    assert key == loss_key(row["likelihood"])
    return loss


@pytest.mark.parametrize("name", DIALS)
def test_the_dial_of_every_method_changes_what_it_computes(write_method, evaluates, tmp_path, name):
    path, output = write_method(name), tmp_path / "dial.svg"
    words = ("--split", "train", *FEW, "--output", output)
    printed = evaluates("sweep", "--ckpts", path, *words, *DIALS[name])
    with output.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert len({loss_of(row) for row in rows}) == 3
    cost = "executed_steps" if name == "ponderlm" else "flops_per_token"
    costs = [float(row[cost]) for row in rows]
    assert costs == sorted(costs)
    assert (costs[0] < costs[-1]) == (name != "ponderlm")
    assert "skipped" not in printed


def test_the_same_command_gives_the_same_files(write_method, evaluates, tmp_path):
    path, pictures, tables = write_method("latent-thought"), [], []
    for number in range(2):
        output = tmp_path / f"{number}.svg"
        evaluates(
            "sweep",
            "--ckpts",
            path,
            "--inner_steps",
            "0,1",
            *FEW,
            "--split",
            "train",
            "--output",
            output,
        )
        pictures.append(output.read_bytes())
        with output.with_suffix(".csv").open(newline="") as file:
            tables.append([{**row, "seconds": 0} for row in csv.DictReader(file)])
    assert pictures[0] == pictures[1]
    assert tables[0] == tables[1]
    assert not list(tmp_path.glob("*.tmp"))


def test_thresholds_hold_at_the_budget_of_the_training_only(
    corpus, train_checkpoint, fails, evaluates, tmp_path
):
    config = {"fork_layers": (1,), "kappa": "1.5L", "allocation": "threshold"}
    data = LocalText(**corpus)
    path = train_checkpoint(tmp_path / "t.ckpt", data, ThoughtbubblesLM, **config)
    command = ("sweep", "--ckpts", path, *FEW, "--output", tmp_path / "a.svg")
    printed = evaluates(*command, "--kappas", "1.2L,1.5L")
    (line,) = [line for line in printed.splitlines() if line.startswith("skipped: ")]
    assert "at kappa 1.2L: kappa (1.2L): the thresholds were observed at 1.5L" in line
    assert "the thresholds were observed at 1.5L" in fails(*command, "--kappas", "1.2L")


def test_windows_and_sentences_are_two_sweeps(write_method, fails, tmp_path):
    paths = [write_method(name) for name in ("gpt2", "thought-gestalt")]
    line = fails("sweep", "--ckpts", *paths, "--output", tmp_path / "a.svg")
    assert "reads windows and ThoughtGestaltLM (thought-gestalt.ckpt) reads sentences" in line
    assert "make one of each kind" in line


def test_exact_and_bound_are_told_apart_in_the_label(write_method, evaluates, tmp_path):
    paths = [write_method(name) for name in ("gpt2", "latent-thought", "thoughtbubbles")]
    words = ("--split", "train", *FEW, "--output", tmp_path / "a.svg")
    printed = evaluates("sweep", "--ckpts", *paths, *words)
    labels = [line.split("  ")[0] for line in printed.splitlines()[1:4]]
    assert labels == ["TransformerLM", "LatentThoughtLM (bound)", "ThoughtbubblesLM (noncausal)"]
    assert "no other one of its kind of likelihood" in printed


def test_models_of_questions_share_a_sweep(write_method, evaluates, tmp_path):
    paths = [write_method(name) for name in ("thinking-states", "no-cot", "coconut")]
    output = tmp_path / "questions.svg"
    evaluates("sweep", "--ckpts", *paths, "--split", "train", *FEW, "--output", output)
    with output.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["ThinkingStatesLM", "NoCoTLM", "CoconutLM"]
    assert {row["likelihood"] for row in rows} == {"exact"}
    costs = {row["label"]: float(row["flops_per_token"]) for row in rows}
    assert costs["NoCoTLM"] < min(costs["ThinkingStatesLM"], costs["CoconutLM"])
