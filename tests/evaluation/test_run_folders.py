"""Runs are found by folder, file and pattern."""

import csv
import json
import shutil

import pytest
import torch

from evaluation.runs import find_checkpoints, find_compared, short_names

EVENTS = "events.out.tfevents.1.host.2.0"


@pytest.fixture
def runs(checkpoint_path, tmp_path):
    """Two runs below a folder, and a third one that has a log only."""
    folders = [tmp_path / "runs" / name / "X" / "version_0" for name in ("a", "b", "c")]
    for folder in folders:
        (folder / "checkpoints").mkdir(parents=True)
        (folder / EVENTS).touch()
    for folder in folders[:2]:
        shutil.copy(checkpoint_path, folder / "checkpoints" / "last.ckpt")
    return tmp_path / "runs"


def test_a_folder_stands_for_the_runs_below_it(runs):
    shutil.rmtree(runs / "c")
    found, _ = find_compared([str(runs)], skip=False)
    assert [run.name for run in found] == ["a", "b"]
    assert [run.log for run in found] == [runs / n / "X" / "version_0" for n in ("a", "b")]
    assert found[0].checkpoint.path == found[0].log / "checkpoints" / "last.ckpt"


def test_patterns_find_runs_and_each_counts_once(runs):
    words = [str(runs / "[ab]"), str(runs / "b" / "X" / "version_0")]
    found, _ = find_compared(words, skip=False)
    assert [run.name for run in found] == ["a", "b"]


def test_checkpoints_are_found_by_file_folder_and_pattern(runs):
    a, b = (runs / name / "X" / "version_0" / "checkpoints" / "last.ckpt" for name in "ab")
    assert [c.path for c in find_checkpoints([str(a), str(runs / "[ab]")])] == [a, b]
    (b.parents[1] / EVENTS).unlink()  # a folder of checkpoints without a log
    assert [c.path for c in find_checkpoints([str(runs / "b")])] == [b]


def test_names_are_what_differs(tmp_path):
    paths = [tmp_path / "x" / name / "X" / "version_0" for name in ("p/a", "b")]
    assert short_names(paths) == ["p/a", "b"]
    assert short_names(paths[:1]) == ["X/version_0"]
    nested = [tmp_path, tmp_path / "y"]
    assert short_names(nested) == [str(tmp_path), "y"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("none", "there is no such file or folder"),
        ("[x]*", "there is no such file or folder"),
        ("empty", "there is no whole checkpoint below"),
        ("c", "there is no whole checkpoint below"),
    ],
)
def test_what_is_no_run_is_refused(runs, word, message):
    (runs / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        find_compared([str(runs / word)], skip=False)


def test_what_is_no_checkpoint_is_refused(runs):
    with pytest.raises(ValueError, match="there is no whole checkpoint below"):
        find_checkpoints([str(runs / "c")])
    with pytest.raises(ValueError, match="there is no such file"):
        find_checkpoints([str(runs / "none.ckpt")])


# ---- the furthest checkpoint of a run, or its best


@pytest.fixture
def run(runs, checkpoint_path):
    """A run that was moved, whose best checkpoint is at an earlier step than its last."""
    folder = runs / "a" / "X" / "version_0" / "checkpoints"
    content = torch.load(checkpoint_path, weights_only=True)
    torch.save({**content, "global_step": 1}, folder / "best-step=1.ckpt")
    for value in content["state_dict"].values():
        value.mul_(1.5)
    state = {"best_model_path": "/elsewhere/checkpoints/best-step=1.ckpt"}
    torch.save({**content, "callbacks": {"SaveCheckpoints": state}}, folder / "last.ckpt")
    return runs / "a"


@pytest.mark.parametrize(("which", "name"), [("best", "best-step=1.ckpt"), ("last", "last.ckpt")])
def test_the_best_of_a_run_is_scored(evaluates, run, checkpoint_path, tmp_path, which, name):
    path, target = next(run.rglob(name)), tmp_path / "result.json"
    chosen = () if which == "last" else ("--which", which)
    few = ("--limit_batches", 1)

    def score(*words):
        evaluates("perplexity", *words, *few, "--output", target)
        return json.loads(target.read_text())

    found, alone = score("--ckpt", run, *chosen), score("--ckpt", path)
    assert found["checkpoint"] == alone["checkpoint"] == str(path)
    assert (found["settings"]["which"], alone["settings"]["which"]) == (which, None)
    assert found["nats_per_token"] == alone["nats_per_token"]
    evaluates("sweep", "--ckpts", run, *chosen, *few, "--output", tmp_path / "sweep.svg")
    (row,) = csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines())
    assert (row["checkpoint"], float(row["nats_per_token"])) == (str(path), alone["nats_per_token"])
    evaluates("compare", run, *chosen, *few, "--output", tmp_path / "report")
    (row,) = csv.DictReader((tmp_path / "report" / "runs.csv").read_text().splitlines())
    assert (row["checkpoint"], row["which"]) == (str(path), which)
    assert float(row["nats_per_token_exact"]) == alone["nats_per_token"]


VERBS = {
    "perplexity": ("--ckpt",),
    "zero_shot": ("--ckpt",),
    "tasks": ("--tasks", "piqa_local", "--ckpt"),
    "generate": ("--prompt", "a", "--ckpt"),
    "answers": ("--ckpt",),
    "quality": ("--ckpt",),
    "gsm8k": ("--files.test", "none.jsonl", "--ckpt"),
    "reversal": ("--ckpt",),
    "reason": ("--ckpt",),
    "sweep": ("--output", "sweep.svg", "--ckpts"),
    "compare": (),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_refuses_a_best_that_there_is_not(fails, run, runs, verb):
    line = fails(verb, *VERBS[verb], runs / "b", "--which", "best")
    assert "which=best: the run of" in line
    assert "has kept no best checkpoint" in line
    file = next(run.rglob("best-step=1.ckpt"))
    line = fails(verb, *VERBS[verb], file, "--which", "best")
    assert f"{file} is one file; give the folder of the run" in line
