"""config.yaml next to the logs, and the folder that one process at a time writes to."""

import csv
import errno
import json
import os
import shutil
import subprocess
import threading
import time
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch
import yaml
from filelock import FileLock
from jsonargparse import Namespace

from callbacks import run_record
from callbacks.run_record import SaveRunRecord, as_yaml, free_path, git_commit
from evaluation.runs import find_compared
from lightning_models.checkpoint import CheckpointError, newest_checkpoint, read_checkpoint
from tests.programs import Program
from tests.reliability.runs import Run, finished, killed, step_lines
from tests.training.conftest import checkpoint_folder, load
from training import UserError, main
from training.help import TrainingParser
from training.run_folder import hold_folder


def test_the_record_names_command_commit_and_versions(trained):
    text = (trained / "TransformerLM" / "version_0" / "config.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert f"# torch: {torch.__version__}" in header
    assert f"# commit: {git_commit()}" in header
    assert any(line.startswith("# command: ") for line in header)
    assert any(line.startswith("# latent-thinking: ") for line in header)


def test_changed_code_makes_a_commit_dirty_and_written_results_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "__file__", str(tmp_path / "callbacks" / "run_record.py"))
    paths = [tmp_path / folder / "x" for folder in ("callbacks", "docs", "callbacks/docs")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("1")

    def git(*command):
        argv = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *command]
        return subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True, text=True)

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() == "unknown"
    git("init")
    assert git_commit() == "unknown"
    git("add", "--all")
    git("commit", "--message", "x")
    commit = git("rev-parse", "HEAD").stdout.strip()
    code, results, own = paths
    results.write_text("2")
    assert git_commit() == commit
    for path in (code, own):
        path.write_text("2")
        assert git_commit() == f"{commit}-dirty"
        path.write_text("1")
    assert git_commit() == commit


