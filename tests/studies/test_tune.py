"""Searches: equal budgets, successive halving, resume at any moment, refusals, one real search."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

from evaluation.runs import find_compared, read_scalars
from studies import tune
from studies.runner import CommandError, RunFolder
from studies.study import StudyError, load_study, study_names

ROOT = Path(__file__).parents[2]
LR, STD = "model.init_args.optimizer.lr", "model.init_args.config.init_std"
SPACE = {LR: {"low": 1e-4, "high": 1e-1, "log": True}, STD: {"choices": [0.02, 0.05]}}
SEARCH = {"trials": 8, "tokens": 300, "space": SPACE}
STEPS, INTERVAL = 9, 1  # 300 tokens in steps of 32, cut at nine validations


class Trainings:
    """In place of training: logs a loss that follows from learning rate and step, and saves."""

    def __init__(self):
        self.seen = []
        self.raising = {}
        """What to raise, by (folder of the trial, validation); once."""
        self.watched = True

    def __call__(self, command, log, threads=None, watch=None):
        value = dict(itertools.pairwise(map(str, command)))
        config = yaml.safe_load(Path(value["-c"]).read_text())
        resumed = value.get("--ckpt_path") == "last"
        root = Path(value["--trainer.default_root_dir"])
        name = f"{root.parts[-3]}/{root.parts[-2]}"
        self.seen.append((name, resumed))
        log.write_text("")
        folder = root / "X" / "version_0"
        file = folder / "checkpoints" / "last.ckpt"
        begin = torch.load(file)["global_step"] if resumed else 0
        writer = SummaryWriter(folder, purge_step=begin or None)
        try:
            for step in range(begin + 1, config["trainer"]["max_steps"] + 1):
                error = self.raising.pop((name, step), None)
                if isinstance(error, CommandError):
                    raise error
                writer.add_scalar("val/loss", loss(config, step), step - 1)
                writer.flush()
                file.parent.mkdir(parents=True, exist_ok=True)
                recipe = {"model": config["model"], "data": config["data"]}
                torch.save({"state_dict": {}, "global_step": step, "recipe": recipe}, file)
                if error is not None:
                    raise error
                if self.watched:
                    watch()
        finally:
            writer.close()


def loss(config, step):
    arguments = config["model"]["init_args"]
    distance = abs(math.log(arguments["optimizer"]["lr"] / 3e-3))
    return 1.0 + distance + arguments["config"]["init_std"] + 1 / step


@pytest.fixture
def trainings(monkeypatch):
    trainings = Trainings()
    monkeypatch.setattr(tune, "executor", lambda jobs: trainings)
    return trainings


@pytest.fixture
def search(study_file, trainings, tmp_path):
    """Searches with changed keys of the declaration; returns exit code and table."""
    runs = yaml.safe_load(study_file().read_text())["runs"]
    for number, run in enumerate(runs.values()):
        optimizer = {"lr": 2e-3}
        run["model"]["init_args"] = {**run["model"]["init_args"], "optimizer": optimizer}
        if number:
            run["search"] = {"model.init_args.config.copies": {"low": 2, "high": 5}}
    evaluations = {"blockwise": {"split": "test"}, "sampled": {"split": "test"}}
    for run in runs.values():
        run["evaluations"] = evaluations

    def search(*words, folder="search", changes=None, **declared):
        content = {"search": {**SEARCH, **declared}, "runs": runs, **(changes or {})}
        path = study_file(evaluations=evaluations, **content)
        place = tmp_path / folder
        code = tune.main([str(path), "--folder", str(place), *words])
        table = place / "search.csv"
        return code, pd.read_csv(table) if table.is_file() else None

    return search


def results(table):
    return table.drop(columns="seconds").astype(object).fillna("").to_dict("records")


# ---- size and order


def test_every_run_has_as_many_trials_of_as_many_tokens(search, trainings, tmp_path):
    code, table = search()
    assert code == 0
    assert table.groupby("run").size().to_dict() == {"plain": 8, "copy": 8}
    assert [name for name, _ in trainings.seen[:4]] == [
        *("plain/trial-000", "copy/trial-000", "plain/trial-001", "copy/trial-001")
    ]
    configs = [yaml.safe_load(p.read_text()) for p in tmp_path.rglob("trial-*/config.yaml")]
    assert {config["trainer"]["max_steps"] for config in configs} == {STEPS}
    assert {config["trainer"]["val_check_interval"] for config in configs} == {INTERVAL}
    assert {config["seed_everything"] for config in configs} == {0}
    whole = table[table.state == "complete"]
    assert set(whole.tokens) == {STEPS * 32}
    assert set(table.tokens) <= {1 * 32, 3 * 32, STEPS * 32}


def test_the_first_trial_has_the_declared_values_and_defaults(search):
    _, table = search()
    first = table[table.trial == 0].set_index("run")
    assert first.loc["plain", LR] == first.loc["copy", LR] == 2e-3
    assert first.loc["plain", STD] == 0.02
    assert len(set(table[table.run == "plain"][LR])) == 8
    assert set(table["model.init_args.config.copies"].dropna()) <= {2, 3, 4, 5}
    assert table[table.run == "plain"]["model.init_args.config.copies"].isna().all()


def test_trials_are_halved_by_the_values_at_the_rungs(search):
    _, table = search("--only=plain", trials=12)
    rungs = {1: [], 3: []}
    for row in table.to_dict("records"):
        config = {"optimizer": {"lr": row[LR]}, "config": {"init_std": row[STD]}}
        ended = STEPS
        for rung, values in rungs.items():
            values.append(loss({"model": {"init_args": config}}, rung))
            if values[-1] > sorted(values)[max(len(values) // 3, 1) - 1]:
                ended = rung
                break
        assert (row["steps"], row["state"]) == (ended, "complete" if ended == STEPS else "pruned")
        expected = loss({"model": {"init_args": config}}, ended)
        assert row["val/loss"] == pytest.approx(expected, rel=1e-6)
    assert {"complete", "pruned"} == set(table.state)


def test_a_trial_that_ends_before_it_is_looked_at_is_judged_by_the_same_values(search, trainings):
    _, watched = search("--only=plain")
    trainings.watched = False
    _, ended = search("--only=plain", folder="other")
    same = ["trial", LR, STD, "val/loss", "state"]
    assert ended[same].equals(watched[same])
    assert set(ended.steps) == {STEPS}


# ---- resume


@pytest.mark.parametrize(
    "moment", [("plain/trial-000", 1), ("copy/trial-000", 4), ("plain/trial-003", 1)]
)
def test_a_killed_search_ends_like_one_that_was_not(search, trainings, moment):
    killed, _ = moment
    _, whole = search()
    trained = [name for name, _ in trainings.seen]
    trainings.seen.clear()
    trainings.raising = {moment: KeyboardInterrupt()}
    code, table = search(folder="killed")
    assert code == 130
    assert "unfinished" in set(table.state)
    assert trainings.seen[-1][0] == killed
    before = [name for name, _ in trainings.seen]
    trainings.seen.clear()
    code, table = search(folder="killed")
    assert code == 0
    # one that had logged what it is pruned by is not trained any more
    assert [each for each in trainings.seen if each[0] == killed] in ([], [(killed, True)])
    after = [name for name, _ in trainings.seen if name != killed]
    assert sorted(before + after) == sorted(trained)
    keys = ["run", "trial"]
    assert results(table.sort_values(keys)) == results(whole.sort_values(keys))
    trainings.seen.clear()
    assert search(folder="killed")[0] == 0
    assert trainings.seen == []


def test_minutes_end_a_search_that_goes_on_later(search, trainings, capsys, monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(tune.time, "monotonic", lambda: float(next(now)))
    code, table = search("--only=plain", "--minutes=0.5")
    assert code == 0
    assert 0 < len(table) < 8
    assert f"{8 - (table.state != 'unfinished').sum()} trials are left" in capsys.readouterr().out
    assert search("--only=plain")[1].trial.tolist() == list(range(8))


def test_more_trials_may_be_asked_for_later(search, trainings):
    _, few = search("--only=plain", "--trials=3")
    trainings.seen.clear()
    _, more = search("--only=plain", trials=5)
    assert [name for name, _ in trainings.seen] == ["plain/trial-003", "plain/trial-004"]
    assert results(more)[:3] == results(few)


@pytest.mark.parametrize(
    ("declared", "key"),
    [
        ({"space": {LR: {"low": 1e-3, "high": 1e-1}}}, "space"),
        ({"tokens": 600}, "tokens"),
        ({"metric": "val/bpb"}, "metric"),
        ({"direction": "maximize"}, "direction"),
        ({"changes": {"seeds": [3]}}, "seed_everything"),
    ],
)
def test_another_declaration_is_refused_in_one_line(search, trainings, capsys, declared, key):
    search("--only=plain", trials=1)
    trainings.seen.clear()
    capsys.readouterr()
    assert search("--only=plain", **declared)[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"begun with another {key}" in line
    assert "--folder" in line
    assert trainings.seen == []


# ---- trials that fail


def test_a_diverged_trial_is_the_worst_one_and_others_go_on(search, trainings, tmp_path):
    log = tmp_path / "log"
    log.write_text("step 0\nerror: step 1, lr 2: the loss of batch 0 is nan\n")
    trainings.raising = {("plain/trial-001", 1): CommandError(["train.py"], 3, log)}
    code, table = search("--only=plain", trials=4)
    assert code == 0
    assert len(table) == 4
    assert table[table.state == "diverged"].trial.tolist() == [1]
    assert table.reason[1] == "step 1, lr 2: the loss of batch 0 is nan"
    best = table[table.state == "complete"].sort_values("val/loss").iloc[0]
    tuned = yaml.safe_load((tmp_path / "search" / "pair_tuned.yaml").read_text())
    arguments = tuned["runs"]["plain"]["model"]["init_args"]
    assert arguments["optimizer"]["lr"] == pytest.approx(best[LR])


def test_another_failure_ends_the_search_with_1(search, trainings, tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text("error: no space left\n")
    trainings.raising = {("plain/trial-001", 1): CommandError(["train.py"], 2, log)}
    assert search("--only=plain")[0] == 1
    assert "no space left" in capsys.readouterr().err
    trainings.seen.clear()
    assert search("--only=plain")[0] == 0
    assert trainings.seen[0] == ("plain/trial-001", False)


def test_a_metric_that_is_not_logged_is_named(search, capsys):
    assert search("--only=plain", metric="val/accuracy")[0] == 2
    assert "search.metric (val/accuracy)" in capsys.readouterr().err


# ---- declarations


@pytest.mark.parametrize(
    ("declared", "key"),
    [
        ({"trials": 0}, "search.trials"),
        ({"tokens": 200}, "search.tokens"),
        ({"direction": "down"}, "search.direction"),
        ({"space": {}}, "search.space"),
        ({"space": {"model.init_args.config.depth": {"choices": [1]}}}, "config.depth is no key"),
        ({"space": {"trainer.max_steps": {"choices": [1]}}}, "trainer.max_steps is no key"),
        ({"space": {LR: {"low": 1, "high": 0.1}}}, LR),
        ({"space": {LR: {"low": 0, "high": 0.1, "log": True}}}, LR),
        ({"space": {LR: {"choices": []}}}, LR),
        ({"space": {LR: {"choices": [1], "log": True}}}, LR),
        ({"changes": {"search": None}}, "declares no search"),
        ({"changes": {"search": {"trials": 1}}}, "has no tokens"),
    ],
)
def test_a_wrong_declaration_is_one_line_before_anything_runs(
    search, trainings, capsys, declared, key
):
    assert search("--only=plain", **declared)[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert key in line
    assert trainings.seen == []


def test_trials_validate_on_documents_that_the_report_does_not_score(study_file):
    def split(**changes):
        changes = {"search": SEARCH, **changes}
        trials = tune.as_trials(load_study(str(study_file(**changes))))
        config = trials.train_config(trials.runs[0])
        return config["data"]["init_args"].get("validation_split", "val")

    only = {"runs": {"plain": {"model": {"class_path": "lightning_models.TransformerLM"}}}}
    columns = {"columns": [{"title": "bpb", "evaluation": "blockwise"}]}
    assert split(**only, **columns) == "test"
    assert split(**only, **columns, evaluations={"blockwise": {"split": "test"}}) == "val"
    assert split(**only, **columns, evaluations={"blockwise": {"command": "reason"}}) == "val"
    assert split(columns=None) == "test"
    assert split(columns=None, compare={"split": "test"}) == "val"
    with pytest.raises(StudyError, match="val and of test"):
        split(evaluations={"blockwise": {"split": "test"}})


@pytest.mark.parametrize("name", [n for n in study_names() if load_study(n).search is not None])
def test_every_declared_search_fits_its_runs(name):
    study = load_study(name, steps=tune.steps_of_trial(load_study(name)))
    trials = tune.as_trials(study)
    for run in trials.runs:
        space = tune.space_of(trials, run)
        declared = {key: tune.value_at(run.model, key, name) for key in space}
        assert all(tune._inside(value, space[key]) for key, value in declared.items()), run.name
        config = trials.train_config(run)
        assert config["trainer"]["max_steps"] % study.search.validations == 0
        split = config["data"]["init_args"].get("validation_split", "val")
        assert split == tune.validation_split(study)


def test_the_best_values_are_a_study(search, tmp_path):
    _, table = search()
    tuned = load_study(str(tmp_path / "search" / "pair_tuned.yaml"))
    for run in tuned.runs:
        own = table[(table.run == run.name) & (table.state == "complete")]
        best = own.sort_values("val/loss").iloc[0]
        assert run.model["init_args"]["optimizer"]["lr"] == pytest.approx(best[LR])
        assert run.model["init_args"]["config"]["dim"] == 16
    text = (tmp_path / "search" / "search.md").read_text()
    assert text.count("| complete") + text.count("| pruned") == 16
    assert text.count(f"Best: `--{LR} ") == 2


# ---- the real programs


@pytest.mark.slow
def test_a_real_search_is_killed_and_goes_on(study_file, text_file, data_cache, tmp_path):
    data = {"tokenizer": "bytes", "block_size": 16, "batch_size": 2, "cache_dir": str(data_cache)}
    declared = {**SEARCH, "trials": 2, "tokens": 32 * 90, "space": {LR: SPACE[LR]}}
    path = study_file(data=data, trainer={"accelerator": "cpu"}, search=declared, columns=None)
    folder = tmp_path / "search"
    words = ["--text", str(text_file), "--folder", str(folder), "--only", "plain"]
    command = [sys.executable, "-m", "studies.tune", str(path), *words]
    place = RunFolder(folder / "plain" / "trial-000")
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    end = time.monotonic() + 300
    while place.checkpoint is None and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143
    assert not place.trained
    stopped = torch.load(place.checkpoint, weights_only=True)["global_step"]
    assert 0 < stopped < 90
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    table = pd.read_csv(folder / "search.csv")
    assert table.state[0] == "complete"
    assert table.steps[0] == 90
    assert json.loads((place.path / "record.json").read_text())["train"]["sittings"] == 2
    assert len(read_scalars(place.checkpoint.parent.parent)["val/loss"]) == 9
    runs, left_out = find_compared([str(folder / "plain")], skip=False)
    assert len(runs) == 2
    assert not left_out


def test_several_at_a_time_are_as_many(search):
    code, table = search("--jobs=2")
    assert code == 0
    assert table.groupby("run").size().to_dict() == {"plain": 8, "copy": 8}
    assert not set(table.state) - {"complete", "pruned"}
