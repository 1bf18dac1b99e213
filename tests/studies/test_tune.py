"""Searches: equal budgets, successive halving, resume, refusals, one real search."""

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from omegaconf import OmegaConf

from evaluation.runs import find_compared
from studies import tune
from studies.runner import RunFolder
from studies.study import StudyError, load_study, study_names
from tests.studies.conftest import load_declared

ROOT = Path(__file__).parents[2]
LR, STD = "model.init_args.optimizer.lr", "model.init_args.config.init_std"
SPACE = {LR: {"low": 1e-4, "high": 1e-1, "log": True}, STD: {"choices": [0.02, 0.05]}}
SEARCH = {"trials": 8, "tokens": 300, "space": SPACE}
STEPS, INTERVAL = 9, 1  # 300 tokens in steps of 32, cut at nine validations


class Trainings:
    """In place of training: a step at each look, whose loss follows from learning rate and step."""

    def __init__(self):
        self.seen = []
        self.raising = {}
        """What to raise, or an exit code, by (folder of the trial, step); once."""
        self.logs = {}
        self.at_once = False
        """Whether a training ends before it is looked at."""

    @contextlib.contextmanager
    def started(self, command, log):
        value = dict(itertools.pairwise(map(str, command)))
        config = yaml.safe_load(Path(value["-c"]).read_text())
        trial = log.parent
        self.seen.append(f"{trial.parent.name}/{trial.name}")
        log.write_text("step 0\nerror: step 1: the loss of batch 0 is nan\n")
        losses = self.logs[trial] = {}
        process = SimpleNamespace(returncode=None)

        def poll():
            step = len(losses) + 1
            happens = self.raising.pop((self.seen[-1], step), None)
            if isinstance(happens, BaseException):
                raise happens
            if happens is not None:
                process.returncode = happens
            elif step <= config["trainer"]["max_steps"]:
                losses[step - 1] = loss(config, step)
                if self.at_once:
                    return poll()
            else:
                process.returncode = 0
            return process.returncode

        process.poll = poll
        yield process

    def logged(self, place):
        return {"val/loss": self.logs.get(place.path, {})}


def loss(config, step):
    arguments = config["model"]["init_args"]
    distance = abs(math.log(arguments["optimizer"]["lr"] / 3e-3))
    return 1.0 + distance + arguments["config"]["init_std"] + 1 / step


@pytest.fixture
def trainings(monkeypatch):
    trainings = Trainings()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # several jobs change it
    monkeypatch.setattr(tune, "started", trainings.started)
    monkeypatch.setattr(tune, "logged", trainings.logged)
    monkeypatch.setattr(tune, "POLL", 0)
    return trainings


@pytest.fixture
def search(study_file, trainings, tmp_path):
    """Searches with changed keys of the declaration; returns exit code and table."""
    runs = yaml.safe_load(study_file().read_text())["runs"]
    for number, run in enumerate(runs.values()):
        arguments = run["model"]["init_args"]
        config = {**arguments["config"], "init_std": 0.02}
        run["model"]["init_args"] = {"config": config, "optimizer": {"lr": 2e-3}}
        if number:
            run["search"] = {"model.init_args.config.copies": {"low": 2, "high": 5}}
            config["copies"] = 3
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
    table = table.drop(columns=["seconds", "trial"]).sort_values(["run", LR], ignore_index=True)
    return table.astype(object).fillna("").to_dict("records")


# ---- size and order


def test_every_run_has_as_many_trials_of_as_many_tokens(search, trainings, tmp_path):
    code, table = search()
    assert code == 0
    assert table.groupby("run").size().to_dict() == {"plain": 8, "copy": 8}
    assert trainings.seen[:4] == [
        *("plain/trial-000", "copy/trial-000", "plain/trial-001", "copy/trial-001")
    ]
    configs = [yaml.safe_load(p.read_text()) for p in tmp_path.rglob("trial-*/config.yaml")]
    assert {config["trainer"]["max_steps"] for config in configs} == {STEPS}
    assert {config["trainer"]["val_check_interval"] for config in configs} == {INTERVAL}
    assert {config["seed_everything"] for config in configs} == {0}
    whole = table[table.state == "complete"]
    assert set(whole.steps) == {STEPS}
    assert set(table.steps) <= {1, 3, STEPS}


