"""Resume, stale settings, jobs, failures, and the execution of commands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from studies.runner import CommandError, RunFolder, StudyProgress, execute, run_study, stop_running
from studies.study import StudyError

ROOT = Path(__file__).parents[2]


def record(folder, run):
    return json.loads((folder / run / "record.json").read_text())


def test_everything_is_done_once_in_order(study, commands, tmp_path, capsys):
    run_study(study, tmp_path, execute=commands)
    assert commands.kinds == [
        "fit plain-seed0",
        "perplexity plain-seed0",
        "fit copy-seed0",
        "perplexity copy-seed0",
        "perplexity copy-seed0",
        "validate copy-seed0",
        "fit plain-seed1",
        "perplexity plain-seed1",
        "fit copy-seed1",
        "perplexity copy-seed1",
        "perplexity copy-seed1",
    ]
    assert not any("--ckpt_path" in command for command in commands.seen if "fit" in command)
    done = list(commands.seen)
    run_study(study, tmp_path, execute=commands)
    assert commands.seen == done
    assert capsys.readouterr().out.count("done before") == 4


def test_several_runs_at_a_time_do_the_same(study, commands, tmp_path):
    run_study(study, tmp_path / "one", execute=commands)
    alone = sorted(commands.kinds)
    commands.seen.clear()
    run_study(study, tmp_path / "two", jobs=2, execute=commands)
    # an analysis may have to wait for the run it refers to, and is then done again
    assert sorted(set(commands.kinds)) == sorted(set(alone))
    reference = (tmp_path / "two" / "copy-seed0" / "looks" / "config.yaml").read_text()
    assert str(RunFolder(tmp_path / "two" / "plain-seed0").checkpoint) in reference


def test_of_several_runs_at_a_time_the_longest_is_first(study, commands, tmp_path):
    commands.failing = {"fit": ValueError("broken")}
    with pytest.raises(ValueError, match="broken"):
        run_study(study, tmp_path, jobs=2, execute=commands)
    assert commands.kinds[0].startswith("fit copy")


def test_a_failure_stops_the_runs_that_have_not_begun(study, commands, tmp_path):
    commands.failing = {"fit": ValueError("broken")}
    with pytest.raises(ValueError, match="broken"):
        run_study(study, tmp_path, jobs=2, execute=commands)
    assert len(commands.seen) <= 3


def test_a_stopped_training_goes_on_from_its_checkpoint(study, commands, tmp_path):
    commands.failing = {"copy-seed0": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path, execute=commands)
    stopped = record(tmp_path, "copy-seed0")["train"]
    assert (stopped["sittings"], stopped["finished"]) == (1, False)
    commands.failing = {}
    commands.seen.clear()
    run_study(study, tmp_path, execute=commands)
    assert commands.kinds[0] == "fit copy-seed0"
    assert commands.seen[0][-2:] == ["--ckpt_path", "last"]
    after = record(tmp_path, "copy-seed0")["train"]
    assert (after["sittings"], after["finished"]) == (2, True)
    assert after["seconds"] > stopped["seconds"]


def test_a_training_without_a_checkpoint_starts_again(study, commands, tmp_path):
    commands.failing = {"plain-seed0": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path, execute=commands)
    place = RunFolder(tmp_path / "plain-seed0")
    place.checkpoint.unlink()
    (place.training / "leftover").touch()
    commands.failing = {}
    run_study(study, tmp_path, only=["plain"], execute=commands)
    assert not (place.training / "leftover").exists()
    assert not any("--ckpt_path" in command for command in commands.seen if "fit" in command)
    assert place.record["train"]["sittings"] == 1


def test_a_failed_evaluation_is_done_again_alone(study, commands, tmp_path):
    commands.failing = {"sampled.json": ValueError("broken")}
    with pytest.raises(ValueError, match="broken"):
        run_study(study, tmp_path, execute=commands)
    commands.failing = {}
    commands.seen.clear()
    run_study(replace(study, seeds=(0,)), tmp_path, execute=commands)
    assert commands.kinds == ["perplexity copy-seed0", "validate copy-seed0"]


def test_a_changed_evaluation_is_done_again(study, commands, tmp_path):
    run_study(study, tmp_path, execute=commands)
    commands.seen.clear()
    plain, copy = study.runs
    sampled = {**copy.evaluations["sampled"], "positions": 16}
    changed = replace(
        study, runs=(plain, replace(copy, evaluations={**copy.evaluations, "sampled": sampled}))
    )
    run_study(changed, tmp_path, execute=commands)
    assert commands.kinds == ["perplexity copy-seed0", "perplexity copy-seed1"]
    assert all(command[-1] == "16" for command in commands.seen)


def test_a_run_with_other_settings_is_not_taken_for_this_one(study, commands, tmp_path):
    run_study(study, tmp_path, only=["plain"], execute=commands)
    other = replace(study, trainer={"gradient_clip_val": 2.0})
    with pytest.raises(StudyError, match=r"plain-seed0 was begun with other settings .*--folder"):
        run_study(other, tmp_path, execute=commands)


def test_two_studies_do_not_share_a_folder(study, commands, tmp_path):
    with FileLock(tmp_path / ".lock"), pytest.raises(StudyError, match="in use by another study"):
        run_study(study, tmp_path, execute=commands)
    assert commands.seen == []


def test_a_lost_checkpoint_is_reported(study, commands, tmp_path):
    run_study(study, tmp_path, only=["plain"], execute=commands)
    place = RunFolder(tmp_path / "plain-seed0")
    place.checkpoint.unlink()
    (place.path / "blockwise.json").unlink()
    with pytest.raises(StudyError, match="no checkpoint any more"):
        run_study(study, tmp_path, only=["plain"], execute=commands)


def test_an_analysis_is_repeated_when_the_run_it_refers_to_appears(study, commands, tmp_path):
    run_study(study, tmp_path, only=["copy"], execute=commands)
    reference = (tmp_path / "copy-seed0" / "looks" / "config.yaml").read_text()
    assert "reference_ckpt: null" in reference
    commands.seen.clear()
    run_study(study, tmp_path, execute=commands)
    assert commands.kinds.count("validate copy-seed0") == 1
    reference = (tmp_path / "copy-seed0" / "looks" / "config.yaml").read_text()
    assert str(RunFolder(tmp_path / "plain-seed0").checkpoint) in reference


def test_checkpoints_and_validations_are_as_frequent(study):
    settings = replace(study, steps=50).train_config(study.runs[0])
    assert settings["trainer"]["val_check_interval"] == 5
    assert settings["checkpoint"]["every_n_train_steps"] == 5


def test_the_time_left_follows_costs_then_measured_times(study, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("studies.runner.time.monotonic", lambda: now[0])
    progress, left = StudyProgress(study.seeded()), []
    for run, seconds in zip(study.seeded(), (60.0, 120.0, 60.0, 120.0), strict=True):
        progress.begin(run)
        now[0] += seconds
        progress.end(run, executed=True)
        left.append(progress.left())
    assert left == [60.0 * (3 + 1 + 3), 60.0 + 120.0, 120.0, None]
    progress = StudyProgress(study.seeded())
    progress.begin(study.seeded()[0])
    progress.end(study.seeded()[0], executed=False)
    assert progress.left() is None


# ---- execution


def test_a_failure_shows_the_command_and_its_last_lines(tmp_path):
    code = "print(*range(100), sep='\\n'); raise SystemExit('no such luck')"
    with pytest.raises(CommandError) as failure:
        execute([sys.executable, "-u", "-c", code], tmp_path / "log")
    message = str(failure.value)
    assert "code 1" in message
    assert "no such luck" in message
    assert "| 99\n" in message
    assert "| 50\n" not in message
    assert f"{sys.executable} -u -c" in message


def test_threads_are_limited(tmp_path):
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    execute([sys.executable, "-c", code], tmp_path / "log", threads=3)
    assert (tmp_path / "log").read_text() == "3\n"


def test_what_a_watch_raises_stops_the_command(tmp_path):
    looks = []

    def watch():
        looks.append((tmp_path / "log").read_text())
        if looks[-1]:
            raise KeyError("enough")

    code = "import time; print('up', flush=True); time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(KeyError, match="enough"):
        execute([sys.executable, "-c", code], tmp_path / "log", watch=watch)
    assert looks[-1] == "up\n"
    assert time.monotonic() - start < 30


ORPHAN = """
import os, sys
from pathlib import Path
from studies.runner import execute
code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
log = Path(sys.argv[1])
def kill():
    if log.read_text():
        os.kill(os.getpid(), 9)
