"""config.yaml next to the logs."""

import os
import time
from types import SimpleNamespace

import pytest
import torch
import yaml

from evaluation.runs import find_compared
from lightning_models.checkpoint import read_checkpoint
from tests.training.conftest import checkpoint_folder, load
from training.records import SaveRunRecord, free_path, git_commit


def test_the_record_names_command_commit_and_versions(trained):
    text = (trained / "TransformerLM" / "version_0" / "config.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert f"# torch: {torch.__version__}" in header
    assert f"# commit: {git_commit()}" in header
    assert any(line.startswith("# command: ") for line in header)
    assert any(line.startswith("# latent-thinking: ") for line in header)


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
    trainer = SimpleNamespace(strategy=strategy, log_dir=None, loggers=[], is_global_zero=False)
    record, checkpoint = SaveRunRecord(None, None), {}
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
