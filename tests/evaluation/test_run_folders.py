"""Runs are found by folder, file and pattern."""

import shutil

import pytest

from evaluation.runs.folders import find_checkpoints, find_runs, short_names

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
    found = find_runs([str(runs)])
    assert [run.name for run in found] == ["a", "b"]
    assert [run.folder for run in found] == [runs / n / "X" / "version_0" for n in ("a", "b")]
    assert found[0].checkpoint.path == found[0].folder / "checkpoints" / "last.ckpt"


def test_patterns_find_runs_and_each_counts_once(runs):
    words = [str(runs / "[ab]"), str(runs / "b" / "X" / "version_0")]
    assert [run.name for run in find_runs(words)] == ["a", "b"]


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
        ("empty", "there are no TensorBoard files"),
        ("c", "has a log but no checkpoint"),
    ],
)
def test_what_is_no_run_is_refused(runs, word, message):
    (runs / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        find_runs([str(runs / word)])


def test_what_is_no_checkpoint_is_refused(runs):
    with pytest.raises(ValueError, match="there is no whole checkpoint below"):
        find_checkpoints([str(runs / "c")])
    with pytest.raises(ValueError, match="there is no such file"):
        find_checkpoints([str(runs / "none.ckpt")])