execute([sys.executable, "-c", code], log, watch=kill)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")
def test_a_command_that_has_outlived_its_study_is_waited_for(tmp_path):
    log, second = tmp_path / "log", [sys.executable, "-c", "print('second')"]
    command = [sys.executable, "-c", ORPHAN, str(log)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    orphan = int(log.read_text())
    try:
        with pytest.raises(StudyError, match="still written to by a command of a killed process"):
            execute(second, log)
        assert int(log.read_text()) == orphan
    finally:
        os.kill(orphan, signal.SIGKILL)
    end = time.monotonic() + 30
    while log.read_text() != "second\n" and time.monotonic() < end:
        with contextlib.suppress(StudyError):  # until the system has ended it
            execute(second, log)
    assert log.read_text() == "second\n"


def test_commands_of_other_threads_can_be_stopped(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        code = "import time; print('up', flush=True); time.sleep(60)"
        future = pool.submit(execute, [sys.executable, "-c", code], tmp_path / "log")
        while not future.done() and not (
            (tmp_path / "log").exists() and (tmp_path / "log").read_text()
        ):
            time.sleep(0.01)
        stop_running()
        with pytest.raises(CommandError, match="code -15"):
            future.result(timeout=30)


SAVING = """
import os, pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(60)
"""


def test_a_stopped_study_lets_the_command_save_its_state(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            execute([sys.executable, "-c", SAVING, str(tmp_path / "state")], tmp_path / "log")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert (tmp_path / "state").read_text() == "saved"