def test_the_record_reproduces_the_run(fit, trained, tmp_path):
    record = trained / "TransformerLM" / "version_0" / "config.yaml"
    root = f"--trainer.default_root_dir={tmp_path}"
    assert fit(tmp_path, f"--config={record}", root, bare=True) == 0
    ours = load(checkpoint_folder(tmp_path) / "last.ckpt")["state_dict"]
    theirs = load(checkpoint_folder(trained) / "last.ckpt")["state_dict"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_existing_record_is_kept_and_never_in_the_way(fit, own_run):
    folder = own_run / "TransformerLM" / "version_0"
    first = (folder / "config.yaml").read_text()
    for max_steps in (8, 10):
        steps = f"--trainer.max_steps={max_steps}"
        assert fit(own_run, "--ckpt_path=last", steps, bare=True) == 0
    assert (folder / "config.yaml").read_text() == first
    resumed = yaml.safe_load((folder / "config_8.yaml").read_text())
    assert resumed["trainer"]["max_steps"] == 10
    assert resumed["model"]["init_args"]["config"]["dim"] == 16


def test_names_are_never_used_twice(tmp_path):
    names = []
    for _ in range(3):
        path = free_path(tmp_path, 7)
        path.write_text("")
        names.append(path.name)
    assert names == ["config.yaml", "config_7.yaml", "config_7_2.yaml"]


def header_of(folder):
    return next(iter((folder / "config.yaml").read_text().splitlines()))


def test_runs_have_ids_that_resuming_keeps(fit, own_run):
    folder = checkpoint_folder(own_run)
    first = load(folder / "last.ckpt")["run"]
    assert first["log_folder"] == "TransformerLM/version_0"
    assert header_of(folder.parent) == f"# run: {first['id']}"
    assert fit(own_run, "--ckpt_path=last", "--trainer.max_steps=7", bare=True) == 0
    assert load(folder / "last.ckpt")["run"] == first
    branch = f"--ckpt_path={folder}/step=4.ckpt"
    assert fit(own_run, branch, "--trainer.max_steps=5", bare=True) == 0
    second = load(checkpoint_folder(own_run, 1) / "last.ckpt")["run"]
    assert second["id"] != first["id"]
    assert second["log_folder"] == "TransformerLM/version_1"


def versions_of(root):
    return sorted(path.name for path in (root / "TransformerLM").iterdir())


def event_files(root, version):
    return len(list((root / "TransformerLM" / f"version_{version}").glob("events.*")))


@pytest.fixture
def two_in_one_folder(fit, tmp_path):
    """A long run and a newer, short one, which keep their checkpoints in one folder."""
    root = tmp_path / "root"
    place = f"--checkpoint.dirpath={tmp_path}/kept"
    for max_steps in (4, 2):
        assert fit(root, place, f"--trainer.max_steps={max_steps}") == 0
    return root, tmp_path / "kept"


def test_last_is_of_the_newest_run_and_logs_go_on_with_it(fit, two_in_one_folder):
    root, kept = two_in_one_folder
    before = load(kept / "last.ckpt")
    arguments = ("--ckpt_path=last", f"--checkpoint.dirpath={kept}", "--trainer.max_steps=3")
    assert fit(root, *arguments, bare=True) == 0
    assert load(kept / "last.ckpt")["global_step"] == before["global_step"] == 4
    assert load(kept / "last-v1.ckpt")["global_step"] == 3
    assert versions_of(root) == ["version_0", "version_1"]
    assert (event_files(root, 0), event_files(root, 1)) == (1, 2)


def test_moved_runs_find_their_logs(fit, two_in_one_folder, tmp_path):
    root, kept = two_in_one_folder
    moved = tmp_path / "elsewhere" / "root"
    moved.parent.mkdir()
    root.rename(moved)
    arguments = ("--ckpt_path=last", f"--checkpoint.dirpath={kept}", "--trainer.max_steps=3")
    assert fit(moved, *arguments, bare=True) == 0
    assert versions_of(moved) == ["version_0", "version_1"]
    assert event_files(moved, 1) == 2


def test_a_log_folder_of_another_run_is_not_taken(fit, two_in_one_folder, tmp_path):
    """Below another root the same name means another run: this one gets a new folder there."""
    _, kept = two_in_one_folder
    other = tmp_path / "other"
    for _ in range(2):
        assert fit(other, "--trainer.max_steps=1") == 0
    arguments = ("--ckpt_path=last", f"--checkpoint.dirpath={kept}", "--trainer.max_steps=3")
    newest = kept / "last-v1.ckpt"
    os.utime(newest, (time.time() + 60,) * 2)
    assert fit(other, *arguments, bare=True) == 0
    assert versions_of(other) == ["version_0", "version_1", "version_2"]
    assert (event_files(other, 1), event_files(other, 2)) == (1, 1)


def test_checkpoints_without_an_id_go_on_in_their_folder(fit, own_run):
    folder = checkpoint_folder(own_run)
    for path in folder.glob("*.ckpt"):
        content = load(path)
        del content["run"], content["pending_validation"]  # as older versions wrote them
        torch.save(content, path)
    assert fit(own_run, "--ckpt_path=last", "--trainer.max_steps=7", bare=True) == 0
    assert versions_of(own_run) == ["version_0"]
    assert load(folder / "last.ckpt")["run"]["id"]
    assert fit(own_run, "--ckpt_path=last", "--trainer.max_steps=8", bare=True) == 0
    assert versions_of(own_run) == ["version_0"]


def test_all_ranks_take_the_id_of_the_first():
    strategy = SimpleNamespace(broadcast=lambda value: "of rank 0")
    trainer = SimpleNamespace(
        strategy=strategy, log_dir=None, loggers=[], is_global_zero=False, ckpt_path=None
    )
    record, checkpoint = SaveRunRecord(None, Namespace()), {}
    record.setup(trainer, None, "fit")
    record.on_save_checkpoint(trainer, None, checkpoint)
    assert checkpoint["run"]["id"] == "of rank 0"


# ---- names


def test_a_name_is_folder_and_row(fit, tmp_path, capsys):
    steps = ("--trainer.max_steps=2", "--name=small")
    assert fit(tmp_path, *steps) == 0
    last = tmp_path / "small" / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last).run_name == "small"
    assert fit(tmp_path, *steps) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert fit(tmp_path, "--trainer.max_steps=2") == 0  # another, newer run
    assert fit(tmp_path, *steps, "--trainer.max_steps=3", "--ckpt_path=last", bare=True) == 0
    resumed = read_checkpoint(last)
    assert (resumed.step, resumed.run_name) == (3, "small")
    runs, _ = find_compared([str(tmp_path)], skip=False)
    assert {run.row for run in runs} == {"small", None}


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_a_name_that_is_no_folder(fit, tmp_path, name):
    assert fit(tmp_path, "--trainer.max_steps=1", f"--name={name}") == 2
    assert list(tmp_path.iterdir()) == []