def test_the_first_trial_has_the_declared_values(search):
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
    trainings.at_once = True
    _, ended = search("--only=plain", folder="other")
    assert results(ended) == results(watched)


# ---- resume


@pytest.mark.parametrize(
    "moment", [("plain/trial-000", 2), ("copy/trial-000", 4), ("plain/trial-003", 1)]
)
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), MemoryError()])
def test_a_killed_search_ends_like_one_that_was_not(search, trainings, moment, stop, tmp_path):
    _, whole = search()
    trained = len(trainings.seen)
    trainings.seen.clear()
    trainings.raising = {moment: stop}
    with contextlib.suppress(MemoryError):
        assert search(folder="killed")[0] == 130
    assert trainings.seen[-1] == moment[0]
    before = trainings.seen[:-1]
    code, table = search(folder="killed")
    assert code == 0
    assert len(before) + len(trainings.seen[len(before) + 1 :]) == trained
    assert len(set(trainings.seen)) == len(trainings.seen)
    assert not (tmp_path / "killed" / moment[0]).exists()
    assert results(table) == results(whole)
    trainings.seen.clear()
    assert search(folder="killed")[0] == 0
    assert trainings.seen == []


def test_minutes_end_a_search_that_goes_on_later(search, capsys, monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(tune.time, "monotonic", lambda: float(next(now)))
    code, table = search("--only=plain", "--minutes=0.2")
    assert code == 0
    assert 0 < len(table) < 8
    assert f"{8 - len(table)} trials are left" in capsys.readouterr().out
    assert search("--only=plain")[1].trial.tolist() == list(range(8))


def test_more_trials_may_be_asked_for_later(search, trainings):
    _, few = search("--only=plain", "--trials=3")
    trainings.seen.clear()
    _, more = search("--only=plain", trials=5)
    assert trainings.seen == ["plain/trial-003", "plain/trial-004"]
    assert results(more[more.trial < 3]) == results(few)


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
    assert key in line
    assert "--folder" in line
    assert trainings.seen == []


# ---- trials that fail


def test_a_diverged_trial_is_the_worst_one_and_others_go_on(search, trainings, tmp_path):
    trainings.raising = {("plain/trial-001", 1): 3}
    code, table = search("--only=plain", trials=4)
    assert code == 0
    assert len(table) == 4
    assert table[table.state == "diverged"].trial.tolist() == [1]
    assert table.reason[1] == "step 1: the loss of batch 0 is nan"
    best = table[table.state == "complete"].sort_values("val/loss").iloc[0]
    tuned = yaml.safe_load((tmp_path / "search" / "pair_tuned.yaml").read_text())
    arguments = tuned["runs"]["plain"]["model"]["init_args"]
    assert arguments["optimizer"]["lr"] == pytest.approx(best[LR])


def test_another_failure_ends_the_search_with_1(search, trainings, capsys):
    trainings.raising = {("plain/trial-001", 1): 2}
    assert search("--only=plain")[0] == 1
    assert "the loss of batch 0" in capsys.readouterr().err
    trainings.seen.clear()
    assert search("--only=plain")[0] == 0
    assert trainings.seen[0] == "plain/trial-002"


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
        (
            {"space": {"model.init_args.config.depth": {"choices": [1]}}},
            "model.init_args.config.depth",
        ),
        ({"space": {"trainer.max_steps": {"choices": [1]}}}, "trainer.max_steps"),
        ({"space": {LR: {"low": 1}}}, LR),
        ({"space": {LR: 3}}, LR),
        ({"space": {LR: {"low": 1, "high": 0.1}}}, LR),
        ({"space": {LR: {"low": 0, "high": 0.1, "log": True}}}, LR),
        ({"space": {LR: {"choices": []}}}, LR),
        ({"space": {LR: {"choices": [1], "log": True}}}, LR),
        ({"changes": {"search": None}}, "declares no search"),
        ({"changes": {"search": {"trials": 1}}}, "search.tokens"),
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
        config = trials.train_config(trials.runs["plain"])
        return config["data"]["init_args"].get("validation_split", "val")

    only = {"runs": {"plain": {"model": {"class_path": "lightning_models.TransformerLM"}}}}
    columns = {"columns": {"bpb": "`blockwise.bits_per_byte` / 1"}}
    assert split(**only, **columns) == "test"
    assert split(**only, **columns, evaluations={"blockwise": {"split": "test"}}) == "val"
    assert split(**only, **columns, evaluations={"blockwise": {"command": "reason"}}) == "val"
    assert split(columns=None) == "test"
    assert split(columns=None, compare={"split": "test"}) == "val"
    with pytest.raises(StudyError, match="val and of test"):
        split(evaluations={"blockwise": {"split": "test"}})


@pytest.mark.parametrize("name", [n for n in study_names() if load_declared(n).search is not None])
def test_every_declared_search_fits_its_runs(name):
    study = load_study(name, steps=tune.steps_of_trial(load_declared(name)))
    trials = tune.as_trials(study)
    for run in trials.runs.values():
        space = tune.space_of(trials, run)
        settings = OmegaConf.create(trials.train_config(run))
        declared = {key: OmegaConf.select(settings, key) for key in space}
        assert all(tune._inside(value, space[key]) for key, value in declared.items()), run.name
        config = trials.train_config(run)
        assert config["trainer"]["max_steps"] % study.search.validations == 0
        split = config["data"]["init_args"].get("validation_split", "val")
        assert split == tune.validation_split(study)


def test_the_best_values_are_a_study(search, tmp_path):
    _, table = search()
    tuned = load_study(str(tmp_path / "search" / "pair_tuned.yaml"))
    for run in tuned.runs.values():
        own = table[(table.run == run.name) & (table.state == "complete")]
        best = own.sort_values("val/loss").iloc[0]
        assert run.model["init_args"]["optimizer"]["lr"] == pytest.approx(best[LR])
        assert run.model["init_args"]["config"]["dim"] == 16
    text = (tmp_path / "search" / "search.md").read_text()
    assert text.count("| complete") + text.count("| pruned") == 16


# ---- the real programs


@pytest.mark.slow
def test_a_real_search_is_killed_and_goes_on(study_file, text_file, data_cache, tmp_path):
    data = {"tokenizer": "bytes", "block_size": 16, "batch_size": 2, "cache_dir": str(data_cache)}
    declared = {**SEARCH, "trials": 2, "tokens": 32 * 90, "space": {LR: SPACE[LR]}}
    runs = yaml.safe_load(study_file().read_text())["runs"]
    runs["plain"]["model"]["init_args"]["optimizer"] = {"lr": 2e-3}
    changes = {"data": data, "trainer": {"accelerator": "cpu"}, "search": declared, "runs": runs}
    path = study_file(columns=None, **changes)
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
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    table = pd.read_csv(folder / "search.csv")
    assert table.trial.tolist() == [1, 2]
    assert set(table.state) <= {"complete", "pruned"}
    assert table.steps[0] == 90
    runs, left_out = find_compared([str(folder / "plain")], skip=False)
    assert len(runs) == 2
    assert not left_out


def test_several_at_a_time_are_as_many(search):
    code, table = search("--jobs=2")
    assert code == 0
    assert table.groupby("run").size().to_dict() == {"plain": 8, "copy": 8}
    assert not set(table.state) - {"complete", "pruned"}
