"""Resume, stale settings, jobs, failures, and the execution of commands."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from studies import runner
from studies.runner import CommandError, RunFolder, execute, in_parallel, run_study, started
from studies.study import StudyError

ROOT = Path(__file__).parents[2]
EVERYTHING = [
    "fit plain-seed0",
    "perplexity plain-seed0",
    "fit copy-seed0",
    "perplexity copy-seed0",
    "perplexity copy-seed0",
    "fit plain-seed1",
    "perplexity plain-seed1",
    "fit copy-seed1",
    "perplexity copy-seed1",
    "perplexity copy-seed1",
    "validate copy-seed0",
]


def record(folder, run):
    return json.loads((folder / run / "record.json").read_text())


def resumed(commands):
    return [command for command in commands.seen if command[-2:] == ["--ckpt_path", "last"]]


def reference(folder):
    return (folder / "copy-seed0" / "looks" / "config.yaml").read_text()


@pytest.mark.parametrize("jobs", [1, 2])
def test_everything_is_done_once(study, commands, tmp_path, jobs):
    run_study(study, tmp_path, jobs=jobs)
    assert (commands.kinds if jobs == 1 else sorted(commands.kinds)) == (
        EVERYTHING if jobs == 1 else sorted(EVERYTHING)
    )
    assert not resumed(commands)
    assert str(RunFolder(tmp_path / "plain-seed0").checkpoint) in reference(tmp_path)
    done = list(commands.seen)
    run_study(study, tmp_path, jobs=jobs)
    assert commands.seen == done


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failure_stops_the_runs_that_have_not_begun(study, commands, tmp_path, jobs):
    commands.failing = {"fit": ValueError("broken")}
    with pytest.raises(ValueError, match="broken"):
        run_study(study, tmp_path, jobs=jobs)
    assert len(commands.seen) <= jobs


def test_a_stopped_training_goes_on_from_its_checkpoint(study, commands, tmp_path):
    commands.failing = {"copy-seed0": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path)
    stopped = record(tmp_path, "copy-seed0")["train"]
    assert not stopped["finished"]
    commands.failing = {}
    commands.seen.clear()
    run_study(study, tmp_path)
    assert commands.kinds[0] == "fit copy-seed0"
    assert len(resumed(commands)) == 1
    after = record(tmp_path, "copy-seed0")["train"]
    assert after["finished"]
    assert after["seconds"] > stopped["seconds"]


def test_a_training_without_a_checkpoint_starts_again(study, commands, tmp_path):
    commands.failing = {"plain-seed0": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path)
    place = RunFolder(tmp_path / "plain-seed0")
    place.checkpoint.unlink()
    (place.training / "leftover").touch()
    commands.failing = {}
    run_study(study, tmp_path, only=["plain"])
    assert not (place.training / "leftover").exists()
    assert not resumed(commands)


def changed_evaluation(study):
    copy = study.runs["copy"]
    evaluations = {**copy.evaluations, "sampled": {**copy.evaluations["sampled"], "positions": 16}}
    return replace(study, runs={**study.runs, "copy": replace(copy, evaluations=evaluations)})


@pytest.mark.parametrize("how", ["failed", "changed", "removed"])
def test_an_evaluation_is_done_again_alone(study, commands, tmp_path, how):
    """One that failed, has other settings, or whose result is gone."""
    study = replace(study, seeds=(0,))
    commands.failing = {"sampled.json": ValueError("broken")} if how == "failed" else {}
    try:
        run_study(study, tmp_path)
    except ValueError:
        assert how == "failed"
    if how == "removed":
        (tmp_path / "copy-seed0" / "sampled.json").unlink()
    commands.failing = {}
    commands.seen.clear()
    run_study(changed_evaluation(study) if how == "changed" else study, tmp_path)
    assert commands.kinds[0] == "perplexity copy-seed0"
    assert commands.kinds[1:] == (["validate copy-seed0"] if how == "failed" else [])
    assert commands.seen[0][-1] == ("16" if how == "changed" else "8")


def test_an_analysis_is_repeated_when_the_run_it_refers_to_appears(study, commands, tmp_path):
    run_study(study, tmp_path, only=["copy"])
    assert "reference_ckpt: null" in reference(tmp_path)
    commands.seen.clear()
    run_study(study, tmp_path)
    assert commands.kinds.count("validate copy-seed0") == 1
    assert str(RunFolder(tmp_path / "plain-seed0").checkpoint) in reference(tmp_path)


def test_folders_that_cannot_be_used_are_refused(study, commands, tmp_path):
    run_study(study, tmp_path, only=["plain"])
    commands.seen.clear()
    other = replace(study, trainer={"gradient_clip_val": 2.0})
    with pytest.raises(StudyError, match=r"plain-seed0 .* --folder"):
        run_study(other, tmp_path, only=["plain"])
    with FileLock(tmp_path / ".lock"), pytest.raises(StudyError, match="--folder"):
        run_study(study, tmp_path)
    RunFolder(tmp_path / "plain-seed0").checkpoint.unlink()
    with pytest.raises(StudyError, match="plain-seed0"):
        run_study(study, tmp_path, only=["plain"])
    assert commands.seen == []


def test_checkpoints_and_validations_are_as_frequent(study):
    settings = replace(study, steps=50).train_config(study.runs["plain"])
    assert settings["trainer"]["val_check_interval"] == 5
    assert settings["checkpoint"]["every_n_train_steps"] == 5


# ---- execution


def test_a_failure_shows_the_command_and_its_last_lines(tmp_path):
    code = "print(*range(100), sep='\\n'); raise SystemExit('no such luck')"
    with pytest.raises(CommandError) as failure:
        execute([sys.executable, "-u", "-c", code], tmp_path / "log")
    message = str(failure.value)
    assert failure.value.code == 1
    assert "no such luck" in message
    assert "| 99\n" in message
    assert "| 50\n" not in message
    assert f"{sys.executable} -u -c" in message


def test_a_training_says_where_it_is(tmp_path, monkeypatch, capsys):
    """Each new progress line of its log, once, while it runs."""
    monkeypatch.setattr(runner, "REPORT_SECONDS", 0.02)
    code = "import time; print('step 1/2: train/loss 3', flush=True); time.sleep(1)"
    execute(
        [sys.executable, "-c", f"print('hello'); {code}"], tmp_path / "log", label="plain-seed0"
    )
    execute([sys.executable, "-c", code], tmp_path / "other")
    assert capsys.readouterr().out == "plain-seed0: step 1/2: train/loss 3\n"


def test_several_commands_share_the_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    runner.share_processors(1)
    assert os.environ["OMP_NUM_THREADS"] == "8"
    runner.share_processors(3)
    execute(
        [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"], tmp_path / "log"
    )
    assert (tmp_path / "log").read_text() == "2\n"


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


SAVING = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
STUDY = """
import os, sys
from pathlib import Path
from studies.runner import started
log = Path(sys.argv[1])
with started([sys.executable, "-c", sys.argv[3], sys.argv[2]], log) as process:
    while not log.read_text():
        pass
    os.kill(os.getpid(), 9)
"""


def test_a_command_that_is_left_early_can_save_its_state(tmp_path):
    log, state = tmp_path / "log", tmp_path / "state"
    with started([sys.executable, "-c", SAVING, str(state)], log) as process:
        wait_for(log.read_text)
    assert process.returncode == 128 + signal.SIGTERM
    assert state.read_text() == "saved"


def test_an_error_ends_the_commands_of_other_threads(tmp_path):
    log, state = tmp_path / "log", tmp_path / "state"

    def work(item):
        if item == "command":
            execute([sys.executable, "-c", SAVING, str(state)], log)
        wait_for(lambda: log.exists() and log.read_text())
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        in_parallel(work, ["command", "other"], jobs=2)
    assert state.read_text() == "saved"


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_command_does_not_outlive_a_killed_study(tmp_path):
    log, state = tmp_path / "log", tmp_path / "state"
    command = [sys.executable, "-c", STUDY, str(log), str(state), SAVING]
    killed = subprocess.run(command, cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    wait_for(lambda: state.exists() and state.read_text())
    assert state.read_text() == "saved"
