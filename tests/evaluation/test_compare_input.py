"""What a comparison takes from other commands, and what it refuses."""

import json
import math
import os
import shutil

import pytest
import torch
from compared_runs import by_model, dress, grown, place, read

ARC = {"arc": {"metrics": {"acc": 0.25}, "standard_errors": {"acc": 0.1}, "seconds": 3.0}}


@pytest.fixture(scope="module")
def runs(checkpoint_path, ponder_path, tmp_path_factory):
    """A folder with a run of the plain transformer and one of PonderLM-3."""
    folder = tmp_path_factory.mktemp("compared")
    for name, model, source in (
        ("plain_1", "TransformerLM", checkpoint_path),
        ("ponder", "PonderLM", ponder_path),
    ):
        shutil.copy(source, place(folder, name, model))
        dress(next((folder / name).rglob("*.ckpt")), seed=1)
    return folder


@pytest.fixture
def compare(evaluates, tmp_path):
    """Compares some runs; returns what was printed, and the rows of the CSV file."""

    def run(*words, output="report"):
        printed = evaluates("compare", *words, "--output", tmp_path / output)
        return printed, read(tmp_path / output / "report.csv")

    return run


# ---- results of other commands


@pytest.fixture
def plain(runs, tmp_path):
    """A copy of a run, to which files can be added."""
    shutil.copytree(runs / "plain_1", tmp_path / "runs" / "plain")
    return tmp_path / "runs" / "plain"


def checkpoint_of(run):
    return next(run.rglob("*.ckpt"))


def test_tasks_beside_a_run_make_columns(compare, plain, runs, tmp_path):
    tasks = {"piqa": {"acc": 0.5, "acc_stderr": 0.1, "acc_norm": 0.75, "alias": "piqa"}}
    content = {"checkpoint": str(checkpoint_of(plain)), "tasks": tasks}
    (plain / "tasks.json").write_text(json.dumps(content))
    named = tmp_path / "named.json"
    content = {"checkpoint": str(checkpoint_of(runs / "ponder")), "tasks": ARC}
    named.write_text(json.dumps(content))
    printed, rows = compare(plain, runs / "ponder", "--results", named)
    found = by_model(rows)
    assert float(found["TransformerLM"]["piqa_acc"]) == 0.5
    assert float(found["TransformerLM"]["piqa_acc_norm"]) == 0.75
    assert not any("stderr" in key for key in rows[0])
    assert float(found["PonderLM"]["arc_acc"]) == 0.25
    assert found["PonderLM"]["piqa_acc"] == ""
    assert not any("seconds" in key for key in rows[0])
    assert "piqa (acc)" in printed
    assert "piqa (acc_norm)" not in printed  # one metric a task for people


def test_scores_measured_in_the_same_way_are_taken_over(compare, evaluates, plain):
    target = plain / "scores.json"
    evaluates("perplexity", "--ckpt", checkpoint_of(plain), "--output", target)
    content = json.loads(target.read_text())
    content["nats_per_token"] = 3.25  # so that it is seen where the number comes from
    target.write_text(json.dumps(content))
    _, (row,) = compare(plain)
    assert float(row["nats_per_token_exact"]) == 3.25
    for options in (("--limit_batches", "1"), ("--split", "test"), ("--precision", "bf16")):
        _, (row,) = compare(plain, *options)
        assert float(row["nats_per_token_exact"]) != 3.25


def test_results_older_than_their_checkpoint_are_none(compare, plain):
    content = {"checkpoint": str(checkpoint_of(plain)), "tasks": {"piqa": {"acc": 0.5}}}
    (plain / "tasks.json").write_text(json.dumps(content))
    later = (plain / "tasks.json").stat().st_mtime + 10
    os.utime(checkpoint_of(plain), (later, later))
    _, (row,) = compare(plain)
    assert "piqa_acc" not in row


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "there is no such file"),
        ("{", "is not JSON"),
        ("[]", "names no checkpoint"),
        ('{"checkpoint": "other.ckpt"}', "is about other.ckpt, which is not compared"),
    ],
)
def test_wrong_results_end_in_one_line(fails, runs, tmp_path, content, expected):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    line = fails("compare", runs / "plain_1", "--results", path, "--output", tmp_path / "report")
    assert expected in line
    assert f"results ({path})" in line


