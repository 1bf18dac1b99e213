"""Result files are whole or not there."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from evaluation.output import check_target, check_targets, write_json, write_jsonl


def test_files_of_one_command_are_different_ones(tmp_path):
    one, other = str(tmp_path / "a"), str(tmp_path / "b")
    assert check_targets(output=one, texts=other) == [Path(one), Path(other)]
    assert check_targets(output=one, texts=None) == [Path(one), None]
    (tmp_path / "link").symlink_to(one)
    for same in (one, str(tmp_path / "." / "a"), str(tmp_path / "link")):
        with pytest.raises(ValueError, match=r"output and plot \(.*\) are one file"):
            check_targets(output=one, plot=same)
    with pytest.raises(ValueError, match=r"plot \(.*\): the folder"):
        check_targets(output=one, plot=str(tmp_path / "none" / "a"))


def test_values_that_json_cannot_hold_leave_the_old_file(tmp_path):
    target = tmp_path / "result.json"
    target.write_text("old")
    with pytest.raises(TypeError):
        write_json(target, {"value": object()})
    assert target.read_text() == "old"


def test_not_a_number_becomes_null(tmp_path):
    target = tmp_path / "result.json"
    write_json(target, {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads(target.read_text()) == {"a": None, "b": [None, 1.5]}


def test_jsonl_has_a_row_a_line(tmp_path):
    target = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a\nb"}, {"prompt": "c"}]
    write_jsonl(target, rows)
    assert [json.loads(line) for line in target.read_text().splitlines()] == rows


def test_result_files_may_be_read_by_others(tmp_path):
    usual = tmp_path / "usual"
    usual.touch()
    write_json(tmp_path / "result.json", {})
    assert (tmp_path / "result.json").stat().st_mode == usual.stat().st_mode


def test_a_folder_that_refuses_files_is_named(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(ValueError, match=r"output .*: cannot write to .* \(Permission denied\)"):
        check_target(tmp_path / "result.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o500)
        with pytest.raises(ValueError, match="cannot write to"):
            check_target(Path(folder) / "result.json")