# ---- one process at a time


def a_run(text_file, tmp_path, *extra):
    return Run(text_file, tmp_path / "root", "--loggers=csv", *extra)


def test_two_runs_that_start_at_once_have_a_folder_each(text_file, tmp_path):
    run = a_run(text_file, tmp_path, "--trainer.max_steps=20")
    for process in [run.start(), run.start()]:
        finished(process)
    assert versions_of(run.root) == ["version_0", "version_1"]
    folders = [checkpoint_folder(run.root, version) for version in (0, 1)]
    ids = [load(folder / "last.ckpt")["run"]["id"] for folder in folders]
    assert [header_of(folder.parent) for folder in folders] == [f"# run: {i}" for i in ids]
    assert len(set(ids)) == 2


IMPATIENT = """
import sys
import training.run_folder
from training import main

training.run_folder.PATIENCE = 0.5
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_goes_on_in_one_process_at_a_time(text_file, tmp_path):
    """The second is refused, until the first is gone, however it went."""
    often = ("--checkpoint.every_n_train_steps=5", "--data.num_workers=1")
    run = a_run(text_file, tmp_path, "--name=mine", "--trainer.max_steps=100000", *often)
    process = run.start()
    assert next(n for n in step_lines(process) if n >= 11)
    for options, named in ((["--ckpt_path=last"], "ckpt_path"), ([], "name")):
        other = Program("-c", IMPATIENT, *run.command[1:], *options, env=run.environment)
        errors = finished(other, code=2)
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert line.startswith(f"error: {named}")
        assert "Traceback" not in errors
    killed(process, 12)
    step = newest_checkpoint([run.root / "mine" / "checkpoints"]).step
    finished(run.start("--ckpt_path=last", f"--trainer.max_steps={step + 1}"))
    assert load(run.root / "mine" / "checkpoints" / "last.ckpt")["global_step"] == step + 1


@pytest.mark.parametrize("place", ["no logger", "own logger", "shared folder"])
def test_a_folder_of_checkpoints_has_one_process_at_a_time(text_file, tmp_path, place):
    """Wherever the values are logged; once the process is gone, a resume takes the folder."""
    root = tmp_path / "root"
    folder = {
        "no logger": root / "checkpoints",
        "own logger": root / "logs" / "mine" / "checkpoints",
        "shared folder": tmp_path / "shared",
    }[place]
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger"}
    logger["init_args"] = {"save_dir": str(root), "name": "logs", "version": "mine"}
    options = {
        "no logger": ["--trainer.logger=false"],
        "own logger": [f"--trainer.logger={json.dumps(logger)}"],
        "shared folder": [f"--checkpoint.dirpath={folder}"],
    }[place]
    often = ("--checkpoint.every_n_train_steps=5", "--trainer.max_steps=100000")
    run = Run(text_file, root, *options, *often)
    process = run.start()
    assert next(n for n in step_lines(process) if n >= 11)
    second = {"shared folder": [f"--trainer.default_root_dir={tmp_path}/second"]}.get(place, [])
    for more in (["--ckpt_path=last"], []):
        command = [*run.command[1:], *second, *more]
        other = Program("-c", IMPATIENT, *command, env=run.environment)
        errors = finished(other, code=2)
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert f"another process trains {'the' if more else 'a'} run in {folder}" in line
    killed(process, 12)
    step = newest_checkpoint([folder]).step  # it may be one past last.ckpt, which is written later
    finished(run.start("--ckpt_path=last", f"--trainer.max_steps={step + 1}"))
    assert load(folder / "last.ckpt")["global_step"] == step + 1


def test_a_resume_that_has_waited_takes_the_newer_checkpoint(fit, own_run, monkeypatch):
    """As a job that SLURM starts again while the former one still writes."""
    folder = checkpoint_folder(own_run)
    shutil.copy(folder / "last.ckpt", own_run / "newer")
    shutil.copy(folder / "step=2.ckpt", folder / "last.ckpt")
    for step in (4, 6):
        (folder / f"step={step}.ckpt").unlink()
    lock = FileLock(folder.parent / ".lock", thread_local=False)
    lock.acquire(timeout=0)

    def end_of_the_other():
        (own_run / "newer").replace(folder / "last.ckpt")
        lock.release(force=True)

    clock = threading.Timer(0.1, end_of_the_other)
    monkeypatch.setattr("training.run_folder.rank_zero_info", lambda _: clock.start())
    assert fit(own_run, "--ckpt_path=last", "--trainer.max_steps=7", bare=True) == 0
    assert (folder.parent / "config_6.yaml").is_file()
    assert load(folder / "last.ckpt")["global_step"] == 7


def test_a_file_system_without_locks_is_warned_of(fit, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(UserWarning, match="without locks"):
        assert fit(tmp_path, "--trainer.max_steps=1") == 0
    assert load(checkpoint_folder(tmp_path) / "last.ckpt")["global_step"] == 1


def test_an_empty_folder_is_left_to_the_process_that_takes_it_next(tmp_path, monkeypatch):
    """It locks the folder as soon as the former one lets go, before that has tidied up."""
    release, next_one = FileLock.release, FileLock(tmp_path / "run" / ".lock")

    def release_and_lose(lock, force=False):
        release(lock, force=force)
        monkeypatch.setattr(FileLock, "release", release)
        next_one.acquire(timeout=0)

    with ExitStack() as at_end:
        hold_folder(tmp_path / "run", at_end, key="name", waits=False)
        monkeypatch.setattr(FileLock, "release", release_and_lose)
    with pytest.raises(UserError), ExitStack() as at_end:
        hold_folder(tmp_path / "run", at_end, key="name", waits=False)
    next_one.release()


def test_a_start_that_fails_leaves_no_folder(fit, tmp_path):
    root = tmp_path / "root"
    assert fit(root, "--trainer.max_steps=1", "--loggers=nowhere") == 2
    assert not root.exists()


# ---- one command that starts and restarts


def test_auto_begins_a_run_and_goes_on_with_it(fit, tmp_path):
    auto = ("--name=mine", "--ckpt_path=auto", "--loggers=csv", "--trainer.log_every_n_steps=1")
    folder = tmp_path / "mine"
    assert fit(tmp_path, *auto, "--trainer.max_steps=2") == 0
    shutil.rmtree(folder / "checkpoints")  # as if it had been killed before the first one
    for steps in (3, 5):
        assert fit(tmp_path, *auto, f"--trainer.max_steps={steps}") == 0
    with (folder / "metrics.csv").open() as file:
        losses = [row["step"] for row in csv.DictReader(file) if row["train/loss"]]
    assert losses == list("01234")
    assert load(folder / "checkpoints" / "last.ckpt")["global_step"] == 5
    assert (folder / "config_3.yaml").is_file()


def test_auto_is_for_training_alone(fit, tmp_path, capsys):
    options = ["--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"]
    assert main(["validate", "--ckpt_path=auto", *options]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "run_id", "dim"),
    [(None, "a", 1), ("older.ckpt", "b", 1), ("older.ckpt", "a", 2), ("older.ckpt", "a", 1)],
)
def test_ranks_that_resume_another_run_are_refused(monkeypatch, path, run_id, dim):
    """The first rank may have found another checkpoint of the same run, if one is damaged."""
    sent = []
    monkeypatch.setattr("callbacks.run_record.gather", lambda own: sent.append(own) or [own])
    model = {"lr": 0.1, "dim": dim}
    SaveRunRecord(None, Namespace(model=model), run_id=run_id)._check_resumed(path)
    monkeypatch.setattr("callbacks.run_record.gather", lambda own: [*sent, own])
    second = SaveRunRecord(None, Namespace(model={"dim": 1, "lr": 0.1}), run_id="a")
    same = (path, run_id, dim) == ("older.ckpt", "a", 1)
    with nullcontext() if same else pytest.raises(CheckpointError, match="ckpt_path"):
        second._check_resumed("last.ckpt")


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "a/${b}", "\\${b}", "\\\\${b} ${c", "\\b"])
def test_a_record_gives_text_back_as_it_was(text):
    """A config file would put values in the place of references; a recipe's text is plain."""
    parser = TrainingParser(parser_mode="omegaconf", exit_on_error=False)
    parser.add_argument("--name", type=str)
    parser.add_argument("--data", type=dict)
    recipe = {"class_path": "A", "init_args": {"dataset": text, "data_files": [text]}}
    parsed = parser.parse_string(as_yaml(parser, Namespace(name=text), {"data": recipe}))
    assert parsed.as_dict() == {"name": text, "data": recipe}