# ---- bad input


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--limit_batches", "0"], "limit_batches (0) must be at least 1"),
        (["--label", "width"], "label (width) is no key"),
        (["--split", "none"], "split"),
        (["--packages", "[not_there]"], "cannot import 'not_there'"),
    ],
)
def test_wrong_options_end_in_one_line(fails, runs, tmp_path, options, expected):
    output = tmp_path / "report"
    assert expected in fails("compare", runs / "plain_1", "--output", output, *options)
    assert not output.exists()


def test_runs_that_are_none_end_in_one_line(fails, tmp_path):
    output = ("--output", tmp_path / "report")
    missing = tmp_path / "none"
    line = fails("compare", missing, *output)
    assert f"runs ({missing})" in line
    assert "there is no such file or folder" in line
    assert "runs" in fails("compare", *output)
    assert "there is no whole checkpoint below" in fails("compare", tmp_path, *output)


@pytest.fixture
def broken(corpus, checkpoint_path, tmp_path):
    """A run whose text is gone, and a file that is no checkpoint."""
    content = torch.load(checkpoint_path, weights_only=True)
    arguments = content["recipe"]["data"]["init_args"]
    arguments["data_files"] = str(tmp_path / "gone.jsonl")
    arguments["cache_dir"] = str(tmp_path / "cache")
    torch.save(content, tmp_path / "textless.ckpt")
    (tmp_path / "half.ckpt").write_bytes(b"half")
    return tmp_path / "textless.ckpt", tmp_path / "half.ckpt"


def test_a_run_that_cannot_be_scored_is_named(fails, broken, runs, tmp_path):
    output = ("--output", tmp_path / "report")
    for path in broken:
        line = fails("compare", runs / "plain_1", path, *output)
        assert path.name in line
        assert "--skip_unreadable" in line
    assert not (tmp_path / "report").exists()


def test_runs_can_be_left_out(compare, fails, broken, runs, tmp_path):
    printed, (row,) = compare(runs / "plain_1", *broken, "--skip_unreadable")
    assert row["runs"].endswith("plain_1")
    assert printed.count("left out: ") == 2
    for name in ("report.md", "report.html"):
        text = (tmp_path / "report" / name).read_text()
        assert "Left out" in text
        assert "half.ckpt" in text
    output = ("--output", tmp_path / "other", "--skip_unreadable")
    assert "none of them can be scored" in fails("compare", broken[0], *output)
    assert "none of them can be read" in fails("compare", broken[1], *output)


def test_a_checkpoint_without_its_run_is_compared(compare, checkpoint_path):
    printed, (row,) = compare(checkpoint_path)
    assert math.isfinite(float(row["bits_per_byte_exact"]))
    assert "tokens_per_second" not in row
    assert "not known: code version: of any run" in printed


# ---- names


@pytest.fixture
def seeds(runs, checkpoint_path, tmp_path):
    """A folder with a run of PonderLM-3 and two of the plain transformer."""
    folder = tmp_path / "seeds"
    shutil.copytree(runs, folder)
    grown(checkpoint_path, place(folder, "plain_2", "TransformerLM"), 1.5)
    dress(next((folder / "plain_2").rglob("*.ckpt")), seed=2)
    return folder


def test_rows_and_report_have_the_names_they_are_given(compare, seeds, tmp_path, monkeypatch):
    monkeypatch.chdir(seeds)
    said = ("--title", "Small <runs>", "--introduction", "Of *two* kinds.")
    printed, rows = compare("plain decoder=plain_*", "ponder", *said)
    found = {row["label"]: row["num_seeds"] for row in rows}
    assert found == {"plain decoder": "2", "PonderLM": "1"}
    assert "plain decoder" in printed
    text = (tmp_path / "report" / "report.md").read_text()
    assert text.startswith("# Small <runs>\n\nOf *two* kinds.\n\n## ")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<h1>Small &lt;runs&gt;</h1>\n<p>Of *two* kinds.</p>" in page


def test_one_name_for_runs_that_differ_is_told_apart(compare, runs):
    _, rows = compare(f"all={runs / 'plain_1'}", f"all={runs / 'ponder'}")
    assert sorted(row["label"] for row in rows) == ["all (plain_1)", "all (ponder)"]


def test_runs_of_two_names_are_two_rows(compare, seeds):
    _, rows = compare(f"one={seeds / 'plain_1'}", f"other={seeds / 'plain_2'}")
    assert sorted(row["label"] for row in rows) == ["one", "other"]


def test_checkpoints_below_are_named_from_here(compare, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(runs.parent)
    compare(runs / "plain_1")
    text = (tmp_path / "report" / "report.md").read_text()
    assert f"| {runs.name}/plain_1/" in text
    assert str(runs) not in text
