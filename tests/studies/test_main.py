"""The command line: exit codes, where reports go, and a trial through the real programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import studies.__main__ as command_line
from studies.runner import CommandError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(study_file, commands, monkeypatch, tmp_path):
    """Runs the command line without executing its commands; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    path = study_file()

    def run(*words):
        return command_line.main([str(path), *words])

    return run


def test_a_study_runs_and_reports(run, commands, tmp_path):
    assert run() == 0
    assert len(commands.kinds) == 2 * 2 + 2 * 3 + 1
    assert (tmp_path / "runs/studies/pair/python_docs-2-steps/plain-seed0").is_dir()
    assert "studies pair --steps 2 --seeds 0,1" in (tmp_path / "results" / "pair.md").read_text()
    commands.seen.clear()
    assert run() == 0
    assert [command[2] for command in commands.seen] == ["compare"]


def test_a_suite_runs_and_compares(run, study_file, tmp_path):
    study_file(columns=None)
    assert run() == 0
    assert (tmp_path / "results" / "pair" / "report.md").is_file()
    assert (tmp_path / "results" / "pair" / "plain-seed0.yaml").is_file()


@pytest.mark.parametrize("columns", ["declared", None])
@pytest.mark.parametrize("words", [["--steps=7"], ["--epochs=2"]])
def test_the_report_of_a_trial_stays_with_its_runs(run, study_file, tmp_path, words, columns):
    study_file(**({} if columns else {"columns": None}))
    assert run(*words) == 0
    assert not list((tmp_path / "results").iterdir())
    (folder,) = (tmp_path / "runs/studies/pair").iterdir()
    assert (folder / "report.md").is_file() or (folder / "report" / "report.md").is_file()


def test_options_reach_the_runs(run, commands, tmp_path):
    (tmp_path / "a.txt").touch()
    words = ["--text", "*.txt", "--text_name=novels", "--only=plain", "--seeds=3", "--jobs=2"]
    assert run(*words, "--output=own.md") == 0
    assert commands.kinds == ["fit plain-seed3", "perplexity plain-seed3"]
    (config,) = tmp_path.rglob("plain-seed3/config.yaml")
    assert f"- {tmp_path}/*.txt" in config.read_text()
    assert "novels" in (tmp_path / "own.md").read_text()


def test_a_failed_command_ends_with_1(run, commands, tmp_path, capsys):
    (tmp_path / "log").write_text("the last line\n")
    commands.failing = {"copy-seed0": CommandError(["train.py"], 3, tmp_path / "log")}
    assert run() == 1
    assert "the last line" in capsys.readouterr().err
    assert not (tmp_path / "results" / "pair.md").exists()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--text", "no/*.txt"], "text"),
        (["--only", "nothing"], "only"),
        (["--steps", "0"], "steps"),
        (["--operations", "3"], "operations"),
        (["--output", "missing/a.md"], "output"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(run, commands, capsys, words, key):
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {key} ")
    assert commands.seen == []


def test_an_unknown_study_is_one_line(capsys):
    assert command_line.main(["suite_cpuu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "suite_cpu, suite_h200, suite_paper" in line


def test_interrupting_ends_with_130(run, commands):
    commands.failing = {"plain-seed0": KeyboardInterrupt()}
    assert run() == 130


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            ["study", "METHOD=thinking_states", "OPERATIONS=20", "ARGS=--seeds 0"],
            "thinking_states --operations 20 --seeds 0",
        ),
        (["suite", "SUITE=cpu", "JOBS=2"], "suite_cpu --jobs 2"),
        (
            ["study", "METHOD=ponderlm", "TEXT=a/*.txt b.txt", "TEXT_NAME=some novels"],
            "ponderlm --text 'a/*.txt' 'b.txt' --text_name 'some novels'",
        ),
        (
            ["tune", "METHOD=ponderlm", "JOBS=2", "ARGS=--only vanilla"],
            "ponderlm --jobs 2 --only vanilla",
        ),
    ],
)
def test_make_passes_options_on_and_quotes_patterns(typed, words):
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", *typed]
    listed = subprocess.run(
        [*command, f"VENV={sys.prefix}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MAKEFLAGS": ""},
    ).stdout
    module = "studies.tune" if typed[0] == "tune" else "studies"
    assert " ".join(listed.splitlines()[-1].split()).endswith(f"-m {module} {words}")


@pytest.mark.slow
def test_a_trial_through_the_real_programs(study_file, text_file, data_cache, tmp_path):
    data = {"tokenizer": "bytes", "block_size": 16, "batch_size": 2, "cache_dir": str(data_cache)}
    columns = {"bpb": "blockwise.bits_per_byte", "logged": "logged.val/bpb"}
    path = study_file(data=data, trainer={"accelerator": "cpu"}, seeds=[0], columns=columns)
    output = tmp_path / "report.md"
    words = ["--text", str(text_file), "--folder", str(tmp_path / "runs"), "--output", str(output)]
    assert command_line.main([str(path), *words]) == 0
    lines = (tmp_path / "report" / "evaluations.csv").read_text().splitlines()
    assert len(lines) == 3
    plain = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    assert 6 < float(plain["bpb"]) < 10
    assert float(plain["bpb"]) == pytest.approx(float(plain["logged"]))
    assert (tmp_path / "report" / "comparison" / "loss.svg").is_file()
