"""Result files side by side."""

import json

import pytest
from compared_runs import read

from evaluation.cli import main

RESULT = {
    "mode": "blockwise",
    "nats_per_token": 3.5,
    "perplexity": 33.1154,
    "causal": True,
    "flops_per_token": 1.5e6,
    "checkpoint": "runs/x.ckpt",
    "data": {"split": "val"},
}


@pytest.fixture
def files(tmp_path):
    for name, changes in {
        "plain": {},
        "forking": {"perplexity": None, "ppl_noncausal": 30.0, "causal": False},
    }.items():
        (tmp_path / name).mkdir()
        result = {key: v for key, v in {**RESULT, **changes}.items() if v is not None}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    return [str(tmp_path / name / "result.json") for name in ("plain", "forking")]


def test_one_row_a_file_and_a_column_for_every_number(files, capsys, tmp_path):
    target = tmp_path / "table.csv"
    assert main(["compare", "--view", "results", *files, "--output", str(target)]) == 0
    header, plain, forking = capsys.readouterr().out.splitlines()
    assert "checkpoint" not in header
    assert plain.split() == ["plain", "blockwise", "3.5", "33.115", "yes", "1.5e+06", "-"]
    assert forking.split() == ["forking", "blockwise", "3.5", "-", "no", "1.5e+06", "30"]
    assert header.index("perplexity") == plain.index("33.115") == forking.index("- ")
    rows = read(target)
    assert [row["result"] for row in rows] == ["plain", "forking"]
    assert [row["perplexity"] for row in rows] == ["33.1154", ""]
    assert rows[1]["ppl_noncausal"] == "30.0"


@pytest.mark.parametrize("content", [None, "no json", "[1]"])
def test_a_file_without_a_result_is_one_clear_line(tmp_path, capsys, content):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    assert main(["compare", "--view", "results", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: runs")
    assert str(path) in line
