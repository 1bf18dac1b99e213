"""Runs are found by folder, file and pattern, named by what differs, and their logs are read."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evaluation.runs import (
    find_checkpoints,
    find_compared,
    make_labels,
    path_names,
    read_record,
    read_scalars,
)
from evaluation.sweep import find_variants, label_variants
from lightning_models.checkpoint import read_checkpoint
from training.loggers import EventLog

LAST = Path("TransformerLM", "version_0", "checkpoints", "last.ckpt")
EVENTS = "events.out.tfevents.1.host.2.0"


@pytest.fixture
def runs(checkpoint_path, tmp_path):
    """Two runs below a folder, and a third one that has a log only."""
    folders = [tmp_path / "runs" / name / "TransformerLM" / "version_0" for name in ("a", "b", "c")]
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
    assert [run.log for run in found] == [
        runs / n / "TransformerLM" / "version_0" for n in ("a", "b")
    ]
    assert found[0].checkpoint.path == found[0].log / "checkpoints" / "last.ckpt"


def test_patterns_find_runs_and_each_counts_once(runs):
    words = [str(runs / "[ab]"), str(runs / "b" / "TransformerLM" / "version_0")]
    found, _ = find_compared(words, skip=False)
    assert [run.name for run in found] == ["a", "b"]
    found, _ = find_compared([f"b={runs / 'a'}", str(runs / "b")], skip=False)
    assert [(run.name, run.row) for run in found] == [("a", "b"), ("b", None)]


def test_checkpoints_are_found_by_file_folder_and_pattern(runs):
    a, b = (runs / name / LAST for name in "ab")
    assert [c.path for c in find_checkpoints([str(a), str(runs / "[ab]")])] == [a, b]
    (b.parents[1] / EVENTS).unlink()  # a folder of checkpoints without a log
    assert [c.path for c in find_checkpoints([str(runs / "b")])] == [b]


def test_runs_that_log_elsewhere_are_found_by_config_and_checkpoints(runs):
    a, b = (runs / name / "TransformerLM" / "version_0" for name in "ab")
    (a / EVENTS).unlink()
    (a / "config.yaml").touch()
    shutil.rmtree(runs / "c")
    found = [c.path for c in find_checkpoints([str(runs)])]
    assert found == [a / "checkpoints" / "last.ckpt", b / "checkpoints" / "last.ckpt"]


def test_starts_that_failed_are_skipped_with_a_word(runs):
    kept = [runs / name / LAST for name in "ab"]
    named = str(runs / "c" / "TransformerLM" / "version_0")
    for word in (runs, runs / "*", runs / "*" / "TransformerLM" / "version_*", runs / "*" / "*"):
        with pytest.warns(UserWarning, match="no checkpoint is in there") as warned:
            assert [c.path for c in find_checkpoints([str(word)])] == kept
        assert named in str(warned[0].message)
        with pytest.warns(UserWarning, match="no checkpoint is in there"):
            found, left_out = find_compared([str(word)], skip=False)
        assert ([run.checkpoint.path for run in found], left_out) == (kept, {})
    with pytest.raises(ValueError, match="there is no complete checkpoint under"):
        find_checkpoints([named, str(runs / "a")])  # named by itself


def test_checkpoints_may_lie_outside_the_folders_of_the_logs(runs):
    kept = runs / "c" / "kept.ckpt"
    shutil.copy(runs / "a" / LAST, kept)
    assert [c.path for c in find_checkpoints([str(runs / "c")])] == [kept]
    assert read_checkpoint(runs / "c").path == kept


def test_names_are_paths_below_the_common_folder(checkpoint_path):
    saved = read_checkpoint(checkpoint_path)

    def names(*paths):
        return path_names([replace(saved, path=Path("/x", path)) for path in paths])

    run = "{}/TransformerLM/version_{}/checkpoints/{}.ckpt"
    assert names(run.format("p/a", 0, "last"), run.format("b", 0, "last")) == ["p/a", "b"]
    assert names(run.format("p/a", 0, "last")) == ["a"]
    assert names("TransformerLM/version_0/checkpoints/last.ckpt") == ["x"]
    versions = names(run.format("a", 0, "last"), run.format("a", 1, "last"))
    assert versions == ["version_0", "version_1"]
    one_run = names(run.format("a", 0, "last"), run.format("a", 0, "best"))
    assert one_run == ["last", "best"]
    assert names("a.ckpt", "b.ckpt") == ["a", "b"]


@pytest.mark.parametrize("word", ["none", "[x]*", "empty", "c"])
def test_what_is_no_run_is_refused(runs, word):
    (runs / "empty").mkdir()
    for find in (find_checkpoints, lambda words: find_compared(words, skip=False)):
        with pytest.raises(ValueError, match="there is no") as refused:
            find([str(runs / word)])
        assert str(runs / word) in str(refused.value)


# ---- the furthest checkpoint of a run, or its best


@pytest.fixture
def run(runs, checkpoint_path):
    """A run that was moved, whose best checkpoint is at an earlier step than its last."""
    folder = runs / "a" / "TransformerLM" / "version_0" / "checkpoints"
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


# ---- labels


def recipe(name="LatentLM", **config):
    return {"class_path": f"lightning_models.{name}", "init_args": {"config": config}}


@pytest.mark.parametrize(
    ("rows", "keys", "expected"),
    [
        ((None, None), None, ["a", "b"]),
        (("first", None), None, ["first", "b"]),
        (("same", "same"), None, ["same (a)", "same (b)"]),
        (("first", None), "n", ["n 1", "n 2.5"]),
        ((None, None), "model,rate", ["LatentLM, rate 0.3", "PlainLM"]),
        ((None, None), "dim", ["dim 8 (a)", "dim 8 (b)"]),
    ],
)
def test_labels_are_names_paths_or_keys_of_configs(rows, keys, expected):
    recipes = [recipe(n=1, dim=8, rate=0.30), recipe("PlainLM", n=2.5, dim=8)]
    assert make_labels("ab", rows, recipes, keys) == expected


def test_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match="steps"):
        make_labels("a", [None], [recipe(inner=1)], "steps")


# ---- log and record


def log(folder, values, purge_step=None):
    for file in folder.glob("events*"):  # of the same second as the next, which is read after it
        file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))
    logger = EventLog(folder.parent, name="", version=folder.name, purge_step=purge_step)
    for step, value in values.items():
        logger.log_metrics({"val/bpb": value}, step)
    logger.finalize("success")


def test_of_a_resumed_run_the_later_values_count(tmp_path):
    log(tmp_path / "run", {0: 4.0, 1: 3.0, 2: 9.0})
    log(tmp_path / "run", {2: 2.5, 3: 2.0}, purge_step=2)
    values = read_scalars(tmp_path / "run")["val/bpb"]
    assert values == {0: 4.0, 1: 3.0, 2: 2.5, 3: 2.0}
    (tmp_path / "run" / "metrics.csv").write_text("step,val/bpb,val/ppl\n-1,5.0,\n0,9.0,2.0\n")
    both = read_scalars(tmp_path / "run")  # logged to one, then to the other
    assert both == {"val/bpb": {-1: 5.0, **values}, "val/ppl": {0: 2.0}}


def test_every_tag_is_read_and_of_a_folder_without_files_none(tmp_path):
    logger = EventLog(tmp_path, name="", version="run")
    for step in range(11_000):  # TensorBoard keeps 10,000 by default
        logger.log_metrics({"train/loss": float(step)}, step)
    logger.log_metrics({"val/loss": 2.0}, 10_999)
    logger.finalize("success")
    scalars = read_scalars(tmp_path / "run")
    assert scalars["train/loss"] == {step: float(step) for step in range(11_000)}
    assert scalars["val/loss"] == {10_999: 2.0}
    assert read_scalars(tmp_path) == {}


def test_a_resumed_run_has_the_settings_of_its_start_and_all_versions(tmp_path):
    (tmp_path / "config.yaml").write_text("# run: x\n# commit: a\n# torch: 2\nseed_everything: 3\n")
    (tmp_path / "config_40.yaml").write_text("# commit: b\n# torch: 2\nseed_everything: 4\n")
    assert read_record(tmp_path) == {
        "recorded": True,
        "seed_everything": 3,
        "precision": None,
        "accumulate_grad_batches": None,
        "commit": "a and b",
        "torch": "2",
    }


@pytest.mark.parametrize("text", [None, "a: [", "- 1", "a: !!python/object:os.x {}"])
def test_what_is_no_record_is_not_known(tmp_path, text):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    unknown = {**dict.fromkeys(read_record(None)), "recorded": False}
    assert read_record(tmp_path) == read_record(None) == unknown


def test_names_of_runs_are_labels_of_sweeps(checkpoint_path):
    saved = read_checkpoint(checkpoint_path)

    def named(name):
        content = {**saved.content, "run": {"id": "0", "name": name}}
        return replace(saved, content=content, path=Path(f"runs/{name}/last.ckpt"))

    variants, _ = find_variants([named("first"), named("second"), named(None)], {}, {})
    assert label_variants(variants, None) == ["first", "second", "None/last"]
    assert label_variants(variants, "dim") == ["dim 32"] * 3
